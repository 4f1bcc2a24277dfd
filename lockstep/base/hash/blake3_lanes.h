#pragma once

#include <cstring>

#include "lockstep/base/hash/blake3_kernel.h"

// BLAKE3 of as many inputs at once as a vector has words, one in each lane. Included by one file
// per instruction set, which brings a type `Lanes`:
//   kCount        how many lanes
//   Vector        kCount words of 32 bits, with +, ^ and |
//   rotate<n>(x)  every word to the right
//   load(at, m)   m[w] = the w-th word of each of the kCount blocks at[0], at[1], ...
// Everything here has internal linkage and calls no library templates: a function that the linker
// shares between files could carry instructions that the processor does not have.

#define LOCKSTEP_INLINE __attribute__((always_inline)) inline

namespace lockstep {
namespace {

struct Blake3Schedule {
  std::uint8_t word[7][16];  // the message word of each place in each round
};

constexpr Blake3Schedule make_blake3_schedule() {
  constexpr std::uint8_t kPermutation[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
  Blake3Schedule schedule{};
  for (std::uint8_t i = 0; i < 16; ++i) schedule.word[0][i] = i;
  for (int round = 1; round < 7; ++round) {
    for (int i = 0; i < 16; ++i) {
      schedule.word[round][i] = schedule.word[round - 1][kPermutation[i]];
    }
  }
  return schedule;
}

constexpr Blake3Schedule kBlake3Schedule = make_blake3_schedule();

template <typename Lanes, typename V>
LOCKSTEP_INLINE void mix(V& a, V& b, V& c, V& d, const V& x, const V& y) {
  a = a + b + x;
  d = Lanes::template rotate<16>(d ^ a);
  c = c + d;
  b = Lanes::template rotate<12>(b ^ c);
  a = a + b + y;
  d = Lanes::template rotate<8>(d ^ a);
  c = c + d;
  b = Lanes::template rotate<7>(b ^ c);
}

// The round is a template argument, so that state and message can stay in registers.
template <typename Lanes, int kRound, typename V>
LOCKSTEP_INLINE void mix_round(V* v, const V* m) {
  constexpr auto& word = kBlake3Schedule.word[kRound];
  mix<Lanes>(v[0], v[4], v[8], v[12], m[word[0]], m[word[1]]);
  mix<Lanes>(v[1], v[5], v[9], v[13], m[word[2]], m[word[3]]);
  mix<Lanes>(v[2], v[6], v[10], v[14], m[word[4]], m[word[5]]);
  mix<Lanes>(v[3], v[7], v[11], v[15], m[word[6]], m[word[7]]);
  mix<Lanes>(v[0], v[5], v[10], v[15], m[word[8]], m[word[9]]);
  mix<Lanes>(v[1], v[6], v[11], v[12], m[word[10]], m[word[11]]);
  mix<Lanes>(v[2], v[7], v[8], v[13], m[word[12]], m[word[13]]);
  mix<Lanes>(v[3], v[4], v[9], v[14], m[word[14]], m[word[15]]);
}

template <typename Lanes, typename V>
LOCKSTEP_INLINE void compress(V* h, const V* m, const V& counter_low, const V& counter_high,
                              std::uint32_t length, std::uint32_t flags) {
  const auto all = [](std::uint32_t word) { return V{} + word; };
  V v[16] = {h[0],
             h[1],
             h[2],
             h[3],
             h[4],
             h[5],
             h[6],
             h[7],
             all(kBlake3Iv[0]),
             all(kBlake3Iv[1]),
             all(kBlake3Iv[2]),
             all(kBlake3Iv[3]),
             counter_low,
             counter_high,
             all(length),
             all(flags)};
  mix_round<Lanes, 0>(v, m);
  mix_round<Lanes, 1>(v, m);
  mix_round<Lanes, 2>(v, m);
  mix_round<Lanes, 3>(v, m);
  mix_round<Lanes, 4>(v, m);
  mix_round<Lanes, 5>(v, m);
  mix_round<Lanes, 6>(v, m);
  for (int i = 0; i < 8; ++i) h[i] = v[i] ^ v[i + 8];
}

// The processor does not foresee what the next lanes will read: many places at once, a chunk apart.
// As integers, because the place may lie behind the end.
LOCKSTEP_INLINE void prefetch(const std::byte* at, std::size_t ahead) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(at) + ahead));
}

// Up to kCount neighbours of a row, from `first` on.
template <typename Lanes>
LOCKSTEP_INLINE void hash_lanes(const Blake3Row& row, std::size_t first) {
  using V = typename Lanes::Vector;
  constexpr std::size_t kCount = Lanes::kCount;
  const std::size_t left = row.count - first;
  const std::size_t used = left < kCount ? left : kCount;
  const bool parent = (row.flags & kBlake3Parent) != 0;

  const std::byte* at[kCount];
  std::uint32_t low[kCount], high[kCount];
  for (std::size_t lane = 0; lane < kCount; ++lane) {
    // Lanes without an input of their own repeat the last one.
    const std::size_t index = first + (lane < used ? lane : used - 1);
    const std::uint64_t counter = parent ? 0 : row.counter + index;
    at[lane] = row.input + index * row.blocks * kBlake3BlockBytes;
    low[lane] = static_cast<std::uint32_t>(counter);
    high[lane] = static_cast<std::uint32_t>(counter >> 32);
  }
  V counter_low, counter_high;
  std::memcpy(&counter_low, low, sizeof(low));
  std::memcpy(&counter_high, high, sizeof(high));

  V h[8];
  for (int i = 0; i < 8; ++i) h[i] = V{} + row.key[i];
  for (std::size_t block = 0; block < row.blocks; ++block) {
    std::uint32_t flags = row.flags;
    if (!parent && block == 0) flags |= kBlake3ChunkStart;
    if (!parent && block + 1 == row.blocks) flags |= kBlake3ChunkEnd;
    V m[16];
    Lanes::load(at, m);
    for (std::size_t lane = 0; lane < kCount; ++lane) {
      prefetch(at[lane], kCount * row.blocks * kBlake3BlockBytes);
      at[lane] += kBlake3BlockBytes;
    }
    compress<Lanes>(h, m, counter_low, counter_high, kBlake3BlockBytes, flags);
  }

  std::uint32_t words[8][kCount];
  std::memcpy(words, h, sizeof(words));
  for (std::size_t lane = 0; lane < used; ++lane) {
    std::uint32_t* output = row.output + 8 * (first + lane);
    for (int i = 0; i < 8; ++i) output[i] = words[i][lane];
  }
}

}  // namespace
}  // namespace lockstep
