#include "lockstep/server/server_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "lockstep/base/check.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/kernels/kernels.h"
#include "lockstep/net/job/job_health.h"
#include "lockstep/server/membership.h"

namespace lockstep {
namespace {

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

Outcome look_at_result(const Call& call, int rank) {
  const bool rooted =
      call.collective == Collective::kReduce || call.collective == Collective::kGather;
  if (!call.options.check_finite || (rooted && rank != call.root)) return {};
  const std::size_t found = find_non_finite(call.out.type(), call.out.data(), call.out.count());
  if (found == call.out.count()) return {};
  return {found};
}

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
    names_[static_cast<std::size_t>(rank_of_worker_[i])] =
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
  return look_at_result(call, rank_);
}

void ServerEngine::leave(Deadline deadline) {
  guarded(own_stamp(), deadline, [&] {
    const auto me = static_cast<std::uint32_t>(rank_);
    const Part part{{me, me + 1}, {}, {}};
    round(RoundControl(own_stamp(), true), static_cast<std::uint32_t>(world_size()), {&part, 1}, 0,
          {});
    if (client_->next_shard()) {
      throw Error(ErrorCode::kUnexpectedMessage,
                  fmt::format("{} goes on after the last round", client_->coordinator()));
    }
  });
  left_ = true;
}

std::vector<double> ServerEngine::round(const RoundControl& control, std::uint32_t lanes,
                                        std::span<const Part> parts, std::size_t numbers,
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
  std::vector<LanePart> sent;
  for (const Part& part : parts) {
    LOCKSTEP_CHECK(part.numbers.size() == numbers);
    LanePart lane{part.node, part.data, std::vector<double>(RoundControl::kNumbers)};
    if (sent.empty()) std::ranges::copy(control.numbers(), lane.tail.begin());
    lane.tail.insert(lane.tail.end(), part.numbers.begin(), part.numbers.end());
    sent.push_back(std::move(lane));
  }
  return client_->reduce_lanes(next_step_++, 0, lanes, sent, RoundControl::kNumbers + numbers, sum);
}

void ServerEngine::agree(const Running& running) {
  const auto me = static_cast<std::uint32_t>(rank_);
  const Part part{{me, me + 1}, {}, {}};
  check_agreement(
      running, round(running.control, static_cast<std::uint32_t>(world_size()), {&part, 1}, 0, {}));
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
    std::vector<Part> parts;
    if (from == rank_) {
      pack(bytes + begin, some, values_);
      parts.push_back({{0, 1}, values_, {}});
    }
    round(control, 1, parts, 0, values_);
    if (from != rank_ && bytes != nullptr) unpack(values_, bytes + begin, some);
  }
}

}  // namespace lockstep
