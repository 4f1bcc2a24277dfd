#pragma once

// The one header that a program includes to train a model of its own, data-parallel: join() makes
// this process a worker of a job, LaneSum adds up what the workers compute.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/hash/blake3.h"
#include "lockstep/base/random.h"
#include "lockstep/base/range.h"
#include "lockstep/base/version.h"
#include "lockstep/comm/call.h"
#include "lockstep/comm/communicator.h"

namespace lockstep {

// What carries the bytes between the workers of a job.
enum class TransportKind : std::uint8_t {
  kLocal,   // threads of one process: join_threads()
  kTcp,     // always sockets
  kShm,     // always shared memory; Error{kNoConnection} if a worker is on another host
  kAuto,    // shared memory between workers of the same host, sockets otherwise
  kMpi,     // the MPI world that mpirun started
  kServer,  // a gradient server
};
std::string_view to_string(TransportKind kind);

struct JoinOptions {
  TransportKind transport = TransportKind::kAuto;
  // Not given: this process alone, or what MPI or the gradient server says.
  std::optional<int> rank = std::nullopt;
  std::optional<int> world_size = std::nullopt;
  // Where the workers meet. Rank 0 listens there, on the descriptor `listener` if given, which
  // join() takes over. With `hosted` the process that started the workers listens instead.
  std::string master_host = {};
  std::uint16_t master_port = 0;
  std::optional<int> listener = std::nullopt;
  bool hosted = false;
  // Hosts of the other workers, where each listens at master_port, too: a rank 0 that is started
  // again finds its job there.
  std::vector<std::string> peers = {};
  // Memory that `lockstep train` shares with this process, for its flight recorder: a descriptor,
  // which join() takes over.
  std::optional<int> flight = std::nullopt;
  std::string coordinator = {};  // HOST:PORT of the gradient server, with kServer

  std::string name = "lockstep";  // of the job; all workers must say the same
  // Names this start of the job, likewise: a process left over from an earlier one cannot join.
  std::string attempt = {};
  // The job's secret, of 16 bytes at least between hosts; empty: this host only.
  std::string token = {};
  // Bytes between hosts are encrypted. With this they are checked only: where the network is
  // trusted. The same for all workers. MPI's and NCCL's own connections are neither.
  bool plain_wire = false;
  // Bytes between hosts, but for those of MPI, NCCL and a gradient server.
  WireCompression wire_compression = WireCompression::kAuto;
  std::string interface = {};  // network interface to use; empty: the one that leads there
  // A worker that is silent for so long is dead. Joining takes at most as long.
  std::chrono::nanoseconds timeout = std::chrono::seconds(30);
  // A collective without a deadline of its own ends by then, and names who has not come; zero: ten
  // timeouts.
  std::chrono::nanoseconds call_timeout{};
  bool mpi_collectives = false;  // with kMpi: MPI's own, whose sums are order-free

  // The job goes on without workers that are lost, if all workers say so (see Job); not with kMpi.
  bool survive = false;
  int min_workers = 1;                  // with fewer it waits for others
  std::chrono::nanoseconds patience{};  // for so long; zero: ten timeouts

  // `given`, with this process's place in the job as torchrun, mpirun, srun or `lockstep train`
  // tell it: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or what Open MPI, MPICH, Slurm and
  // Kubernetes set instead. LOCKSTEP_TOKEN, or what `lockstep train` hands down, is the secret
  // where none is given. Just `given` where no launcher started this process. Throws
  // Error{kInvalidArgument} that names the variable which is missing or makes no sense.
  static JoinOptions from_environment(JoinOptions given);
  static JoinOptions from_environment() { return from_environment(JoinOptions()); }
};

// How a worker comes to ask for the next generation of its job.
enum class Regroup : std::uint8_t {
  kAfterLoss,  // the one before has failed
  kInOrder,    // between two steps, as all workers know: somebody comes or leaves
  kTooFew,     // as kInOrder; this worker has saved its work, and waits for others to come
};

// What the job wants of its workers. A worker that is asked passes it on to all.
struct JobWishes {
  int stop = 0;          // a signal's number: end in order
  int save = 0;          // a checkpoint, once for each number that comes here; 0: none
  bool regroup = false;  // newcomers wait: Regroup::kInOrder after the step
};

// One worker's place in a job: processes that train together. Its ranks belong to a generation, an
// ordered roster of members, and so does the communicator. Collectives fail together: what ends one
// worker ends the generation for all, and every worker throws the same first cause. That ends the
// job, too, unless it survives losses (JoinOptions::survive): then those that are left regroup(),
// and go on with another communicator. One thread at a time, apart from what Communicator allows.
class Job {
 public:
  struct State;
  explicit Job(std::unique_ptr<State> state);
  // Waits for nobody. A worker that goes without leave() while others still work ends the job; with
  // JoinOptions::survive only the worker is lost.
  ~Job();
  Job(Job&& other) noexcept;
  Job& operator=(Job&& other) noexcept;

  int rank() const;
  int world_size() const;
  std::uint32_t generation() const;  // the first is 1; 0: a job of this process alone
  // The last ranks of the generation, which were in none that has begun. In the first one: none.
  int newcomers() const;
  // Who has gone since the generation that this worker was in before, and why.
  struct Departure {
    enum class Kind : std::uint8_t { kDied, kFailed, kExpelled, kLeft };
    int rank = 0;  // that it had there; -1: it was lost while a generation formed
    Kind kind{};
    std::string name;
    std::string why;
  };
  const std::vector<Departure>& departed() const;
  // That of the current generation. A later generation has another one: ask for it where it is
  // used, do not keep it.
  Communicator& communicator() const;

  // The end in good order: waits for all workers. Collective; nothing may follow.
  void leave(const CallOptions& options = {});

  // Whether the generation has ended because a worker was lost, which is what this error tells, and
  // the job goes on: regroup() is possible.
  bool survives(const Error& error) const;
  // This process stood still for longer than the timeout: the others have gone on without it, and
  // what it has is old. False again once it has joined them.
  bool stood_still() const;
  // Leaves the generation and returns in the next one, with other ranks and another communicator.
  // The caller uses nothing of the communicator before any more, its memory included. `step` is how
  // many steps this worker has done. Throws why there is no next generation.
  void regroup(std::int64_t step, Regroup how);
  // The generation is smaller than min_workers: save, then regroup with Regroup::kTooFew.
  bool too_few() const;
  // This worker fails by itself: those that survive losses go on without it. Callable from any
  // thread.
  void give_up(const std::string& reason);
  // Ends the job for all workers at once, also between two generations. Callable from any thread.
  void abort(const std::string& reason);

  // Whether this worker has come to a job that runs already. It has no communicator then:
  // description() says what the job is, and regroup() lets it in.
  bool newcomer() const;
  const std::vector<std::byte>& description() const;
  // For a newcomer, before it enters: what carries the bytes in the job, if it is not what join()
  // was told.
  void set_transport(TransportKind transport);
  // What newcomers are told; all workers say the same. More than `most_workers` have nothing to do
  // and wait outside.
  void describe(std::vector<std::byte> description, int most_workers);
  JobWishes wishes() const;
  // From rank 0 to a launcher that shows the run: a line of metrics (docs/metrics.md). Never waits.
  // Nobody hears it where no launcher of ours has started the workers.
  void tell(const std::string& line);

  // What this worker did last, its collectives above all, for `lockstep explain`: written to
  // FOLDER/generation-NUMBER-TAG/rank-RANK.json, whose path is returned. Callable from any thread,
  // also while another one is blocked in a collective. Throws Error{kIo}.
  std::string write_flight(const std::string& folder, const std::string& why) const;
  const std::shared_ptr<FlightRecorder>& flight() const;
  // Has every worker of the job do the same. False: this process does not have the job's centre;
  // rank 0 has it, where no launcher of ours has started it. Never waits. Callable from any thread.
  bool ask_flight();
  // What this worker does when it is asked so: called on a thread of the library, must not wait.
  void on_flight_asked(const std::function<void()>& write);

 private:
  friend class LaneSum;
  friend bool on_one_host(const Job& job);  // for the library itself
  std::unique_ptr<State> state_;
};

// Joins the job that the environment tells of; without one, a job of this process alone. Returns
// when all workers are there, or throws an Error that names who is missing or wrong.
Job join();
Job join(const JoinOptions& options);
// A job of threads of this process: element i is rank i, for a thread of its own.
std::vector<Job> join_threads(int world_size,
                              std::chrono::nanoseconds timeout = std::chrono::seconds(30));

// Adds up the gradients of a step. A step is cut into lanes, the workers share them, and the sum is
// taken in one fixed tree over the lanes: it has the same bits for any number of workers.
class LaneSum {
 public:
  // Adds the gradient of a lane to `gradient`, and what is to be summed beside it (losses, counts)
  // to `numbers`; both hold zeros. Depends on step and lane alone, not on the worker: which lanes a
  // worker is asked for, how often and in which order, is up to the job.
  using Compute =
      std::function<void(std::uint32_t lane, std::span<float> gradient, std::span<double> numbers)>;
  struct Sum {
    std::span<float> gradient;  // valid until the next sum() or begin(); may be changed
    std::vector<double> numbers;
  };

  // For `lanes` gradients of `elements` numbers, with `numbers` beside each. The same on all
  // workers; at least a lane for each of them. The job stays where it is and outlives this; every
  // generation of it shares the lanes anew.
  // What travels at once are buckets of `bucket_bytes`.
  LaneSum(Job& job, std::uint32_t lanes, std::size_t elements, std::size_t numbers = 0,
          std::size_t bucket_bytes = std::size_t{4} << 20);
  ~LaneSum();
  LaneSum(LaneSum&& other) noexcept;
  LaneSum& operator=(LaneSum&& other) noexcept;

  // The sum over all lanes of all workers. Collective, with the same step everywhere. Errors are
  // the communicator's and final; Error{kNonFinite} where a gradient server meets NaN or infinity.
  Sum sum(std::int64_t step, const Compute& compute);

  // The same piece by piece, for gradients that others compute: begin(); for every own lane, in
  // their order, fill lane_gradient() and call ready() as parts of it are final; finish(). What is
  // final in the last lane travels while the rest is computed. Error{kInvalidArgument} for another
  // order.
  std::vector<std::uint32_t> own_lanes();  // of this worker in this generation, as to be computed
  void begin(std::int64_t step);
  // Of the index-th own lane. The gradient holds what was there before, the numbers zeros. Valid
  // until the generation ends.
  std::span<float> lane_gradient(std::size_t index);
  std::span<double> lane_numbers(std::size_t index);
  // Elements `range` are final: all that were not yet, up to its end.
  void ready(std::size_t index, Range range);
  // All lanes are ready: waits until then for the sum; whether it has come. Errors as in sum().
  bool wait_until(Deadline deadline);
  // Likewise, until it has come.
  Sum finish();

 private:
  struct State;
  std::shared_ptr<State> state_;  // the job gives up what belongs to a generation when that ends
};

// A training loop that survives. Calls `step` for the steps from 1 to `steps`, on all workers, and
// goes on with those that are left when one is lost. `state` is all that a step changes, and `step`
// changes it only when it can no longer fail: after its last collective. A worker that is behind,
// or has come later (Job::newcomer), is given the state of one that is ahead. With fewer than
// min_workers it waits for others. The workers make all steps together or, where the job does not
// survive a loss, throw its cause.
void run_steps(Job& job, std::int64_t steps, const std::vector<std::span<float>>& state,
               const std::function<void(std::int64_t step)>& step);

}  // namespace lockstep
