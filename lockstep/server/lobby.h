#pragma once

#include <poll.h>

#include <list>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/net/job/handshake.h"
#include "lockstep/server/frame_channel.h"

namespace lockstep {

struct LobbyOptions {
  Identity identity;
  bool insecure = false;  // with a token: let in those who have none
  Deadline::Clock::duration timeout{};
};

// Where connections wait until they have asked to join: accepts them, tells our own workers from
// those of the original protocol, runs the handshakes side by side. Whoever is silent, slow,
// hostile or too many is let go; nobody else notices. Never waits; used by one thread.
class Lobby {
 public:
  using Clock = Deadline::Clock;

  // Without a listener only adopted connections come.
  Lobby(std::optional<Socket> listener, LobbyOptions options);

  // The other end of a connection that needs no proof: a worker of this process.
  void adopt(Socket socket, int place);

  // Somebody who has asked to join.
  struct Candidate {
    FrameChannel channel;
    JoinRequest request;
    bool ours = false;
    int place = -1;  // the one it is to have; -1: any
  };
  // An event loop polls what add_poll() lists, until wake_at(), then calls serve() with it.
  void add_poll(std::vector<pollfd>& entries) const;
  Clock::time_point wake_at() const;
  std::vector<Candidate> serve(std::span<const pollfd> entries);
  // Tells it why, if it understands, and lets it go.
  void turn_away(Candidate candidate, const Error& reason);

 private:
  struct Guest {
    FrameChannel channel;
    Clock::time_point limit;
    Opening opening = Opening::kUndecided;
    std::optional<Handshake> handshake;
    bool admitted = false;  // it may ask to join
    bool leaving = false;   // once its answer is sent
    int place = -1;
  };

  void accept_guests(Clock::time_point now);
  void drop_oldest(Clock::time_point now);
  void attend(Guest& guest, std::vector<Candidate>& candidates);
  void recognise(Guest& guest);
  bool shake_hands(Guest& guest);
  Handshake make_handshake(const Message& first) const;
  void warn(std::string_view text);

  const LobbyOptions options_;
  const std::optional<Socket> listener_;
  bool accepting_ = true;
  std::int64_t warnings_left_ = 20;  // strangers must not fill the log
  std::list<Guest> guests_;          // the oldest first
};

}  // namespace lockstep
