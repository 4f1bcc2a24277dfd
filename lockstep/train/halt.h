#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/model/layout.h"

namespace lockstep {

// Why a run halted on a value that is not finite: enough to compute the lane once more.
struct HaltReport {
  std::int64_t step = 0;  // counted from 1; it changed no weights
  std::string what;       // "gradient", "loss", "weight" or "sum"
  std::uint32_t lane = 0;
  std::vector<std::uint64_t> samples;  // of the lane
  int rank = -1;
  std::string host;
  std::string tensor;         // none for a loss
  std::uint64_t element = 0;  // of the tensor, row-major
  std::string value;          // "nan", "inf", "-inf"

  bool operator==(const HaltReport&) const = default;
};

// One line for people.
std::string to_string(const HaltReport& report);
// halt.json, and back; nothing for text that is none.
std::string to_json(const HaltReport& report);
std::optional<HaltReport> parse_halt_report(std::string_view json);

// A lane of a step that is left out, as --skip-lanes has it: STEP:LANE, steps counted from 1.
struct SkippedLane {
  std::int64_t step = 0;
  std::uint32_t lane = 0;
  auto operator<=>(const SkippedLane&) const = default;
};
std::optional<SkippedLane> parse_skipped_lane(std::string_view text);

// The first value of a flat buffer that is not finite, by tensor; fills in tensor, element and
// value. Nothing if all are.
bool find_non_finite_tensor(const ParameterLayout& layout, std::span<const float> values,
                            HaltReport& report);

}  // namespace lockstep
