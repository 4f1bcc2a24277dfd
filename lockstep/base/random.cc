#include "lockstep/base/random.h"

namespace lockstep {
namespace {

constexpr int kRounds = 10;

constexpr std::uint32_t low(std::uint64_t value) { return static_cast<std::uint32_t>(value); }
constexpr std::uint32_t high(std::uint64_t value) { return low(value >> 32); }

}  // namespace

std::array<std::uint32_t, 4> philox(const std::array<std::uint32_t, 4>& counter,
                                    const std::array<std::uint32_t, 2>& key) {
  auto [c0, c1, c2, c3] = counter;
  auto [k0, k1] = key;
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t a = std::uint64_t{0xd2511f53} * c0;
    const std::uint64_t b = std::uint64_t{0xcd9e8d57} * c2;
    c0 = high(b) ^ c1 ^ k0;
    c1 = low(b);
    c2 = high(a) ^ c3 ^ k1;
    c3 = low(a);
    k0 += 0x9e3779b9;  // golden ratio
    k1 += 0xbb67ae85;  // square root of 3, less 1
  }
  return {c0, c1, c2, c3};
}

std::uint64_t random_u64(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  const auto words =
      philox({low(index), high(index), low(stream), high(stream)}, {low(seed), high(seed)});
  return words[0] | (std::uint64_t{words[1]} << 32);
}

float random_f32(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return static_cast<float>(random_u64(seed, stream, index) >> 40) * 0x1p-24f;
}

}  // namespace lockstep
