#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/comm/buffer.h"
#include "lockstep/comm/call.h"
#include "lockstep/comm/work.h"

namespace lockstep {

class Engine;
class FlightRecorder;
struct Progress;

// Collectives among the ranks of a group. All ranks call the same collectives in the same order,
// blocking and asynchronous ones counted together; a rank that does not is found out and named.
//
// A blocking call runs on the caller's thread, after all asynchronous work started before it. An
// asynchronous one runs on the communication thread, which exists from the first start() on. Every
// call ends by its deadline. After a failure the communicator is dead: what is pending and what
// comes later throws the same first cause. Calls from several threads are taken one after another.
class Communicator {
 public:
  // `timeout` is the job's one knob: a call without a deadline of its own has ten times that, or
  // what set_patience() says.
  // `group` is the group's number, the same on all its ranks. Without a `flight` recorder of the
  // rank the communicator makes one of its own.
  Communicator(std::unique_ptr<Engine> engine, std::chrono::nanoseconds timeout,
               std::uint32_t group = 0, std::shared_ptr<FlightRecorder> flight = nullptr);
  // Never waits for peers: asynchronous work that has not ended makes this abort the group.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const;
  int world_size() const;
  // "rank 2 (10.0.0.3:4711)", for messages to people.
  std::string name_of(int rank) const;
  // Sums over lanes (reduce_nodes) must not meet NaN or infinity: that ends the job.
  bool finite_only() const;
  // The longest that a call without a deadline of its own takes.
  std::chrono::nanoseconds patience() const;
  // Before the first call; groups that are split off inherit it.
  void set_patience(std::chrono::nanoseconds patience);
  // The algorithm that this call will use: its own choice, or the engine's.
  Algorithm algorithm_for(Call call) const;

  // Carries out a call (call.h) on this thread, or starts it on the communication thread. Messages
  // (send, recv) do not wait for collectives: every sender-receiver pair is a group of its own.
  // run() and start() throw Error{kInvalidArgument, kInvalidRank or kSizeMismatch} for arguments
  // that do not fit together, and then have done nothing.
  Outcome run(Call call);
  Work start(Call call);

  // The collectives as blocking members; namespace calls says what each does.
  Outcome all_reduce(BufferView data, ReduceOp op, const CallOptions& options = {}) {
    return run(calls::all_reduce(data, op, options));
  }
  Outcome reduce_scatter(ConstBufferView in, BufferView out, ReduceOp op,
                         std::vector<std::size_t> counts = {}, const CallOptions& options = {}) {
    return run(calls::reduce_scatter(in, out, op, std::move(counts), options));
  }
  Outcome all_gather(ConstBufferView in, BufferView out, std::vector<std::size_t> counts = {},
                     const CallOptions& options = {}) {
    return run(calls::all_gather(in, out, std::move(counts), options));
  }
  Outcome broadcast(BufferView data, int root, const CallOptions& options = {}) {
    return run(calls::broadcast(data, root, options));
  }
  Outcome reduce(ConstBufferView in, BufferView out, ReduceOp op, int root,
                 const CallOptions& options = {}) {
    return run(calls::reduce(in, out, op, root, options));
  }
  Outcome gather(ConstBufferView in, BufferView out, int root, std::vector<std::size_t> counts = {},
                 const CallOptions& options = {}) {
    return run(calls::gather(in, out, root, std::move(counts), options));
  }
  Outcome scatter(ConstBufferView in, BufferView out, int root,
                  std::vector<std::size_t> counts = {}, const CallOptions& options = {}) {
    return run(calls::scatter(in, out, root, std::move(counts), options));
  }
  Outcome all_to_all(ConstBufferView in, BufferView out, std::vector<std::size_t> send_counts = {},
                     std::vector<std::size_t> recv_counts = {}, const CallOptions& options = {}) {
    return run(calls::all_to_all(in, out, std::move(send_counts), std::move(recv_counts), options));
  }
  Outcome barrier(const CallOptions& options = {}) { return run(calls::barrier(options)); }
  Outcome send(ConstBufferView data, int to, std::uint32_t tag = 0,
               const CallOptions& options = {}) {
    return run(calls::send(data, to, tag, options));
  }
  Outcome recv(BufferView data, int from, std::uint32_t tag = 0, const CallOptions& options = {}) {
    return run(calls::recv(data, from, tag, options));
  }
  Outcome recv_any(BufferView data, std::uint32_t tag = 0, const CallOptions& options = {}) {
    return run(calls::recv_any(data, tag, options));
  }
  Outcome reduce_nodes(std::vector<ConstBufferView> partials, LeafOwners owners, BufferView out,
                       ReduceOp op = ReduceOp::kSum, const CallOptions& options = {}) {
    return run(calls::reduce_nodes(std::move(partials), std::move(owners), out, op, options));
  }
  Outcome reduce_scatter_nodes(std::vector<ConstBufferView> partials, LeafOwners owners,
                               BufferView out, std::vector<std::size_t> counts,
                               ReduceOp op = ReduceOp::kSum, const CallOptions& options = {}) {
    return run(calls::reduce_scatter_nodes(std::move(partials), std::move(owners), out,
                                           std::move(counts), op, options));
  }

  // Ranks that give the same color form a new group, ordered by key, then by rank. A negative
  // color joins none and gets null. Collective. Groups of a job fail together.
  std::unique_ptr<Communicator> split(int color, int key);
  // A group of some ranks, in the order of their new ranks. Only they call it, with the same
  // arguments; no group of theirs has had this label before. Waits for nobody, except over MPI.
  std::unique_ptr<Communicator> subgroup(const std::vector<int>& members, std::string_view label);

  // Ends everything at once, on every rank; callable from any thread.
  void abort(const std::string& reason);

  // For what ranks do together by other means than collectives. Both are callable from any thread.
  // Throws the job's first cause if it has failed; waits for nothing.
  void check() const;
  // Reports a failure of such means, which ends the job, and throws the cause that the job agrees
  // on: this one, or an earlier one. Waits for that briefly.
  [[noreturn]] void fail(const Error& seen);

  // Memory where collectives are fastest (see Buffer).
  Buffer allocate(std::size_t bytes);

  // What this rank is doing and did before that, for the job's supervisor (see ProgressBook).
  // Callable from any thread.
  std::vector<Progress> progress() const;
  // What remembers the last collectives of this rank, and other things if the caller likes.
  FlightRecorder& flight() const;

 private:
  std::unique_ptr<Communicator> part_of(const std::vector<int>& members, std::uint32_t group);

  class State;  // the engine, the queue of asynchronous work and the communication thread
  const std::unique_ptr<State> state_;
};

}  // namespace lockstep
