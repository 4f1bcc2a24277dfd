#include "lockstep/net/job/control_loop.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace lockstep {

ControlLoop::ControlLoop(FailureLatch& latch, const ProgressBook& book,
                         std::unique_ptr<Centre> centre)
    : latch_(latch), book_(book), centre_(std::move(centre)) {
  const auto failed = [this](const Error& error) {
    latch_.trip(error);
    end();
  };
  thread_.start(
      "the control thread", [this] { run(); }, failed);
}

ControlLoop::~ControlLoop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.set();
  thread_.join();
}

void ControlLoop::attach(Link link, const MemberOptions& options) {
  auto member =
      std::make_unique<Member>(std::move(link), options, latch_, [this] { return book_.all(); });
  {
    const std::lock_guard lock(mutex_);
    joining_ = std::move(member);
  }
  connected_.store(true, std::memory_order_release);
  wake_.set();
}

bool ControlLoop::report(const Error& error) {
  if (!connected_.load(std::memory_order_acquire)) return false;
  {
    const std::lock_guard lock(mutex_);
    reports_.push_back(error);
  }
  wake_.set();
  return true;
}

void ControlLoop::run() {
  while (take_orders()) poll_once();
  const std::vector<Progress> last = book_.all();
  if (member_) member_->leave();
  if (centre_) centre_->leave(last);
  end();
}

void ControlLoop::end() {
  connected_.store(false, std::memory_order_release);
  member_.reset();
  centre_.reset();
}

bool ControlLoop::take_orders() {
  std::vector<Error> reports;
  bool stop;
  {
    const std::lock_guard lock(mutex_);
    if (joining_) member_ = std::move(joining_);
    if (member_) reports.swap(reports_);
    stop = stop_;
  }
  // Without the lock: a report asks for progress, whose source may have locks of its own.
  for (const Error& error : reports) member_->report(error);
  return !stop;
}

void ControlLoop::poll_once() {
  entries_.clear();
  entries_.push_back({wake_.fd(), POLLIN, 0});
  auto wake = Deadline::Clock::time_point::max();
  if (member_) {
    member_->add_poll(entries_);
    wake = std::min(wake, member_->wake_at());
  }
  const std::size_t members = entries_.size() - 1;
  if (centre_) {
    centre_->add_poll(entries_);
    wake = std::min(wake, centre_->wake_at());
  }

  const int ready = ::poll(entries_.data(), entries_.size(), Deadline::at(wake).poll_timeout());
  if (ready < 0 && errno != EINTR) throw_io("polling the control links", errno);

  if (entries_.front().revents != 0) wake_.clear();
  const std::span<const pollfd> rest = std::span(entries_).subspan(1);
  if (member_) {
    member_->serve(rest.first(members));
    centre_left_.store(member_->centre_left(), std::memory_order_release);
    connected_.store(member_->connected() && !member_->centre_left(), std::memory_order_release);
  }
  if (centre_) centre_->serve(rest.subspan(members));
}

}  // namespace lockstep
