#include "lockstep/net/job/rendezvous.h"

#include <fmt/format.h>
#include <poll.h>

#include <utility>

#include "lockstep/net/socket/interface.h"
#include "lockstep/wire/wire_error.h"

namespace lockstep {

RendezvousServer::RendezvousServer(Socket listener, CentreOptions options)
    : loop_(latch_, book_, std::make_unique<Centre>(std::move(listener), std::move(options))) {}

Socket connect_to_rendezvous(const HostPort& where, const Identity& identity, Deadline deadline) {
  while (true) {
    try {
      Socket socket = connect_with_retry(where, deadline);
      require_token_for(socket.peer_address(), identity.token);
      client_handshake(socket, identity, Purpose::kRendezvous, 0, deadline);
      return socket;
    } catch (const Error& error) {
      // Closed without a reason: a server that was just ending, or had no room. Call again.
      if (error.code() != ErrorCode::kChannelClosed || deadline.expired()) {
        throw Error(error.code(),
                    fmt::format("rendezvous at {}: {}", to_string(where), error.message()));
      }
      ::poll(nullptr, 0, deadline.poll_timeout(std::chrono::milliseconds(20)));
    }
  }
}

namespace {

Message ask(Link& link, const Card& card, Deadline deadline) {
  const auto patience = std::chrono::floor<std::chrono::milliseconds>(deadline.remaining());
  try {
    link.send(MessageKind::kJoin, encode(Join{card, patience}), deadline);
    link.set_limit(kMaxRosterBody);
    return link.receive(deadline);
  } catch (const Error& error) {
    throw Error(
        error.code() == ErrorCode::kChannelClosed ? ErrorCode::kPeerLost : error.code(),
        fmt::format("the rendezvous went away before all ranks had come: {}", error.message()));
  }
}

}  // namespace

RosterMessage join(Link& link, const Card& card, Deadline deadline) {
  const Message answer = ask(link, card, deadline);
  if (answer.kind == MessageKind::kVerdict) {
    if (const auto verdict = decode_wire_error(answer.body)) throw verdict->error();
  }
  if (answer.kind == MessageKind::kGoodbye) {
    throw Error(
        ErrorCode::kPeerLost,
        fmt::format("{}, where the ranks meet, ended before all had come", link.socket().peer()));
  }
  auto roster = answer.kind == MessageKind::kRoster ? decode_roster(answer.body) : std::nullopt;
  if (!roster || static_cast<int>(roster->roster.size()) != card.world_size ||
      roster->roster[card.rank] != card) {
    throw Error(ErrorCode::kUnexpectedMessage,
                fmt::format("{} answered with a {} that makes no sense", link.socket().peer(),
                            to_string(answer.kind)));
  }
  return std::move(*roster);
}

}  // namespace lockstep
