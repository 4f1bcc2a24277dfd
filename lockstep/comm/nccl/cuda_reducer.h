#pragma once

#include <memory>
#include <vector>

#include "lockstep/base/cuda/runtime.h"
#include "lockstep/comm/nccl/device_transport.h"
#include "lockstep/comm/tree_inputs.h"

namespace lockstep {

// A DeviceReducer over a transport of any kind. A range is cut into *chunks*, one for each rank:
// even ones, or by the shards. A *round* takes some elements of every rank's chunk: each rank sends
// every other rank those elements of its partials, and adds everybody's partials in its own chunk
// along the canonical tree. When all rounds are enqueued, everybody sends its chunk of the sum to
// everybody, or with shards to its buddies.
class CudaReducer final : public DeviceReducer {
 public:
  // Bounds what a round receives, and so the scratch memory: about this many elements for each of
  // a rank's nodes. Tests make it small to have many rounds.
  static constexpr std::size_t kRoundElements = std::size_t{16} << 20;

  // Takes its scratch memory here. Throws Error{kInvalidArgument} for options that do not fit the
  // transport's world size.
  CudaReducer(std::unique_ptr<DeviceTransport> transport, const DeviceReducerOptions& options,
              std::size_t round_elements = kRoundElements);

  void set_owners(const LeafOwners& owners) override;
  void reduce(std::span<float* const> partials, Range range, DeviceStream stream) override;
  void all_gather(float* values, DeviceStream stream) override;
  void check() override { transport_->check(); }
  void abort() noexcept override { transport_->abort(); }

 private:
  std::vector<Range> chunks_of(Range range) const;
  std::size_t longest_chunk(int rank) const;
  // Partials that `rank` gets from others in a round.
  std::size_t received_by(int rank) const;
  // chunks[r] is what rank r adds up.
  void run_round(std::span<float* const> partials, const std::vector<Range>& chunks,
                 DeviceStream stream);
  // Everybody's chunk of `values`, or only those of `ranks`, who are the same for all of them.
  void gather(float* values, const std::vector<Range>& chunks, Range ranks, DeviceStream stream);
  void reduce_natively(std::span<float* const> partials, Range range, DeviceStream stream);
  float* scratch_partial(int rank, std::size_t partial) const;

  // Constant after construction.
  const std::unique_ptr<DeviceTransport> transport_;
  const int rank_;
  const int world_size_;
  const bool native_;
  std::vector<Range> shards_;                // per rank; empty: everybody has all
  const Range buddies_;                      // ranks, this one among them; with shards
  std::size_t elements_ = 0;                 // 0: not known
  std::size_t most_round_ = 0;               // elements of a rank's chunk in a round, at most
  std::vector<std::size_t> scratch_floats_;  // per rank, the size of its scratch_

  // Follow from the owners.
  TreeInputs inputs_;
  std::vector<CombineStep> own_program_;    // adds this rank's partials one after another
  std::vector<std::size_t> scratch_begin_;  // per rank, its first partial in scratch_
  std::size_t round_ = 0;                   // elements of a rank's chunk in a round
  std::size_t longest_ = 0;                 // elements of a partial in scratch_, at most round_

  DeviceArray<float> scratch_;  // of the stream
};

}  // namespace lockstep
