#include "tests/support/job_groups.h"

#include "lockstep/base/index.h"
#include "lockstep/comm/transport/mesh.h"
#include "lockstep/net/job/job.h"
#include "tests/support/groups.h"

namespace lockstep::test {
namespace {

JobOptions job_options(const GroupOptions& options) {
  JobOptions job;
  job.world_size = options.world_size;
  job.master_host = options.medium == GroupMedium::kTcpV6 ? "::1" : "127.0.0.1";
  job.timeout = options.timeout;
  if (options.medium == GroupMedium::kTcpSealed) job.wire = WireChoice::kSealedAlways;
  return job;
}

Medium medium_of(GroupMedium medium) {
  switch (medium) {
    case GroupMedium::kShm: return Medium::kShared;
    case GroupMedium::kAuto: return Medium::kAuto;
    default: return Medium::kTcp;
  }
}

}  // namespace

Rendezvous::Rendezvous(const GroupOptions& options)
    : listener_(listen_for_rendezvous(job_options(options))),
      port_(listener_.local_address().port()) {}

std::unique_ptr<Transport> Rendezvous::join(const GroupOptions& options, int rank) {
  JobOptions job = job_options(options);
  job.rank = rank;
  job.master_port = port_;
  std::optional<Socket> listener;
  if (rank == 0) listener = std::move(listener_);
  JoinedJob joined = join_job(job, std::move(listener));
  for (std::size_t r = 0; r < options.hosts.size(); ++r) {
    joined.roster[r].host.network_namespace = index_of(options.hosts[r]);
  }
  return make_mesh(std::move(joined), medium_of(options.medium), options.timeout);
}

}  // namespace lockstep::test
