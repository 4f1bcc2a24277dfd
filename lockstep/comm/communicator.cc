#include "lockstep/comm/communicator.h"

#include <algorithm>

#include "lockstep/comm/calls.h"

namespace lockstep {

struct Communicator::Pending {
  Call call;
  std::shared_ptr<WorkState> state = std::make_shared<WorkState>();
};

Communicator::Communicator(std::unique_ptr<Engine> engine, std::chrono::nanoseconds timeout,
                           std::uint32_t group)
    : engine_(std::move(engine)), timeout_(timeout), group_(group) {
  if (world_size() > 1) {
    engine_->supervisor().progress_book().add(this, [this] { return progress(); });
  }
}

Communicator::~Communicator() {
  {
    const std::lock_guard lock(queue_mutex_);
    closing_ = true;
    if (unfinished_ > 0) {
      engine_->supervisor().abort("a communicator was destroyed with work under way");
    }
  }
  queue_changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  engine_->supervisor().progress_book().remove(this);
}

Deadline Communicator::deadline_of(const Call& call) const {
  if (call.options.deadline) return *call.options.deadline;
  return Deadline::roughly_after(patience());
}

Algorithm Communicator::algorithm_for(Call call) const {
  complete_call(call, rank(), world_size());
  return engine_->choose(call);
}

Outcome Communicator::run(Call call) {
  complete_call(call, rank(), world_size());
  if (started_.load(std::memory_order_acquire)) {
    const Deadline deadline = deadline_of(call);
    std::unique_lock lock(queue_mutex_);
    const auto idle = [&] { return unfinished_ == 0; };
    if (!queue_changed_.wait_until(lock, deadline.time(), idle)) {
      lock.unlock();
      engine_->supervisor().abort("asynchronous work ahead of a blocking call did not end");
      engine_->supervisor().latch().check();
    }
  }
  const std::lock_guard lock(running_);
  return execute(call);
}

Work Communicator::start(Call call) {
  complete_call(call, rank(), world_size());
  engine_->supervisor().latch().check();
  auto pending = std::make_shared<Pending>();
  std::string description = describe(stamp_of(call));
  pending->call = std::move(call);
  {
    const std::lock_guard lock(queue_mutex_);
    queue_.push_back(pending);
    ++unfinished_;
    if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
  }
  started_.store(true, std::memory_order_release);
  queue_changed_.notify_all();
  return Work(pending->state, &engine_->supervisor(), std::move(description));
}

// The communication thread: runs queued work in order until the communicator is destroyed.
void Communicator::serve() {
  for (;;) {
    std::shared_ptr<Pending> next;
    {
      std::unique_lock lock(queue_mutex_);
      queue_changed_.wait(lock, [&] { return closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      next = queue_.front();
      queue_.pop_front();
    }
    Outcome outcome;
    std::optional<Error> error;
    try {
      const std::lock_guard lock(running_);
      outcome = execute(next->call);
    } catch (const Error& caught) {
      error = caught;
    }
    {
      // Both at once: whoever learns that the work is done may destroy the communicator.
      const std::lock_guard queue_lock(queue_mutex_);
      const std::lock_guard lock(next->state->mutex);
      next->state->outcome = outcome;
      next->state->error = error;
      next->state->done = true;
      --unfinished_;
    }
    next->state->ended.notify_all();
    queue_changed_.notify_all();
  }
}

Outcome Communicator::execute(const Call& call) {
  engine_->supervisor().latch().check();
  MeshFrame stamp = stamp_of(call);
  stamp.group = group_;
  stamp.sequence = ++sequence_;
  if (world_size() == 1) return run_alone(call);
  stamp.algorithm = static_cast<std::uint8_t>(engine_->choose(call));
  stamps_[stamp.sequence % stamps_.size()].store(stamp);
  entered_.store(stamp.sequence, std::memory_order_release);
  inside_.store(true, std::memory_order_release);
  const Outcome outcome = engine_->run(call, stamp, deadline_of(call));
  inside_.store(false, std::memory_order_release);
  return outcome;
}

std::vector<Progress> Communicator::progress() const {
  const bool inside = inside_.load(std::memory_order_acquire);
  const std::uint64_t entered = entered_.load(std::memory_order_acquire);
  std::vector<Progress> progress{{group_, entered, inside, "", engine_->waits_for()}};
  for (std::uint64_t i = 0; i < stamps_.size() && i < entered; ++i) {
    const MeshFrame stamp = stamps_[(entered - i) % stamps_.size()].load();
    if (stamp.sequence != entered - i) break;  // it has moved on
    if (i > 0) progress.push_back({group_, stamp.sequence, false, ""});
    progress.back().description = describe(stamp);
  }
  return progress;
}

std::unique_ptr<Communicator> Communicator::split(int color, int key) {
  const auto n = static_cast<std::size_t>(world_size());
  std::vector<std::int32_t> all(2 * n);
  const std::vector<std::int32_t> mine{color, key};
  all_gather(std::span(mine), std::span(all));
  const std::uint32_t child = children_.fetch_add(1) + 1;
  if (color < 0) return nullptr;
  std::vector<int> members;
  for (std::size_t r = 0; r < n; ++r) {
    if (all[2 * r] == color) members.push_back(static_cast<int>(r));
  }
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return all[2 * static_cast<std::size_t>(a) + 1] < all[2 * static_cast<std::size_t>(b) + 1];
  });
  // Tells all groups of a job apart: by parent, split and first member.
  std::uint32_t group = group_;
  for (const auto word : {child, static_cast<std::uint32_t>(members[0]) + 1}) {
    group = (group ^ word) * 0x9e3779b1U;
    group ^= group >> 15;
  }
  return std::make_unique<Communicator>(engine_->split(members, group), timeout_, group);
}

Outcome Communicator::all_reduce(BufferView data, ReduceOp op, const CallOptions& options) {
  return run(calls::all_reduce(data, op, options));
}

Outcome Communicator::reduce_scatter(ConstBufferView in, BufferView out, ReduceOp op,
                                     std::vector<std::size_t> counts, const CallOptions& options) {
  return run(calls::reduce_scatter(in, out, op, std::move(counts), options));
}

void Communicator::all_gather(ConstBufferView in, BufferView out, std::vector<std::size_t> counts,
                              const CallOptions& options) {
  run(calls::all_gather(in, out, std::move(counts), options));
}

void Communicator::broadcast(BufferView data, int root, const CallOptions& options) {
  run(calls::broadcast(data, root, options));
}

Outcome Communicator::reduce(ConstBufferView in, BufferView out, ReduceOp op, int root,
                             const CallOptions& options) {
  return run(calls::reduce(in, out, op, root, options));
}

void Communicator::gather(ConstBufferView in, BufferView out, int root,
                          std::vector<std::size_t> counts, const CallOptions& options) {
  run(calls::gather(in, out, root, std::move(counts), options));
}

void Communicator::scatter(ConstBufferView in, BufferView out, int root,
                           std::vector<std::size_t> counts, const CallOptions& options) {
  run(calls::scatter(in, out, root, std::move(counts), options));
}

void Communicator::all_to_all(ConstBufferView in, BufferView out,
                              std::vector<std::size_t> send_counts,
                              std::vector<std::size_t> recv_counts, const CallOptions& options) {
  run(calls::all_to_all(in, out, std::move(send_counts), std::move(recv_counts), options));
}

void Communicator::barrier(const CallOptions& options) { run(calls::barrier(options)); }

Outcome Communicator::reduce_nodes(std::vector<ConstBufferView> partials, const LeafOwners& owners,
                                   BufferView out, ReduceOp op, const CallOptions& options) {
  return run(calls::reduce_nodes(std::move(partials), owners, out, op, options));
}

Outcome Communicator::reduce_scatter_nodes(std::vector<ConstBufferView> partials,
                                           const LeafOwners& owners, BufferView out,
                                           std::vector<std::size_t> counts, ReduceOp op,
                                           const CallOptions& options) {
  return run(calls::reduce_scatter_nodes(std::move(partials), owners, out, std::move(counts), op,
                                         options));
}

void Communicator::leave(const CallOptions& options) {
  const Call call = calls::barrier(options);
  run(call);
  const std::lock_guard lock(running_);
  engine_->leave(deadline_of(call));
}

void Communicator::abort(const std::string& reason) { engine_->supervisor().abort(reason); }

void Communicator::fail(const Error& seen) {
  engine_->supervisor().fail(seen);
  throw Error(seen);  // never: but GCC does not see it through a virtual call
}

}  // namespace lockstep
