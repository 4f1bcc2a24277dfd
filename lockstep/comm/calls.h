#pragma once

#include "lockstep/comm/call.h"

namespace lockstep {

// Collectives as data, for Communicator::start(). Arguments as in Communicator.
namespace calls {

Call all_reduce(BufferView data, ReduceOp op, const CallOptions& options = {});
Call reduce_scatter(ConstBufferView in, BufferView out, ReduceOp op,
                    std::vector<std::size_t> counts = {}, const CallOptions& options = {});
Call all_gather(ConstBufferView in, BufferView out, std::vector<std::size_t> counts = {},
                const CallOptions& options = {});
Call broadcast(BufferView data, int root, const CallOptions& options = {});
Call reduce(ConstBufferView in, BufferView out, ReduceOp op, int root,
            const CallOptions& options = {});
Call gather(ConstBufferView in, BufferView out, int root, std::vector<std::size_t> counts = {},
            const CallOptions& options = {});
Call scatter(ConstBufferView in, BufferView out, int root, std::vector<std::size_t> counts = {},
             const CallOptions& options = {});
Call all_to_all(ConstBufferView in, BufferView out, std::vector<std::size_t> send_counts = {},
                std::vector<std::size_t> recv_counts = {}, const CallOptions& options = {});
Call barrier(const CallOptions& options = {});
Call reduce_nodes(std::vector<ConstBufferView> partials, LeafOwners owners, BufferView out,
                  ReduceOp op = ReduceOp::kSum, const CallOptions& options = {});
Call reduce_scatter_nodes(std::vector<ConstBufferView> partials, LeafOwners owners, BufferView out,
                          std::vector<std::size_t> counts, ReduceOp op = ReduceOp::kSum,
                          const CallOptions& options = {});

}  // namespace calls

// Fills in what the arguments imply (total, even counts) and throws Error{kInvalidArgument,
// kInvalidRank or kSizeMismatch} if they do not fit together on this rank.
void complete_call(Call& call, int rank, int world_size);

// A completed call in a world of one.
Outcome run_alone(const Call& call);

}  // namespace lockstep
