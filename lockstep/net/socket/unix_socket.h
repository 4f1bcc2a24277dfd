#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/net/socket/socket.h"

namespace lockstep {

// Sockets between processes of one host, named in the abstract namespace: no file, so nothing can
// be left behind. They carry descriptors, which is how ranks share memory.

Socket listen_unix(const std::string& name);
// Use accept() of socket.h on the listener, then require_trusted_peer() of peer_user.h.
// Error{kAuthentication}: the listener is a process of another user.
Socket connect_unix(const std::string& name, Deadline deadline,
                    const FailureLatch* latch = nullptr);
std::pair<Socket, Socket> unix_socket_pair();

inline constexpr std::size_t kMaxDescriptors = 16;  // in one message

// Both sides agree on the number. Nothing else may be read from the socket in between.
void send_descriptors(const Socket& socket, std::span<const int> descriptors, Deadline deadline,
                      const FailureLatch* latch = nullptr);
std::vector<Descriptor> receive_descriptors(const Socket& socket, std::size_t count,
                                            Deadline deadline, const FailureLatch* latch = nullptr);

}  // namespace lockstep
