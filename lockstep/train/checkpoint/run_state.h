#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "lockstep/model/config.h"
#include "lockstep/model/schedule.h"
#include "lockstep/model/update.h"
#include "lockstep/train/checkpoint/checkpoint_format.h"
#include "lockstep/train/halt.h"

namespace lockstep {

// Where a run stands: everything that its later steps depend on but weights and moments. There is
// no state of random numbers: they are functions of seed and position. trainer_state.json. Pure.

// The options that are part of the result.
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

struct DataIdentity {
  std::uint64_t samples = 0;
  std::string fingerprint = {};  // as Samples has it, in hexadecimal digits
  bool operator==(const DataIdentity&) const = default;
};

// What the bits depend on beside the program's input.
struct Versions {
  std::string lockstep = {};
  std::string c_library = {};
  std::string instruction_set = {};
  bool operator==(const Versions&) const = default;
};
Versions these_versions();

struct RunState {
  std::int64_t step = 0;  // steps that are done
  RunSettings settings;
  DataIdentity data;
  std::vector<SkippedLane> skipped_lanes;
  Versions versions;
};

std::string to_json(const RunState& state);
std::variant<RunState, FormatProblem> parse_run_state(std::string_view text);

// How a run that is to go on differs from the one that was saved, a line each.
struct Differences {
  std::vector<std::string> forbidden;  // it would be another run
  std::vector<std::string> noted;      // it may go on, with other bits than without the change
};
Differences compare(const RunState& saved, const RunState& now);

}  // namespace lockstep
