#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/version.h"
#include "lockstep/net/job/control_plane.h"
#include "lockstep/net/job/door.h"
#include "lockstep/net/job/handshake.h"
#include "lockstep/net/socket/socket.h"
#include "lockstep/wire/join_messages.h"

namespace lockstep {

struct JobOptions {
  int rank = 0;        // -1, where the centre is no rank: the centre gives one
  int world_size = 1;  // 0, likewise: as the centre says
  // Where the rendezvous is. Rank 0 serves it; with `hosted` a coordinator or launcher does that is
  // no rank.
  std::string master_host = "127.0.0.1";
  std::uint16_t master_port = 0;
  bool hosted = false;
  // Hosts where the other ranks listen at master_port, too: a rank 0 that comes back asks them.
  std::vector<std::string> peers = {};
  // Whether other ranks connect to this one: not where MPI or a gradient server carries the data.
  bool listens = true;

  std::string version{lockstep::version()};  // of the program; all ranks must say the same
  std::string job = "lockstep";
  std::string token;  // empty: loopback only
  WireChoice wire = WireChoice::kSealed;
  std::string interface;  // empty: the one that leads to the rendezvous
  Deadline::Clock::duration timeout = std::chrono::seconds(30);

  // The job goes on without ranks that are lost, if all ranks say so, down to `min_workers`.
  bool survives = false;
  std::uint32_t min_workers = 1;
  // How long fewer of them, or a rank without a centre, wait; zero: ten timeouts.
  Deadline::Clock::duration patience{};
  // The centre stays where it is, even when it is gone for a while: a coordinator.
  bool fixed_centre = false;
};

// A rank's place in a generation of a job: who the others are, how to reach them, who watches over
// it.
struct JoinedJob {
  Identity identity;
  GenerationName generation;
  Roster roster;         // empty: the job runs already, and this process is a newcomer
  int newcomers = 0;     // the last ranks; all of them in the first generation
  bool too_few = false;  // see RosterMessage
  std::int64_t step = 0;
  std::chrono::milliseconds timeout{};  // the centre's
  std::shared_ptr<ControlPlane> control;

  int rank() const { return identity.rank; }
  int world_size() const { return static_cast<int>(roster.size()); }
};

// Opens this rank's door, joins the rendezvous and returns once all ranks are there, or throws
// an Error that names who is missing or wrong. Takes at most `timeout`. Rank 0 serves the
// rendezvous at master_host:master_port, or on `listener` where it is already open (master_port is
// then ignored); if the job runs already at one of `peers`, it comes as a process without a rank.
// World size 1 opens no socket at all. Where the job runs already, a process without
// a rank returns as a newcomer: ControlPlane::welcome() says what the job is, and regroup_job()
// with Standing::kPrepared lets it in.
JoinedJob join_job(const JobOptions& options, std::optional<Socket> listener = std::nullopt);

// The next generation, after the one of `job` has ended, or ends by this; `step` is how many steps
// this rank has done. Nobody uses `job` any more. ControlPlane::ready_to_go() follows.
JoinedJob regroup_job(const JoinedJob& job, Standing standing, std::int64_t step);

struct HostOptions {
  std::string title = "the coordinator";  // how messages call the process
  int world_size = 0;                     // of the job that forms here; 0: none does
  std::string version{lockstep::version()};
  std::string job = "lockstep";
  std::string token;
  WireChoice wire = WireChoice::kSealed;
  Deadline::Clock::duration timeout = std::chrono::seconds(30);
  Deadline::Clock::duration patience{};                   // for ranks to come; zero: the timeout
  bool fixed_centre = false;                              // see JobOptions
  std::optional<std::vector<std::byte>> invitation = {};  // see CentreOptions
};

// Serves in a process that is no rank: the door for all that the entrance offers and, if a job
// forms here, its centre. Returns at once.
std::unique_ptr<ControlPlane> host_job(const HostOptions& options, Entrance entrance);

// Connects to the rendezvous, or to what else is served at its address, and passes the handshake;
// tries again for as long as nobody answers.
Socket connect_to_rendezvous(const HostPort& where, const Identity& identity, Deadline deadline,
                             Purpose purpose = Purpose::kRendezvous);

// One call to whoever may be the centre, or know it; it must be `whom` where that is given.
Link call_centre(const std::string& address, const std::optional<MemberId>& whom,
                 const Identity& identity, Deadline::Clock::duration timeout, Deadline deadline);

// The listener that rank 0 serves on: bound to master_host:master_port, on all interfaces where
// master_host is a name or an address of another device (then a token is needed).
Socket listen_for_rendezvous(const JobOptions& options);

}  // namespace lockstep
