#pragma once

#include <string>

#include "lockstep/net/socket/address.h"

namespace lockstep {

// The address by which this host reaches `peer`, as the routing table says; port 0. No packet is
// sent. Throws Error{kNoConnection} if there is no route.
SocketAddress local_address_toward(const SocketAddress& peer);

// An address of the named interface, of `family` if it has one, never link-local; port 0.
// Error{kInvalidArgument} lists the interfaces there are.
SocketAddress interface_address(const std::string& interface, int family);

// Anything but loopback needs a token, of 16 bytes at least: without one anybody could join. Throws
// Error{kAuthentication} that says what to do.
void require_token_for(const SocketAddress& address, const std::string& token);

}  // namespace lockstep
