#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/canonical_tree.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/thread.h"
#include "lockstep/net/job/job.h"
#include "lockstep/net/socket/address.h"
#include "lockstep/server/frame_socket.h"
#include "lockstep/server/settings.h"

namespace lockstep {

struct WorkerOptions {
  HostPort coordinator;
  std::string node_id = "worker";
  std::uint32_t gpu_count = 0;
  std::string backend = "cpu";
  std::string job = "lockstep";
  std::string token;
  // Speak the original protocol: no handshake, no heartbeats, no extensions.
  bool seed_protocol = false;
  // For connecting and joining. Afterwards the coordinator's own timeout counts, if it tells one.
  Deadline::Clock::duration timeout = std::chrono::seconds(30);
};

// The sum of a worker over a node of T(0, lanes) that it owns.
struct LanePartial {
  Range node;
  std::span<const float> data;
  std::vector<double> tail;
};

// Bytes for a rank or, with kEveryOther, for all others.
struct BytesOut {
  std::uint32_t to = kEveryOther;
  std::span<const std::byte> bytes;
};
// Where bytes of a rank belong. Those of one rank come in the order in which it sends them.
struct BytesIn {
  int from = -1;
  std::span<std::byte> bytes;
};

// A worker's end of its connection to the coordinator (docs/wire_protocol.md). Every call throws
// the job's first cause when the coordinator tells it, Error{kPeerLost} when nothing was heard of
// the coordinator for the timeout, and Error{kTimeout} after ten times that; an error is final.
// Sending does not wait for a receive: what arrives meanwhile is kept. When the coordinator has
// gone, calls first read all that it sent, so that its reason is not missed. A thread of the
// client's own sends heartbeats between calls. Used by one thread.
//
// A rank has a control link besides: here it neither joins nor sends heartbeats, nor watches over
// the coordinator, and it tells its control plane what goes wrong.
class WorkerClient {
 public:
  using Clock = Deadline::Clock;

  // Connects, again and again until the timeout, and joins.
  explicit WorkerClient(const WorkerOptions& options);
  // Joins over a connection to a server of this process.
  WorkerClient(Socket socket, const WorkerOptions& options);
  // For a rank that has joined: connects under the job's identity.
  WorkerClient(const HostPort& coordinator, const JoinedJob& job);
  ~WorkerClient();
  WorkerClient(const WorkerClient&) = delete;
  WorkerClient& operator=(const WorkerClient&) = delete;

  int worker_id() const { return worker_id_; }
  int total_workers() const { return total_workers_; }
  // The coordinator's; nothing where it speaks the original protocol.
  const std::optional<ServerSettings>& settings() const { return settings_; }
  // "the coordinator (10.0.0.1:4700)"
  const std::string& coordinator() const { return frames_.socket().peer(); }

  // The samples of the next step, or nothing: the job is done.
  std::optional<Shard> next_shard();

  void send_gradient(std::uint64_t step, std::span<const float> gradients, float loss,
                     std::uint64_t correct, std::uint64_t total);
  // The averages, into memory of the size that was sent. A vector's gives the global loss.
  float receive_averaged(std::uint64_t step, std::span<float> gradients);

  void send_block(std::uint64_t step, std::uint32_t block, std::uint32_t num_blocks,
                  std::span<const float> gradients, std::span<const std::uint32_t> component_sizes);
  std::vector<std::uint32_t> receive_averaged_block(std::uint64_t step, std::uint32_t block,
                                                    std::span<float> gradients);

  void send_component(std::uint64_t step, std::uint8_t component, std::span<const float> gradients);
  void receive_averaged_component(std::uint64_t step, std::uint8_t component,
                                  std::span<float> gradients);

  // Adds the partial sums of all workers, for elements [offset, offset + sum.size()) of the flat
  // gradient, along T(0, lanes): `partials` are this worker's nodes, any number of them. Every
  // worker calls it for the same ranges in the same order, with tails of the same length: none but
  // for the last range of a step, which has one. `sum` may be the data of a partial. Returns the
  // tail's sum.
  std::vector<double> reduce_lanes(std::uint64_t step, std::uint64_t offset, std::uint32_t lanes,
                                   std::span<const LanePartial> partials, std::size_t tail_count,
                                   std::span<float> sum);

  // For ranks.

  // This rank enters a collective. The calls that follow belong to it, and what other ranks send
  // for it must come with the same stamp: Error{kCollectiveMismatch} names the rank whose does not.
  void enter(const MeshFrame& stamp);
  // Sends bytes to other ranks and receives theirs, all at once. All ranks of a collective move
  // matching bytes. Bytes that a rank ahead of this one sends are kept for later calls.
  void move_bytes(std::span<const BytesOut> out, std::span<const BytesIn> in);
  // The rank whose bytes this one has been waiting for lately, -1: none. Callable from any thread.
  int waits_for() const { return waits_for_.load(std::memory_order_relaxed); }

  // A descriptor that, once readable, ends calls with the error that `why` gives then, or with
  // Error{kAborted}. The coordinator is told.
  void set_stop(int fd, std::function<Error()> why = {});
  // Calls end with Error{kTimeout} at this time at the latest.
  void set_deadline(Deadline deadline);

  // Tells the coordinator why this worker gives up, as well as it can at once, and leaves.
  void abort(const Error& reason);

 private:
  using Lock = std::unique_lock<std::mutex>;

  void join(const WorkerOptions& options);
  void pulse();
  // Heartbeats go both ways, and silence is death.
  bool beats() const { return ours_ && !is_rank_; }

  // Moves bytes until `done`, which takes what has come. `what` is what we wait for.
  void drive(const std::string& what, const std::function<bool()>& done);
  void wait(const std::string& what, Clock::time_point since);
  void check_limits(const std::string& what, Clock::time_point since, Clock::time_point now);
  void flush();
  void fill();
  // What may come between any two messages: heartbeats, halts and bytes of other ranks.
  void take_between();
  // Takes what is there of the Bytes at the front. Whether all of them are taken.
  bool take_bytes();
  void open_bytes();
  // Throws if bytes of that rank with that stamp belong to no collective that is still to come.
  void check_stamp(int from, const MeshFrame& stamp) const;
  // Where the next bytes of a rank belong, which this one waits for; compares the whole stamp.
  std::span<std::byte> place_of(int from, const MeshFrame& stamp) const;
  void count_placed(int from);
  // Puts bytes that came before this rank waited for them where they belong.
  void take_early(int from);
  static bool is_control(WireTag tag) {
    return tag == WireTag::kAlive || tag == WireTag::kHeartbeat || tag == WireTag::kHalt;
  }
  // Bytes are at the front or open, and take_between() has not got them all yet.
  bool bytes_are_next() const;
  void queue_alive(Clock::time_point now);
  SmallMessage receive_small(const std::string& what);
  void send(const BulkHead& head, std::span<const float> data, const BulkFoot& foot);
  BulkFoot receive(const BulkHead& expected, std::span<float> into);
  // Opens the gradient that is at the front, if it is there, and compares it with what is expected.
  bool open_expected(const BulkHead& expected);
  // Takes as much of that gradient as is there, into `into`; `done` counts its bytes. Returns the
  // foot once all of it is taken.
  std::optional<BulkFoot> take_expected(const BulkHead& expected, std::span<float> into,
                                        std::size_t& done);
  [[noreturn]] void fail(const Error& error);
  void tell(const Error& reason);
  std::string gone() const;

  // Bytes of a rank that this one waits for.
  struct Awaited {
    std::span<std::byte> bytes;
    std::size_t done = 0;
  };
  struct Early {
    MeshFrame stamp;
    std::vector<std::byte> bytes;
  };
  // The Bytes that are being read.
  struct OpenBytes {
    int from = -1;
    bool early = false;  // they are kept for later
    Early kept;
    std::span<std::byte> place;
    std::size_t done = 0;
  };
  // What another rank sends to this one.
  struct Peer {
    std::string name;
    std::uint32_t sent = 0;       // frames to it in this collective
    std::uint32_t received = 0;   // frames of it in this collective
    std::deque<Awaited> awaited;  // in the order in which they will come
    std::deque<Early> early;
  };

  // Constant after joining.
  bool ours_;
  bool is_rank_ = false;  // its control plane watches over the job
  Clock::duration timeout_;
  int worker_id_ = -1;
  int total_workers_ = 0;
  std::optional<ServerSettings> settings_;

  std::mutex mutex_;
  std::condition_variable stopping_;
  bool stop_ = false;  // guarded by mutex_, as is all below
  int stop_fd_ = -1;
  std::function<Error()> why_stop_;
  Deadline deadline_ = Deadline::at(Clock::time_point::max());
  bool halted_ = false;  // the coordinator has told us why
  FrameSocket frames_;
  std::optional<Error> failure_;
  Clock::time_point last_heard_;
  Clock::time_point last_look_;  // at whether it is silent
  Clock::time_point next_alive_;
  std::vector<std::uint32_t> last_sizes_;  // of the last block received
  MeshFrame call_;                         // the collective entered last
  std::uint64_t digest_ = 0;               // of it; 0 where there is none
  std::vector<Peer> peers_;                // by rank; this one's own is not used
  OpenBytes open_;
  std::atomic<int> waits_for_{-1};
  Thread thread_;  // last: it uses all of the above
};

}  // namespace lockstep
