#pragma once

#include <array>
#include <cstdint>

namespace lockstep {

// Philox4x32-10 (Salmon and others, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011):
// a pure function, so any number of any stream can be had at any time, on any thread.
std::array<std::uint32_t, 4> philox(const std::array<std::uint32_t, 4>& counter,
                                    const std::array<std::uint32_t, 2>& key);

// The `index`-th random number of `stream` under `seed`. The key is the seed, the counter is the
// index (low half) and the stream (high half). Part of the result of a run: never change it.
std::uint64_t random_u64(std::uint64_t seed, std::uint64_t stream, std::uint64_t index);

// Uniform in [0, 1), a multiple of 2^-24: the upper 24 bits of random_u64.
float random_f32(std::uint64_t seed, std::uint64_t stream, std::uint64_t index);

}  // namespace lockstep
