#include "lockstep/net/job/job.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <utility>

#include "lockstep/base/cores.h"
#include "lockstep/base/host.h"
#include "lockstep/net/job/centre.h"
#include "lockstep/net/job/member.h"
#include "lockstep/net/socket/interface.h"
#include "lockstep/net/socket/unix_socket.h"

namespace lockstep {
namespace {

void validate(const JobOptions& options) {
  const int least = options.hosted ? 0 : 1;
  if (options.world_size < least || options.world_size > kMaxWorldSize) {
    throw Error(ErrorCode::kInvalidWorldSize,
                fmt::format("{} ranks; 1 to {} are possible", options.world_size, kMaxWorldSize));
  }
  const bool given = options.rank == -1 && options.hosted;
  if (!given && (options.rank < 0 || options.rank >= options.world_size)) {
    throw Error(ErrorCode::kInvalidRank,
                fmt::format("rank {} in a world of {}", options.rank, options.world_size));
  }
  if (options.timeout < std::chrono::milliseconds(1) || options.timeout > std::chrono::hours(24)) {
    throw Error(ErrorCode::kInvalidArgument, "the timeout must be between a millisecond and a day");
  }
}

bool is_numeric(const std::string& host) {
  return SocketAddress::parse(to_string(HostPort{host, 0})).has_value();
}

// Whether the user meant this host alone. A name that happens to resolve to loopback here (as a
// host's own name often does) means another address to others.
bool means_loopback(const std::string& host) {
  const auto address = SocketAddress::parse(to_string(HostPort{host, 0}));
  return address ? address->is_loopback() : host == "localhost";
}

bool is_local(const SocketAddress& address) {
  return address.is_loopback() || local_address_toward(address) == address.with_port(0);
}

// Where peers can reach this rank; `local` is our end of the way to the rendezvous.
SocketAddress mesh_address(const JobOptions& options, const SocketAddress& local) {
  if (!options.interface.empty()) return interface_address(options.interface, local.family());
  if (local.is_loopback() && !means_loopback(options.master_host) && !options.token.empty()) {
    if (const auto way_out = address_for_others(AF_INET6)) return *way_out;
  }
  return local.with_port(0);
}

SocketAddress way_to_rendezvous(const JobOptions& options, Deadline deadline) {
  const auto addresses = resolve({options.master_host, options.master_port}, deadline);
  return local_address_toward(addresses.front());
}

Card make_card(const JobOptions& options, const MemberId& id) {
  Card card;
  card.rank = options.rank;
  card.world_size = options.world_size;
  card.version = options.version;
  card.id = id;
  card.pid = static_cast<std::int32_t>(::getpid());
  card.host = this_host();
  card.fingerprint = host_fingerprint();
  card.cores = core_list(own_cores());
  if (card.cores.size() > kMaxCardText) card.cores.clear();
  return card;
}

// A member of the job that runs already, at one of the peers. None: nobody answers there.
std::optional<Socket> call_peers(const JobOptions& options, const Identity& identity,
                                 Deadline deadline) {
  constexpr std::chrono::seconds kOneCall{1};
  for (const std::string& host : options.peers) {
    const Deadline soon = earlier(deadline, Deadline::after(kOneCall));
    try {
      for (const SocketAddress& address : resolve({host, options.master_port}, soon)) {
        Socket socket = connect_tcp(address, soon);
        require_token_for(socket.peer_address(), identity.token);
        client_handshake(socket, identity, Purpose::kRendezvous, 0, soon);
        return socket;
      }
    } catch (const Error& error) {  // it has not begun, or is gone
      if (error.code() == ErrorCode::kAuthentication) throw;
    }
  }
  return std::nullopt;
}

// Where other ranks connect to this one; `card` then tells them.
void add_entrances(std::vector<Entrance>& entrances, Card& card, const JobOptions& options,
                   const SocketAddress& local) {
  if (!options.listens) return;
  const SocketAddress address = mesh_address(options, local);
  require_token_for(address, options.token);
  Socket mesh = listen_tcp(address);
  card.mesh_address = to_string(mesh.local_address());
  // Who looks for the centre asks any member.
  entrances.push_back({std::move(mesh), {Purpose::kMesh, Purpose::kRendezvous}});
  // Anybody on this host can list the names: they tell nothing.
  card.unix_name = fmt::format("lockstep-{}", to_string(random_member_id()));
  entrances.push_back({listen_unix(card.unix_name), {Purpose::kShared}});
}

}  // namespace

Socket listen_for_rendezvous(const JobOptions& options) {
  const HostPort where{options.master_host, options.master_port};
  const SocketAddress address = resolve(where, Deadline::after(options.timeout)).front();
  // One address is enough if it is the one that all ranks use.
  const bool exact = is_numeric(where.host) || means_loopback(where.host) || options.token.empty();
  if (exact && is_local(address)) {
    require_token_for(address, options.token);
    return listen_tcp(address);
  }
  require_token_for(SocketAddress::any(AF_INET6), options.token);
  try {
    return listen_tcp(SocketAddress::any(AF_INET6, where.port));
  } catch (const Error&) {  // a host without IPv6
    return listen_tcp(SocketAddress::any(AF_INET, where.port));
  }
}

std::unique_ptr<ControlPlane> host_job(const HostOptions& options, Entrance entrance) {
  require_token_for(entrance.listener.local_address(), options.token);
  const Identity identity{
      .job = options.job, .id = random_member_id(), .token = options.token, .wire = options.wire};
  const CentreCard card{-1, options.title, this_host().hostname,
                        static_cast<std::int32_t>(::getpid())};
  std::vector<Entrance> entrances;
  entrances.push_back(std::move(entrance));
  auto door = std::make_unique<Door>(identity, std::move(entrances), options.timeout);
  std::unique_ptr<Centre> centre;
  if (options.world_size > 0) {
    CentreOptions own{.card = card,
                      .world_size = options.world_size,
                      .version = options.version,
                      .timeout = options.timeout,
                      .patience = options.patience,
                      .member = {},
                      .moves = !options.fixed_centre,
                      .invitation = options.invitation};
    centre = std::make_unique<Centre>(std::move(own), Deadline::Clock::now());
  }
  return std::make_unique<ControlPlane>(std::move(door), std::move(centre), name_of(card),
                                        options.timeout);
}

Socket connect_to_rendezvous(const HostPort& where, const Identity& identity, Deadline deadline,
                             Purpose purpose) {
  std::optional<Error> hung_up;
  while (true) {
    try {
      Socket socket = connect_with_retry(where, deadline);
      require_token_for(socket.peer_address(), identity.token);
      client_handshake(socket, identity, purpose, 0, deadline);
      return socket;
    } catch (const Error& error) {
      const bool closed = error.code() == ErrorCode::kChannelClosed;
      // Whom nobody answers any more tells what was answered.
      const Error& told = !closed && deadline.expired() && hung_up ? *hung_up : error;
      if (!closed || deadline.expired()) {
        throw Error(told.code(),
                    fmt::format("rendezvous at {}: {}", to_string(where), told.message()));
      }
      // Closed without a reason: a server that was just ending, or had no room. Call again.
      hung_up = error;
      ::poll(nullptr, 0, deadline.poll_timeout(std::chrono::milliseconds(20)));
    }
  }
}

namespace {

Deadline::Clock::duration patience_of(const JobOptions& options) {
  return options.patience.count() > 0 ? options.patience : 10 * options.timeout;
}

WayBack way_back(const JobOptions& options, const Identity& identity, const Card& card) {
  WayBack way;
  way.call = [caller = identity, timeout = options.timeout](const std::string& address, int rank,
                                                            const std::optional<MemberId>& whom,
                                                            Deadline deadline) mutable {
    caller.rank = rank;
    return call_centre(address, whom, caller, timeout, deadline);
  };
  if (options.fixed_centre) {
    const auto where =
        resolve({options.master_host, options.master_port}, Deadline::after(options.timeout));
    way.home = to_string(where.front());
  } else if (options.listens) {
    way.make_centre = [options, card](Inheritance inherited) {
      const int rank = inherited.roster.roster.empty() ? -1 : 0;
      CentreOptions centre{.card = {rank, "", card.host.hostname, card.pid},
                           .world_size = static_cast<int>(inherited.roster.roster.size()),
                           .version = options.version,
                           .timeout = inherited.roster.timeout,
                           .patience = options.patience,
                           .member = card.id};
      return std::make_unique<Centre>(std::move(centre), std::move(inherited),
                                      Deadline::Clock::now());
    };
  }
  return way;
}

void take_generation(JoinedJob& job, RosterMessage message) {
  job.generation = message.generation;
  job.identity.generation = tag_of(message.generation);
  job.identity.rank = job.control->rank();
  job.newcomers = static_cast<int>(message.newcomers);
  job.too_few = message.too_few;
  job.step = message.step;
  job.timeout = message.timeout;
  job.roster = std::move(message.roster);
}

}  // namespace

Link call_centre(const std::string& address, const std::optional<MemberId>& whom,
                 const Identity& identity, Deadline::Clock::duration timeout, Deadline deadline) {
  const auto where = SocketAddress::parse(address);
  if (!where) {
    throw Error(ErrorCode::kUnexpectedMessage, fmt::format("'{}' is no address", address));
  }
  Socket socket = connect_tcp(*where, deadline);
  require_token_for(socket.peer_address(), identity.token);
  const PeerIdentity answered =
      client_handshake(socket, identity, Purpose::kRendezvous, 0, deadline);
  // It has proved that it is a member; at an address that was given anew it may be another one.
  if (whom && answered.id != *whom) {
    throw Error(ErrorCode::kNoConnection,
                fmt::format("another process answered at {}", to_string(*where)));
  }
  tune_tcp(socket, timeout);
  return Link(std::move(socket), kMaxRosterBody);
}

JoinedJob join_job(const JobOptions& given, std::optional<Socket> listener) {
  validate(given);
  JobOptions options = given;
  const Deadline deadline = Deadline::after(options.timeout);
  JoinedJob job;
  job.identity = {.job = options.job,
                  .id = random_member_id(),
                  .rank = options.rank,
                  .token = options.token,
                  .wire = options.wire};
  const bool serves = options.rank == 0 && !options.hosted;
  std::optional<Socket> socket;  // to the centre, or to whoever knows it
  if (serves && options.survives) {
    Identity caller = job.identity;
    caller.rank = -1;
    socket = call_peers(options, caller, deadline);
    if (socket) {
      job.identity = caller;
      options.rank = -1;
      options.world_size = 0;
    }
  }
  Card card = make_card(options, job.identity.id);
  if (options.world_size == 1 && !options.hosted) {
    job.roster = {card};
    job.timeout = std::chrono::ceil<std::chrono::milliseconds>(options.timeout);
    job.control = std::make_shared<ControlPlane>();
    return job;
  }

  std::vector<Entrance> entrances;
  std::unique_ptr<Centre> centre;
  std::optional<Link> link;  // none: the centre is in this process
  std::string where = "the rendezvous";
  std::string called;
  if (serves && !socket) {
    if (!listener) listener = listen_for_rendezvous(options);
    const SocketAddress bound = listener->local_address();
    require_token_for(bound, options.token);
    add_entrances(entrances, card, options,
                  bound.is_any() ? way_to_rendezvous(options, deadline) : bound);
    entrances.push_back({std::move(*listener), {Purpose::kRendezvous}});
    CentreOptions own{.card = {0, "", card.host.hostname, card.pid},
                      .world_size = options.world_size,
                      .version = options.version,
                      .timeout = options.timeout,
                      .member = card.id};
    centre = std::make_unique<Centre>(std::move(own), Deadline::Clock::now());
  } else {
    if (!socket) {
      socket =
          connect_to_rendezvous({options.master_host, options.master_port}, job.identity, deadline);
    }
    tune_tcp(*socket, options.timeout);
    add_entrances(entrances, card, options, socket->local_address());
    if (!options.peers.empty()) {  // so that each of them can be asked
      entrances.push_back({listen_for_rendezvous(options), {Purpose::kRendezvous}});
    }
    where = fmt::format("the rendezvous at {}", socket->peer());
    called = to_string(socket->peer_address());
    link.emplace(std::move(*socket), kMaxRosterBody);
  }
  std::unique_ptr<Door> door;
  if (!entrances.empty()) {
    door = std::make_unique<Door>(job.identity, std::move(entrances), options.timeout);
  }
  job.control = std::make_shared<ControlPlane>(std::move(door), std::move(centre), name_of(card),
                                               options.timeout);
  MemberOptions member{.card = card,
                       .centre = std::move(where),
                       .patience = options.survives ? patience_of(options) : deadline.remaining(),
                       .timeout = options.timeout,
                       .survives = options.survives,
                       .min_workers = options.min_workers};
  WayBack back;
  if (options.survives) back = way_back(options, job.identity, card);
  back.first = std::move(called);
  auto answer = job.control->join(std::move(link), std::move(member), std::move(back));
  if (answer) take_generation(job, std::move(*answer));
  return job;
}

JoinedJob regroup_job(const JoinedJob& job, Standing standing, std::int64_t step) {
  JoinedJob next;
  next.identity = job.identity;
  next.control = job.control;
  take_generation(next, next.control->regroup(standing, step));
  return next;
}

}  // namespace lockstep
