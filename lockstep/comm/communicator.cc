#include "lockstep/comm/communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "lockstep/base/index.h"
#include "lockstep/base/thread.h"
#include "lockstep/comm/any_receiver.h"
#include "lockstep/comm/call_check.h"
#include "lockstep/comm/collective_stay.h"
#include "lockstep/comm/engine.h"
#include "lockstep/comm/flight_recorder.h"
#include "lockstep/comm/group_number.h"

namespace lockstep {
namespace {

// Whoever hangs in a collective learns from so many how the others called it before they went on.
constexpr std::uint64_t kToldCollectives = 4;

// What tells the numbers of groups of two ranks, and of groups with a label, from those of splits.
constexpr std::uint32_t kMessages = 0x4000'0000;
constexpr std::uint32_t kSubgroups = 0x8000'0000;

}  // namespace

class Communicator::State final : public AnyReceiver::Senders {
 public:
  State(std::unique_ptr<Engine> engine, std::chrono::nanoseconds timeout, std::uint32_t group,
        std::shared_ptr<FlightRecorder> flight)
      : flight_(flight ? std::move(flight) : std::make_shared<FlightRecorder>()),
        engine_(std::move(engine)),
        timeout_(timeout),
        group_(group),
        patience_(10 * timeout),
        rough_deadline_(patience_),
        track_(flight_->take_track(group)) {
    if (track_ == nullptr) {
      own_track_ = std::make_unique<FlightTrack>();
      track_ = own_track_.get();
    }
    first_ = track_->ring.count();
    engine_->note_waits_in(track_->waits);
    if (engine_->world_size() > 1) {
      supervisor().progress_book().add(this, [this] { return progress(); });
    }
  }
  ~State() override;

  Engine& engine() { return *engine_; }
  Supervisor& supervisor() { return engine_->supervisor(); }
  std::chrono::nanoseconds timeout() const { return timeout_; }
  std::chrono::nanoseconds patience() const { return patience_; }
  void set_patience(std::chrono::nanoseconds patience) {
    patience_ = patience;
    rough_deadline_ = RoughDeadline(patience);
  }
  std::uint32_t group() const { return group_; }
  const std::shared_ptr<FlightRecorder>& flight() const { return flight_; }
  // How many groups have been split from this one, with the one that is being split now.
  std::uint32_t count_child() { return children_.fetch_add(1) + 1; }

  // Of a message: between its two ranks, beside the collectives of the group.
  Outcome run_message(Call call);
  Work start_message(Call call);
  // In place: a Call is large beside the shortest collectives.
  void complete(Call& call) const { complete_call(call, engine_->rank(), engine_->world_size()); }
  Outcome run(const Call& call);
  Work start(Call call);
  std::vector<Progress> progress() const;
  Deadline deadline_of(const CallOptions& options) const {
    return options.deadline ? *options.deadline : Deadline::roughly_after(patience_);
  }

 private:
  struct Pending {
    Call call;
    std::shared_ptr<WorkState> state = std::make_shared<WorkState>();
  };

  // The group of a sender and its receiver.
  State& pair_of(std::pair<int, int> ends);
  std::uint32_t pair_number(std::pair<int, int> ends) const {
    return group_number(group_, kMessages + static_cast<std::uint32_t>(ends.second), ends.first);
  }
  // Throws unless this rank can send to, or receive from, the other one.
  void check_other(const Call& call) const;
  // Completes a receive. If it, or one before it, waits for any rank, it is queued. Otherwise
  // go_ahead() is called, which tells `pair` of it: no later receive comes before it.
  Work queue_receive(Call& call, int source, State*& pair, const std::function<void()>& go_ahead);
  bool has_unended_receives();

  // Of AnyReceiver::Senders.
  int count() const override { return engine_->world_size(); }
  std::optional<Outcome> receive(int rank, const AnyReceiver::Pick& pick) override;
  Error late(const Call& call) const override;

  Outcome execute(const Call& call);
  void serve();

  const std::shared_ptr<FlightRecorder> flight_;
  const std::unique_ptr<Engine> engine_;
  const std::chrono::nanoseconds timeout_;
  const std::uint32_t group_;
  std::atomic<std::uint32_t> children_{0};

  std::mutex running_;          // held by the thread that runs a collective
  std::uint64_t sequence_ = 0;  // guarded by running_
  std::chrono::nanoseconds patience_;
  RoughDeadline rough_deadline_;  // guarded by running_

  // The collectives entered last; written by the thread that holds running_.
  std::unique_ptr<FlightTrack> own_track_;  // where the recorder had none left
  FlightTrack* track_;
  std::uint64_t first_ = 0;  // collective of this communicator on the track

  std::mutex queue_mutex_;
  std::condition_variable queue_changed_;
  std::deque<std::shared_ptr<Pending>> queue_;  // guarded by queue_mutex_
  std::size_t unfinished_ = 0;                  // guarded by queue_mutex_: queued or running
  bool closing_ = false;                        // guarded by queue_mutex_
  std::atomic<bool> started_{false};            // whether thread_ was ever needed
  Thread thread_;                               // guarded by queue_mutex_

  // Of a group of a sender and its receiver: blocking receives that have not ended.
  std::atomic<int> receives_{0};
  // The order of receives.
  std::mutex receives_mutex_;
  std::unique_ptr<AnyReceiver> any_;  // guarded by receives_mutex_; made by the first that needs it

  // Groups of a sender and its receiver, made for their first message.
  std::mutex pairs_mutex_;
  std::map<std::pair<int, int>, std::unique_ptr<State>> pairs_;  // guarded by pairs_mutex_
};

Communicator::State::~State() {
  any_.reset();
  pairs_.clear();
  {
    const std::lock_guard lock(queue_mutex_);
    closing_ = true;
    if (unfinished_ > 0) {
      supervisor().abort("a communicator was destroyed with work under way");
    }
  }
  queue_changed_.notify_all();
  thread_.join();
  supervisor().progress_book().remove(this);
  if (!own_track_) flight_->drop_track(track_);
}

void Communicator::State::check_other(const Call& call) const {
  const char* what = call.sends ? "send" : "recv";
  const int rank = engine_->rank();
  const int world_size = engine_->world_size();
  const int other = call.root;
  const bool any = !call.sends && other == kAnySource && world_size > 1;
  if (!any && (other < 0 || other >= world_size)) {
    throw Error(ErrorCode::kInvalidRank,
                other == kAnySource
                    ? fmt::format("{}: there is no other rank", what)
                    : fmt::format("{}: rank {} is not in [0, {})", what, other, world_size));
  }
  if (other == rank) {
    throw Error(ErrorCode::kSelfSend,
                fmt::format("{}: rank {} cannot exchange messages with itself", what, rank), rank);
  }
  // Two ranks that wait for each other's first messages would never make the groups for them.
  if (engine_->split_waits()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: MPI has no messages between two ranks; use another transport", what));
  }
}

// A group per direction, so that two ranks can send each other large messages at once, and neither
// waits for the collectives of the group. The sender is rank 0 of the two.
Communicator::State& Communicator::State::pair_of(std::pair<int, int> ends) {
  const std::lock_guard lock(pairs_mutex_);
  std::unique_ptr<State>& pair = pairs_[ends];
  if (pair == nullptr) {
    supervisor().latch().check();
    const std::uint32_t number = pair_number(ends);
    pair = std::make_unique<State>(engine_->split({ends.first, ends.second}, number), timeout_,
                                   number, flight_);
    pair->set_patience(patience_);
  }
  return *pair;
}

Outcome Communicator::State::run_message(Call call) {
  check_other(call);
  const int other = std::exchange(call.root, 0);
  if (call.sends) {
    State& pair = pair_of({engine_->rank(), other});
    pair.complete(call);
    return pair.run(call);
  }
  State* pair = nullptr;
  Work queued = queue_receive(call, other, pair, [&] { pair->receives_.fetch_add(1); });
  if (queued.valid()) return queued.wait(Deadline::after(Deadline::Clock::duration::max()));
  const auto ended = [](State* state) { state->receives_.fetch_sub(1); };
  const std::unique_ptr<State, decltype(ended)> until_the_end(pair, ended);
  return pair->run(call);
}

Work Communicator::State::start_message(Call call) {
  check_other(call);
  const int other = std::exchange(call.root, 0);
  if (call.sends) {
    State& pair = pair_of({engine_->rank(), other});
    pair.complete(call);
    return pair.start(std::move(call));
  }
  State* pair = nullptr;
  Work started;
  Work queued = queue_receive(call, other, pair, [&] { started = pair->start(std::move(call)); });
  return queued.valid() ? std::move(queued) : std::move(started);
}

Work Communicator::State::queue_receive(Call& call, int source, State*& pair,
                                        const std::function<void()>& go_ahead) {
  if (source == kAnySource) {
    const int next = (engine_->rank() + 1) % engine_->world_size();
    engine_->opened_by(next, pair_number({next, engine_->rank()}));  // throws where it cannot be
    complete_call(call, 1, 2);
  } else {
    pair = &pair_of({source, engine_->rank()});
    pair->complete(call);
  }
  const std::lock_guard lock(receives_mutex_);
  if (source != kAnySource && (any_ == nullptr || any_->idle())) {
    go_ahead();
    return {};
  }
  if (any_ == nullptr) any_ = std::make_unique<AnyReceiver>(*this, supervisor());
  const Deadline deadline = deadline_of(call.options);
  return any_->start(std::move(call), source, deadline);
}

bool Communicator::State::has_unended_receives() {
  if (receives_.load() > 0) return true;
  const std::lock_guard lock(queue_mutex_);
  return unfinished_ > 0;
}

std::optional<Outcome> Communicator::State::receive(int rank, const AnyReceiver::Pick& pick) {
  if (rank == engine_->rank()) return std::nullopt;
  const std::pair ends(rank, engine_->rank());
  {
    const std::lock_guard lock(pairs_mutex_);
    if (!pairs_.contains(ends) && !engine_->opened_by(rank, pair_number(ends))) return std::nullopt;
  }
  State& pair = pair_of(ends);
  if (pair.has_unended_receives()) return std::nullopt;
  const std::unique_lock lock(pair.running_, std::try_to_lock);
  if (!lock) return std::nullopt;
  const std::optional<MeshFrame> frame = pair.engine_->next_frame(0, Deadline::after(timeout_));
  const Call* call = frame ? pick(*frame) : nullptr;
  if (call == nullptr) return std::nullopt;
  return pair.execute(*call);
}

Error Communicator::State::late(const Call& call) const {
  std::string awaited;
  int last = -1;
  int others = 0;
  for (int rank = 0; rank < engine_->world_size(); ++rank) {
    if (rank == engine_->rank() || (call.root != kAnySource && rank != call.root)) continue;
    awaited += (awaited.empty() ? "" : " or ") + engine_->name_of(rank);
    last = rank;
    ++others;
  }
  return Error(ErrorCode::kTimeout,
               fmt::format("{}: {} waited in vain for data from {}", describe(stamp_of(call)),
                           engine_->name_of(engine_->rank()), awaited),
               others == 1 ? engine_->job_rank(last) : -1);
}

Outcome Communicator::State::run(const Call& call) {
  if (started_.load(std::memory_order_acquire)) {
    std::unique_lock lock(queue_mutex_);
    const auto idle = [&] { return unfinished_ == 0; };
    if (!queue_changed_.wait_until(lock, deadline_of(call.options).time(), idle)) {
      lock.unlock();
      supervisor().abort("asynchronous work ahead of a blocking call did not end");
      supervisor().latch().check();
    }
  }
  const std::lock_guard lock(running_);
  return execute(call);
}

Work Communicator::State::start(Call call) {
  supervisor().latch().check();
  auto pending = std::make_shared<Pending>();
  std::string description = describe(stamp_of(call));
  pending->call = std::move(call);
  {
    const std::lock_guard lock(queue_mutex_);
    if (!thread_.started()) {
      const auto failed = [this](const Error& error) { supervisor().fail_quietly(error); };
      thread_.start(
          "the communication thread", [this] { serve(); }, failed);
    }
    queue_.push_back(pending);
    ++unfinished_;
  }
  started_.store(true, std::memory_order_release);
  queue_changed_.notify_all();
  return Work(pending->state, &supervisor(), std::move(description));
}

// The communication thread: runs queued work in order until the communicator is destroyed.
void Communicator::State::serve() {
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
      const auto begin = std::chrono::steady_clock::now();
      outcome = execute(next->call);
      outcome.took = std::chrono::steady_clock::now() - begin;
    } catch (const Error& caught) {
      error = caught;
    } catch (...) {  // of which the job does not know yet
      supervisor().fail_quietly(caught_error("the communication thread"));
      error = supervisor().latch().error();
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

Outcome Communicator::State::execute(const Call& call) {
  supervisor().latch().check();
  MeshFrame stamp = stamp_of(call);
  stamp.group = group_;
  stamp.sequence = ++sequence_;
  if (engine_->world_size() > 1) stamp.algorithm = static_cast<std::uint8_t>(engine_->choose(call));
  CollectiveStay stay(*flight_, *track_, stamp, rough_deadline_, call.options.deadline);
  const Outcome outcome = engine_->run(call, stamp, stay);
  stay.succeeded();
  return outcome;
}

std::vector<Progress> Communicator::State::progress() const {
  const std::uint64_t entered = track_->ring.count();
  std::vector<Progress> progress{{group_, 0, false, "", engine_->waits_for()}};
  for (std::uint64_t i = 0; i < kToldCollectives && first_ + i < entered; ++i) {
    const auto entry = track_->ring.at(entered - 1 - i);
    if (!entry) break;
    if (i > 0) progress.push_back({group_, 0, false, ""});
    const MeshFrame call = entry->what.frame();
    progress.back().sequence = call.sequence;
    // In one that failed this rank stays for ever.
    progress.back().inside = i == 0 && (entry->end == 0 || unpack_end(entry->note).failed);
    progress.back().description = describe(call);
  }
  return progress;
}

Communicator::Communicator(std::unique_ptr<Engine> engine, std::chrono::nanoseconds timeout,
                           std::uint32_t group, std::shared_ptr<FlightRecorder> flight)
    : state_(std::make_unique<State>(std::move(engine), timeout, group, std::move(flight))) {}

Communicator::~Communicator() = default;

int Communicator::rank() const { return state_->engine().rank(); }

int Communicator::world_size() const { return state_->engine().world_size(); }

std::string Communicator::name_of(int rank) const { return state_->engine().name_of(rank); }

bool Communicator::finite_only() const { return state_->engine().finite_only(); }

std::chrono::nanoseconds Communicator::patience() const { return state_->patience(); }

void Communicator::set_patience(std::chrono::nanoseconds patience) {
  state_->set_patience(patience);
}

Algorithm Communicator::algorithm_for(Call call) const {
  state_->complete(call);
  return state_->engine().choose(call);
}

Outcome Communicator::run(Call call) {
  if (call.collective == Collective::kPointToPoint) return state_->run_message(std::move(call));
  state_->complete(call);
  return state_->run(call);
}

Work Communicator::start(Call call) {
  if (call.collective == Collective::kPointToPoint) return state_->start_message(std::move(call));
  state_->complete(call);
  return state_->start(std::move(call));
}

std::unique_ptr<Communicator> Communicator::split(int color, int key) {
  std::vector<std::int32_t> all(2 * index_of(world_size()));
  const std::vector<std::int32_t> mine{color, key};
  all_gather(std::span(mine), std::span(all));
  const std::uint32_t child = state_->count_child();
  if (color < 0) return nullptr;
  std::vector<int> members;
  for (int r = 0; r < world_size(); ++r) {
    if (all[2 * index_of(r)] == color) members.push_back(r);
  }
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return all[2 * index_of(a) + 1] < all[2 * index_of(b) + 1];
  });
  const std::uint32_t group = group_number(state_->group(), child, members[0]);
  return part_of(members, group);
}

std::unique_ptr<Communicator> Communicator::subgroup(const std::vector<int>& members,
                                                     std::string_view label) {
  std::vector<int> sorted = members;
  std::ranges::sort(sorted);
  if (sorted.empty() || sorted.front() < 0 || sorted.back() >= world_size() ||
      std::ranges::adjacent_find(sorted) != sorted.end()) {
    throw Error(ErrorCode::kInvalidRank,
                fmt::format("subgroup '{}': the members [{}] are not different ranks in [0, {})",
                            label, fmt::join(members, ", "), world_size()));
  }
  if (!std::ranges::binary_search(sorted, rank())) {
    throw Error(ErrorCode::kInvalidRank,
                fmt::format("subgroup '{}': rank {} is none of its members", label, rank()));
  }
  check();
  std::uint32_t name = kSubgroups;
  for (const char letter : label) name = (name ^ static_cast<unsigned char>(letter)) * 0x01000193U;
  const std::uint32_t group = group_number(state_->group(), name | kSubgroups, members[0]);
  return part_of(members, group);
}

std::unique_ptr<Communicator> Communicator::part_of(const std::vector<int>& members,
                                                    std::uint32_t group) {
  auto part = std::make_unique<Communicator>(state_->engine().split(members, group),
                                             state_->timeout(), group, state_->flight());
  part->set_patience(patience());
  return part;
}

void Communicator::abort(const std::string& reason) { state_->supervisor().abort(reason); }

void Communicator::check() const { state_->supervisor().latch().check(); }

void Communicator::fail(const Error& seen) {
  state_->supervisor().fail(seen);
  throw Error(seen);  // never: but GCC does not see it through a virtual call
}

std::vector<Progress> Communicator::progress() const { return state_->progress(); }

FlightRecorder& Communicator::flight() const { return *state_->flight(); }

Buffer Communicator::allocate(std::size_t bytes) { return state_->engine().allocate(bytes); }

}  // namespace lockstep
