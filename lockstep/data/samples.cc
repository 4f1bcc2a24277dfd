#include "lockstep/data/samples.h"

#include <algorithm>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/index.h"

namespace lockstep {

Samples::Samples(std::vector<TokenShard> shards, std::uint32_t vocab, int context)
    : shards_(std::move(shards)), vocab_(vocab), context_(context) {
  LOCKSTEP_CHECK(context > 0);
  for (const TokenShard& shard : shards_) {
    if (shard.size() > 0) count_ += (shard.size() - 1) / static_cast<std::uint64_t>(context);
    ends_.push_back(count_);
  }
}

void Samples::read(std::uint64_t sample, std::span<std::int32_t> tokens,
                   std::span<std::int32_t> targets) const {
  const auto length = static_cast<std::size_t>(context_);
  LOCKSTEP_CHECK(sample < count_ && tokens.size() == length && targets.size() == length);
  const std::uint64_t id = first_ + sample;
  const auto shard = std::ranges::upper_bound(ends_, id) - ends_.begin();
  const std::uint64_t before = shard == 0 ? 0 : ends_[index_of(shard - 1)];
  const TokenShard& from = shards_[index_of(shard)];
  const std::uint64_t begin = (id - before) * length;
  from.copy(begin, vocab_, tokens);
  from.copy(begin + 1, vocab_, targets);
}

Blake3Hash Samples::fingerprint() const {
  constexpr std::uint64_t kMostTokens = std::uint64_t{1} << 24;
  const auto length = static_cast<std::size_t>(context_);
  const std::uint64_t read_samples =
      std::min(count_, std::max<std::uint64_t>(1, kMostTokens / length));
  Blake3 hash;
  hash.update(std::as_bytes(std::span(&count_, 1)));
  std::vector<std::int32_t> tokens(length), targets(length);
  for (std::uint64_t i = 0; i < read_samples; ++i) {
    read(i * count_ / read_samples, tokens, targets);
    hash.update(std::as_bytes(std::span(tokens)));
    hash.update(std::as_bytes(std::span(targets).last(1)));
  }
  return hash.finish();
}

Samples Samples::slice(std::uint64_t first, std::uint64_t count) const {
  LOCKSTEP_CHECK(first <= count_ && count <= count_ - first);
  Samples part = *this;
  part.first_ = first_ + first;
  part.count_ = count;
  return part;
}

}  // namespace lockstep
