#pragma once

#ifdef __x86_64__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace lockstep {

// Copies to memory that is not in the cache and that nobody reads soon, past the cache: to fetch
// what is overwritten would take as long as to write it. The two do not overlap.
inline void stream_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
#ifdef __x86_64__
  const std::size_t unaligned = reinterpret_cast<std::uintptr_t>(to) % sizeof(__m128i);
  const std::size_t first =
      std::min(bytes, unaligned == 0 ? std::size_t{0} : sizeof(__m128i) - unaligned);
  std::copy_n(from, first, to);
  std::size_t at = first;
  for (; at + 4 * sizeof(__m128i) <= bytes; at += 4 * sizeof(__m128i)) {
    for (std::size_t i = 0; i < 4; ++i) {
      const std::size_t word = at + i * sizeof(__m128i);
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + word),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + word)));
    }
  }
  std::copy_n(from + at, bytes - at, to + at);
  _mm_sfence();  // before anybody is told that the bytes are there
#else
  std::copy_n(from, bytes, to);
#endif
}

}  // namespace lockstep
