#include "lockstep/comm/mpi/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "lockstep/base/check.h"
#include "lockstep/base/hash/blake3.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/kernels/kernels.h"

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

std::size_t largest_piece(const Call& call, int world_size) {
  std::size_t largest = call.counts.empty() ? chunk_of(call.total, world_size, 0).size() : 0;
  for (const std::size_t count : call.counts) largest = std::max(largest, count);
  for (const std::size_t count : call.recv_counts) largest = std::max(largest, count);
  return largest;
}

bool has_result(const Call& call, int rank) {
  const bool rooted =
      call.collective == Collective::kReduce || call.collective == Collective::kGather;
  return !rooted || rank == call.root;
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

Outcome MpiEngine::run(const Call& call, const MeshFrame& stamp, Deadline deadline) {
  Running running{call, stamp, deadline};
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
  if (!call.options.check_finite || !has_result(call, rank())) return {};
  const std::size_t found = find_non_finite(call.out.type(), call.out.data(), call.out.count());
  if (found == call.out.count()) return {};
  return {found};
}

// MPI compares nothing: other sizes or types would corrupt the result or never end. One reduction
// with minimum finds both ends of the digests, and the largest sizes.
void MpiEngine::agree(Running& running) {
  const Call& call = running.call;
  const std::uint64_t digest = digest_of(encode(running.stamp));
  const std::uint64_t total = std::max({call.total, call.in.count(), call.out.count()});
  std::array<std::uint64_t, 4> words{digest, ~digest, ~total, ~largest_piece(call, world_size())};
  complete(running, "comparing calls", [&](MPI_Request* request) {
    return MPI_Iallreduce(MPI_IN_PLACE, words.data(), static_cast<int>(words.size()), MPI_UINT64_T,
                          MPI_MIN, group_->comm(), request);
  });
  if (words[0] != ~words[1]) explain_difference(running);
  running.most_total = ~words[2];
  running.most_piece = ~words[3];
}

void MpiEngine::explain_difference(const Running& running) {
  const MeshFrameBytes own = encode(running.stamp);
  std::vector<MeshFrameBytes> all(static_cast<std::size_t>(world_size()));
  complete(running, "comparing calls", [&](MPI_Request* request) {
    return MPI_Iallgather(own.data(), own.size(), MPI_BYTE, all.data(), own.size(), MPI_BYTE,
                          group_->comm(), request);
  });
  const auto other = std::ranges::find_if(all, [&](const auto& stamp) { return stamp != all[0]; });
  LOCKSTEP_CHECK(other != all.end());
  const auto says = [&](int rank) {
    const std::optional<MeshFrame> stamp = decode_mesh_frame(std::span(all[index_of(rank)]));
    LOCKSTEP_CHECK(stamp);
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
    const auto index = static_cast<std::size_t>(peer);
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
  for (std::size_t round = 0; round * slice < running.most_piece; ++round) {
    sent.take_round(round, slice, sent_, /*fill=*/true);
    received.take_round(round, slice, received_, /*fill=*/false);
    complete(running, operation, [&](MPI_Request* request) { return start(false, request); });
    received.put_round();
  }
}

std::unique_ptr<Engine> make_mpi_engine(const MpiOptions& options) {
  const std::size_t most = std::clamp<std::size_t>(options.most_elements, 1, std::size_t{1} << 30);
  return std::make_unique<MpiEngine>(MpiWorld::join(options).group(), most);
}

}  // namespace lockstep
