#include "lockstep/comm/nccl/cuda_reducer.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "lockstep/base/error.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/call.h"
#include "lockstep/comm/nccl/combine.h"

namespace lockstep {
namespace {

constexpr std::size_t kQuad = 4;  // chunks of an aligned range are aligned for float4

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, "exchange between GPUs: " + what);
}

TreeInputs checked_inputs(const LeafOwners& owners, int world_size) {
  for (int rank = 0; rank < world_size; ++rank) {
    if (std::find(owners.begin(), owners.end(), rank) != owners.end()) continue;
    refuse(fmt::format("rank {} of {} has none of the {} lanes, so no place for the sum", rank,
                       world_size, owners.size()));
  }
  for (const int owner : owners) {
    if (owner >= 0 && owner < world_size) continue;
    refuse(fmt::format("a lane belongs to rank {}, but there are {} ranks", owner, world_size));
  }
  TreeInputs inputs = TreeInputs::nodes(owners, world_size);
  if (inputs.sources.size() > cuda::kMostInputs) {
    refuse(
        fmt::format("{} lanes among {} ranks make {} partial sums, more than {}; with a "
                    "power of two of lanes for each rank there is one for each",
                    owners.size(), world_size, inputs.sources.size(), cuda::kMostInputs));
  }
  return inputs;
}

std::vector<Range> checked_shards(const std::vector<std::size_t>& shards, int world_size) {
  if (shards.empty()) return {};
  if (shards.size() != static_cast<std::size_t>(world_size)) {
    refuse(fmt::format("{} shards for {} ranks", shards.size(), world_size));
  }
  const std::size_t total = std::accumulate(shards.begin(), shards.end(), std::size_t{0});
  return lockstep::chunks_of(shards, total, world_size);
}

// Those of `rank`.
Range checked_buddies(const std::vector<Range>& buddies, std::size_t shards, int rank) {
  if (buddies.empty()) return {index_of(rank), index_of(rank) + 1};
  if (buddies.size() != shards) {
    refuse(fmt::format("{} ranks have buddies, but {} have shards", buddies.size(), shards));
  }
  for (std::size_t r = 0; r < buddies.size(); ++r) {
    const Range theirs = buddies[r];
    bool mutual = theirs.begin <= r && r < theirs.end && theirs.end <= buddies.size();
    for (std::size_t buddy = theirs.begin; mutual && buddy < theirs.end; ++buddy) {
      mutual = buddies[buddy] == theirs;
    }
    if (!mutual) refuse(fmt::format("the buddies of rank {} do not have it as theirs", r));
  }
  return buddies[index_of(rank)];
}

}  // namespace

CudaReducer::CudaReducer(std::unique_ptr<DeviceTransport> transport,
                         const DeviceReducerOptions& options, std::size_t round_elements)
    : transport_(std::move(transport)),
      rank_(transport_->rank()),
      world_size_(transport_->world_size()),
      native_(options.native),
      shards_(checked_shards(options.shards, world_size_)),
      buddies_(checked_buddies(options.buddies, shards_.size(), rank_)),
      elements_(options.elements),
      inputs_(checked_inputs(options.owners, world_size_)) {
  if (!shards_.empty()) {
    const std::size_t total = shards_.back().end;
    if (elements_ != 0 && elements_ != total) {
      refuse(fmt::format("the shards have {} elements, the vector {}", total, elements_));
    }
    elements_ = total;
  }
  const std::size_t share = round_elements / static_cast<std::size_t>(world_size_);
  most_round_ = std::max(kQuad, share / kQuad * kQuad);
  for (int rank = 0; rank < world_size_; ++rank) {
    // With other owners there may be more partials, of which a round then takes less.
    scratch_floats_.push_back(
        std::max(kQuad * cuda::kMostInputs, received_by(rank) * longest_chunk(rank)));
  }
  set_owners(options.owners);
  if (native_ || world_size_ == 1) return;
  scratch_ = DeviceArray<float>(scratch_floats_[index_of(rank_)], "what other ranks' GPUs send");
}

std::size_t CudaReducer::longest_chunk(int rank) const {
  if (elements_ == 0) return most_round_;
  const std::size_t longest = chunks_of({0, elements_})[index_of(rank)].size();
  return std::min(most_round_, (longest + kQuad - 1) / kQuad * kQuad);
}

std::size_t CudaReducer::received_by(int rank) const {
  return inputs_.sources.size() - inputs_.partials_of[index_of(rank)];
}

// Rounds are equally long on all ranks, so that what is sent fits what is received.
void CudaReducer::set_owners(const LeafOwners& owners) {
  inputs_ = checked_inputs(owners, world_size_);
  own_program_.clear();
  for (std::size_t partial = 0; partial < inputs_.partials_of[index_of(rank_)]; ++partial) {
    own_program_.push_back({.push = true});
    if (partial > 0) own_program_.push_back({.push = false});
  }
  if (world_size_ == 1) return;
  scratch_begin_.clear();
  std::size_t partials = 0;
  round_ = most_round_;
  for (int rank = 0; rank < world_size_; ++rank) {
    scratch_begin_.push_back(partials);
    if (rank != rank_) partials += inputs_.partials_of[index_of(rank)];
    const std::size_t fits = scratch_floats_[index_of(rank)] / received_by(rank);
    if (fits < longest_chunk(rank)) round_ = std::min(round_, fits / kQuad * kQuad);
  }
  longest_ = std::min(round_, longest_chunk(rank_));
}

float* CudaReducer::scratch_partial(int rank, std::size_t partial) const {
  return scratch_.data() + (scratch_begin_[index_of(rank)] + partial) * longest_;
}

std::vector<Range> CudaReducer::chunks_of(Range range) const {
  std::vector<Range> chunks;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (!shards_.empty()) {
      chunks.push_back(common_part(shards_[index_of(rank)], range));
      continue;
    }
    const Range quads = chunk_of((range.size() + kQuad - 1) / kQuad, world_size_, rank);
    chunks.push_back(
        common_part({range.begin + quads.begin * kQuad, range.begin + quads.end * kQuad}, range));
  }
  return chunks;
}

void CudaReducer::reduce(std::span<float* const> partials, Range range, DeviceStream stream) {
  transport_->check();
  const std::size_t own_partials = inputs_.partials_of[index_of(rank_)];
  if (partials.size() != own_partials) {
    refuse(fmt::format("rank {} owns {} nodes, but brings {} partial sums", rank_, own_partials,
                       partials.size()));
  }
  if (elements_ != 0 && (range.begin > range.end || range.end > elements_)) {
    refuse(fmt::format("a piece of {} elements from {} on, of a vector of {}", range.size(),
                       range.begin, elements_));
  }
  if (native_) return reduce_natively(partials, range, stream);
  if (world_size_ == 1) return;  // its one node is the whole tree

  const std::vector<Range> chunks = chunks_of(range);
  std::size_t longest = 0;
  for (const Range& chunk : chunks) longest = std::max(longest, chunk.size());
  std::vector<Range> round(chunks.size());
  for (std::size_t begin = 0; begin < longest; begin += round_) {
    for (std::size_t r = 0; r < chunks.size(); ++r) {
      const std::size_t at = chunks[r].begin + begin;
      round[r] = common_part({at, at + round_}, chunks[r]);
    }
    run_round(partials, round, stream);
  }
  // It overwrites what the rounds sent from the first partial, and so comes after all of them.
  gather(partials[0], chunks, shards_.empty() ? Range{0, index_of(world_size_)} : buddies_, stream);
}

void CudaReducer::run_round(std::span<float* const> partials, const std::vector<Range>& chunks,
                            DeviceStream stream) {
  const Range own = chunks[index_of(rank_)];
  std::vector<DeviceSend> sends;
  std::vector<DeviceRecv> recvs;
  for (int i = 1; i < world_size_; ++i) {
    const int to = (rank_ + i) % world_size_;
    const Range theirs = chunks[index_of(to)];
    for (const float* partial : partials) {
      if (theirs.size() > 0) sends.push_back({to, partial + theirs.begin, theirs.size()});
    }
    const int from = (rank_ + world_size_ - i) % world_size_;
    for (std::size_t partial = 0; partial < inputs_.partials_of[index_of(from)]; ++partial) {
      if (own.size() > 0) recvs.push_back({from, scratch_partial(from, partial), own.size()});
    }
  }
  transport_->exchange(sends, recvs, stream);
  if (own.size() == 0) return;
  std::vector<const float*> inputs;
  for (const TreeInputs::Source& source : inputs_.sources) {
    inputs.push_back(source.rank == rank_ ? partials[source.partial] + own.begin
                                          : scratch_partial(source.rank, source.partial));
  }
  cuda::combine(inputs_.program, inputs, partials[0] + own.begin, own.size(), stream);
}

void CudaReducer::gather(float* values, const std::vector<Range>& chunks, Range ranks,
                         DeviceStream stream) {
  const Range own = chunks[index_of(rank_)];
  const auto takes_part = [&](int rank) {
    return index_of(rank) >= ranks.begin && index_of(rank) < ranks.end;
  };
  std::vector<DeviceSend> sends;
  std::vector<DeviceRecv> recvs;
  for (int i = 1; i < world_size_; ++i) {
    const int to = (rank_ + i) % world_size_;
    if (takes_part(to) && own.size() > 0) sends.push_back({to, values + own.begin, own.size()});
    const int from = (rank_ + world_size_ - i) % world_size_;
    const Range theirs = chunks[index_of(from)];
    if (takes_part(from) && theirs.size() > 0)
      recvs.push_back({from, values + theirs.begin, theirs.size()});
  }
  transport_->exchange(sends, recvs, stream);
}

// With shards too, everybody gets the whole sum: more than asked for, but right.
void CudaReducer::reduce_natively(std::span<float* const> partials, Range range,
                                  DeviceStream stream) {
  if (range.size() == 0) return;
  if (partials.size() > 1) {
    std::vector<const float*> inputs;
    for (const float* partial : partials) inputs.push_back(partial + range.begin);
    cuda::combine(own_program_, inputs, partials[0] + range.begin, range.size(), stream);
  }
  transport_->all_reduce(partials[0] + range.begin, range.size(), stream);
}

void CudaReducer::all_gather(float* values, DeviceStream stream) {
  transport_->check();
  if (shards_.empty()) refuse("there are no shards to gather");
  gather(values, shards_, {0, index_of(world_size_)}, stream);
}

}  // namespace lockstep
