#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

#include "lockstep/base/canonical_tree.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/range.h"
#include "lockstep/comm/types.h"

namespace lockstep {

// The values of both enumerations are part of the mesh protocol (docs/mesh_protocol.md).
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
  kReduceNodes,         // all-reduce of partials over lanes
  kReduceScatterNodes,  // reduce-scatter of partials over lanes
};

enum class Algorithm : std::uint8_t {
  kAuto,             // the engine chooses, by size and number of ranks
  kPair,             // every rank sends its whole vector to every other; one round
  kRing,             // reduce-scatter, then all-gather around the ring; adds in an order of its own
  kHalvingDoubling,  // recursive halving by doubling distances, then doubling
  kDirect,           // every rank reduces one chunk of everybody's vectors, then all-gather
  kTree,             // binomial reduce to a root, binomial broadcast
  kShared,           // direct, through memory that all ranks map
  kNative,           // the engine's own (MPI's); adds in an order of its own
  kTwoLevel,         // direct between hosts, through memory that the ranks of a host map
};

std::string_view to_string(Collective collective);
std::string_view to_string(Algorithm algorithm);

struct CallOptions {
  // When unset, ten times the job's timeout.
  std::optional<Deadline> deadline;
  Algorithm algorithm = Algorithm::kAuto;
  // Look for NaN and infinity in the result; see Outcome. Costs one more pass over the result.
  bool check_finite = false;
  // Named in errors, and compared between ranks.
  std::uint32_t step = 0;
  std::uint32_t bucket = 0;
};

// Where a message is received from whichever rank sends one.
inline constexpr int kAnySource = std::numeric_limits<int>::min();

struct Outcome {
  // With check_finite: the first element of the result on this rank that is NaN or infinite.
  std::optional<std::size_t> first_non_finite;
  // Of an asynchronous call: how long it took, once all work before it had ended.
  std::chrono::nanoseconds took{};
  // Of recv_any: the rank that sent the message.
  int source = -1;
};

// One collective as data, for Communicator::run() and start(). The functions of `calls` make it.
// Its views must stay valid until the collective has ended.
struct Call {
  Collective collective = Collective::kBarrier;
  ConstBufferView in{nullptr, 0, DataType::kU8};
  BufferView out{nullptr, 0, DataType::kU8};
  ReduceOp op = ReduceOp::kSum;
  int root = 0;                           // of a message: the other rank
  bool sends = false;                     // a message only
  std::size_t total = 0;                  // elements of the whole vector
  std::vector<std::size_t> counts;        // of it, per rank; empty: even
  std::vector<std::size_t> recv_counts;   // all_to_all only
  std::vector<ConstBufferView> partials;  // reduce_nodes: of owned_nodes(owners, rank), in order
  LeafOwners owners;
  CallOptions options;
};

// The collectives, each declared and described here once. Communicator has a blocking member of
// the same name and arguments for each. Counts are elements per rank, in rank order.
namespace calls {

// data = the reduction of everybody's data.
Call all_reduce(BufferView data, ReduceOp op, const CallOptions& options = {});
// out = this rank's chunk of the reduction of everybody's `in`. `counts` are the sizes of the
// chunks; even ones (chunk_of) if it is empty.
Call reduce_scatter(ConstBufferView in, BufferView out, ReduceOp op,
                    std::vector<std::size_t> counts = {}, const CallOptions& options = {});
// out = everybody's `in` in rank order. `in` may be its own place in `out`. Equal sizes unless
// `counts` says otherwise.
Call all_gather(ConstBufferView in, BufferView out, std::vector<std::size_t> counts = {},
                const CallOptions& options = {});
// data = the root's data.
Call broadcast(BufferView data, int root, const CallOptions& options = {});
// As all_reduce, to the root alone: `out` is used there only, and may be `in`.
Call reduce(ConstBufferView in, BufferView out, ReduceOp op, int root,
            const CallOptions& options = {});
// As all_gather, to the root alone: `out` is used there only.
Call gather(ConstBufferView in, BufferView out, int root, std::vector<std::size_t> counts = {},
            const CallOptions& options = {});
// The reverse of gather: `in` is used on the root alone.
Call scatter(ConstBufferView in, BufferView out, int root, std::vector<std::size_t> counts = {},
             const CallOptions& options = {});
// `in` holds a chunk for every rank, `out` receives one from every rank, both in rank order. Equal
// chunks if the counts are empty.
Call all_to_all(ConstBufferView in, BufferView out, std::vector<std::size_t> send_counts = {},
                std::vector<std::size_t> recv_counts = {}, const CallOptions& options = {});
// Ends when every rank has called it.
Call barrier(const CallOptions& options = {});
// A message to another rank, and its receipt there: no collective, nobody else takes part. Messages
// from one rank to another arrive in the order in which they were sent. Types, counts and tags must
// be the same on both sides. A large message waits for its receiver.
Call send(ConstBufferView data, int to, std::uint32_t tag = 0, const CallOptions& options = {});
Call recv(BufferView data, int from, std::uint32_t tag = 0, const CallOptions& options = {});
// Receives the next message of any rank that has this tag. Of several receives that a message fits,
// the one that was called first gets it; one from a named rank fits all messages of that rank.
Call recv_any(BufferView data, std::uint32_t tag = 0, const CallOptions& options = {});
// out = the sum over all lanes, along the canonical tree. `partials` are this rank's sums over
// owned_nodes(owners, rank), in that order, each as long as `out`. The bits do not depend on who
// owns which lane.
Call reduce_nodes(std::vector<ConstBufferView> partials, LeafOwners owners, BufferView out,
                  ReduceOp op = ReduceOp::kSum, const CallOptions& options = {});
// As reduce_nodes, but `out` is this rank's chunk by `counts`, whose sum is a partial's length.
Call reduce_scatter_nodes(std::vector<ConstBufferView> partials, LeafOwners owners, BufferView out,
                          std::vector<std::size_t> counts, ReduceOp op = ReduceOp::kSum,
                          const CallOptions& options = {});

}  // namespace calls

// Cuts `count` elements into `parts` even chunks; the first `count % parts` have one more element.
Range chunk_of(std::size_t count, int parts, int index);
// The chunk of a vector of `total` elements that belongs to each rank: by counts, or even if
// `counts` is empty.
std::vector<Range> chunks_of(const std::vector<std::size_t>& counts, std::size_t total,
                             int world_size);

}  // namespace lockstep
