#include "lockstep/comm/any_receiver.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "lockstep/comm/call_check.h"
#include "lockstep/net/job/supervisor.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

// A thread that waits for a message gives way for so long, then sleeps, at most the long nap.
constexpr auto kYieldTime = 50us;
constexpr std::chrono::microseconds kShortNap = 20us;
constexpr std::chrono::microseconds kLongNap = 1ms;

}  // namespace

AnyReceiver::AnyReceiver(Senders& senders, Supervisor& supervisor)
    : senders_(senders), supervisor_(supervisor) {}

AnyReceiver::~AnyReceiver() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    if (unended_ > 0) supervisor_.abort("a communicator was destroyed with work under way");
  }
  changed_.notify_all();
  thread_.join();
}

Work AnyReceiver::start(Call call, int source, Deadline deadline) {
  supervisor_.latch().check();
  std::string description = describe(stamp_of(call));
  Pending pending{std::move(call), source, deadline};
  Work work(pending.state, &supervisor_, std::move(description));
  {
    const std::lock_guard lock(mutex_);
    if (!thread_.started()) {
      const auto failed = [this](const Error& error) { supervisor_.fail_quietly(error); };
      thread_.start(
          "the receiving thread", [this] { serve(); }, failed);
    }
    waiting_.push_back(std::move(pending));
    ++unended_;
  }
  changed_.notify_all();
  return work;
}

bool AnyReceiver::idle() const {
  const std::lock_guard lock(mutex_);
  return waiting_.empty();
}

bool AnyReceiver::Pending::fits(int sender, const MeshFrame& frame) const {
  return source == sender || (source == kAnySource && call.options.step == frame.step);
}

void AnyReceiver::serve() {
  auto idle_since = Deadline::Clock::time_point::max();
  auto nap = kShortNap;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (waiting_.empty()) {
        idle_since = Deadline::Clock::time_point::max();
        changed_.wait(lock, [&] { return closing_ || !waiting_.empty(); });
        if (waiting_.empty()) return;
      }
    }
    try {
      supervisor_.latch().check();
      if (look_at_all()) {
        idle_since = Deadline::Clock::time_point::max();
        continue;
      }
      if (const std::optional<Error> error = late()) supervisor_.fail(*error);
    } catch (const Error& error) {
      end_all(error);
      continue;
    } catch (...) {
      supervisor_.fail_quietly(caught_error("the receiving thread"));
      continue;
    }
    const auto now = Deadline::Clock::now();
    if (idle_since > now) {
      idle_since = now;
      nap = kShortNap;
    }
    if (now - idle_since < kYieldTime) {
      sched_yield();
      continue;
    }
    std::unique_lock lock(mutex_);
    const std::size_t before = waiting_.size();
    changed_.wait_for(lock, nap, [&] { return closing_ || waiting_.size() != before; });
    nap = std::min(kLongNap, 2 * nap);
  }
}

bool AnyReceiver::look_at_all() {
  const int count = senders_.count();
  for (int i = 0; i < count; ++i) {
    const int sender = (first_ + i) % count;
    if (!look_at(sender)) continue;
    first_ = (sender + 1) % count;  // the others are to have their turn
    return true;
  }
  return false;
}

bool AnyReceiver::look_at(int sender) {
  std::optional<Pending> picked;
  const auto pick = [&](const MeshFrame& frame) -> const Call* {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find_if(
        waiting_, [&](const Pending& pending) { return pending.fits(sender, frame); });
    if (found == waiting_.end()) return nullptr;
    picked = std::move(*found);
    waiting_.erase(found);
    return &picked->call;
  };
  Outcome outcome;
  std::optional<Error> error;
  try {
    const auto begin = Deadline::Clock::now();
    const std::optional<Outcome> received = senders_.receive(sender, pick);
    if (!received) return false;
    outcome = *received;
    outcome.took = Deadline::Clock::now() - begin;
    if (picked->source == kAnySource) outcome.source = sender;
  } catch (const Error& caught) {
    if (!picked) throw;
    error = caught;
  } catch (...) {  // of which the job does not know yet
    if (!picked) throw;
    supervisor_.fail_quietly(caught_error("the receiving thread"));
    error = supervisor_.latch().error();
  }
  end(*picked, outcome, error);
  return true;
}

void AnyReceiver::end_all(const Error& error) {
  std::list<Pending> ended;
  {
    const std::lock_guard lock(mutex_);
    ended.swap(waiting_);
  }
  for (const Pending& pending : ended) end(pending, {}, error);
}

void AnyReceiver::end(const Pending& pending, const Outcome& outcome,
                      const std::optional<Error>& error) {
  {
    // Both at once: whoever learns that it is done may destroy the communicator.
    const std::lock_guard own_lock(mutex_);
    const std::lock_guard lock(pending.state->mutex);
    --unended_;
    pending.state->outcome = outcome;
    pending.state->error = error;
    pending.state->done = true;
  }
  pending.state->ended.notify_all();
}

std::optional<Error> AnyReceiver::late() const {
  const std::lock_guard lock(mutex_);
  const auto found =
      std::ranges::find_if(waiting_, [](const Pending& each) { return each.deadline.expired(); });
  if (found == waiting_.end()) return std::nullopt;
  Call call = found->call;
  call.root = found->source;
  return senders_.late(call);
}

}  // namespace lockstep
