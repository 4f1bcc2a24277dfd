#include "lockstep/net/job/job.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <span>
#include <string_view>
#include <utility>

#include "lockstep/base/descriptor.h"
#include "lockstep/base/error.h"
#include "lockstep/base/host.h"
#include "lockstep/comm/collectives/plan_engine.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/mpi/mpi.h"
#include "lockstep/comm/transport/mesh.h"
#include "lockstep/flight/flight_file.h"
#include "lockstep/launch/rank_environment.h"
#include "lockstep/lockstep.h"
#include "lockstep/net/socket/address.h"
#include "lockstep/run/fault.h"
#include "lockstep/run/job_state.h"
#include "lockstep/server/server_engine.h"

namespace lockstep {

namespace {

// A job that ends when one of its workers does.
Job job_over(std::unique_ptr<Engine> engine, const JoinOptions& options) {
  auto state = std::make_unique<Job::State>();
  state->communicator =
      std::make_unique<Communicator>(std::move(engine), options.timeout, 0, state->flight);
  if (options.call_timeout.count() > 0) state->communicator->set_patience(options.call_timeout);
  // All say the same; what it is does not matter.
  auto tag = static_cast<std::int32_t>(::getpid());
  Communicator& all = *state->communicator;
  if (all.world_size() > 1) all.broadcast(std::span(&tag, 1), 0);
  state->flight->set_place(all.rank(), all.world_size(), 0, static_cast<std::uint32_t>(tag));
  return Job(std::move(state));
}

Standing standing_of(Regroup how) {
  switch (how) {
    case Regroup::kAfterLoss: return Standing::kBroken;
    case Regroup::kInOrder: return Standing::kBoundary;
    case Regroup::kTooFew: return Standing::kWaits;
  }
  return Standing::kBroken;
}

// A worker with a control plane: its generations are those of the job's centre.
struct MemberState : Job::State {
  // Makes the communicator of a generation.
  using Connect = std::function<std::unique_ptr<Communicator>(
      const JoinedJob& job, TransportKind transport, const std::shared_ptr<FlightRecorder>&)>;

  MemberState(const JoinOptions& options, JoinedJob joined, Connect how)
      : job_(std::move(joined)),
        transport_(options.transport),
        call_timeout_(options.call_timeout),
        connect_(std::move(how)) {
    if (options.flight) flight = std::make_shared<FlightRecorder>(Descriptor(*options.flight));
    newcomer = job_.roster.empty();
    fault_ = planned_fault(newcomer ? -1 : job_.rank(), nullptr);
    if (newcomer) {
      description = job_.control->welcome()->contents;
    } else {
      enter();
    }
  }

  bool survives(const Error& error) const override { return job_.control->survives(error); }
  bool stood_still() const override { return job_.control->stood_still(); }

  void regroup(std::int64_t step, Regroup how) override {
    if (job_.control->is_alone()) State::regroup(step, how);
    Standing standing = newcomer ? Standing::kPrepared : standing_of(how);
    departed.clear();
    for (bool begun = true;; begun = false) {  // a generation may end before it has begun
      // All have what they need of this generation before its connections close.
      if (standing == Standing::kBoundary || standing == Standing::kWaits) part_in_order();
      communicator.reset();
      at("standing");
      job_ = regroup_job(job_, standing, step);
      note_departed(begun);
      at("roster");
      try {
        enter();
        at("ready");
        job_.control->ready_to_go();
        at("go");
        newcomer = false;
        return;
      } catch (const Error& error) {
        if (!job_.control->survives(error)) throw;
        // Who comes, or comes back, and cannot be used by the others must not try for ever.
        const bool comes = newcomer || job_.rank() >= job_.world_size() - job_.newcomers;
        if (comes && error.rank() == job_.rank()) {
          throw Error(error.code(),
                      fmt::format("the job cannot use this worker: {}", error.message()),
                      error.rank());
        }
      }
      standing = newcomer ? Standing::kEnters : Standing::kBroken;
    }
  }

  void give_up(const std::string& reason) override { job_.control->give_up(reason); }
  void abort(const std::string& reason) override { job_.control->abort(reason); }
  void set_transport(TransportKind kind) override { transport_ = kind; }

  void describe(std::vector<std::byte> contents, int most_workers) override {
    description = contents;
    job_.control->describe({static_cast<std::uint32_t>(most_workers), std::move(contents)});
  }

  JobWishes wishes() const override {
    const Wish wish = job_.control->wanted();
    return {static_cast<int>(wish.stop), static_cast<int>(wish.save), wish.regroup};
  }

  void tell(const std::string& line) override { job_.control->tell(line); }
  bool ask_flight() override { return job_.control->ask_flight(); }
  void on_flight_asked(const std::function<void()>& write) override {
    job_.control->on_flight_asked(write);
  }

  bool on_one_host() const override {
    return std::ranges::all_of(
        job_.roster, [host = this_host()](const Card& card) { return same_host(card.host, host); });
  }

 private:
  void enter() {
    const std::uint32_t tag = tag_of(job_.generation);
    flight->set_place(job_.rank(), job_.world_size(), job_.generation.number,
                      tag != 0 ? tag : static_cast<std::uint32_t>(::getpid()));
    try {
      communicator = connect_(job_, transport_, flight);
      if (call_timeout_.count() > 0) communicator->set_patience(call_timeout_);
    } catch (const Error& error) {
      job_.control->fail(error);
    }
    generation = job_.generation.number;
    newcomers = job_.generation.number > 1 ? job_.newcomers : 0;
    too_few = job_.too_few;
  }

  // `begun`: the generation that they were in.
  void note_departed(bool begun) {
    for (const lockstep::Departure& each : job_.control->roster()->departed) {
      departed.push_back({begun ? each.rank : -1, static_cast<Job::Departure::Kind>(each.kind),
                          each.name, each.why});
    }
  }

  void at(std::string_view place) const {
    if (fault_) fault_(place, job_.generation.number);
  }

  void part_in_order() {
    try {
      communicator->barrier();
    } catch (const Error& error) {
      if (!survives(error)) throw;
    }
  }

  JoinedJob job_;
  TransportKind transport_;
  std::chrono::nanoseconds call_timeout_;
  Connect connect_;
  std::function<void(std::string_view, std::int64_t)> fault_;  // may be null
};

Medium medium_of(TransportKind kind) {
  switch (kind) {
    case TransportKind::kTcp: return Medium::kTcp;
    case TransportKind::kShm: return Medium::kShared;
    default: return Medium::kAuto;
  }
}

std::optional<Socket> take_listener(std::optional<int> descriptor) {
  if (!descriptor) return std::nullopt;
  Descriptor listener(*descriptor);
  ::fcntl(listener.get(), F_SETFD, FD_CLOEXEC);
  ::fcntl(listener.get(), F_SETFL, O_NONBLOCK);  // as every Socket is
  return Socket(std::move(listener), "rendezvous");
}

Job join_mesh(const JoinOptions& options) {
  JobOptions place;
  place.rank = options.rank.value_or(0);
  place.world_size = options.world_size.value_or(1);
  if (place.world_size > 1 && options.master_host.empty()) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} and {} must say where the ranks meet",
                                                         kMasterHostVariable, kMasterPortVariable));
  }
  place.master_host = options.master_host;
  place.master_port = options.master_port;
  place.hosted = options.hosted;
  place.peers = options.peers;
  place.job = job_name(options.name, options.attempt);
  place.token = options.token;
  place.wire = wire_choice(options.plain_wire);
  place.interface = options.interface;
  place.timeout = options.timeout;
  place.survives = options.survive;
  place.min_workers = static_cast<std::uint32_t>(options.min_workers);
  place.patience = options.patience;
  const auto connect = [timeout = options.timeout, compression = options.wire_compression](
                           const JoinedJob& job, TransportKind transport,
                           const std::shared_ptr<FlightRecorder>& flight) {
    auto mesh = make_mesh(job, medium_of(transport), timeout, compression);
    return std::make_unique<Communicator>(std::make_unique<PlanEngine>(std::move(mesh)), timeout, 0,
                                          flight);
  };
  return Job(std::make_unique<MemberState>(
      options, join_job(place, take_listener(options.listener)), connect));
}

Job join_mpi(const JoinOptions& options) {
  MpiOptions mpi;
  mpi.timeout = options.timeout;
  mpi.interface = options.interface;
  auto engine = options.mpi_collectives
                    ? make_mpi_engine(mpi)
                    : std::unique_ptr<Engine>(new PlanEngine(make_mpi_transport(mpi)));
  return job_over(std::move(engine), options);
}

// A server that hangs up on the first bytes may speak the original protocol.
JoinedJob join_star_or_hint(const StarOptions& star) {
  try {
    return join_star(star);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kChannelClosed) throw;
    throw Error(
        error.code(),
        fmt::format("{}; if it is a server of the original protocol, use --protocol original",
                    error.message()));
  }
}

Job join_server(const JoinOptions& options) {
  StarOptions star;
  star.coordinator = require_host_port("--coordinator", options.coordinator);
  star.job = options.name;
  star.token = options.token;
  star.wire = wire_choice(options.plain_wire);
  star.timeout = options.timeout;
  star.rank = options.rank.value_or(-1);
  star.world_size = options.world_size.value_or(0);
  star.survives = options.survive;
  star.min_workers = static_cast<std::uint32_t>(options.min_workers);
  star.patience = options.patience;
  const auto connect = [star](const JoinedJob& job, TransportKind,
                              const std::shared_ptr<FlightRecorder>& flight) {
    return connect_star(star, job, flight);
  };
  return Job(std::make_unique<MemberState>(options, join_star_or_hint(star), connect));
}

}  // namespace

std::string_view to_string(TransportKind kind) {
  switch (kind) {
    case TransportKind::kLocal: return "local";
    case TransportKind::kTcp: return "tcp";
    case TransportKind::kShm: return "shm";
    case TransportKind::kAuto: return "auto";
    case TransportKind::kMpi: return "mpi";
    case TransportKind::kServer: return "server";
  }
  return "?";
}

JoinOptions JoinOptions::from_environment(JoinOptions given) {
  const auto found = rank_environment();
  if (found) {
    given.rank = found->rank;
    given.world_size = found->world_size;
    given.master_host = found->master_host;
    given.master_port = found->master_port;
    given.listener = found->listener;
    given.hosted = found->hosted;
    given.peers = found->peers;
    given.flight = found->flight;
    given.attempt = found->attempt;
  }
  const char* token = std::getenv(kTokenVariable);
  if (given.token.empty() && token != nullptr) given.token = token;
  if (given.token.empty() && found) given.token = found->secret;
  return given;
}

Job::Job(std::unique_ptr<State> state) : state_(std::move(state)) {}
Job::~Job() = default;
Job::Job(Job&& other) noexcept = default;
Job& Job::operator=(Job&& other) noexcept = default;

int Job::rank() const { return communicator().rank(); }
int Job::world_size() const { return communicator().world_size(); }
std::uint32_t Job::generation() const { return state_->generation; }
int Job::newcomers() const { return state_->newcomers; }
const std::vector<Job::Departure>& Job::departed() const { return state_->departed; }
Communicator& Job::communicator() const { return *state_->communicator; }
void Job::leave(const CallOptions& options) { communicator().barrier(options); }

bool Job::survives(const Error& error) const { return state_->survives(error); }
bool Job::stood_still() const { return state_->stood_still(); }
void Job::regroup(std::int64_t step, Regroup how) {
  std::erase_if(state_->before_regroup, [](const auto& give_up) { return !give_up(); });
  state_->regroup(step, how);
}
bool Job::too_few() const { return state_->too_few; }
void Job::give_up(const std::string& reason) { state_->give_up(reason); }
void Job::abort(const std::string& reason) { state_->abort(reason); }
void Job::set_transport(TransportKind transport) { state_->set_transport(transport); }
bool Job::newcomer() const { return state_->newcomer; }
const std::vector<std::byte>& Job::description() const { return state_->description; }
void Job::describe(std::vector<std::byte> description, int most_workers) {
  state_->describe(std::move(description), most_workers);
}
JobWishes Job::wishes() const { return state_->wishes(); }
void Job::tell(const std::string& line) { state_->tell(line); }
bool Job::ask_flight() { return state_->ask_flight(); }
void Job::on_flight_asked(const std::function<void()>& write) { state_->on_flight_asked(write); }
const std::shared_ptr<FlightRecorder>& Job::flight() const { return state_->flight; }
std::string Job::write_flight(const std::string& folder, const std::string& why) const {
  return write_flight_file(folder, flight_file_of(state_->flight->snapshot(), why));
}

bool on_one_host(const Job& job) { return job.state_->on_one_host(); }

Job join() { return join(JoinOptions::from_environment()); }

Job join(const JoinOptions& options) {
  switch (options.transport) {
    case TransportKind::kMpi: return join_mpi(options);
    case TransportKind::kServer: return join_server(options);
    case TransportKind::kLocal:
      throw Error(ErrorCode::kInvalidArgument, "threads of one process join by join_threads()");
    default: return join_mesh(options);
  }
}

}  // namespace lockstep
