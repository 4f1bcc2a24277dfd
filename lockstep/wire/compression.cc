#include "lockstep/wire/compression.h"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "lockstep/base/check.h"
#include "lockstep/wire/bytes.h"

namespace lockstep {
namespace {

constexpr std::size_t kFewestWords = 256;  // fewer are not worth a table
constexpr std::size_t kLeastSaving = 16;   // one byte of so many
// So many words are looked at to choose planes. A plane is worth a code if two of its bytes are
// equal once in so many times; random bytes are once in 256.
constexpr std::size_t kSampled = 512;
constexpr std::size_t kWorthOneIn = 64;

// Which planes are coded, one bit each: one of them, or every other one, as numbers of two bytes
// have.
constexpr std::array<unsigned, 6> kPlaneSets{0b0001, 0b0010, 0b0100, 0b1000, 0b0101, 0b1010};

std::uint32_t word_at(const std::byte* bytes, std::size_t word) {
  return load_little_endian<std::uint32_t>(bytes + kPlaneWord * word);
}

// Calls visit with the set as a constant, so that its loop is compiled for it.
template <typename Visit>
void with_planes(unsigned planes, Visit&& visit) {
  switch (planes) {
    case 0b0001: return visit.template operator()<0b0001>();
    case 0b0010: return visit.template operator()<0b0010>();
    case 0b0100: return visit.template operator()<0b0100>();
    case 0b1000: return visit.template operator()<0b1000>();
    case 0b0101: return visit.template operator()<0b0101>();
    default: return visit.template operator()<0b1010>();
  }
}

constexpr std::size_t kept_bytes(unsigned planes) {
  return kPlaneWord - static_cast<std::size_t>(std::popcount(planes));
}

// A *word* is four bytes in a row. Its bytes that are not coded, together at its low end; and back.
template <unsigned kPlanes>
std::uint32_t keep(std::uint32_t word) {
  std::uint32_t kept = 0;
  for (unsigned from = 0, to = 0; from < kPlaneWord; ++from) {
    if ((kPlanes >> from & 1) == 0) kept |= (word >> (8 * from) & 0xff) << (8 * to++);
  }
  return kept;
}
template <unsigned kPlanes>
std::uint32_t spread(std::uint32_t kept) {
  std::uint32_t word = 0;
  for (unsigned from = 0, to = 0; to < kPlaneWord; ++to) {
    if ((kPlanes >> to & 1) == 0) word |= (kept >> (8 * from++) & 0xff) << (8 * to);
  }
  return word;
}

template <unsigned kPlanes>
void keep_words(const std::byte* plain, std::size_t words, std::byte* to) {
  for (std::size_t i = 0; i < words; ++i) {
    store_little_endian(to + kept_bytes(kPlanes) * i, keep<kPlanes>(word_at(plain, i)));
  }
}

// Reads up to two bytes behind what is kept.
template <unsigned kPlanes>
void spread_words(const std::byte* kept, std::size_t words, std::byte* plain) {
  for (std::size_t i = 0; i < words; ++i) {
    const auto some = load_little_endian<std::uint32_t>(kept + kept_bytes(kPlanes) * i);
    store_little_endian(plain + kPlaneWord * i, spread<kPlanes>(some));
  }
}

// 0: none is worth a code.
unsigned choose_planes(const std::byte* plain, std::size_t words) {
  std::array<std::array<std::uint16_t, 256>, kPlaneWord> counts{};
  const std::size_t stride = std::max<std::size_t>(words / kSampled, 1);
  std::size_t sampled = 0;
  for (std::size_t i = 0; i < words; i += stride, ++sampled) {
    const std::uint32_t word = word_at(plain, i);
    for (unsigned plane = 0; plane < kPlaneWord; ++plane)
      ++counts[plane][word >> (8 * plane) & 0xff];
  }
  // How often two of a plane's bytes are equal, of sampled².
  std::array<std::size_t, kPlaneWord> equal{};
  for (std::size_t plane = 0; plane < kPlaneWord; ++plane) {
    for (const std::size_t count : counts[plane]) equal[plane] += count * count;
  }
  const std::size_t worth = sampled * sampled / kWorthOneIn;
  const auto best = static_cast<std::size_t>(std::ranges::max_element(equal) - equal.begin());
  if (equal[best] < worth) return 0;
  const std::size_t twin = best ^ 2U;
  return 1U << best | (equal[twin] < worth ? 0U : 1U << twin);
}

}  // namespace

std::span<const std::byte> Compressor::compress(std::span<const std::byte> plain) {
  LOCKSTEP_CHECK(plain.size() <= kMostCompressed);
  const std::size_t words = plain.size() / kPlaneWord;
  if (words < kFewestWords) return {};
  const unsigned planes = choose_planes(plain.data(), words);
  if (planes == 0) return {};
  out_.resize(1 + 2 * kMostPlaneBytes + kMostCompressed);
  std::byte* to = out_.data();
  *to++ = static_cast<std::byte>(planes);
  for (std::size_t plane = 0; plane < kPlaneWord; ++plane) {
    if ((planes >> plane & 1) != 0) to = write_plane(plain.data() + plane, words, to);
  }
  const std::size_t kept = kept_bytes(planes) * words;
  const std::span rest = plain.subspan(kPlaneWord * words);
  const auto size = static_cast<std::size_t>(to - out_.data()) + kept + rest.size();
  if (size > plain.size() - plain.size() / kLeastSaving) return {};
  with_planes(planes, [&]<unsigned kPlanes> { keep_words<kPlanes>(plain.data(), words, to); });
  std::ranges::copy(rest, to + kept);
  return std::span(out_).first(size);
}

bool Decompressor::decompress(std::span<const std::byte> compressed, std::span<std::byte> plain) {
  if (compressed.empty() || plain.size() < kPlaneWord) return false;
  const auto planes = std::to_integer<unsigned>(compressed.front());
  if (std::ranges::find(kPlaneSets, planes) == kPlaneSets.end()) return false;
  const std::size_t words = plain.size() / kPlaneWord;
  const std::span rest = plain.subspan(kPlaneWord * words);
  const std::size_t behind_codes = kept_bytes(planes) * words + rest.size();
  if (compressed.size() < 1 + behind_codes) return false;
  const std::span kept = compressed.last(behind_codes);
  // Words are read four bytes at a time: the last ones have to come from where there are so many.
  with_planes(planes, [&]<unsigned kPlanes> {
    const std::size_t safe = words > kPlaneWord ? words - kPlaneWord : 0;
    spread_words<kPlanes>(kept.data(), safe, plain.data());
    std::array<std::byte, kPlaneWord*(kPlaneWord + 1)> last{};
    const auto from =
        kept.subspan(kept_bytes(kPlanes) * safe, kept_bytes(kPlanes) * (words - safe));
    std::ranges::copy(from, last.begin());
    spread_words<kPlanes>(last.data(), words - safe, plain.data() + kPlaneWord * safe);
  });
  std::ranges::copy(kept.last(rest.size()), rest.begin());
  ByteReader codes(compressed.subspan(1, compressed.size() - 1 - behind_codes));
  for (std::size_t plane = 0; plane < kPlaneWord; ++plane) {
    if ((planes >> plane & 1) == 0) continue;
    if (!read_plane(codes, words, table_, plain.data() + plane)) return false;
  }
  return codes.finished();
}

}  // namespace lockstep
