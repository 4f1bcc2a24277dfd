#include "lockstep/base/hash/crc32c.h"

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
__attribute__((target("sse4.2"))) std::uint32_t crc32c_sse42(std::span<const std::byte> bytes,
                                                             std::uint32_t before) {
  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  std::uint64_t crc = ~before;
  for (; left >= 8; at += 8, left -= 8) {
    std::uint64_t word;
    std::memcpy(&word, at, sizeof(word));
    crc = _mm_crc32_u64(crc, word);
  }
  auto tail = static_cast<std::uint32_t>(crc);
  for (; left > 0; ++at, --left) tail = _mm_crc32_u8(tail, std::to_integer<unsigned char>(*at));
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
  if (__builtin_cpu_supports("sse4.2")) return crc32c_sse42(bytes, before);
#endif
  return crc32c_portable(bytes, before);
}

}  // namespace lockstep
