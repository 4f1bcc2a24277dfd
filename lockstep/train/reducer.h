#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

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
  // What travels. bf16 is order-free: a worker adds its lanes and what rounding took from its sums
  // before, rounds, and all get the same rounded result.
  DataType wire = DataType::kF32;
  std::size_t bucket_bytes = std::size_t{4} << 20;
  bool overlap = true;  // buckets travel while the backward pass goes on
  bool shard = false;   // every rank gets its shard of the sum only
  // The replicas sum gradients among themselves, from GPU to GPU; only tails travel here.
  bool on_device = false;
};

// Whether gradients go to other ranks through a communicator. A rank by itself has the sum already,
// unless it is to be rounded.
bool travels(const ReducerOptions& options, int world_size);

// The part of a flat buffer that rank `rank` keeps when the optimizer is sharded: whole norm
// blocks, as evenly as they go.
Range shard_range(std::size_t size, int rank, int world_size);
std::vector<std::size_t> shard_sizes(std::size_t size, int world_size);

struct ReducedStep {
  // Flat: the sum over all lanes of the step, never scaled; meaningless when it is on the device.
  std::span<const float> gradient;
  Range range;               // where it is valid: everywhere, or in this rank's shard
  std::vector<double> tail;  // the sum over all lanes
  // Buckets that some rank did not send because they were not finite, where the communicator
  // carries finite numbers only: zeros travelled instead, and the sum is worthless.
  double withheld = 0;
};

// Where the model meets the other workers. In every step, in this order and with the same sizes on
// all ranks: begin(), ready() as the partial sums become final, finish(). The gradient travels in
// buckets, sub-ranges of the flat buffers, which start as soon as they are final; nothing is copied
// (bf16 aside). One thread at a time. Failures are the communicator's, and final.
class GradientReducer {
 public:
  // `partials` are this rank's sums over its nodes of T(0, owners.size()), in the order of
  // owned_nodes(); they stay where they are. `reduced` is told, in ascending order, of ranges whose
  // sum has replaced the first partial, from ready() and finish().
  GradientReducer(Communicator& communicator, LeafOwners owners,
                  std::vector<std::span<float>> partials, const ReducerOptions& options,
                  std::function<void(Range)> reduced = {});
  // Waits for nobody: buckets under way are aborted, with the group.
  ~GradientReducer();
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  void begin(std::int64_t step);
  // Elements `range` of all partials are final. Ranges come in ascending order without gaps.
  void ready(Range range);
  // The rest of the gradient is final, too. `lane_tails` are numbers that travel beside it, equally
  // many for every lane of this rank in lane order; they are added in the same tree, never rounded.
  // The result replaces the first partial.
  ReducedStep finish(std::span<const std::vector<double>> lane_tails);

  std::size_t buckets() const { return buckets_.size(); }
  // Bytes that travel for every byte of gradient and rank: more than 1 where ranks have several
  // partials.
  double traffic() const;
  Range shard() const { return shard_; }
  // What rounding took so far, with bf16; empty otherwise. Part of a run's state.
  std::span<float> residual() { return residual_.span(); }

 private:
  void finish_bucket(std::size_t bucket);
  void tell_reduced(std::size_t bucket) const;
  Call call_for(std::size_t bucket);
  Call tree_call(Range range, const CallOptions& options);
  Call order_free_call(Range range, const CallOptions& options);
  void add_partials(Range range);
  void withhold_non_finite(Range range);
  std::vector<std::size_t> shard_counts(Range range) const;
  Range own_part(Range range) const;
  std::vector<double> sum_tails(std::span<const std::vector<double>> lane_tails);

  // Constant after construction.
  Communicator& communicator_;
  const LeafOwners owners_;
  const std::vector<Range> nodes_;  // of this rank
  const std::vector<std::span<float>> partials_;
  const ReducerOptions options_;
  const std::function<void(Range)> reduced_;
  std::vector<Range> buckets_;
  Range shard_;

  // Of the step under way.
  std::int64_t step_ = 0;
  std::size_t final_ = 0;  // elements
  std::vector<Work> works_;
  std::size_t told_ = 0;  // buckets that are known to be done
  double withheld_ = 0;

  // With bf16.
  FloatBuffer residual_;
  std::vector<BFloat16> rounded_;
};

}  // namespace lockstep
