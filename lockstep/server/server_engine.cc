#include "lockstep/server/server_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "lockstep/base/check.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/collective_stay.h"
#include "lockstep/comm/kernels/kernels.h"
#include "lockstep/comm/kernels/outcome.h"
#include "lockstep/comm/tree_inputs.h"
#include "lockstep/server/settings.h"

namespace lockstep {
namespace {

// A sum's tail has at most so many numbers.
constexpr std::size_t kMostNumbers = 2048;
// Partials are combined in strips of so many bytes.
constexpr std::size_t kStripBytes = 4 * kBytesPiece;
// Bytes of calls by which a rank may be ahead of others that do not wait for it; they keep them, up
// to kMostEarly. Before a rank sends more all have to be in its call.
constexpr std::size_t kMostAhead = std::size_t{16} << 20;
static_assert(kMostAhead < kMostEarly);
// What a call without any bytes counts.
constexpr std::size_t kEmptyCall = 1024;

bool adds(ReduceOp op) { return op == ReduceOp::kSum || op == ReduceOp::kMean; }

bool everybody_owns_a_lane(const LeafOwners& owners, int world_size) {
  std::vector<bool> owns(static_cast<std::size_t>(world_size));
  for (const int owner : owners) owns[index_of(owner)] = true;
  return std::ranges::find(owns, false) == owns.end();
}

}  // namespace

JoinedJob join_star(const StarOptions& options) {
  JobOptions place;
  place.rank = options.rank;
  place.world_size = options.world_size;
  place.master_host = options.coordinator.host;
  place.master_port = options.coordinator.port;
  place.hosted = true;
  place.listens = false;
  place.job = options.job;
  place.token = options.token;
  place.wire = options.wire;
  place.timeout = options.timeout;
  place.survives = options.survives;
  place.min_workers = options.min_workers;
  place.patience = options.patience;
  place.fixed_centre = true;
  return join_job(place);
}

std::unique_ptr<Communicator> connect_star(const StarOptions& options, const JoinedJob& job,
                                           std::shared_ptr<FlightRecorder> flight) {
  auto client = std::make_unique<RankClient>(options.coordinator, job);
  return std::make_unique<Communicator>(std::make_unique<ServerEngine>(job, std::move(client)),
                                        job.timeout, 0, std::move(flight));
}

ServerEngine::ServerEngine(JoinedJob job, std::unique_ptr<RankClient> client)
    : job_(std::move(job)), rank_(job_.rank()), client_(std::move(client)) {}

Algorithm ServerEngine::choose(const Call& call) const {
  const Algorithm asked = call.options.algorithm;
  if (asked == Algorithm::kAuto || asked == Algorithm::kTree) return Algorithm::kTree;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}: a gradient server does not offer the algorithm {}",
                          to_string(call.collective), to_string(asked)));
}

std::unique_ptr<Engine> ServerEngine::split(const std::vector<int>&, std::uint32_t) {
  throw Error(ErrorCode::kInvalidArgument,
              "a gradient server serves all its workers together: there are no sub-groups; split "
              "needs another transport");
}

Outcome ServerEngine::run(const Call& call, const MeshFrame& stamp, CollectiveStay& stay) {
  if (world_size() == 1) return run_alone(call);
  const Deadline deadline = stay.enter();
  supervisor().latch().check();
  try {
    client_->enter(stamp, deadline);
    switch (call.collective) {
      case Collective::kBarrier: meet(); break;
      case Collective::kAllReduce:
      case Collective::kReduceScatter:
      case Collective::kReduce: reduce_ranks(call); break;
      case Collective::kReduceNodes:
      case Collective::kReduceScatterNodes: reduce_nodes(call); break;
      case Collective::kBroadcast: broadcast(call); break;
      case Collective::kAllGather:
      case Collective::kGather: gather(call); break;
      case Collective::kScatter: scatter(call); break;
      case Collective::kAllToAll: all_to_all(call); break;
      case Collective::kPointToPoint: LOCKSTEP_CHECK(false);  // needs split()
    }
  } catch (const Error& error) {
    supervisor().fail(error);
  }
  return outcome_of(call, rank_);
}

std::vector<double> ServerEngine::add_up(std::size_t lanes, std::span<const LanePartial> partials,
                                         std::size_t numbers, std::span<float> sum) {
  ahead_ = 0;
  return client_->add_up(static_cast<std::uint32_t>(lanes), partials, numbers, sum);
}

void ServerEngine::meet() {
  const auto me = index_of(rank_);
  const LanePartial partial{{me, me + 1}, {}, {}};
  add_up(index_of(world_size()), {&partial, 1}, 0, {});
}

void ServerEngine::count_ahead(std::size_t bytes) {
  ahead_ += bytes + kEmptyCall;
  if (ahead_ > kMostAhead) meet();
}

void ServerEngine::reduce_nodes(const Call& call) {
  const DataType type = call.out.type();
  const bool scatters = call.collective == Collective::kReduceScatterNodes;
  const std::vector<Range> wanted =
      scatters ? chunks_of(call.counts, call.total, world_size())
               : std::vector<Range>(index_of(world_size()), Range{0, call.total});
  // A rank that brings nothing is not compared with the others, and they do not wait for it.
  if (!everybody_owns_a_lane(call.owners, world_size())) meet();
  if (!adds(call.op) || (type != DataType::kF32 && type != DataType::kF64)) {
    std::vector<const std::byte*> partials;
    for (const ConstBufferView& partial : call.partials) partials.push_back(partial.data());
    return reduce_here(call, call.owners, partials, wanted);
  }
  const std::size_t element = size_of(type);
  std::byte* const sum = scatters ? scratch_.get(call.total * element) : call.out.data();
  if (type == DataType::kF32) {
    sum_nodes_f32(call, {reinterpret_cast<float*>(sum), call.total});
  } else {
    sum_nodes_f64(call, {reinterpret_cast<double*>(sum), call.total});
  }
  if (scatters) {
    copy_bytes(call.out.data(), sum + wanted[index_of(rank_)].begin * element, call.out.bytes());
  }
  if (call.op == ReduceOp::kMean) {
    finish_mean(type, call.out.data(), call.out.count(), static_cast<int>(call.owners.size()));
  }
}

void ServerEngine::sum_nodes_f32(const Call& call, std::span<float> sum) {
  const std::vector<Range> nodes = owned_nodes(call.owners, rank_);
  std::vector<LanePartial> partials;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const auto* data = reinterpret_cast<const float*>(call.partials[i].data());
    partials.push_back({nodes[i], {data, call.total}, {}});
  }
  add_up(call.owners.size(), partials, 0, sum);
}

void ServerEngine::sum_nodes_f64(const Call& call, std::span<double> sum) {
  const std::vector<Range> nodes = owned_nodes(call.owners, rank_);
  std::size_t begin = 0;
  do {  // no numbers at all are a sum, too
    const std::size_t count = std::min(kMostNumbers, sum.size() - begin);
    std::vector<LanePartial> partials;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      const ConstBufferView some = call.partials[i].slice({begin, begin + count});
      LanePartial partial{nodes[i], {}, std::vector<double>(count)};
      if (count > 0) std::memcpy(partial.tail.data(), some.data(), some.bytes());
      partials.push_back(std::move(partial));
    }
    const std::vector<double> sums = add_up(call.owners.size(), partials, count, {});
    std::ranges::copy(sums, sum.begin() + static_cast<std::ptrdiff_t>(begin));
    begin += count;
  } while (begin < sum.size());
}

void ServerEngine::reduce_here(const Call& call, const LeafOwners& owners,
                               std::span<const std::byte* const> partials,
                               const std::vector<Range>& wanted) {
  const TreeInputs inputs = TreeInputs::nodes(owners, world_size());
  const std::size_t element = size_of(call.out.type());
  const std::size_t strip = kStripBytes / element;
  const bool alike = std::ranges::adjacent_find(wanted, std::not_equal_to<>()) == wanted.end();
  const Range own = wanted[index_of(rank_)];
  std::size_t turns = 1;  // an empty call is compared, too
  for (const Range& each : wanted) turns = std::max(turns, (each.size() + strip - 1) / strip);
  for (std::size_t turn = 0; turn < turns; ++turn) {
    const auto part_of = [&](const Range& whole) {
      const std::size_t begin = std::min(whole.begin + turn * strip, whole.end);
      return Range{begin, std::min(begin + strip, whole.end)};
    };
    std::vector<BytesOut> out;
    const auto send = [&](std::uint32_t receiver, const Range& part) {
      if (turn > 0 && part.size() == 0) return;
      for (const std::byte* partial : partials) {
        out.push_back({receiver, {partial + part.begin * element, part.size() * element}});
      }
    };
    if (alike) send(kEveryOther, part_of(own));
    for (int rank = 0; rank < world_size() && !alike; ++rank) {
      if (rank != rank_) {
        send(static_cast<std::uint32_t>(rank), part_of(wanted[index_of(rank)]));
      }
    }

    const Range mine = part_of(own);
    const std::size_t bytes = mine.size() * element;
    void* const result = scratch_.get((inputs.sources.size() + 1) * bytes);
    std::byte* place = static_cast<std::byte*>(result) + bytes;
    std::vector<BytesIn> in;
    std::vector<const void*> strips;
    for (const TreeInputs::Source& source : inputs.sources) {
      if (source.rank == rank_) {
        strips.push_back(partials[source.partial] + mine.begin * element);
        continue;
      }
      if (turn == 0 || bytes > 0) in.push_back({source.rank, {place, bytes}});
      strips.push_back(place);
      place += bytes;
    }
    client_->move_bytes(out, in);
    if (bytes == 0) continue;
    reduce_tree({call.op, call.out.type(), inputs.program, inputs.leaves}, strips, {&result, 1},
                mine.size());
    std::memcpy(call.out.data() + (mine.begin - own.begin) * element, result, bytes);
  }
  ahead_ = 0;
}

void ServerEngine::reduce_ranks(const Call& call) {
  const auto n = index_of(world_size());
  std::vector<Range> wanted(n, Range{0, call.total});
  if (call.collective == Collective::kReduceScatter) {
    wanted = chunks_of(call.counts, call.total, world_size());
  } else if (call.collective == Collective::kReduce) {
    wanted.assign(n, Range{});
    wanted[index_of(call.root)] = {0, call.total};
  }
  const std::byte* const own = call.in.data();
  reduce_here(call, even_owners(n, world_size()), {&own, 1}, wanted);
}

BytesOut ServerEngine::to(int rank, ConstBufferView bytes) {
  return {static_cast<std::uint32_t>(rank), {bytes.data(), bytes.bytes()}};
}

BytesIn ServerEngine::from(int rank, BufferView bytes) {
  return {rank, {bytes.data(), bytes.bytes()}};
}

void ServerEngine::broadcast(const Call& call) {
  count_ahead(call.out.bytes());
  if (rank_ == call.root) {
    const BytesOut out{kEveryOther, {call.out.data(), call.out.bytes()}};
    return client_->move_bytes({&out, 1}, {});
  }
  const BytesIn in = from(call.root, call.out);
  client_->move_bytes({}, {&in, 1});
}

void ServerEngine::gather(const Call& call) {
  const bool all = call.collective == Collective::kAllGather;
  count_ahead(call.total * size_of(call.out.type()));
  std::vector<BytesOut> out;
  if (all) {
    out.push_back({kEveryOther, {call.in.data(), call.in.bytes()}});
  } else if (rank_ != call.root) {
    out.push_back(to(call.root, call.in));
  }
  std::vector<BytesIn> in;
  const std::vector<Range> chunks = chunks_of(call.counts, call.total, world_size());
  for (int rank = 0; rank < world_size() && (all || rank_ == call.root); ++rank) {
    const BufferView place = call.out.slice(chunks[index_of(rank)]);
    if (rank == rank_) {
      copy_bytes(place.data(), call.in.data(), place.bytes());
    } else {
      in.push_back(from(rank, place));
    }
  }
  client_->move_bytes(out, in);
  if (all) ahead_ = 0;
}

void ServerEngine::scatter(const Call& call) {
  count_ahead(call.total * size_of(call.out.type()));
  if (rank_ != call.root) {
    const BytesIn in = from(call.root, call.out);
    return client_->move_bytes({}, {&in, 1});
  }
  std::vector<BytesOut> out;
  const std::vector<Range> chunks = chunks_of(call.counts, call.total, world_size());
  for (int rank = 0; rank < world_size(); ++rank) {
    const ConstBufferView chunk = call.in.slice(chunks[index_of(rank)]);
    if (rank == rank_) {
      copy_bytes(call.out.data(), chunk.data(), chunk.bytes());
    } else {
      out.push_back(to(rank, chunk));
    }
  }
  client_->move_bytes(out, {});
}

void ServerEngine::all_to_all(const Call& call) {
  meet();  // no rank knows how much the others send
  std::vector<BytesOut> out;
  std::vector<BytesIn> in;
  const std::vector<Range> sent = chunks_of(call.counts, call.in.count(), world_size());
  const std::vector<Range> received = chunks_of(call.recv_counts, call.out.count(), world_size());
  for (int rank = 0; rank < world_size(); ++rank) {
    const ConstBufferView chunk = call.in.slice(sent[index_of(rank)]);
    const BufferView place = call.out.slice(received[index_of(rank)]);
    if (rank == rank_) {
      copy_bytes(place.data(), chunk.data(), chunk.bytes());
    } else {
      out.push_back(to(rank, chunk));
      in.push_back(from(rank, place));
    }
  }
  client_->move_bytes(out, in);
  ahead_ = 0;
}

}  // namespace lockstep
