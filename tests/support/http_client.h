#pragma once

#include <poll.h>

#include <array>
#include <cstddef>
#include <span>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/net/socket/socket.h"
#include "tests/support/ranks.h"

namespace lockstep::test {

// What still comes, until the server closes the connection.
inline std::string http_rest(const Socket& socket) {
  std::string received;
  try {
    for (std::array<std::byte, 65536> bytes{};;) {
      wait_for(socket.fd(), POLLIN, soon(), nullptr, "waiting for an answer");
      if (const auto count = socket.try_recv(bytes)) {
        received.append(reinterpret_cast<const char*>(bytes.data()), *count);
      }
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kChannelClosed) throw;
  }
  return received;
}

// What a server answers to some bytes, until it closes the connection.
inline std::string http_exchange(const SocketAddress& address, const std::string& sent) {
  const Socket socket = connect_tcp(address, soon());
  socket.send_all(std::as_bytes(std::span(sent)), soon());
  return http_rest(socket);
}

// The answer to a GET, status line and headers included. `headers` end with CR LF each.
inline std::string http_get(const SocketAddress& address, const std::string& target,
                            const std::string& headers = "Host: localhost\r\n") {
  return http_exchange(address,
                       "GET " + target + " HTTP/1.1\r\n" + headers + "Connection: close\r\n\r\n");
}

}  // namespace lockstep::test
