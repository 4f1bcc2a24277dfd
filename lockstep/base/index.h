#pragma once

#include <concepts>
#include <cstddef>
#include <type_traits>

namespace lockstep {

// A number that is known not to be negative, such as a rank, or an enumerator as an index.
template <typename T>
requires std::integral<T> || std::is_enum_v<T>
constexpr std::size_t index_of(T value) { return static_cast<std::size_t>(value); }

}  // namespace lockstep
