#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/model/layout.h"

namespace lockstep {

// Why a run halted: a value that is not finite, or workers that crashed again and again, and the
// lane that did it, so that the lane can be computed again.
struct HaltReport {
  struct Lane {
    std::uint32_t lane = 0;
    std::vector<std::uint64_t> samples;
    bool operator==(const Lane&) const = default;
  };

  std::int64_t step = 0;  // counted from 1; the step changed no weights
  std::string what;       // "gradient", "loss", "weight", "sum" or "crash"
  std::uint32_t lane = 0;
  std::vector<std::uint64_t> samples;  // of the lane
  int rank = -1;
  std::string host;
  std::string tensor;         // empty for a loss or a crash
  std::uint64_t element = 0;  // of the tensor, row-major
  std::string value;          // "nan", "inf", "-inf"; for a crash: how the last worker ended
  std::vector<Lane> more;     // for a crash: the other lanes that all crashed workers had

  std::vector<Lane> lanes() const;  // all of them

  bool operator==(const HaltReport&) const = default;
};

// One line for people.
std::string to_string(const HaltReport& report);
// halt.json. Parsing returns nothing for any other text.
std::string to_json(const HaltReport& report);
std::optional<HaltReport> parse_halt_report(std::string_view json);

// Looks for the first value of a flat buffer that is not finite and fills in tensor, element and
// value of the report. False when all values are finite.
bool find_non_finite_tensor(const ParameterLayout& layout, std::span<const float> values,
                            HaltReport& report);

}  // namespace lockstep
