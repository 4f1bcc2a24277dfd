#pragma once

#include <poll.h>

#include <array>
#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/index.h"
#include "lockstep/net/job/arrivals.h"
#include "lockstep/net/job/job.h"
#include "lockstep/server/frame_socket.h"
#include "lockstep/server/membership.h"
#include "lockstep/server/round.h"
#include "lockstep/server/settings.h"

namespace lockstep {

struct ServerOptions {
  int workers = 1;
  ServerSettings settings;
  // Bytes that a worker may be ahead of the slowest one, the system's buffers aside. What all have
  // sent should fit the second-level cache. At least 64 KiB.
  std::size_t window = 256 * 1024;
  int stop_fd = -1;  // readable: end the job with Error{kAborted}
};

// Memory for the elements of a gradient; not initialised.
struct Payload {
  std::unique_ptr<float[]> elements;
  std::size_t capacity = 0;
};

// Two payloads that serve one after the other: one is sent while the next is filled. Memory that
// has been used before has its pages.
class PayloadPool {
 public:
  // A payload that nobody else holds, with room for `count` elements, or nothing. `force`: rather
  // let one of the two go to its holders and make a new one.
  std::shared_ptr<Payload> take(std::size_t count, bool force);

 private:
  static std::shared_ptr<Payload> fit(std::shared_ptr<Payload>& payload, std::size_t count);

  std::array<std::shared_ptr<Payload>, 2> payloads_;
};

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

  // Connections of workers, ours and of the original protocol, come from `arrivals` (see
  // host_job); null: only adopted ones come.
  GradientServer(Arrivals* arrivals, ServerOptions options);
  GradientServer(const GradientServer&) = delete;
  GradientServer& operator=(const GradientServer&) = delete;

  // A worker of this process, at the other end of the socket; it will be worker `place`.
  void adopt(Socket socket, int place);

  // Called with a line for people when a worker joins or leaves.
  using Notice = std::function<void(const std::string&)>;
  void set_notice(Notice notice) { notice_ = std::move(notice); }

  void wait_for_workers();
  // Those that have joined and have not left.
  int worker_count() const;

  // Of the steps that follow. Workers of ours have been told that of the start.
  void set_total_samples(std::uint64_t samples) { total_samples_ = samples; }
  void send_shards(std::uint64_t step);
  // Where the workers say how many steps there are: waits until one of them begins to send its part
  // of `step`, or all have closed their connections. False: all have, and the job is done. Throws
  // when some have left and another goes on.
  bool await_step(std::uint64_t step);
  // Collects one round and averages it.
  RoundResult reduce(const RoundKey& key);
  // To all workers. Returns at once: it goes out during the calls that follow.
  void broadcast(const RoundResult& result);
  // Returns when all that was broadcast has gone out.
  void drain();
  // Tells all workers that the job is done, sends what is left and waits until they have gone.
  void shutdown();
  // Ends the job: all workers are told the cause. Does nothing once it has ended.
  void halt(const Error& cause);

 private:
  // The server's end of one worker.
  struct Connection {
    FrameSocket frames;
    bool ours = false;             // it speaks our protocol, not the original one
    std::optional<Totals> totals;  // of the gradient that follows
    bool misnamed = false;         // its payloads have another's worker_id; that is in the log
    bool begun = false;            // it has sent a gradient
  };
  // A connection that has not asked to join yet, or that is leaving.
  struct Newcomer {
    FrameSocket frames;
    Clock::time_point limit;
    bool ours = false;
    int place = -1;        // the one it is to have; -1: any
    bool leaving = false;  // once its answer is sent
  };

  // Serves until `done`; an error ends the job.
  void run(const std::function<bool()>& done);
  void wait_for_events();
  void receive(Clock::time_point now);
  void meet_newcomers(Clock::time_point now);
  // Takes its request to join, once it is there. Whether the newcomer is done with.
  bool attend(Newcomer& newcomer, Clock::time_point now);
  void welcome(Newcomer& newcomer, const JoinRequest& request, Clock::time_point now);
  void send(Clock::time_point now);
  void judge(Clock::time_point now);
  // A worker is gone. Before all are there it is forgotten; later its loss ends the job, unless the
  // job is done.
  void lose(int worker, const Error& error);
  // Closed its connection between two steps, with nothing of the next one sent.
  bool left_in_order(int worker) const;
  bool anyone_begins() const;
  // An original worker cannot be told the mode, and one that waits for a shard says nothing.
  void hint_at_mode(Clock::time_point now);
  // Why sending to a worker failed: what it said before it went, or that it went.
  Error last_words(int worker, const Error& unsent);
  Error departure(int worker) const;

  // What becomes of the frames that have come. Each tells whether it got a step further.
  void process_all();
  void process(int worker);
  bool process_between(int worker);
  bool process_round(int worker);
  void handle(int worker, const SmallMessage& message);
  void begin_round(int worker);
  void check_average_fits(const BulkHead& head) const;
  bool take_output();
  bool advance_round();

  void owe_all(const std::string& what);
  void queue_all(const FrameSocket::Outgoing& frame);
  void take_leave(Clock::duration patience);
  bool anyone_sending() const;
  std::vector<std::string> names() const;
  Connection& connection(int worker) { return *connections_[index_of(worker)]; }
  template <typename Body>
  void for_each_connection(Body&& body) {
    for (int worker = 0; worker < membership_.size(); ++worker) {
      if (connections_[index_of(worker)]) body(worker, connection(worker));
    }
  }

  // Constant after construction.
  const ServerOptions options_;
  Notice notice_;

  Arrivals* const arrivals_;
  std::list<Newcomer> newcomers_;
  Membership membership_;
  std::vector<std::optional<Connection>> connections_;  // by worker
  PayloadPool pool_;
  std::optional<AverageRound> round_;
  std::shared_ptr<Payload> output_;  // of the round
  std::vector<pollfd> entries_;
  std::vector<const std::byte*> inputs_;
  std::uint64_t total_samples_;
  bool between_steps_ = false;                // await_step() waits: workers may leave
  std::optional<Error> departed_;             // of the first that has left; counts if others go on
  std::optional<Clock::time_point> hint_at_;  // mode blocks: when silence is to be wondered at
  bool finished_ = false;                     // all workers have been told; they may go
  std::optional<Error> failure_;
};

// A listener for workers. Without a token only loopback may be bound: Error{kInvalidArgument}.
Socket listen_for_workers(const HostPort& bind, const std::string& token, Deadline deadline);

// A gradient server and its workers in one process, over socket pairs: one thread drives the
// server, worker i builds its WorkerClient from ends[i] on a thread of its own.
struct LocalStar {
  std::unique_ptr<GradientServer> server;
  std::vector<Socket> ends;
};
LocalStar make_local_star(const ServerOptions& options);

}  // namespace lockstep
