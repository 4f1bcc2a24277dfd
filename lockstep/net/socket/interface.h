#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "lockstep/net/socket/address.h"

namespace lockstep {

// The address by which this host reaches `peer`, as the routing table says; port 0. No packet is
// sent. Throws Error{kNoConnection} if there is no route.
SocketAddress local_address_toward(const SocketAddress& peer);

// The address by which other hosts reach this one where no interface is named: that of the way out,
// or of the first interface that has one, never loopback; port 0. For callers of a listener of this
// family on all addresses; one of IPv6 takes callers of IPv4, too.
std::optional<SocketAddress> address_for_others(int family);

// An address of the named interface, of `family` if it has one, never link-local; port 0.
// Error{kInvalidArgument} lists the interfaces there are.
SocketAddress interface_address(const std::string& interface, int family);

// A token with fewer bytes can be guessed: over loopback it keeps out no other user, and between
// hosts whoever has recorded a handshake can try out tokens as fast as its machine hashes.
inline constexpr std::size_t kLeastToken = 16;

// Anything but loopback needs a token, of kLeastToken bytes: without one anybody could join. Throws
// Error{kAuthentication} that says what to do.
void require_token_for(const SocketAddress& address, const std::string& token);

}  // namespace lockstep
