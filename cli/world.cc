#include "cli/world.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <fstream>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/comm/collectives/plan_engine.h"
#include "lockstep/comm/mpi/mpi.h"
#include "lockstep/comm/transport/mesh.h"

namespace lockstep::cli {
namespace {

Medium medium_of(TransportKind kind) {
  switch (kind) {
    case TransportKind::kTcp: return Medium::kTcp;
    case TransportKind::kShm: return Medium::kShared;
    default: return Medium::kAuto;
  }
}

std::optional<Socket> take_listener(const RankEnvironment& environment) {
  if (!environment.listener) return std::nullopt;
  Descriptor listener(*environment.listener);
  ::fcntl(listener.get(), F_SETFD, FD_CLOEXEC);
  ::fcntl(listener.get(), F_SETFL, O_NONBLOCK);  // as every Socket is
  return Socket(std::move(listener), "rendezvous");
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

std::unique_ptr<Communicator> join_world(const WorldOptions& options,
                                         const RankEnvironment& environment) {
  if (environment.world_size > 1 && environment.master_host.empty()) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} and {} must say where the ranks meet",
                                                         kMasterHostVariable, kMasterPortVariable));
  }
  JobOptions job_options;
  job_options.rank = environment.rank;
  job_options.world_size = environment.world_size;
  job_options.master_host = environment.master_host;
  job_options.master_port = environment.master_port;
  job_options.token = options.token;
  job_options.interface = options.interface;
  job_options.timeout = options.timeout;
  JoinedJob job = join_job(job_options, take_listener(environment));
  auto mesh = make_mesh(std::move(job), medium_of(options.transport), options.timeout);
  return std::make_unique<Communicator>(std::make_unique<PlanEngine>(std::move(mesh)),
                                        options.timeout);
}

std::unique_ptr<Communicator> join_mpi_world(const WorldOptions& options, bool native) {
  MpiOptions mpi;
  mpi.timeout = options.timeout;
  mpi.interface = options.interface;
  auto engine = native ? make_mpi_engine(mpi)
                       : std::unique_ptr<Engine>(new PlanEngine(make_mpi_transport(mpi)));
  return std::make_unique<Communicator>(std::move(engine), options.timeout);
}

std::string read_token_file(const std::string& path) {
  std::ifstream file(path);
  std::string token;
  if (!std::getline(file, token) || token.empty()) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} holds no token", path));
  }
  return token;
}

}  // namespace lockstep::cli
