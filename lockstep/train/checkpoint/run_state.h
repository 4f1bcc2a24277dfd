#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "lockstep/data/lanes.h"
#include "lockstep/model/config.h"
#include "lockstep/model/gpu_model.h"
#include "lockstep/model/schedule.h"
#include "lockstep/model/update.h"
#include "lockstep/train/checkpoint/manifest.h"

namespace lockstep {

// trainer_state.json: all that the later steps of a run depend on, except weights and moments.
// Random numbers have no state: they are functions of seed and position. Pure.

// The options that change the result.
struct RunSettings {
  ModelConfig model;
  Precision precision = Precision::kF32;
  std::uint64_t global_batch = 0;
  std::uint64_t micro_batch = 0;
  AdamWOptions adamw;
  Schedule schedule;
  double clip = 0;
  std::uint64_t seed = 0;
  std::string reduction = "tree";  // as the command line names them
  std::string wire_dtype = "f32";
};

// Fingerprints are as Samples has them, in hexadecimal digits; empty: not recorded.
struct DataIdentity {
  std::uint64_t samples = 0;
  std::string fingerprint = {};
  std::string validation = {};    // the fingerprint of the samples for validation
  std::vector<MixPart> mix = {};  // empty: one source
  bool operator==(const DataIdentity&) const = default;
};

// What the bits of the result depend on besides options and data.
struct Versions {
  std::string lockstep = {};
  std::string c_library = {};
  std::string instruction_set = {};
  GpuVersions gpu = {};
  bool operator==(const Versions&) const = default;
};

// How validation has gone so far.
struct ValidationRecord {
  std::int64_t best_step = 0;  // of the lowest loss; 0: there was no validation
  double best_loss = 0;
  std::int64_t since_best = 0;  // validations after it
  bool operator==(const ValidationRecord&) const = default;
};

struct RunState {
  std::int64_t step = 0;  // steps that are done
  ValidationRecord validation;
  RunSettings settings;
  DataIdentity data;
  std::vector<SkippedLane> skipped_lanes;
  Versions versions;
};

std::string to_json(const RunState& state);
std::variant<RunState, FormatProblem> parse_run_state(std::string_view text);

// How a run that is to be resumed differs from the one that was saved, one line per difference.
struct Differences {
  std::vector<std::string> forbidden;  // it would be another run
  std::vector<std::string> noted;      // it may be resumed, but its result changes
};
Differences compare(const RunState& saved, const RunState& now);

}  // namespace lockstep
