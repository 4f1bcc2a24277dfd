#include "lockstep/server/round_control.h"

#include "lockstep/base/check.h"
#include "lockstep/base/hash/blake3.h"

namespace lockstep {
namespace {

constexpr std::size_t kCount = 1;  // how many ranks brought theirs
constexpr std::size_t kWords = 2;  // then three words of a digest, each with its square
// Sums over 4096 ranks of squares of such words are exact in f64.
constexpr std::uint32_t kWordMask = (1U << 19) - 1;

}  // namespace

RoundControl::RoundControl(const MeshFrame& stamp, bool last) {
  numbers_[kLast] = last ? 1 : 0;
  numbers_[kCount] = 1;
  const Blake3Hash hash = blake3(encode(stamp));
  for (std::size_t i = kWords; i < kNumbers; i += 2) {
    std::uint32_t word = 0;
    for (std::size_t byte = 0; byte < 4; ++byte) {
      word = word << 8 | std::to_integer<std::uint32_t>(hash[2 * i + byte]);
    }
    const double value = word & kWordMask;
    numbers_[i] = value;
    numbers_[i + 1] = value * value;
  }
}

// Equal sums and equal sums of squares mean that no rank's word is another one.
bool RoundControl::agrees(std::span<const double> sums) const {
  LOCKSTEP_CHECK(sums.size() >= kNumbers);
  for (std::size_t i = kWords; i < kNumbers; ++i) {
    if (sums[i] != sums[kCount] * numbers_[i]) return false;
  }
  return true;
}

}  // namespace lockstep
