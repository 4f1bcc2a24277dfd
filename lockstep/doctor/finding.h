#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

enum class Verdict : std::uint8_t {
  kGood,
  kWarning,  // a run works, but slower, less safe or with other bits than one may think
  kBad,      // a run will fail
};
inline std::string_view to_string(Verdict verdict) {
  switch (verdict) {
    case Verdict::kGood: return "good";
    case Verdict::kWarning: return "warning";
    case Verdict::kBad: return "bad";
  }
  return "?";
}

// One thing that the doctor has looked at.
struct Finding {
  std::string host;
  std::string check;
  Verdict verdict = Verdict::kGood;
  std::string found;
  std::string advice = {};  // what to do; empty where all is well
};

inline Verdict worst(const std::vector<Finding>& findings) {
  Verdict verdict = Verdict::kGood;
  for (const Finding& each : findings) verdict = std::max(verdict, each.verdict);
  return verdict;
}

}  // namespace lockstep
