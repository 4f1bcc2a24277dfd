#pragma once

#include <poll.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <functional>
#include <utility>

#include "lockstep/net/socket/unix_socket.h"
#include "tests/support/ranks.h"

namespace lockstep::test {

// A process of this test that runs as another user, until it is told to go. Needs root.
class OtherUser {
 public:
  explicit OtherUser(const std::function<void()>& body) : ends_(unix_socket_pair()) {
    child_ = ::fork();
    if (child_ != 0) {
      wait_for(ends_.first.fd(), POLLIN, soon(), nullptr, "waiting for the other user");
      return;
    }
    constexpr uid_t kNobody = 65534;
    if (::setuid(kNobody) != 0) ::_exit(1);
    body();
    std::byte word{};
    ends_.second.send_all({&word, 1}, soon());
    ends_.second.recv_all({&word, 1}, soon());
    ::_exit(0);
  }
  ~OtherUser() {
    const std::byte word{};
    ends_.first.send_all({&word, 1}, soon());
    ::waitpid(child_, nullptr, 0);
  }

 private:
  std::pair<Socket, Socket> ends_;
  pid_t child_ = -1;
};

}  // namespace lockstep::test
