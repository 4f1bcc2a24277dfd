#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/base/hash/blake3.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/model/batch.h"
#include "lockstep/model/layout.h"
#include "lockstep/model/update.h"
#include "lockstep/train/gradient_tree.h"

namespace lockstep {

// One worker's copy of the model, and all arithmetic on it: parameters, moments, lanes and their
// partial sums. The trainer sees nothing else of the device. Flat buffers are in the order of
// layout(). One thread at a time.
class Replica {
 public:
  virtual ~Replica() = default;

  virtual const ParameterLayout& layout() const = 0;
  virtual const LaneSchedule& schedule() const = 0;

  // Whole flat buffers, on the host.
  virtual void set_parameters(std::span<const float> values) = 0;
  virtual void get_parameters(std::span<float> values) const = 0;
  // The elements whose moments are held here: all, or this rank's shard.
  virtual Range shard() const = 0;
  virtual void set_moments(std::span<const float> first, std::span<const float> second) = 0;
  virtual void get_moments(std::span<float> first, std::span<float> second) const = 0;

  virtual LossSum loss(const Batch& batch) = 0;
  // Lane `index` of the schedule: the gradient of the sum of its token losses goes into its
  // accumulator, and the merges of the schedule are made, if need be after this has returned.
  // `ready`, which the last lane has, is told in ascending order of ranges that are final in all
  // partials; where these are exchanged through the host, they can then be read through partial().
  virtual void gradient(const Batch& batch, std::size_t index, const RangeReady& ready) = 0;
  // The same with a gradient of zeros, for a lane that is left out.
  virtual void skip(std::size_t index, const RangeReady& ready) = 0;
  // Waits for the lanes that were begun since it was called last, and tells of them in that order.
  virtual std::vector<LaneResult> finish_lanes() = 0;
  // Partial sum i on the host, to be sent; the sum over all lanes comes back in partial(0).
  virtual std::span<float> partial(std::size_t index) = 0;
  // Elements `range` of the sum have come back there. Others may still be computed.
  virtual void reduced(Range range) = 0;

  // The gradient of a batch by itself, on the host; it takes the place of partial(0).
  virtual std::span<const float> single_gradient(const Batch& batch, LossSum& sum) = 0;

  // What follows is about the sum over all lanes, in partial(0) or where exchanges on the device
  // left it. On the host; only shard() of it is valid.
  virtual std::span<const float> reduced_sum() = 0;
  // The squares of its norm blocks. `range` begins at a block.
  virtual void block_squares(Range range, std::span<double> sums) = 0;
  // AdamW on shard(), if need be after this has returned. Looks at the losses of lanes that
  // finish_lanes() has not told of.
  virtual void update(const UpdateRequest& request) = 0;
  virtual UpdateResult finish_update() = 0;
  // Calls `exchange` with the flat parameters, of which shard() is up to date; it fills in the
  // rest.
  virtual void complete_parameters(
      const std::function<void(std::span<float> parameters)>& exchange) = 0;
  // The same from device to device, where sums are exchanged like that; false elsewhere.
  virtual bool complete_on_device() { return false; }

  // Of every tensor's parameters, in the order of layout().tensors(), as weights_hash() has them.
  virtual std::vector<Blake3Hash> tensor_hashes() const = 0;
  // Bytes that are held for parameters, moments and sums of gradients.
  virtual std::size_t state_bytes() const = 0;
};

// How the partials of the ranks become one sum.
enum class Exchange : std::uint8_t {
  kNone,    // there is nobody to exchange with
  kHost,    // through partial(), by the reducer
  kDevice,  // by the replicas themselves, from GPU to GPU
};

struct ReplicaOptions {
  ModelConfig model;
  Precision precision = Precision::kF32;
  AdamWOptions adamw;
  int rows = 1;  // of a lane, or of a validation batch
  int context = 1;
  std::vector<Range> partials;  // as owned_nodes() gives them
  Range shard;
  Exchange exchange = Exchange::kHost;
  bool recompute = false;  // activations on a GPU, which spares memory
  int device = 0;          // which GPU, counted round those that there are
  // For Exchange::kDevice.
  LeafOwners owners;
  bool native = false;  // NCCL's own all-reduce
  bool sharded = false;
};

// On the processor's cores. Sums of gradients lie in the communicator's memory; it must outlive the
// replica, as must the pool.
std::unique_ptr<Replica> make_cpu_replica(const ReplicaOptions& options, Communicator& communicator,
                                          ThreadPool& pool);

// On a GPU. The communicator must outlive it.
std::unique_ptr<Replica> make_gpu_replica(const ReplicaOptions& options,
                                          Communicator& communicator);

}  // namespace lockstep
