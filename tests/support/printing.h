#pragma once

#include <ostream>
#include <type_traits>

namespace lockstep {

// GoogleTest prints values that have names by them, not as bytes. Comes with the precompiled
// header.
template <typename T>
requires std::is_enum_v<T> && requires(T value) { to_string(value); }
void PrintTo(const T& value, std::ostream* out) { *out << to_string(value); }

}  // namespace lockstep
