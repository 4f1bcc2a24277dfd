#include "lockstep/comm/mpi/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "lockstep/base/check.h"
#include "lockstep/base/hash/blake3.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/call_check.h"
#include "lockstep/comm/collective_stay.h"
#include "lockstep/comm/kernels/kernels.h"
#include "lockstep/comm/kernels/outcome.h"
#include "lockstep/comm/mpi/types.h"

namespace lockstep {
namespace {

// Scratch memory of one side of a collective that goes in rounds.
constexpr std::size_t kRoundBytes = 64 * 1024 * 1024;

std::uint64_t digest_of(const MeshFrameBytes& stamp) {
  const Blake3Hash hash = blake3(stamp);
  std::uint64_t digest = 0;
  std::memcpy(&digest, hash.data(), sizeof digest);
  return digest;
}

std::size_t largest_chunk(const Call& call, int world_size) {
  std::size_t largest = call.counts.empty() ? chunk_of(call.total, world_size, 0).size() : 0;
  for (const std::size_t count : call.counts) largest = std::max(largest, count);
  for (const std::size_t count : call.recv_counts) largest = std::max(largest, count);
  return largest;
}

bool overlap(ConstBufferView a, ConstBufferView b) {
  return a.data() < b.data() + b.bytes() && b.data() < a.data() + a.bytes();
}

std::vector<Range> whole(std::size_t count) { return {{0, count}}; }

// One after another: MPI's part of the sum follows no order either.
void fold(const Call& call, std::byte* out) {
  const DataType type = call.out.type();
  if (call.partials.empty()) return fill_neutral(call.op, type, out, call.total);
  std::vector<const void*> inputs;
  std::vector<CombineStep> program;
  for (const ConstBufferView& partial : call.partials) {
    inputs.push_back(partial.data());
    program.push_back({.push = true});
    if (inputs.size() > 1) program.push_back({.push = false});
  }
  // The mean comes at the very end.
  const ReduceOp op = call.op == ReduceOp::kMean ? ReduceOp::kSum : call.op;
  void* const output = out;
  reduce_tree({op, type, program}, inputs, {&output, 1}, call.total);
}

void finish(const Call& call, int mean_of) {
  if (call.op != ReduceOp::kMean) return;
  finish_mean(call.out.type(), call.out.data(), call.out.count(), mean_of);
}

}  // namespace

MpiEngine::MpiEngine(std::unique_ptr<MpiGroup> group, std::size_t most_elements)
    : group_(std::move(group)), most_elements_(most_elements) {}

Algorithm MpiEngine::choose(const Call& call) const {
  const Algorithm asked = call.options.algorithm;
  if (asked == Algorithm::kAuto || asked == Algorithm::kNative) return Algorithm::kNative;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}: MPI's own collectives do not offer the algorithm {}",
                          to_string(call.collective), to_string(asked)));
}

std::unique_ptr<Engine> MpiEngine::split(const std::vector<int>& members, std::uint32_t group) {
  return std::make_unique<MpiEngine>(group_->split(members, group), most_elements_);
}

Outcome MpiEngine::run(const Call& call, const MeshFrame& stamp, CollectiveStay& stay) {
  if (world_size() == 1) return run_alone(call);
  Running running{call, stamp, stay.enter()};
  agree(running);
  switch (call.collective) {
    case Collective::kBarrier: return {};  // to agree is to have met
    case Collective::kAllReduce: all_reduce(running); break;
    case Collective::kReduceScatter: reduce_scatter(running, call.in); break;
    case Collective::kReduce: reduce(running); break;
    case Collective::kReduceNodes:
    case Collective::kReduceScatterNodes: reduce_nodes(running); break;
    case Collective::kAllGather: all_gather(running); break;
    case Collective::kBroadcast: broadcast(running); break;
    case Collective::kGather: gather(running); break;
    case Collective::kScatter: scatter(running); break;
    case Collective::kAllToAll: all_to_all(running); break;
    case Collective::kPointToPoint: LOCKSTEP_CHECK(call.collective != Collective::kPointToPoint);
  }
  return outcome_of(call, rank());
}

// MPI compares nothing: other sizes or types would corrupt the result or never end. One reduction
// with minimum finds both ends of the digests, and the largest sizes.
void MpiEngine::agree(Running& running) {
  const Call& call = running.call;
  const std::uint64_t digest = digest_of(encode(running.stamp));
  const std::uint64_t total = std::max({call.total, call.in.count(), call.out.count()});
  std::array<std::uint64_t, 4> words{digest, ~digest, ~total, ~largest_chunk(call, world_size())};
  complete(running, "comparing calls", [&](MPI_Request* request) {
    return MPI_Iallreduce(MPI_IN_PLACE, words.data(), static_cast<int>(words.size()), MPI_UINT64_T,
                          MPI_MIN, group_->comm(), request);
  });
  if (words[0] != ~words[1]) explain_difference(running);
  running.most_total = ~words[2];
  running.most_chunk = ~words[3];
}

void MpiEngine::explain_difference(const Running& running) {
  const MeshFrameBytes own = encode(running.stamp);
  std::vector<MeshFrameBytes> all(static_cast<std::size_t>(world_size()));
  complete(running, "comparing calls", [&](MPI_Request* request) {
    return MPI_Iallgather(own.data(), own.size(), MPI_BYTE, all.data(), own.size(), MPI_BYTE,
                          group_->comm(), request);
  });
  const auto other = std::ranges::find_if(all, [&](const auto& stamp) { return stamp != all[0]; });
  if (other == all.end()) {
    supervisor().fail(Error(
        ErrorCode::kCollectiveMismatch,
        fmt::format("{}: a rank compared another call than it reported", describe(running.stamp))));
  }
  const auto says = [&](int rank) {
    const std::optional<MeshFrame> stamp = decode_mesh_frame(std::span(all[index_of(rank)]));
    if (!stamp) return fmt::format("{} reports no call", name_of(rank));
    return fmt::format("{} is in collective {}: {}", name_of(rank), stamp->sequence,
                       describe(*stamp));
  };
  const int rank = static_cast<int>(other - all.begin());
  supervisor().fail(Error(ErrorCode::kCollectiveMismatch,
                          fmt::format("{}; {}", says(rank), says(0)), group_->job_rank(rank)));
}

void MpiEngine::compare_counts(const Running& running) {
  const std::vector<std::uint64_t> sent(running.call.counts.begin(), running.call.counts.end());
  std::vector<std::uint64_t> offered(sent.size());
  complete(running, "comparing counts", [&](MPI_Request* request) {
    return MPI_Ialltoall(sent.data(), 1, MPI_UINT64_T, offered.data(), 1, MPI_UINT64_T,
                         group_->comm(), request);
  });
  for (int peer = 0; peer < world_size(); ++peer) {
    const auto index = index_of(peer);
    if (offered[index] == running.call.recv_counts[index]) continue;
    supervisor().fail(Error(ErrorCode::kSizeMismatch,
                            fmt::format("{}: {} sends {} elements, {} expects {}",
                                        describe(running.stamp), name_of(peer), offered[index],
                                        name_of(rank()), running.call.recv_counts[index]),
                            group_->job_rank(peer)));
  }
}

void MpiEngine::complete(const Running& running, const char* operation, const Start& start) {
  try {
    MPI_Request request = MPI_REQUEST_NULL;
    {
      const auto lock = mpi_lock();
      check_mpi(start(&request), operation);
    }
    const Patience patience{running.deadline, &supervisor().latch(),
                            running.call.total * running.element(),
                            group_->world().oversubscribed()};
    if (await(request, patience)) return;
  } catch (const Error& error) {
    supervisor().fail(
        Error(error.code(),
              fmt::format("{}: {}: {}", describe(running.stamp), name_of(rank()), error.message()),
              error.rank()));
  }
  supervisor().fail(
      Error(ErrorCode::kTimeout, fmt::format("{}: {} waited in vain for the others ({})",
                                             describe(running.stamp), name_of(rank()), operation)));
}

void MpiEngine::in_parts(const Running& running, const char* operation, std::size_t count,
                         const StartPart& start) {
  for (std::size_t begin = 0; begin < count; begin += most_elements_) {
    const auto part = static_cast<int>(std::min(most_elements_, count - begin));
    complete(running, operation, [&](MPI_Request* request) { return start(begin, part, request); });
  }
}

void MpiEngine::in_rounds(const Running& running, const char* operation, MpiSlices& sent,
                          MpiSlices& received,
                          const std::function<int(bool whole, MPI_Request*)>& start) {
  if (running.most_total <= most_elements_) {
    sent.take_all();
    received.take_all();
    complete(running, operation, [&](MPI_Request* request) { return start(true, request); });
    return;
  }
  const std::size_t most = std::min(most_elements_, kRoundBytes / running.element());
  const std::size_t slice = std::max<std::size_t>(1, most / static_cast<std::size_t>(world_size()));
  for (std::size_t round = 0; round * slice < running.most_chunk; ++round) {
    sent.take_round(round, slice, sent_, /*fill=*/true);
    received.take_round(round, slice, received_, /*fill=*/false);
    complete(running, operation, [&](MPI_Request* request) { return start(false, request); });
    received.put_round();
  }
}

void MpiEngine::all_reduce(const Running& running) {
  const Call& call = running.call;
  in_parts(running, "MPI_Iallreduce", call.total,
           [&](std::size_t begin, int count, MPI_Request* request) {
             return MPI_Iallreduce(MPI_IN_PLACE, call.out.data() + begin * running.element(), count,
                                   mpi_type(running.type()), mpi_op(call.op, running.type()),
                                   group_->comm(), request);
           });
  if (call.owners.empty()) finish(call, world_size());
}

void MpiEngine::reduce(const Running& running) {
  const Call& call = running.call;
  const bool at_root = rank() == call.root;
  const bool in_place = at_root && call.in.data() == call.out.data();
  in_parts(running, "MPI_Ireduce", call.total,
           [&](std::size_t begin, int count, MPI_Request* request) {
             const std::size_t offset = begin * running.element();
             return MPI_Ireduce(in_place ? MPI_IN_PLACE : call.in.data() + offset,
                                at_root ? call.out.data() + offset : nullptr, count,
                                mpi_type(running.type()), mpi_op(call.op, running.type()),
                                call.root, group_->comm(), request);
           });
  if (at_root) finish(call, world_size());
}

void MpiEngine::reduce_scatter(const Running& running, ConstBufferView in) {
  const Call& call = running.call;
  if (overlap(in, call.out)) {
    std::byte* copy = vector_.get(in.bytes());
    std::memcpy(copy, in.data(), in.bytes());
    in = {copy, in.count(), in.type()};
  }
  MpiSlices sent(in.data(), chunks_of(call.counts, call.total, world_size()), running.element());
  MpiSlices received(call.out.data(), whole(call.out.count()), running.element());
  in_rounds(running, "MPI_Ireduce_scatter", sent, received, [&](bool, MPI_Request* request) {
    return MPI_Ireduce_scatter(sent.data(), received.data(), sent.counts(),
                               mpi_type(running.type()), mpi_op(call.op, running.type()),
                               group_->comm(), request);
  });
  if (call.owners.empty()) finish(call, world_size());
}

void MpiEngine::reduce_nodes(const Running& running) {
  const Call& call = running.call;
  if (call.collective == Collective::kReduceNodes) {
    fold(call, call.out.data());
    all_reduce(running);
  } else {
    std::byte* sum = vector_.get(call.total * running.element());
    fold(call, sum);
    reduce_scatter(running, {sum, call.total, running.type()});
  }
  finish(call, static_cast<int>(call.owners.size()));
}

void MpiEngine::broadcast(const Running& running) {
  const Call& call = running.call;
  in_parts(running, "MPI_Ibcast", call.total,
           [&](std::size_t begin, int count, MPI_Request* request) {
             return MPI_Ibcast(call.out.data() + begin * running.element(), count,
                               mpi_type(running.type()), call.root, group_->comm(), request);
           });
}

void MpiEngine::all_gather(const Running& running) {
  const Call& call = running.call;
  MpiSlices sent(call.in.data(), whole(call.in.count()), running.element());
  MpiSlices received(call.out.data(), chunks_of(call.counts, call.total, world_size()),
                     running.element());
  in_rounds(running, "MPI_Iallgatherv", sent, received, [&](bool all, MPI_Request* request) {
    const bool in_place = all && overlap(call.in, call.out);
    return MPI_Iallgatherv(in_place ? MPI_IN_PLACE : sent.data(), sent.counts()[0],
                           mpi_type(running.type()), received.data(), received.counts(),
                           received.displacements(), mpi_type(running.type()), group_->comm(),
                           request);
  });
}

void MpiEngine::gather(const Running& running) {
  const Call& call = running.call;
  const bool at_root = rank() == call.root;
  MpiSlices sent(call.in.data(), whole(call.in.count()), running.element());
  MpiSlices received(
      call.out.data(),
      at_root ? chunks_of(call.counts, call.total, world_size()) : std::vector<Range>{},
      running.element());
  in_rounds(running, "MPI_Igatherv", sent, received, [&](bool all, MPI_Request* request) {
    const bool in_place = all && at_root && overlap(call.in, call.out);
    return MPI_Igatherv(in_place ? MPI_IN_PLACE : sent.data(), sent.counts()[0],
                        mpi_type(running.type()), received.data(), received.counts(),
                        received.displacements(), mpi_type(running.type()), call.root,
                        group_->comm(), request);
  });
}

void MpiEngine::scatter(const Running& running) {
  const Call& call = running.call;
  const bool at_root = rank() == call.root;
  MpiSlices sent(call.in.data(),
                 at_root ? chunks_of(call.counts, call.total, world_size()) : std::vector<Range>{},
                 running.element());
  MpiSlices received(call.out.data(), whole(call.out.count()), running.element());
  in_rounds(running, "MPI_Iscatterv", sent, received, [&](bool all, MPI_Request* request) {
    const bool in_place = all && at_root && overlap(call.in, call.out);
    return MPI_Iscatterv(sent.data(), sent.counts(), sent.displacements(), mpi_type(running.type()),
                         in_place ? MPI_IN_PLACE : received.data(), received.counts()[0],
                         mpi_type(running.type()), call.root, group_->comm(), request);
  });
}

void MpiEngine::all_to_all(const Running& running) {
  const Call& call = running.call;
  compare_counts(running);
  MpiSlices sent(call.in.data(), chunks_of(call.counts, call.in.count(), world_size()),
                 running.element());
  MpiSlices received(call.out.data(), chunks_of(call.recv_counts, call.out.count(), world_size()),
                     running.element());
  in_rounds(running, "MPI_Ialltoallv", sent, received, [&](bool, MPI_Request* request) {
    return MPI_Ialltoallv(sent.data(), sent.counts(), sent.displacements(),
                          mpi_type(running.type()), received.data(), received.counts(),
                          received.displacements(), mpi_type(running.type()), group_->comm(),
                          request);
  });
}

std::unique_ptr<Engine> make_mpi_engine(const MpiOptions& options) {
  const std::size_t most = std::clamp<std::size_t>(options.most_elements, 1, std::size_t{1} << 30);
  return std::make_unique<MpiEngine>(MpiWorld::join(options).group(), most);
}

}  // namespace lockstep
