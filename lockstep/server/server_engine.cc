#include "lockstep/server/server_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>

#include "lockstep/base/check.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/call_check.h"
#include "lockstep/comm/kernels/kernels.h"
#include "lockstep/comm/kernels/outcome.h"
#include "lockstep/comm/tree_inputs.h"
#include "lockstep/net/job/job_health.h"
#include "lockstep/server/membership.h"

namespace lockstep {
namespace {

// How a worker introduces itself to the others.
struct Introduction {
  std::int32_t rank;
  std::array<char, 124> name;
};

// What is not a call of the user's: joining and leaving.
MeshFrame own_stamp() { return {}; }

// The server has numbers of its own; so that its messages tell the rank, too.
WorkerOptions worker_options(const StarOptions& options) {
  WorkerOptions worker = options.worker;
  if (options.rank >= 0) worker.node_id = fmt::format("rank {}, {}", options.rank, worker.node_id);
  return worker;
}

std::unique_ptr<Communicator> make_communicator(std::unique_ptr<WorkerClient> client,
                                                const StarOptions& options) {
  auto engine = std::make_unique<ServerEngine>(std::move(client), options);
  const auto timeout = engine->timeout();
  return std::make_unique<Communicator>(std::move(engine), timeout);
}

// A sum's tail has at most so many numbers.
constexpr std::size_t kMostNumbers = 2048;
// Partials are combined in strips of so many bytes.
constexpr std::size_t kStripBytes = 4 * kBytesPiece;
// Bytes of calls by which a rank may be ahead of others that do not wait for it; they keep them.
constexpr std::size_t kMostAhead = std::size_t{16} << 20;
// What a call without any bytes counts.
constexpr std::size_t kEmptyCall = 1024;

bool adds(ReduceOp op) { return op == ReduceOp::kSum || op == ReduceOp::kMean; }

bool everybody_owns_a_lane(const LeafOwners& owners, int world_size) {
  std::vector<bool> owns(static_cast<std::size_t>(world_size));
  for (const int owner : owners) owns[index_of(owner)] = true;
  return std::ranges::find(owns, false) == owns.end();
}

}  // namespace

std::unique_ptr<Communicator> join_star(const StarOptions& options) {
  return make_communicator(std::make_unique<WorkerClient>(worker_options(options)), options);
}

std::unique_ptr<Communicator> join_star(Socket end, const StarOptions& options) {
  return make_communicator(std::make_unique<WorkerClient>(std::move(end), worker_options(options)),
                           options);
}

ServerSupervisor::ServerSupervisor(WorkerClient& client) : client_(client) {
  client_.set_stop(latch_.fd(), [this] { return *latch_.error(); });
}

void ServerSupervisor::set_name(std::string name, int rank) {
  name_ = std::move(name);
  rank_ = rank;
}

void ServerSupervisor::fail(const Error& seen) {
  latch_.trip(seen);
  const Error cause = *latch_.error();
  client_.abort(cause);
  throw Error(cause);
}

void ServerSupervisor::abort(const std::string& reason) {
  const Error cause = aborted_error(name_, rank_, reason);
  if (latch_.trip(cause)) client_.abort(cause);
}

ServerEngine::ServerEngine(std::unique_ptr<WorkerClient> client, const StarOptions& options)
    : client_(std::move(client)), supervisor_(*client_) {
  const auto& settings = client_->settings();
  if (!settings || !settings->serves_ranks()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} does not serve ranks: start it with --mode lanes, without --steps",
                            client_->coordinator()));
  }
  if (options.world_size > 0 && options.world_size != world_size()) {
    throw Error(ErrorCode::kInvalidWorldSize,
                fmt::format("{} waits for {} workers, but this job has {} ranks",
                            client_->coordinator(), world_size(), options.world_size));
  }
  introduce(options);
}

void ServerEngine::introduce(const StarOptions& options) {
  const auto n = static_cast<std::size_t>(world_size());
  const int worker = client_->worker_id();
  // Until all ranks are known, workers go by the server's numbers.
  rank_ = worker;
  for (std::size_t i = 0; i < n; ++i) {
    rank_of_worker_.push_back(static_cast<int>(i));
    names_.push_back(fmt::format("worker {}", i));
  }
  supervisor_.set_name(names_[index_of(worker)], worker);
  Introduction own{options.rank, {}};
  std::string name = options.worker.node_id;
  if (const auto address = client_->own_address()) name += ", " + to_string(*address);
  std::copy_n(name.data(), std::min(name.size(), own.name.size() - 1), own.name.data());
  std::vector<Introduction> cards(n, own);
  std::vector<BytesIn> in;
  for (std::size_t i = 0; i < n; ++i) {
    const auto peer = static_cast<int>(i);
    if (peer != worker) in.push_back({peer, std::as_writable_bytes(std::span(&cards[i], 1))});
  }
  const BytesOut out{kEveryOther, std::as_bytes(std::span(&own, 1))};
  guarded(own_stamp(), Deadline::after((kOverdueFactor + 1) * timeout()), [&] {
    client_->enter(own_stamp());
    client_->move_bytes({&out, n > 1 ? 1U : 0U}, in);
    std::vector<std::int32_t> wanted;
    for (std::size_t i = 0; i < n; ++i) {
      cards[i].name.back() = '\0';
      wanted.push_back(cards[i].rank);
      names_[i] = fmt::format("worker {} ({})", i, cards[i].name.data());
    }
    assign_ranks(wanted);
  });
  std::vector<std::string> by_worker;
  worker_of_rank_.resize(n);
  for (std::size_t i = 0; i < n; ++i) {
    const int rank = rank_of_worker_[i];
    worker_of_rank_[index_of(rank)] = static_cast<int>(i);
    by_worker.push_back(fmt::format("rank {} ({})", rank, cards[i].name.data()));
    names_[index_of(rank)] = by_worker.back();
  }
  client_->set_names(by_worker);
  rank_ = rank_of_worker_[index_of(worker)];
  supervisor_.set_name(name_of(rank_), rank_);
}

void ServerEngine::assign_ranks(const std::vector<std::int32_t>& wanted) {
  const std::size_t n = wanted.size();
  std::vector<std::optional<std::size_t>> worker_of(n);
  for (std::size_t i = 0; i < n; ++i) {
    if (wanted[i] < 0) continue;
    const auto rank = static_cast<std::size_t>(wanted[i]);
    if (rank >= n) {
      throw Error(ErrorCode::kInvalidRank,
                  fmt::format("{} says that it is rank {} of {} ranks", names_[i], rank, n));
    }
    if (worker_of[rank]) {
      throw Error(ErrorCode::kInvalidRank, fmt::format("{} and {} both say that they are rank {}",
                                                       names_[*worker_of[rank]], names_[i], rank));
    }
    worker_of[rank] = i;
  }
  std::size_t next = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if (wanted[i] < 0) {
      while (worker_of[next]) ++next;
      worker_of[next] = i;
    }
  }
  for (std::size_t rank = 0; rank < n; ++rank) {
    rank_of_worker_[*worker_of[rank]] = static_cast<int>(rank);
  }
}

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

template <typename Body>
void ServerEngine::guarded(const MeshFrame& stamp, Deadline deadline, Body&& body) {
  supervisor_.latch().check();
  try {
    if (left_) throw Error(ErrorCode::kChannelClosed, "this rank has left the job already");
    client_->set_deadline(deadline);
    body();
  } catch (const Error& error) {
    supervisor_.fail(in_ranks(error, stamp));
  }
}

// The server counts workers as they joined, and knows sizes but not what was called.
Error ServerEngine::in_ranks(const Error& error, const MeshFrame& stamp) const {
  const int worker = error.rank();
  const int rank = worker >= 0 && worker < world_size() ? rank_of_worker_[index_of(worker)] : -1;
  std::string text(error.message());
  const std::string own = describe(stamp);
  const bool unclear = error.code() == ErrorCode::kSizeMismatch ||
                       error.code() == ErrorCode::kTimeout ||
                       error.code() == ErrorCode::kCollectiveMismatch;
  if (unclear && text.find(own) == std::string::npos) {
    text += fmt::format("; {} is in collective {}: {}", name_of(rank_), stamp.sequence, own);
  }
  return Error(error.code(), text, rank);
}

Outcome ServerEngine::run(const Call& call, const MeshFrame& stamp, Deadline deadline) {
  if (world_size() == 1) return run_alone(call);
  // The server gives up on whoever is absent after the same time and says who: let it.
  const bool usual =
      !call.options.deadline && deadline.remaining() < 2 * kOverdueFactor * timeout();
  const Deadline limit = usual ? Deadline::at(deadline.time() + timeout()) : deadline;
  guarded(stamp, limit, [&] {
    client_->enter(stamp);
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
      case Collective::kPointToPoint: LOCKSTEP_CHECK(false);  // complete_call refuses it
    }
  });
  return outcome_of(call, rank_);
}

void ServerEngine::leave(Deadline deadline) {
  guarded(own_stamp(), deadline, [&] { client_->leave(); });
  left_ = true;
}

std::vector<double> ServerEngine::add_up(std::size_t lanes, std::span<const LanePartial> partials,
                                         std::size_t numbers, std::span<float> sum) {
  ahead_ = 0;
  return client_->reduce_lanes(next_step_++, 0, static_cast<std::uint32_t>(lanes), partials,
                               numbers, sum);
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
      const auto receiver = static_cast<std::uint32_t>(worker_of(rank));
      if (rank != rank_) send(receiver, part_of(wanted[index_of(rank)]));
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
      if (turn == 0 || bytes > 0) in.push_back({worker_of(source.rank), {place, bytes}});
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

BytesOut ServerEngine::to(int rank, ConstBufferView bytes) const {
  return {static_cast<std::uint32_t>(worker_of(rank)), {bytes.data(), bytes.bytes()}};
}

BytesIn ServerEngine::from(int rank, BufferView bytes) const {
  return {worker_of(rank), {bytes.data(), bytes.bytes()}};
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
  if (!all) count_ahead(call.total * size_of(call.out.type()));
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
