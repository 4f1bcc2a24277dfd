#pragma once

#include <sys/types.h>

#include <optional>
#include <string_view>

#include "lockstep/net/socket/socket.h"

namespace lockstep {

// Whether the other end of a connection within this host is a process of this user, or of root.

// Of a unix socket, or of TCP over loopback. Throws Error{kAuthentication} that says who it is, or
// that nobody can tell: of a TCP connection that the other side has not accepted yet. Throws
// Error{kChannelClosed} if nobody can tell because the other side has closed it.
void require_trusted_peer(const Socket& socket);

// The owner of the TCP socket of this host at `local` that is connected to `remote`. The kernel is
// asked for this one socket, which takes microseconds. Nothing if it is not there, if no process
// has it open, or if the kernel does not answer such questions.
std::optional<uid_t> owner_by_kernel(const SocketAddress& local, const SocketAddress& remote);

// The same in the text of /proc/net/tcp or /proc/net/tcp6. Pure.
std::optional<uid_t> owner_in_table(std::string_view table, const SocketAddress& local,
                                    const SocketAddress& remote);

}  // namespace lockstep
