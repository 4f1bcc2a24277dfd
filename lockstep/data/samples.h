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

  // Tells sets of samples apart: the BLAKE3 of the number of samples and of their tokens. Of more
  // than some sixteen million tokens only samples at even distances are read.
  Blake3Hash fingerprint() const;

  // Samples [first, first + count) as a set of their own.
  Samples slice(std::uint64_t first, std::uint64_t count) const;

 private:
  std::vector<TokenShard> shards_;
  std::vector<std::uint64_t> ends_;  // samples up to the end of each shard
  std::uint32_t vocab_;
  int context_;
  std::uint64_t first_ = 0;
  std::uint64_t count_ = 0;
};

}  // namespace lockstep
