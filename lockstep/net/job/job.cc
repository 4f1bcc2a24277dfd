#include "lockstep/net/job/job.h"

#include <fmt/format.h>
#include <unistd.h>

#include <utility>

#include "lockstep/base/cores.h"
#include "lockstep/base/host.h"
#include "lockstep/net/job/rendezvous.h"
#include "lockstep/net/socket/interface.h"
#include "lockstep/net/socket/unix_socket.h"

namespace lockstep {
namespace {

void validate(const JobOptions& options) {
  if (options.world_size < 1 || options.world_size > kMaxWorldSize) {
    throw Error(ErrorCode::kInvalidWorldSize,
                fmt::format("{} ranks; 1 to {} are possible", options.world_size, kMaxWorldSize));
  }
  if (options.rank < 0 || options.rank >= options.world_size) {
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
    try {  // the way out of this host, whichever it is
      return local_address_toward(*SocketAddress::parse("198.51.100.1:9"));
    } catch (const Error&) {  // there is none
    }
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

void open_listeners(JoinedJob& job, Card& card, const JobOptions& options,
                    const SocketAddress& local) {
  const SocketAddress address = mesh_address(options, local);
  require_token_for(address, options.token);
  job.mesh_listener = listen_tcp(address);
  card.mesh_address = to_string(job.mesh_listener.local_address());
  card.unix_name = fmt::format("lockstep-{}", to_string(card.id));
  job.unix_listener = listen_unix(card.unix_name);
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

JoinedJob join_job(const JobOptions& options, std::optional<Socket> listener) {
  validate(options);
  const Deadline deadline = Deadline::after(options.timeout);
  JoinedJob job;
  job.identity = {options.job, options.generation, random_member_id(), options.rank, options.token};
  Card card = make_card(options, job.identity.id);
  if (options.world_size == 1) {
    job.roster = {card};
    job.control = std::make_unique<ControlPlane>();
    return job;
  }

  std::optional<Link> link;
  if (options.rank == 0 && !options.served_elsewhere) {
    if (!listener) listener = listen_for_rendezvous(options);
    const SocketAddress bound = listener->local_address();
    require_token_for(bound, options.token);
    open_listeners(job, card, options,
                   bound.is_any() ? way_to_rendezvous(options, deadline) : bound);
    // This rank joins like any other, over a pair of sockets inside the process.
    auto [near, far] = unix_socket_pair();
    auto centre = std::make_unique<Centre>(
        std::move(*listener),
        CentreOptions{job.identity, options.world_size, options.version, options.timeout});
    centre->adopt(std::move(far));
    job.control = std::make_unique<ControlPlane>(std::move(centre));
    link.emplace(std::move(near), kMaxRosterBody);
  } else {
    Socket socket =
        connect_to_rendezvous({options.master_host, options.master_port}, job.identity, deadline);
    tune_tcp(socket, options.timeout);
    open_listeners(job, card, options, socket.local_address());
    job.control = std::make_unique<ControlPlane>();
    link.emplace(std::move(socket), kMaxRosterBody);
  }

  RosterMessage answer = join(*link, card, deadline);
  job.roster = std::move(answer.roster);
  job.control->attach(std::move(*link),
                      {options.rank, name_of(card), answer.centre, options.timeout});
  return job;
}

}  // namespace lockstep
