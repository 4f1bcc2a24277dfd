#include "lockstep/net/job/job.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <cstdlib>
#include <utility>

#include "lockstep/base/descriptor.h"
#include "lockstep/base/error.h"
#include "lockstep/base/host.h"
#include "lockstep/comm/collectives/plan_engine.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/mpi/mpi.h"
#include "lockstep/comm/transport/local_group.h"
#include "lockstep/comm/transport/mesh.h"
#include "lockstep/launch/rank_environment.h"
#include "lockstep/lockstep.h"
#include "lockstep/net/socket/address.h"
#include "lockstep/server/server_engine.h"

namespace lockstep {

struct Job::State {
  std::unique_ptr<Communicator> communicator;
  std::uint32_t generation = 0;
};

namespace {

Job job_over(std::unique_ptr<Communicator> communicator) {
  return Job(std::make_unique<Job::State>(Job::State{std::move(communicator)}));
}

Job job_over(std::unique_ptr<Engine> engine, std::chrono::nanoseconds timeout) {
  return job_over(std::make_unique<Communicator>(std::move(engine), timeout));
}

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
  place.served_elsewhere = options.hosted;
  place.job = job_name(options.name, options.attempt);
  place.token = options.token;
  place.interface = options.interface;
  place.timeout = options.timeout;
  auto mesh = make_mesh(join_job(place, take_listener(options.listener)),
                        medium_of(options.transport), options.timeout);
  return job_over(std::make_unique<PlanEngine>(std::move(mesh)), options.timeout);
}

Job join_mpi(const JoinOptions& options) {
  MpiOptions mpi;
  mpi.timeout = options.timeout;
  mpi.interface = options.interface;
  auto engine = options.mpi_collectives
                    ? make_mpi_engine(mpi)
                    : std::unique_ptr<Engine>(new PlanEngine(make_mpi_transport(mpi)));
  return job_over(std::move(engine), options.timeout);
}

Job join_server(const JoinOptions& options) {
  const auto where = parse_host_port(options.coordinator);
  if (!where) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--coordinator {}: not HOST:PORT", options.coordinator));
  }
  StarOptions star;
  star.coordinator = *where;
  star.job = options.name;
  star.token = options.token;
  star.timeout = options.timeout;
  star.rank = options.rank.value_or(-1);
  star.world_size = options.world_size.value_or(0);
  return job_over(join_star(star));
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
Communicator& Job::communicator() const { return *state_->communicator; }
void Job::leave(const CallOptions& options) { communicator().barrier(options); }

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

std::vector<Job> join_threads(int world_size, std::chrono::nanoseconds timeout) {
  std::vector<Job> jobs;
  for (auto& transport : make_local_group(world_size)) {
    jobs.push_back(job_over(std::make_unique<PlanEngine>(std::move(transport)), timeout));
  }
  return jobs;
}

}  // namespace lockstep
