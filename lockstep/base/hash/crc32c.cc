#include "lockstep/base/hash/crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>

#ifdef __x86_64__
#include <nmmintrin.h>
#endif

namespace lockstep {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // bit-reversed, as CRC-32C is computed

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    table[i] = crc;
  }
  return table;
}

constexpr auto kTable = make_table();

#ifdef __x86_64__
// The product of two polynomials modulo that of the CRC, all bit-reversed: the highest bit is x^0.
constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (int bit = 31; bit >= 0; --bit) {
    if ((a >> bit & 1) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1) != 0 ? kPolynomial : 0);
  }
  return product;
}

// A CRC after so many more zero bytes, looked up by the bytes of the CRC before them.
using ShiftTable = std::array<std::array<std::uint32_t, 256>, 4>;

constexpr ShiftTable make_shift_table(std::size_t zero_bytes) {
  std::uint32_t power = std::uint32_t{1} << 31;   // x^(8 zero_bytes)
  std::uint32_t square = std::uint32_t{1} << 30;  // x^(2^i)
  for (std::size_t exponent = 8 * zero_bytes; exponent > 0; exponent >>= 1) {
    if ((exponent & 1) != 0) power = multiply(power, square);
    square = multiply(square, square);
  }
  ShiftTable table{};
  for (std::size_t byte = 0; byte < 4; ++byte) {
    for (std::size_t bit = 0; bit < 8; ++bit) {
      const std::size_t one = std::size_t{1} << bit;
      table[byte][one] = multiply(power, static_cast<std::uint32_t>(one << (8 * byte)));
      for (std::size_t below = 1; below < one; ++below) {
        table[byte][one + below] = table[byte][one] ^ table[byte][below];
      }
    }
  }
  return table;
}

std::uint32_t shift(const ShiftTable& table, std::uint32_t crc) {
  return table[0][crc & 0xff] ^ table[1][crc >> 8 & 0xff] ^ table[2][crc >> 16 & 0xff] ^
         table[3][crc >> 24];
}

template <bool kCopy>
__attribute__((target("sse4.2"))) inline std::uint64_t add_word(std::uint64_t crc, std::byte* to,
                                                                const std::byte* from,
                                                                std::size_t offset) {
  std::uint64_t word;
  std::memcpy(&word, from + offset, sizeof(word));
  if constexpr (kCopy) std::memcpy(to + offset, &word, sizeof(word));
  return _mm_crc32_u64(crc, word);
}

// A CRC takes three cycles per word, and three of them side by side take no longer: three strips of
// `kBytes` each, put together in the end.
template <bool kCopy, std::size_t kBytes>
__attribute__((target("sse4.2"))) std::uint64_t add_strips(std::uint64_t crc, std::byte*& to,
                                                           std::span<const std::byte>& bytes) {
  static constexpr ShiftTable kShift = make_shift_table(kBytes);
  while (bytes.size() >= 3 * kBytes) {
    const std::byte* const at = bytes.data();
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::size_t i = 0; i < kBytes; i += 8) {
      crc = add_word<kCopy>(crc, to, at, i);
      second = add_word<kCopy>(second, to, at, kBytes + i);
      third = add_word<kCopy>(third, to, at, 2 * kBytes + i);
    }
    crc = shift(kShift, static_cast<std::uint32_t>(crc)) ^ second;
    crc = shift(kShift, static_cast<std::uint32_t>(crc)) ^ third;
    bytes = bytes.subspan(3 * kBytes);
    if constexpr (kCopy) to += 3 * kBytes;
  }
  return crc;
}

template <bool kCopy>
__attribute__((target("sse4.2"))) std::uint32_t crc32c_sse42(std::byte* to,
                                                             std::span<const std::byte> bytes,
                                                             std::uint32_t before) {
  std::uint64_t crc = ~before;
  crc = add_strips<kCopy, 1024>(crc, to, bytes);
  crc = add_strips<kCopy, 64>(crc, to, bytes);
  while (bytes.size() >= 8) {
    crc = add_word<kCopy>(crc, to, bytes.data(), 0);
    bytes = bytes.subspan(8);
    if constexpr (kCopy) to += 8;
  }
  auto tail = static_cast<std::uint32_t>(crc);
  for (const std::byte byte : bytes) {
    tail = _mm_crc32_u8(tail, std::to_integer<unsigned char>(byte));
    if constexpr (kCopy) *to++ = byte;
  }
  return ~tail;
}
#endif

}  // namespace

std::uint32_t crc32c_portable(std::span<const std::byte> bytes, std::uint32_t before) {
  std::uint32_t crc = ~before;
  for (const std::byte byte : bytes) {
    crc = (crc >> 8) ^ kTable[(crc ^ std::to_integer<std::uint32_t>(byte)) & 0xff];
  }
  return ~crc;
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("sse4.2")) return crc32c_sse42<false>(nullptr, bytes, before);
#endif
  return crc32c_portable(bytes, before);
}

std::uint32_t crc32c_copy(std::byte* to, std::span<const std::byte> bytes, std::uint32_t before) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("sse4.2")) return crc32c_sse42<true>(to, bytes, before);
#endif
  std::copy(bytes.begin(), bytes.end(), to);
  return crc32c_portable(bytes, before);
}

}  // namespace lockstep
