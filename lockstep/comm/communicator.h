#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/seq_lock.h"
#include "lockstep/comm/engine.h"
#include "lockstep/comm/work.h"

namespace lockstep {

// Collectives among the ranks of a group. All ranks call the same collectives in the same order,
// blocking and asynchronous ones counted together; a rank that does not is found out and named.
//
// A blocking call runs on the caller's thread, after all asynchronous work started before it. An
// asynchronous one runs on the communication thread, which exists from the first start() on. Every
// call ends by its deadline. After a failure the communicator is dead: what is pending and what
// comes later throws the same first cause. Calls from several threads are taken one after another.
class Communicator {
 public:
  // `timeout` is the job's one knob: a call without a deadline of its own has ten times that.
  Communicator(std::unique_ptr<Engine> engine, std::chrono::nanoseconds timeout,
               std::uint32_t group = 0);
  // Never waits for peers: asynchronous work that has not ended makes this abort the group.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return engine_->rank(); }
  int world_size() const { return engine_->world_size(); }
  std::string name_of(int rank) const { return engine_->name_of(rank); }
  // Sums over lanes (reduce_nodes) must not meet NaN or infinity: that ends the job.
  bool finite_only() const { return engine_->finite_only(); }
  // The longest that a call without a deadline of its own takes.
  std::chrono::nanoseconds patience() const { return 10 * timeout_; }
  // The table's or the caller's choice for this call.
  Algorithm algorithm_for(Call call) const;

  // data = reduction of everybody's data.
  Outcome all_reduce(BufferView data, ReduceOp op, const CallOptions& options = {});
  // out = this rank's piece of the reduction of everybody's `in`; `counts` gives the pieces'
  // sizes, even ones (chunk_of) if empty.
  Outcome reduce_scatter(ConstBufferView in, BufferView out, ReduceOp op,
                         std::vector<std::size_t> counts = {}, const CallOptions& options = {});
  // out = everybody's `in` in rank order; `in` may be its own place in `out`. Equal sizes unless
  // `counts` says otherwise.
  void all_gather(ConstBufferView in, BufferView out, std::vector<std::size_t> counts = {},
                  const CallOptions& options = {});
  void broadcast(BufferView data, int root, const CallOptions& options = {});
  // `out` is used on the root alone, and may be `in`.
  Outcome reduce(ConstBufferView in, BufferView out, ReduceOp op, int root,
                 const CallOptions& options = {});
  // As all_gather, to the root alone.
  void gather(ConstBufferView in, BufferView out, int root, std::vector<std::size_t> counts = {},
              const CallOptions& options = {});
  // The reverse of gather: `in` is used on the root alone.
  void scatter(ConstBufferView in, BufferView out, int root, std::vector<std::size_t> counts = {},
               const CallOptions& options = {});
  // `in` holds a part for every rank, in rank order, `out` receives one from every rank. Equal
  // parts if the counts are empty.
  void all_to_all(ConstBufferView in, BufferView out, std::vector<std::size_t> send_counts = {},
                  std::vector<std::size_t> recv_counts = {}, const CallOptions& options = {});
  void barrier(const CallOptions& options = {});
  // The sum over lanes, along the canonical tree: `partials` are those of owned_nodes(owners,
  // rank()), in that order, each as long as `out`. Same bits whoever owns which lane.
  Outcome reduce_nodes(std::vector<ConstBufferView> partials, const LeafOwners& owners,
                       BufferView out, ReduceOp op = ReduceOp::kSum,
                       const CallOptions& options = {});
  // Likewise, `out` being this rank's piece by `counts`, whose sum is the partials' length.
  Outcome reduce_scatter_nodes(std::vector<ConstBufferView> partials, const LeafOwners& owners,
                               BufferView out, std::vector<std::size_t> counts,
                               ReduceOp op = ReduceOp::kSum, const CallOptions& options = {});

  // Any of the above, given as data (calls.h), blocking or not.
  Outcome run(Call call);
  Work start(Call call);

  // Ranks that give the same color form a new group, ordered by key, then by rank. A negative
  // color joins none and gets null. Collective. Groups of a job fail together.
  std::unique_ptr<Communicator> split(int color, int key);

  // The end of the job in good order: waits for all ranks. Collective; nothing may follow. Groups
  // that nobody serves may as well just end, but a gradient server takes that for a death.
  void leave(const CallOptions& options = {});

  // Ends everything at once, on every rank; callable from any thread.
  void abort(const std::string& reason);

  // For what ranks do together by other means than collectives. Both are callable from any thread.
  // Throws the job's first cause if it has failed; waits for nothing.
  void check() const { engine_->supervisor().latch().check(); }
  // Reports a failure of such means, which ends the job, and throws the cause that the job agrees
  // on: this one, or an earlier one. Waits for that briefly.
  [[noreturn]] void fail(const Error& seen);

  // Memory where collectives are fastest (see Buffer).
  Buffer allocate(std::size_t bytes) { return engine_->allocate(bytes); }

  // What this rank is doing and did before that, for the job's supervisor (see ProgressBook).
  // Callable from any thread.
  std::vector<Progress> progress() const;

 private:
  struct Pending;

  Outcome execute(const Call& call);
  Deadline deadline_of(const Call& call) const;
  void serve();

  const std::unique_ptr<Engine> engine_;
  const std::chrono::nanoseconds timeout_;
  const std::uint32_t group_;

  std::mutex running_;          // held by the thread that runs a collective
  std::uint64_t sequence_ = 0;  // guarded by running_
  std::atomic<std::uint32_t> children_{0};

  // For progress(): the collectives entered last, by sequence, and whether the last is under way.
  std::array<SeqLock<MeshFrame>, 4> stamps_;
  std::atomic<std::uint64_t> entered_{0};
  std::atomic<bool> inside_{false};

  std::mutex queue_mutex_;
  std::condition_variable queue_changed_;
  std::deque<std::shared_ptr<Pending>> queue_;  // guarded by queue_mutex_
  std::size_t unfinished_ = 0;                  // guarded by queue_mutex_: queued or running
  bool closing_ = false;                        // guarded by queue_mutex_
  std::atomic<bool> started_{false};            // whether thread_ was ever needed
  std::thread thread_;                          // guarded by queue_mutex_
};

}  // namespace lockstep
