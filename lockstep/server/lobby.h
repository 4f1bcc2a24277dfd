#pragma once

#include <poll.h>

#include <list>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/net/job/handshake.h"
#include "lockstep/server/frame_socket.h"

namespace lockstep {

struct LobbyOptions {
  Identity identity;
  bool insecure = false;  // with a token: let in those who have none
  Deadline::Clock::duration timeout{};
};

// Where connections wait until they have asked to join. Accepts visitors, tells our own workers
// from those of the original protocol and runs the handshakes side by side. Closes the connections
// of visitors that are silent, slow, hostile or too many, without effect on the others. Never
// waits; used by one thread.
class Lobby {
 public:
  using Clock = Deadline::Clock;

  // Without a listener only adopted connections come.
  Lobby(std::optional<Socket> listener, LobbyOptions options);

  // The other end of the connection of a worker of this process, which needs no handshake.
  void adopt(Socket socket, int place);

  // A visitor that has asked to join.
  struct Candidate {
    FrameSocket frames;
    JoinRequest request;
    bool ours = false;
    int place = -1;  // the one it is to have; -1: any
  };
  // An event loop polls what add_poll() lists, until wake_at(), then calls serve() with it.
  void add_poll(std::vector<pollfd>& entries) const;
  Clock::time_point wake_at() const;
  std::vector<Candidate> serve(std::span<const pollfd> entries);
  // Sends the reason, if the candidate speaks our protocol, and closes the connection.
  void turn_away(Candidate candidate, const Error& reason);

 private:
  // A connection whose handshake is under way, or that is leaving.
  struct Visitor {
    FrameSocket frames;
    Clock::time_point limit;
    Opening opening = Opening::kUndecided;
    std::optional<Handshake> handshake;
    bool admitted = false;  // it may ask to join
    bool leaving = false;   // once its answer is sent
    int place = -1;
  };

  void accept_visitors(Clock::time_point now);
  void drop_oldest(Clock::time_point now);
  void attend(Visitor& visitor, std::vector<Candidate>& candidates);
  void recognise(Visitor& visitor);
  bool shake_hands(Visitor& visitor);
  Handshake make_handshake(const Message& first) const;
  void warn(std::string_view text);

  const LobbyOptions options_;
  const std::optional<Socket> listener_;
  bool accepting_ = true;
  std::int64_t warnings_left_ = 20;  // strangers must not fill the log
  std::list<Visitor> visitors_;      // the oldest first
};

}  // namespace lockstep
