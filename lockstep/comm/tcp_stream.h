#pragma once

#include "lockstep/comm/stream.h"
#include "lockstep/net/socket.h"

namespace lockstep {

// A connected TCP socket as a Stream.
class TcpStream final : public Stream {
 public:
  explicit TcpStream(Socket socket) : socket_(std::move(socket)) {}

  std::size_t write_some(std::span<const std::byte> head,
                         std::span<const std::byte> body) override;
  std::size_t read_some(std::span<std::byte> head, std::span<std::byte> body) override;
  bool prepare_wait(Direction direction, std::vector<pollfd>& fds) override;
  void finish_wait(Direction) override {}

 private:
  const Socket socket_;
};

}  // namespace lockstep
