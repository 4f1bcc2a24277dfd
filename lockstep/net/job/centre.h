#pragma once

#include <poll.h>

#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/net/job/gathering.h"
#include "lockstep/net/job/handshake.h"
#include "lockstep/net/job/job_health.h"
#include "lockstep/net/job/link.h"
#include "lockstep/wire/join_messages.h"

namespace lockstep {

struct CentreOptions {
  Identity identity;  // its rank is -1 in a launcher
  int world_size = 1;
  std::string version;
  Deadline::Clock::duration timeout{};
};

// The centre of a job: lets the ranks in, sends them the roster, then hears their heartbeats and
// tells all of them why the job failed. Gathering and JobHealth decide; this class moves the
// messages. Never waits: an event loop polls what add_poll() lists, until wake_at(), then calls
// serve(). Used by one thread.
class Centre {
 public:
  using Clock = Deadline::Clock;

  Centre(Socket listener, CentreOptions options);
  ~Centre();
  Centre(const Centre&) = delete;
  Centre& operator=(const Centre&) = delete;

  // The other end of the link of this process's own rank, which needs no handshake.
  void adopt(Socket socket);

  void add_poll(std::vector<pollfd>& entries) const;
  Clock::time_point wake_at() const;
  // `entries` are those that add_poll() added, after poll().
  void serve(std::span<const pollfd> entries);

  // Says goodbye to all ranks; a verdict that is still open is decided first. `progress` is that of
  // this process's own rank.
  void leave(const std::vector<Progress>& progress);

 private:
  // A connection that has not joined yet.
  struct Visitor {
    Link link;
    Handshake handshake;
    bool admitted = false;  // the handshake is done
    Clock::time_point limit;
    bool leaving = false;  // once its answer is sent
  };

  void accept_visitors(Clock::time_point now);
  void drop_oldest_stranger(Clock::time_point now);
  void warn(std::string_view text);
  void serve_visitor(Visitor& visitor, Clock::time_point now);
  void shake_hands(Visitor& visitor, const Message& message);
  void join(Visitor& visitor, const Message& message, Clock::time_point now);
  void dismiss(Visitor& visitor, const Error& error);
  void serve_rank(int rank, Clock::time_point now);
  void receive(int rank, const Message& message, Clock::time_point now);
  void start_job(Clock::time_point now);
  void end_job(const Error& verdict);
  void broadcast(MessageKind kind, std::span<const std::byte> body);
  void decide(Clock::time_point now);
  void flush_all();

  // Constant after construction.
  const CentreOptions options_;
  CentreCard card_;
  Socket listener_;

  bool accepting_ = true;
  std::int64_t warnings_left_ = 20;  // strangers must not fill the log
  std::list<Visitor> visitors_;
  std::vector<std::unique_ptr<Link>> ranks_;  // null: not there
  Gathering gathering_;
  Roster roster_;                    // once all are there
  std::optional<JobHealth> health_;  // from then on
  std::optional<Error> verdict_;
  Clock::time_point next_heartbeat_ = Clock::time_point::max();
};

}  // namespace lockstep
