#include "lockstep/comm/call.h"

#include <algorithm>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/index.h"

namespace lockstep {

std::string_view to_string(Collective collective) {
  switch (collective) {
    case Collective::kPointToPoint: return "message";
    case Collective::kBarrier: return "barrier";
    case Collective::kAllReduce: return "all_reduce";
    case Collective::kReduceScatter: return "reduce_scatter";
    case Collective::kAllGather: return "all_gather";
    case Collective::kBroadcast: return "broadcast";
    case Collective::kReduce: return "reduce";
    case Collective::kGather: return "gather";
    case Collective::kScatter: return "scatter";
    case Collective::kAllToAll: return "all_to_all";
    case Collective::kReduceNodes: return "reduce_nodes";
    case Collective::kReduceScatterNodes: return "reduce_scatter_nodes";
  }
  return "unknown collective";
}

std::string_view to_string(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kAuto: return "auto";
    case Algorithm::kPair: return "pair";
    case Algorithm::kRing: return "ring";
    case Algorithm::kHalvingDoubling: return "halving-doubling";
    case Algorithm::kDirect: return "direct";
    case Algorithm::kTree: return "tree";
    case Algorithm::kShared: return "shared";
    case Algorithm::kNative: return "native";
    case Algorithm::kTwoLevel: return "two-level";
  }
  return "unknown";
}

Range chunk_of(std::size_t count, int parts, int index) {
  LOCKSTEP_CHECK(parts > 0 && index >= 0 && index < parts);
  const auto i = static_cast<std::size_t>(index);
  const std::size_t size = count / static_cast<std::size_t>(parts);
  const std::size_t larger = count % static_cast<std::size_t>(parts);
  const std::size_t begin = i * size + std::min(i, larger);
  return {begin, begin + size + (i < larger ? 1 : 0)};
}

std::vector<Range> chunks_of(const std::vector<std::size_t>& counts, std::size_t total,
                             int world_size) {
  std::vector<Range> chunks;
  std::size_t begin = 0;
  for (int r = 0; r < world_size; ++r) {
    if (counts.empty()) {
      chunks.push_back(chunk_of(total, world_size, r));
    } else {
      chunks.push_back({begin, begin + counts[index_of(r)]});
      begin = chunks.back().end;
    }
  }
  return chunks;
}

namespace calls {
namespace {

Call make(Collective collective, ConstBufferView in, BufferView out, const CallOptions& options) {
  Call call;
  call.collective = collective;
  call.in = in;
  call.out = out;
  call.options = options;
  return call;
}

}  // namespace

Call all_reduce(BufferView data, ReduceOp op, const CallOptions& options) {
  Call call = make(Collective::kAllReduce, data, data, options);
  call.op = op;
  return call;
}

Call reduce_scatter(ConstBufferView in, BufferView out, ReduceOp op,
                    std::vector<std::size_t> counts, const CallOptions& options) {
  Call call = make(Collective::kReduceScatter, in, out, options);
  call.op = op;
  call.counts = std::move(counts);
  return call;
}

Call all_gather(ConstBufferView in, BufferView out, std::vector<std::size_t> counts,
                const CallOptions& options) {
  Call call = make(Collective::kAllGather, in, out, options);
  call.counts = std::move(counts);
  return call;
}

Call broadcast(BufferView data, int root, const CallOptions& options) {
  Call call = make(Collective::kBroadcast, data, data, options);
  call.root = root;
  return call;
}

Call reduce(ConstBufferView in, BufferView out, ReduceOp op, int root, const CallOptions& options) {
  Call call = make(Collective::kReduce, in, out, options);
  call.op = op;
  call.root = root;
  return call;
}

Call gather(ConstBufferView in, BufferView out, int root, std::vector<std::size_t> counts,
            const CallOptions& options) {
  Call call = make(Collective::kGather, in, out, options);
  call.root = root;
  call.counts = std::move(counts);
  return call;
}

Call scatter(ConstBufferView in, BufferView out, int root, std::vector<std::size_t> counts,
             const CallOptions& options) {
  Call call = make(Collective::kScatter, in, out, options);
  call.root = root;
  call.counts = std::move(counts);
  return call;
}

Call all_to_all(ConstBufferView in, BufferView out, std::vector<std::size_t> send_counts,
                std::vector<std::size_t> recv_counts, const CallOptions& options) {
  Call call = make(Collective::kAllToAll, in, out, options);
  call.counts = std::move(send_counts);
  call.recv_counts = std::move(recv_counts);
  return call;
}

Call barrier(const CallOptions& options) {
  Call call;
  call.collective = Collective::kBarrier;
  call.options = options;
  return call;
}

Call send(ConstBufferView data, int to, std::uint32_t tag, const CallOptions& options) {
  // Its sender only reads it.
  const BufferView view(const_cast<std::byte*>(data.data()), data.count(), data.type());
  Call call = recv(view, to, tag, options);
  call.sends = true;
  return call;
}

Call recv(BufferView data, int from, std::uint32_t tag, const CallOptions& options) {
  Call call = make(Collective::kPointToPoint, data, data, options);
  call.root = from;
  call.options.step = tag;
  call.options.bucket = 0;
  return call;
}

Call recv_any(BufferView data, std::uint32_t tag, const CallOptions& options) {
  return recv(data, kAnySource, tag, options);
}

Call reduce_nodes(std::vector<ConstBufferView> partials, LeafOwners owners, BufferView out,
                  ReduceOp op, const CallOptions& options) {
  Call call = make(Collective::kReduceNodes, out, out, options);
  call.op = op;
  call.partials = std::move(partials);
  call.owners = std::move(owners);
  return call;
}

Call reduce_scatter_nodes(std::vector<ConstBufferView> partials, LeafOwners owners, BufferView out,
                          std::vector<std::size_t> counts, ReduceOp op,
                          const CallOptions& options) {
  Call call = make(Collective::kReduceScatterNodes, out, out, options);
  call.op = op;
  call.partials = std::move(partials);
  call.owners = std::move(owners);
  call.counts = std::move(counts);
  return call;
}

}  // namespace calls

}  // namespace lockstep
