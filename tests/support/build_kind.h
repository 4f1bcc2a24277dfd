#pragma once

#include <chrono>
#include <string_view>

// What build the tests run in; LOCKSTEP_SANITIZERS comes from CMake, e.g. "address,undefined".
namespace lockstep::test {

inline constexpr std::string_view kSanitizers = LOCKSTEP_SANITIZERS;
inline constexpr bool kThreadSanitizer = kSanitizers.find("thread") != std::string_view::npos;

// How much later than promised something may happen before a test calls it late.
inline constexpr std::chrono::seconds kSlack{kSanitizers.empty() ? 1 : 5};

}  // namespace lockstep::test
