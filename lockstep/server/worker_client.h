#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/thread.h"
#include "lockstep/net/job/handshake.h"
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
  WireChoice wire = WireChoice::kSealed;
  // Speak the original protocol: no handshake, no heartbeats, no extensions.
  bool original = false;
  // For connecting and joining. Afterwards the coordinator's own timeout counts, if it tells one.
  Deadline::Clock::duration timeout = std::chrono::seconds(30);
};

// A worker's end of its connection to the coordinator (docs/wire_protocol.md). Every call throws
// the job's first cause when the coordinator tells it, Error{kPeerLost} when nothing was heard of
// the coordinator for the timeout, and Error{kTimeout} after ten times that; an error is final.
// Sending does not wait for a receive: what arrives meanwhile is kept. When the coordinator has
// gone, calls first read all that it sent, so that its reason is not missed. A thread of the
// client's own sends heartbeats between calls. Used by one thread.
class WorkerClient {
 public:
  using Clock = Deadline::Clock;

  // Connects, again and again until the timeout, and joins.
  explicit WorkerClient(const WorkerOptions& options);
  // Joins over a connection to a server of this process.
  WorkerClient(Socket socket, const WorkerOptions& options);
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
  // The averages, into memory of the size that was sent. A vector's gives the global loss. Throws
  // Error{kNonFinite} if one has NaN or infinity.
  float receive_averaged(std::uint64_t step, std::span<float> gradients);

  void send_block(std::uint64_t step, std::uint32_t block, std::uint32_t num_blocks,
                  std::span<const float> gradients, std::span<const std::uint32_t> component_sizes);
  // The component sizes, or nothing: the coordinator has said Shutdown instead, the job is done.
  std::optional<std::vector<std::uint32_t>> receive_averaged_block(std::uint64_t step,
                                                                   std::uint32_t block,
                                                                   std::span<float> gradients);

  void send_component(std::uint64_t step, std::uint8_t component, std::span<const float> gradients);
  void receive_averaged_component(std::uint64_t step, std::uint8_t component,
                                  std::span<float> gradients);

  // A descriptor that, once readable, ends calls with Error{kAborted}. The coordinator is told.
  void set_stop(int fd);

  // Tells the coordinator why this worker gives up, as well as it can at once, and leaves.
  void abort(const Error& reason);

 private:
  using Lock = std::unique_lock<std::mutex>;

  void join(const WorkerOptions& options);
  void pulse();

  // Moves bytes until `done`, which takes what has come. `what` is what we wait for.
  void drive(const std::string& what, const std::function<bool()>& done);
  void wait(const std::string& what, Clock::time_point since);
  void check_limits(const std::string& what, Clock::time_point since, Clock::time_point now);
  void fill();
  // Heartbeats and halts, wherever they come, once they are whole.
  void take_control();
  static bool is_control(WireTag tag) {
    return tag == WireTag::kAlive || tag == WireTag::kHeartbeat || tag == WireTag::kHalt;
  }
  void queue_alive(Clock::time_point now);
  SmallMessage receive_small(const std::string& what);
  void send(const BulkHead& head, std::span<const float> data, const BulkFoot& foot);
  // Nothing: a Shutdown came instead of a block.
  std::optional<BulkFoot> receive(const BulkHead& expected, std::span<float> into);
  bool take_shutdown(const BulkHead& expected);
  void check_finite(const BulkHead& head, std::span<const float> elements, const BulkFoot& foot);
  // Opens the gradient that is at the front, if it is there, and compares it with what is expected.
  bool open_expected(const BulkHead& expected);
  // Takes as much of that gradient as is there, into `into`; `done` counts its bytes. Returns the
  // foot once all of it is taken.
  std::optional<BulkFoot> take_expected(const BulkHead& expected, std::span<float> into,
                                        std::size_t& done);
  [[noreturn]] void fail(const Error& error);
  void tell(const Error& reason);
  std::string gone() const;

  // Constant after joining.
  bool ours_;
  Clock::duration timeout_;
  int worker_id_ = -1;
  int total_workers_ = 0;
  std::optional<ServerSettings> settings_;

  std::mutex mutex_;
  std::condition_variable stopping_;
  bool stop_ = false;  // guarded by mutex_, as is all below
  int stop_fd_ = -1;
  bool halted_ = false;  // the coordinator has told us why
  bool hinted_ = false;  // that a coordinator without heartbeats is silent is in the log
  FrameSocket frames_;
  std::optional<Error> failure_;
  Clock::time_point last_heard_;
  Clock::time_point last_look_;  // at whether it is silent
  Clock::time_point next_alive_;
  std::vector<std::uint32_t> last_sizes_;  // of the last block received
  Thread thread_;                          // last: it uses all of the above
};

}  // namespace lockstep
