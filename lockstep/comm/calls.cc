#include "lockstep/comm/calls.h"

#include <fmt/format.h>

#include <cstring>
#include <numeric>

#include "lockstep/base/error.h"
#include "lockstep/comm/kernels/kernels.h"

namespace lockstep {
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

namespace {

[[noreturn]] void refuse(const Call& call, ErrorCode code, const std::string& why) {
  throw Error(code, fmt::format("{}: {}", to_string(call.collective), why));
}

void check_size(const Call& call, const char* what, std::size_t got, std::size_t expected) {
  if (got == expected) return;
  refuse(call, ErrorCode::kSizeMismatch,
         fmt::format("{} has {} elements, {} are needed", what, got, expected));
}

std::size_t sum(const std::vector<std::size_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

void check_counts(const Call& call, const std::vector<std::size_t>& counts, int world_size) {
  if (!counts.empty() && counts.size() != static_cast<std::size_t>(world_size)) {
    refuse(call, ErrorCode::kInvalidArgument,
           fmt::format("{} counts for {} ranks", counts.size(), world_size));
  }
}

void check_owners(const Call& call, int rank, int world_size) {
  if (call.owners.size() < static_cast<std::size_t>(world_size)) {
    refuse(call, ErrorCode::kInvalidArgument,
           fmt::format("{} lanes for {} ranks", call.owners.size(), world_size));
  }
  for (const int owner : call.owners) {
    if (owner < 0 || owner >= world_size) {
      refuse(call, ErrorCode::kInvalidRank, fmt::format("a lane belongs to rank {}", owner));
    }
  }
  const std::size_t nodes = owned_nodes(call.owners, rank).size();
  if (call.partials.size() != nodes) {
    refuse(
        call, ErrorCode::kInvalidArgument,
        fmt::format("{} partials, but rank {} owns {} nodes", call.partials.size(), rank, nodes));
  }
  for (const ConstBufferView& partial : call.partials) {
    check_size(call, "a partial", partial.count(), call.total);
    if (partial.type() != call.out.type()) {
      refuse(call, ErrorCode::kInvalidArgument, "a partial is of another type than the result");
    }
  }
}

}  // namespace

void complete_call(Call& call, int rank, int world_size) {
  const auto n = static_cast<std::size_t>(world_size);
  const auto me = static_cast<std::size_t>(rank);
  if (call.root < 0 || call.root >= world_size) {
    refuse(call, ErrorCode::kInvalidRank,
           fmt::format("root {} is not in [0, {})", call.root, world_size));
  }
  if (call.in.type() != call.out.type()) {
    refuse(call, ErrorCode::kInvalidArgument,
           fmt::format("input is {}, output is {}", to_string(call.in.type()),
                       to_string(call.out.type())));
  }
  check_counts(call, call.counts, world_size);
  const bool at_root = rank == call.root;
  switch (call.collective) {
    case Collective::kPointToPoint: refuse(call, ErrorCode::kInvalidArgument, "no collective");
    case Collective::kBarrier: break;
    case Collective::kAllReduce:
    case Collective::kBroadcast: call.total = call.out.count(); break;
    case Collective::kReduceScatter:
      call.total = call.in.count();
      if (!call.counts.empty()) check_size(call, "the input", call.total, sum(call.counts));
      check_size(
          call, "the output", call.out.count(),
          call.counts.empty() ? chunk_of(call.total, world_size, rank).size() : call.counts[me]);
      break;
    case Collective::kAllGather:
    case Collective::kGather:
      if (call.counts.empty()) call.counts.assign(n, call.in.count());
      call.total = sum(call.counts);
      check_size(call, "the input", call.in.count(), call.counts[me]);
      if (call.collective == Collective::kAllGather || at_root) {
        check_size(call, "the output", call.out.count(), call.total);
      }
      break;
    case Collective::kReduce:
      call.total = call.in.count();
      if (at_root) check_size(call, "the output", call.out.count(), call.total);
      break;
    case Collective::kScatter:
      if (call.counts.empty()) call.counts.assign(n, call.out.count());
      call.total = sum(call.counts);
      check_size(call, "the output", call.out.count(), call.counts[me]);
      if (at_root) check_size(call, "the input", call.in.count(), call.total);
      break;
    case Collective::kAllToAll:
      check_counts(call, call.recv_counts, world_size);
      if (call.counts.empty()) call.counts.assign(n, call.in.count() / n);
      if (call.recv_counts.empty()) call.recv_counts.assign(n, call.out.count() / n);
      call.total = call.in.count();
      check_size(call, "the input", call.in.count(), sum(call.counts));
      check_size(call, "the output", call.out.count(), sum(call.recv_counts));
      check_size(call, "the own part of the output", call.recv_counts[me], call.counts[me]);
      break;
    case Collective::kReduceNodes:
      call.total = call.out.count();
      check_owners(call, rank, world_size);
      break;
    case Collective::kReduceScatterNodes:
      check_size(call, "the list of counts", call.counts.size(), n);
      call.total = sum(call.counts);
      check_size(call, "the output", call.out.count(), call.counts[me]);
      check_owners(call, rank, world_size);
      break;
  }
}

Outcome run_alone(const Call& call) {
  if (!call.owners.empty()) {
    // One rank owns every lane, so its one partial is the sum.
    std::memmove(call.out.data(), call.partials[0].data(), call.out.bytes());
    if (call.op == ReduceOp::kMean && call.owners.size() > 1) {
      finish_mean(call.out.type(), call.out.data(), call.out.count(),
                  static_cast<int>(call.owners.size()));
    }
  } else if (call.out.bytes() > 0 && call.out.data() != call.in.data()) {
    std::memmove(call.out.data(), call.in.data(), call.out.bytes());
  }
  if (!call.options.check_finite) return {};
  const std::size_t found = find_non_finite(call.out.type(), call.out.data(), call.out.count());
  if (found == call.out.count()) return {};
  return {found};
}

}  // namespace lockstep
