#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/canonical_tree.h"
#include "lockstep/base/deadline.h"
#include "lockstep/comm/collectives/plan.h"
#include "lockstep/comm/types.h"
#include "lockstep/wire/mesh_frame.h"

namespace lockstep {

// Values are part of the mesh protocol.
enum class Collective : std::uint8_t {
  kPointToPoint,
  kBarrier,
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
  kAllToAll,
  kReduceNodes,         // all-reduce of lane partials
  kReduceScatterNodes,  // reduce-scatter of lane partials
};

std::string_view to_string(Collective collective);

struct CallOptions {
  // When unset, ten times the job's timeout.
  std::optional<Deadline> deadline;
  Algorithm algorithm = Algorithm::kAuto;
  // Look for NaN and infinity in the result; see Outcome.
  bool check_finite = false;
  // Named in errors, and compared between ranks.
  std::uint32_t step = 0;
  std::uint32_t bucket = 0;
};

struct Outcome {
  // With check_finite: the first element of the result on this rank that is NaN or infinite.
  std::optional<std::size_t> first_non_finite;
};

// One collective, as called. Views must stay valid until it has ended.
struct Call {
  Collective collective = Collective::kBarrier;
  ConstBufferView in{nullptr, 0, DataType::kU8};
  BufferView out{nullptr, 0, DataType::kU8};
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  std::size_t total = 0;                  // elements of the whole vector
  std::vector<std::size_t> counts;        // of it, per rank; empty: even
  std::vector<std::size_t> recv_counts;   // all_to_all only
  std::vector<ConstBufferView> partials;  // reduce_nodes: of owned_nodes(owners, rank), in order
  LeafOwners owners;
  CallOptions options;
};

// What all ranks must agree on, as a frame without payload; of a completed call (calls.h).
MeshFrame stamp_of(const Call& call);
// "all_reduce sum f32 x 1000 (direct), step 3, bucket 2"
std::string describe(const MeshFrame& stamp);

// The chunk of the whole that belongs to each rank: by counts, or even.
std::vector<Range> chunks_of(const std::vector<std::size_t>& counts, std::size_t total,
                             int world_size);

}  // namespace lockstep
