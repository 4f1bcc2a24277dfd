#include "lockstep/server/server_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "lockstep/base/check.h"
#include "lockstep/base/hash/blake3.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/call_check.h"
#include "lockstep/comm/kernels/kernels.h"
#include "lockstep/comm/kernels/outcome.h"
#include "lockstep/net/job/job_health.h"
#include "lockstep/server/membership.h"

namespace lockstep {
namespace {

// Where RoundControl has its other numbers.
constexpr std::size_t kCount = 1;  // how many ranks brought theirs
constexpr std::size_t kWords = 2;  // then three words of a digest, each with its square
// Sums over 4096 ranks of squares of such words are exact in f64.
constexpr std::uint32_t kWordMask = (1U << 19) - 1;

// Bytes of one rank that travel in one round, two to an element.
constexpr std::size_t kSpreadBytes = 16 * 2 * kLanePiece;

// How a worker introduces itself to the others.
struct Introduction {
  std::int32_t rank;
  std::array<char, 124> name;
};

// 16 bits as a whole number, which sums of one keep exact.
void pack(const std::byte* bytes, std::size_t size, std::span<float> values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    unsigned word = std::to_integer<unsigned>(bytes[2 * i]);
    if (2 * i + 1 < size) word |= std::to_integer<unsigned>(bytes[2 * i + 1]) << 8;
    values[i] = static_cast<float>(word);
  }
}

void unpack(std::span<const float> values, std::byte* bytes, std::size_t size) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto word = static_cast<unsigned>(values[i]);
    bytes[2 * i] = static_cast<std::byte>(word & 0xff);
    if (2 * i + 1 < size) bytes[2 * i + 1] = static_cast<std::byte>(word >> 8);
  }
}

// What is not a call of the user's: joining, comparing calls, leaving.
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

// A round's tail has at most so many numbers, those of its control among them.
constexpr std::size_t kMostNumbers = 2048 - RoundControl::kNumbers;
// Partials are combined in strips of so many bytes: one piece on the wire.
constexpr std::size_t kStripBytes = 2 * kLanePiece;

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

RoundControl::RoundControl(const MeshFrame& stamp, bool last) {
  numbers_[kLast] = last ? 1 : 0;
  numbers_[kCount] = 1;
  const Blake3Hash hash = blake3(encode(stamp));
  for (std::size_t i = kWords; i < kNumbers; i += 2) {
    std::uint32_t word = 0;
    for (std::size_t byte = 0; byte < 4; ++byte) {
      word = word << 8 | std::to_integer<std::uint32_t>(hash[2 * i + byte]);
    }
    const double value = word & kWordMask;
    numbers_[i] = value;
    numbers_[i + 1] = value * value;
  }
}

// Equal sums and equal sums of squares mean that no rank's word is another one.
bool RoundControl::agrees(std::span<const double> sums) const {
  LOCKSTEP_CHECK(sums.size() >= kNumbers);
  for (std::size_t i = kWords; i < kNumbers; ++i) {
    if (sums[i] != sums[kCount] * numbers_[i]) return false;
  }
  return true;
}

ServerEngine::ServerEngine(std::unique_ptr<WorkerClient> client, const StarOptions& options)
    : client_(std::move(client)), supervisor_(*client_) {
  const auto& settings = client_->settings();
  if (!settings || settings->mode != Mode::kLanes) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} does not run in mode lanes, which collectives need",
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
  std::vector<std::int32_t> wanted;
  std::vector<std::string> texts;
  guarded(own_stamp(), Deadline::after((kOverdueFactor + 1) * timeout()), [&] {
    const RoundControl control(own_stamp(), false);
    for (std::size_t i = 0; i < n; ++i) {
      Introduction card = own;
      spread(control, static_cast<int>(i), reinterpret_cast<std::byte*>(&card), sizeof card);
      card.name.back() = '\0';
      wanted.push_back(card.rank);
      texts.emplace_back(card.name.data());
      names_[i] = fmt::format("worker {} ({})", i, texts[i]);
    }
    assign_ranks(wanted);
  });
  for (std::size_t i = 0; i < n; ++i) {
    names_[index_of(rank_of_worker_[i])] =
        fmt::format("rank {} ({})", rank_of_worker_[i], texts[i]);
  }
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
  if (error.code() == ErrorCode::kSizeMismatch || error.code() == ErrorCode::kTimeout) {
    text += fmt::format("; {} is in collective {}: {}", name_of(rank_), stamp.sequence,
                        describe(stamp));
  }
  return Error(error.code(), text, rank);
}

Outcome ServerEngine::run(const Call& call, const MeshFrame& stamp, Deadline deadline) {
  if (world_size() == 1) return run_alone(call);
  // The server gives up on whoever is absent after the same time and says who: let it.
  const bool usual =
      !call.options.deadline && deadline.remaining() < 2 * kOverdueFactor * timeout();
  const Deadline limit = usual ? Deadline::at(deadline.time() + timeout()) : deadline;
  Running running{call, stamp, RoundControl(stamp, false)};
  guarded(stamp, limit, [&] {
    switch (call.collective) {
      case Collective::kBarrier: agree(running); break;
      case Collective::kAllReduce:
      case Collective::kReduceScatter:
      case Collective::kReduce: reduce_ranks(running); break;
      case Collective::kReduceNodes:
      case Collective::kReduceScatterNodes: reduce_nodes(running); break;
      case Collective::kBroadcast:
        agree(running);
        spread(running.control, call.root, call.out.data(), call.out.bytes());
        break;
      case Collective::kAllGather:
      case Collective::kGather: gather(running); break;
      case Collective::kScatter: scatter(running); break;
      case Collective::kAllToAll: all_to_all(running); break;
      case Collective::kPointToPoint: LOCKSTEP_CHECK(false);  // complete_call refuses it
    }
  });
  return outcome_of(call, rank_);
}

void ServerEngine::leave(Deadline deadline) {
  guarded(own_stamp(), deadline, [&] {
    const auto me = static_cast<std::uint32_t>(rank_);
    const LanePartial partial{{me, me + 1}, {}, {}};
    round(RoundControl(own_stamp(), true), static_cast<std::uint32_t>(world_size()), {&partial, 1},
          0, {});
    if (client_->next_shard()) {
      throw Error(ErrorCode::kUnexpectedMessage,
                  fmt::format("{} goes on after the last round", client_->coordinator()));
    }
  });
  left_ = true;
}

std::vector<double> ServerEngine::round(const RoundControl& control, std::uint32_t lanes,
                                        std::span<const LanePartial> partials, std::size_t numbers,
                                        std::span<float> sum) {
  const auto shard = client_->next_shard();
  if (!shard) {
    throw Error(ErrorCode::kChannelClosed, fmt::format("{} ended the job after {} rounds",
                                                       client_->coordinator(), next_step_));
  }
  if (shard->step != next_step_) {
    throw Error(ErrorCode::kStepMismatch,
                fmt::format("{} is at round {}, this rank at {}", client_->coordinator(),
                            shard->step, next_step_));
  }
  std::vector<LanePartial> sent;
  for (const LanePartial& partial : partials) {
    LOCKSTEP_CHECK(partial.tail.size() == numbers);
    LanePartial lane{partial.node, partial.data, std::vector<double>(RoundControl::kNumbers)};
    if (sent.empty()) std::ranges::copy(control.numbers(), lane.tail.begin());
    lane.tail.insert(lane.tail.end(), partial.tail.begin(), partial.tail.end());
    sent.push_back(std::move(lane));
  }
  return client_->reduce_lanes(next_step_++, 0, lanes, sent, RoundControl::kNumbers + numbers, sum);
}

void ServerEngine::agree(const Running& running) {
  const auto me = static_cast<std::uint32_t>(rank_);
  const LanePartial partial{{me, me + 1}, {}, {}};
  check_agreement(running, round(running.control, static_cast<std::uint32_t>(world_size()),
                                 {&partial, 1}, 0, {}));
}

void ServerEngine::check_agreement(const Running& running, std::span<const double> sums) {
  if (!running.control.agrees(sums)) explain_difference(running);
}

// All ranks come here together, so they can tell each other.
void ServerEngine::explain_difference(const Running& running) {
  const RoundControl control(own_stamp(), false);
  const MeshFrameBytes own = encode(running.stamp);
  std::vector<MeshFrameBytes> all;
  for (int rank = 0; rank < world_size(); ++rank) {
    all.push_back(own);
    spread(control, rank, all.back().data(), own.size());
  }
  const auto other = std::ranges::find_if(all, [&](const auto& stamp) { return stamp != all[0]; });
  LOCKSTEP_CHECK(other != all.end());
  const auto says = [&](std::size_t rank) {
    const auto stamp = decode_mesh_frame(std::span(all[rank]));
    LOCKSTEP_CHECK(stamp);
    return fmt::format("{} is in collective {}: {}", names_[rank], stamp->sequence,
                       describe(*stamp));
  };
  const auto rank = static_cast<std::size_t>(other - all.begin());
  supervisor_.fail(Error(ErrorCode::kCollectiveMismatch, fmt::format("{}; {}", says(rank), says(0)),
                         static_cast<int>(rank)));
}

void ServerEngine::spread(const RoundControl& control, int from, std::byte* bytes,
                          std::size_t size) {
  for (std::size_t begin = 0; begin < size; begin += kSpreadBytes) {
    const std::size_t some = std::min(kSpreadBytes, size - begin);
    values_.resize((some + 1) / 2);
    std::vector<LanePartial> partials;
    if (from == rank_) {
      pack(bytes + begin, some, values_);
      partials.push_back({{0, 1}, values_, {}});
    }
    round(control, 1, partials, 0, values_);
    if (from != rank_ && bytes != nullptr) unpack(values_, bytes + begin, some);
  }
}

void ServerEngine::reduce_nodes(const Running& running) {
  const Call& call = running.call;
  const bool scatters = call.collective == Collective::kReduceScatterNodes;
  const Range chunk = scatters ? chunks_of(call.counts, call.total, world_size())[index_of(rank_)]
                               : Range{0, call.total};
  const bool fast =
      adds(call.op) && (running.type() == DataType::kF32 || running.type() == DataType::kF64);
  if (!fast) {
    agree(running);
    std::vector<const std::byte*> partials;
    for (const ConstBufferView& partial : call.partials) partials.push_back(partial.data());
    return reduce_partials(running, call.owners, partials, chunk, call.out.data());
  }
  // A rank that brings nothing to the sum can bring no stamp with it either.
  if (!everybody_owns_a_lane(call.owners, world_size())) agree(running);
  std::byte* const sum = scatters ? scratch_.get(call.total * running.element()) : call.out.data();
  if (running.type() == DataType::kF32) {
    sum_nodes_f32(running, {reinterpret_cast<float*>(sum), call.total});
  } else {
    sum_nodes_f64(running, {reinterpret_cast<double*>(sum), call.total});
  }
  if (scatters)
    copy_bytes(call.out.data(), sum + chunk.begin * running.element(), call.out.bytes());
  if (call.op == ReduceOp::kMean) {
    finish_mean(running.type(), call.out.data(), call.out.count(),
                static_cast<int>(call.owners.size()));
  }
}

void ServerEngine::sum_nodes_f32(const Running& running, std::span<float> sum) {
  const Call& call = running.call;
  const std::vector<Range> nodes = owned_nodes(call.owners, rank_);
  std::vector<LanePartial> partials;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const auto* data = reinterpret_cast<const float*>(call.partials[i].data());
    partials.push_back({nodes[i], {data, call.total}, {}});
  }
  check_agreement(running, round(running.control, static_cast<std::uint32_t>(call.owners.size()),
                                 partials, 0, sum));
}

void ServerEngine::sum_nodes_f64(const Running& running, std::span<double> sum) {
  const Call& call = running.call;
  const std::vector<Range> nodes = owned_nodes(call.owners, rank_);
  std::size_t begin = 0;
  do {  // no numbers at all are a round, too
    const std::size_t count = std::min(kMostNumbers, sum.size() - begin);
    std::vector<LanePartial> partials;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      const ConstBufferView some = call.partials[i].slice({begin, begin + count});
      LanePartial partial{nodes[i], {}, std::vector<double>(count)};
      if (count > 0) std::memcpy(partial.tail.data(), some.data(), some.bytes());
      partials.push_back(std::move(partial));
    }
    const std::vector<double> sums =
        round(running.control, static_cast<std::uint32_t>(call.owners.size()), partials, count, {});
    check_agreement(running, sums);
    std::copy_n(sums.begin() + RoundControl::kNumbers, count,
                sum.begin() + static_cast<std::ptrdiff_t>(begin));
    begin += count;
  } while (begin < sum.size());
}

void ServerEngine::reduce_partials(const Running& running, const LeafOwners& owners,
                                   std::span<const std::byte* const> partials, Range chunk,
                                   std::byte* out) {
  const std::vector<Range> nodes = maximal_nodes(owners);
  const std::vector<CombineStep> program = combine_program(nodes, owners.size());
  const std::size_t element = running.element();
  const std::size_t strip = kStripBytes / element;
  const std::size_t total = running.call.total;
  for (std::size_t begin = 0; begin < total; begin += strip) {
    const std::size_t count = std::min(strip, total - begin);
    std::byte* place = scratch_.get(nodes.size() * count * element);
    void* const result = place;  // where the first node's partial was
    std::vector<const void*> strips;
    auto own = partials.begin();
    for (const Range& node : nodes) {
      const int owner = owners[node.begin];
      if (owner == rank_) std::memcpy(place, *own++ + begin * element, count * element);
      spread(running.control, owner, place, count * element);
      strips.push_back(place);
      place += count * element;
    }
    reduce_tree({running.call.op, running.type(), program, static_cast<int>(owners.size())}, strips,
                {&result, 1}, count);
    const std::size_t first = std::max(begin, chunk.begin);
    const std::size_t last = std::min(begin + count, chunk.end);
    if (out == nullptr || first >= last) continue;
    std::memcpy(out + (first - chunk.begin) * element,
                static_cast<std::byte*>(result) + (first - begin) * element,
                (last - first) * element);
  }
}

void ServerEngine::reduce_ranks(const Running& running) {
  const Call& call = running.call;
  agree(running);
  const std::byte* const own = call.in.data();
  const bool scatters = call.collective == Collective::kReduceScatter;
  const bool wanted = call.collective != Collective::kReduce || rank_ == call.root;
  const Range chunk = scatters ? chunks_of(call.counts, call.total, world_size())[index_of(rank_)]
                               : Range{0, call.total};
  reduce_partials(running, even_owners(index_of(world_size()), world_size()), {&own, 1}, chunk,
                  wanted ? call.out.data() : nullptr);
}

void ServerEngine::gather(const Running& running) {
  const Call& call = running.call;
  agree(running);
  const bool wanted = call.collective == Collective::kAllGather || rank_ == call.root;
  const std::vector<Range> chunks = chunks_of(call.counts, call.total, world_size());
  for (int from = 0; from < world_size(); ++from) {
    const Range chunk = chunks[index_of(from)];
    const std::size_t bytes = chunk.size() * running.element();
    std::byte* place = wanted ? call.out.slice(chunk).data() : nullptr;
    if (from == rank_) {
      if (!wanted) place = scratch_.get(bytes);
      copy_bytes(place, call.in.data(), bytes);
    }
    spread(running.control, from, place, bytes);
  }
}

void ServerEngine::scatter(const Running& running) {
  const Call& call = running.call;
  agree(running);
  const std::vector<Range> chunks = chunks_of(call.counts, call.total, world_size());
  for (int to = 0; to < world_size(); ++to) {
    const Range chunk = chunks[index_of(to)];
    const std::size_t bytes = chunk.size() * running.element();
    std::byte* place = to == rank_ ? call.out.data() : nullptr;
    if (rank_ == call.root) {
      if (to != rank_) place = scratch_.get(bytes);
      copy_bytes(place, call.in.slice(chunk).data(), bytes);
    }
    spread(running.control, call.root, place, bytes);
  }
}

void ServerEngine::all_to_all(const Running& running) {
  const Call& call = running.call;
  agree(running);
  const auto n = static_cast<std::size_t>(world_size());
  // What every rank sends to each, then what it expects of each.
  std::vector<std::vector<std::uint64_t>> counts;
  for (int from = 0; from < world_size(); ++from) {
    std::vector<std::uint64_t> theirs(call.counts.begin(), call.counts.end());
    theirs.insert(theirs.end(), call.recv_counts.begin(), call.recv_counts.end());
    spread(running.control, from, reinterpret_cast<std::byte*>(theirs.data()),
           theirs.size() * sizeof theirs[0]);
    counts.push_back(std::move(theirs));
  }
  for (std::size_t from = 0; from < n; ++from) {
    for (std::size_t to = 0; to < n; ++to) {
      if (counts[from][to] == counts[to][n + from]) continue;
      throw Error(ErrorCode::kSizeMismatch,
                  fmt::format("{} sends {} elements, {} expects {}", names_[from], counts[from][to],
                              names_[to], counts[to][n + from]));
    }
  }
  const std::vector<Range> sent = chunks_of(call.counts, call.in.count(), world_size());
  const std::vector<Range> received = chunks_of(call.recv_counts, call.out.count(), world_size());
  for (std::size_t from = 0; from < n; ++from) {
    for (std::size_t to = 0; to < n; ++to) {
      const bool mine = static_cast<int>(from) == rank_;
      const auto bytes = static_cast<std::size_t>(counts[from][to]) * running.element();
      std::byte* place = nullptr;
      if (static_cast<int>(to) == rank_) {
        place = call.out.slice(received[from]).data();
      } else if (mine) {
        place = scratch_.get(bytes);
      }
      if (mine) copy_bytes(place, call.in.slice(sent[to]).data(), bytes);
      if (from != to) spread(running.control, static_cast<int>(from), place, bytes);
    }
  }
}

}  // namespace lockstep
