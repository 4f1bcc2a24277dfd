#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/base/hash/blake3.h"
#include "lockstep/data/token_shard.h"

namespace lockstep {

// Shards cut into samples: `context` tokens and, for each, the one that follows it. Samples of a
// shard lie end to end; what is left at its end is not used. Cheap to copy; any thread may read.
class Samples {
 public:
  Samples(std::vector<TokenShard> shards, std::uint32_t vocab, int context);

  std::uint64_t size() const { return count_; }
  int context() const { return context_; }

  // Writes `context` elements to each. Throws Error{kIo} for a token beyond the vocabulary.
  void read(std::uint64_t sample, std::span<std::int32_t> tokens,
            std::span<std::int32_t> targets) const;

  // Tells sets of samples apart: the BLAKE3 of their length, and for every shard where its samples
  // are and the hash of all its tokens. May read the shards: see PayloadHash.
  Blake3Hash fingerprint() const;
  // Where the samples are.
  std::vector<TokenShard> shards() const;

  // Samples [first, first + count) as a set of their own.
  Samples slice(std::uint64_t first, std::uint64_t count) const;
  // Those of `more`, of the same vocabulary and context, behind these.
  void append(const Samples& more);

 private:
  // Samples of one shard that follow each other.
  struct Run {
    TokenShard shard;
    std::uint64_t first = 0;  // in the shard
    std::uint64_t end = 0;    // in the set
  };

  std::vector<Run> runs_;
  std::uint32_t vocab_;
  int context_;
  std::uint64_t count_ = 0;
};

}  // namespace lockstep
