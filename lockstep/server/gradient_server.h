#pragma once

#include <poll.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/index.h"
#include "lockstep/server/frame_channel.h"
#include "lockstep/server/lane_step.h"
#include "lockstep/server/lobby.h"
#include "lockstep/server/membership.h"
#include "lockstep/server/payload_pool.h"
#include "lockstep/server/round.h"
#include "lockstep/server/settings.h"

namespace lockstep {

struct ServerOptions {
  int workers = 1;
  JobSettings settings;
  std::string job = "lockstep";
  std::string token;      // empty: loopback only, everybody is let in
  bool insecure = false;  // with a token: let in those who have none
  // Bytes that a worker may be ahead of the slowest one, the system's buffers aside. What all have
  // sent should fit the second-level cache. At least 64 KiB.
  std::size_t window = 256 * 1024;
  int stop_fd = -1;  // readable: end the job with Error{kAborted}
};

// A listener for workers. Without a token only loopback may be bound: Error{kInvalidArgument}.
Socket listen_for_workers(const HostPort& bind, const std::string& token, Deadline deadline);

// The coordinator of a star of workers (docs/wire_protocol.md): gives every worker its shard of a
// step, then collects, checks, averages and sends back what they send. Elements are checked and
// added as they come from all workers at once; at most two payloads and one window per worker are
// held (in weighted vector rounds also the payload of every worker of the original protocol, whose
// weight comes last).
//
// One event loop, on the caller's thread, inside these calls; between them nobody is served. The
// first error ends the job: all workers are told the cause, the call throws it, and every later
// call throws it again. Used by one thread.
class GradientServer {
 public:
  using Clock = Deadline::Clock;

  GradientServer(std::optional<Socket> listener, ServerOptions options);
  GradientServer(const GradientServer&) = delete;
  GradientServer& operator=(const GradientServer&) = delete;

  // A worker of this process, at the other end of the socket; it will be worker `place`.
  void adopt(Socket socket, int place) { lobby_.adopt(std::move(socket), place); }

  // Called with a line for people when a worker joins or leaves.
  using Notice = std::function<void(const std::string&)>;
  void set_notice(Notice notice) { notice_ = std::move(notice); }

  void wait_for_workers();
  const Membership& membership() const { return membership_; }

  void send_shards(std::uint64_t step);
  // Collects one round and averages it.
  RoundResult reduce(const RoundKey& key);
  // To all workers. Returns at once: it goes out during the calls that follow.
  void broadcast(const RoundResult& result);
  // Returns when all that was broadcast has gone out.
  void drain();
  // Collects the partial sums of a step and sends every piece's sum back as soon as it is there.
  // Returns the last piece, which has the tail.
  LaneStep::Piece reduce_lanes(std::uint64_t step);
  // Tells all workers that the job is done, sends what is left and waits until they have gone.
  void shutdown();
  // Ends the job: all workers are told the cause. Does nothing once it has ended.
  void halt(const Error& cause);

 private:
  struct Line {
    FrameChannel channel;
    bool ours = false;
    std::optional<Totals> totals;
    LaneValue incoming;     // of the open PartialSum
    bool accepted = false;  // the open PartialSum belongs to the open piece
  };

  // Serves until `done`; an error ends the job.
  void run(const std::function<bool()>& done);
  void wait_for_events();
  void receive(Clock::time_point now);
  void welcome(std::vector<Lobby::Candidate> candidates, Clock::time_point now);
  void send(Clock::time_point now);
  void judge(Clock::time_point now);
  // Before all are there it is forgotten; later that ends the job, unless the job is done anyway.
  void lose(int worker, const Error& error);
  // Why sending to it failed: what it said before it went, or that it went.
  Error last_words(int worker, const Error& unsent);
  Error departure(int worker) const;

  // Frames that have come; in server_frames.cc. Each tells whether it got a step further.
  void process_all();
  void process(int worker);
  bool process_between(int worker);
  bool process_round(int worker);
  bool process_lanes(int worker);
  void handle(int worker, const SmallMessage& message);
  void begin_round(int worker);
  bool take_output();
  bool advance_round();
  void finish_piece();

  void owe_all(const std::string& what);
  void queue_all(const FrameChannel::Outgoing& frame);
  void take_leave(Clock::duration patience);
  bool anyone_sending() const;
  std::vector<std::string> names() const;
  Line& line(int worker) { return *lines_[index_of(worker)]; }
  template <typename Body>
  void for_each_line(Body&& body) {
    for (int worker = 0; worker < membership_.size(); ++worker) {
      if (lines_[index_of(worker)]) body(worker, line(worker));
    }
  }

  // Constant after construction.
  const ServerOptions options_;
  Notice notice_;

  Lobby lobby_;
  Membership membership_;
  std::vector<std::optional<Line>> lines_;  // by worker
  PayloadPool pool_;
  std::optional<AverageRound> round_;
  std::shared_ptr<Payload> output_;  // of the round
  std::optional<LaneStep> lanes_;
  std::optional<LaneStep::Piece> last_piece_;
  bool piece_finished_ = false;  // since frames were last looked at
  std::vector<pollfd> entries_;
  std::vector<const std::byte*> inputs_;
  bool finished_ = false;  // all workers have been told; they may go
  std::optional<Error> failure_;
};

}  // namespace lockstep
