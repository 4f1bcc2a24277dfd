#pragma once

#include "lockstep/net/job/control_loop.h"
#include "lockstep/net/job/link.h"
#include "lockstep/net/job/supervisor.h"
#include "lockstep/net/socket/socket.h"
#include "lockstep/wire/join_messages.h"

namespace lockstep {

// The rendezvous and the centre of a job in a process that is no rank: a launcher. Serves on a
// thread of its own until it is destroyed.
class RendezvousServer {
 public:
  // `options.identity.rank` is -1.
  RendezvousServer(Socket listener, CentreOptions options);

 private:
  FailureLatch latch_;
  ProgressBook book_;  // empty: it runs no collectives
  ControlLoop loop_;
};

// Connects to the rendezvous and passes the handshake; tries again for as long as nobody answers.
Socket connect_to_rendezvous(const HostPort& where, const Identity& identity, Deadline deadline);

// Sends the card over a link that has passed the handshake and waits for the roster. Throws what
// the rendezvous answers instead: who is missing, or what does not fit.
RosterMessage join(Link& link, const Card& card, Deadline deadline);

}  // namespace lockstep
