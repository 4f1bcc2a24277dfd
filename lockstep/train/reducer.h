#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/float_buffer.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/model/layout.h"

namespace lockstep {

// How the workers' sums become one.
enum class Reduction : std::uint8_t {
  kTree,    // the canonical tree over lanes: the same bits for any number of workers
  kRing,    // order-free: replicas stay identical, but another number of workers gives other bits
  kNative,  // the engine's own (MPI); order-free
  kNccl,    // NCCL's own, from GPU to GPU; order-free
};
std::string_view to_string(Reduction reduction);

struct ReducerOptions {
  Reduction reduction = Reduction::kTree;
  // The type on the wire. bf16 is order-free: a worker adds up its lanes and its rounding errors of
  // earlier steps, and rounds the sum; all ranks get the same rounded result.
  DataType wire = DataType::kF32;
  std::size_t bucket_bytes = std::size_t{4} << 20;
  bool overlap = true;  // buckets travel while the backward pass goes on
  bool shard = false;   // every rank gets its shard of the sum only
  // With shards: a rank gets the shards of its buddies, too (group_range()), so that their moments
  // are held twice. Each bucket then travels once more, to its owner's buddies.
  bool buddy = true;
  // The replicas add up gradients from GPU to GPU; the reducer sends only tails.
  bool on_device = false;
};

// Whether gradients go through the communicator. A single rank already has the sum, but bf16 still
// has to be rounded.
bool travels(const ReducerOptions& options, int world_size);

// The shard of a flat buffer whose moments rank `rank` keeps when the optimizer is sharded: whole
// norm blocks, as even as possible.
Range shard_range(std::size_t size, int rank, int world_size);
// Of all ranks.
std::vector<std::size_t> shard_sizes(std::size_t size, int world_size);

// Buddies hold the moments of each other's shards: ranks 2k and 2k + 1, and the last three where
// the number of ranks is odd. As long as one of them lives no moment is lost. A Range of ranks.
Range buddies_of(int rank, int world_size);
// The shards of a rank and its buddies.
Range group_range(std::size_t size, int rank, int world_size);
// The elements whose sum and moments a rank holds with these options: all, its shard, or the shards
// of its buddies, too.
Range held_range(const ReducerOptions& options, std::size_t size, int rank, int world_size);

struct ReducedStep {
  // The sum over all lanes of the step, not scaled. Meaningless with ReducerOptions::on_device.
  std::span<const float> gradient;
  // This rank's part of the norm: everything, or its shard. The sum is valid in held().
  Range range;
  std::vector<double> tail;  // the sum over all lanes
  // How many buckets of all ranks were not finite, where the communicator carries finite numbers
  // only. Zeros were sent instead, so the sum is wrong.
  double withheld = 0;
  // How long buckets were under way, the time included in which they waited for other ranks.
  std::chrono::nanoseconds travelled{};
};

// Adds up the partials of all workers. In every step, with the same sizes on all ranks: begin(),
// ready() as the partials become final, finish(). The gradient travels in buckets, ranges of the
// flat buffers, each of which starts as soon as it is final; nothing is copied (bf16 aside). One
// thread at a time. After an Error of the communicator the reducer cannot be used.
//
// Buddies cost a rank memory and traffic: with n ranks, moments of 2/n of the model instead of 1/n,
// and 1/n of the gradient sent once more (both up to 3/n and 2/n among the last three of an odd
// number).
class GradientReducer {
 public:
  // `partials` are this rank's sums over its nodes of T(0, owners.size()), in the order of
  // owned_nodes(); their memory outlives the reducer. ready() and finish() call `reduced`, in
  // ascending order, with ranges of the first partial that have become the sum of all workers.
  GradientReducer(Communicator& communicator, LeafOwners owners,
                  std::vector<std::span<float>> partials, const ReducerOptions& options,
                  std::function<void(Range)> reduced = {});
  // Does not wait: buckets under way are aborted, and the group with them.
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  // Between steps, on all ranks alike: other owners of the lanes, and this rank's partials.
  void set_owners(LeafOwners owners, std::vector<std::span<float>> partials);

  void begin(std::int64_t step);
  // Elements `range` of all partials are final. Ranges come in ascending order without gaps.
  void ready(Range range);
  // The rest of the gradient is final as well: waits until then for what is under way; whether all
  // has come.
  bool wait_until(Deadline deadline);
  // Likewise, until it has come. `lane_tails` has the tail of every lane of this
  // rank, in lane order (LaneWork::place) and of equal length; tails are added in the same tree and
  // never rounded. The sum replaces the first partial.
  ReducedStep finish(std::span<const std::vector<double>> lane_tails);

  // Whether something of the step has been sent.
  bool under_way() const { return !works_.empty(); }
  std::size_t buckets() const { return buckets_.size(); }
  // Bytes sent per rank for every byte of gradient: more than 1 where ranks have several partials.
  double traffic() const;
  // This rank's own shard, which it shares with all ranks once it is updated. Everything without
  // shards.
  Range shard() const { return shard_; }
  // Where finish() leaves the sum: shard() and the buddies' shards.
  Range held() const { return held_; }
  // `values` are those of held(), and set in shard(): sets the rest from the buddies. Between
  // steps, on all ranks alike.
  void complete_held(std::span<float> values);
  // The rounding errors still to be added, with bf16; otherwise empty. Part of a run's state.
  std::span<float> residual() { return residual_.span(); }

 private:
  void finish_bucket(std::size_t bucket);
  void tell_reduced(std::size_t bucket) const;
  std::vector<Call> calls_for(std::size_t bucket);
  Call tree_call(Range range, const CallOptions& options);
  Call order_free_call(Range range, const CallOptions& options);
  void add_partials(Range range);
  void withhold_non_finite(Range range);
  std::vector<std::size_t> shard_counts(Range range) const;
  Range own_part(Range range) const;
  Range shard_of(int rank) const;
  // How often something of `range` travels among buddies: each time to another of them.
  int buddy_turns(Range range) const;
  // `data` are elements `range`. This rank's own go to one buddy, those of another come.
  Call buddy_call(int turn, Range range, BufferView data, const CallOptions& options) const;
  std::vector<double> sum_tails(std::span<const std::vector<double>> lane_tails);

  // Constant during a step.
  LeafOwners owners_;
  std::vector<Range> nodes_;  // of this rank
  std::vector<std::span<float>> partials_;

  // Constant after construction.
  Communicator& communicator_;
  const ReducerOptions options_;
  const std::function<void(Range)> reduced_;
  std::vector<Range> buckets_;
  Range shard_;
  Range held_;

  // Of the step under way.
  std::int64_t step_ = 0;
  std::size_t final_ = 0;                 // elements
  std::vector<std::vector<Work>> works_;  // of every bucket, in the order of its calls
  std::size_t told_ = 0;                  // buckets that `reduced_` was called for
  double withheld_ = 0;
  std::chrono::nanoseconds travelled_{};

  // With bf16.
  FloatBuffer residual_;
  std::vector<BFloat16> rounded_;
};

}  // namespace lockstep
