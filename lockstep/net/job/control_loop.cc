#include "lockstep/net/job/control_loop.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "lockstep/base/log.h"
#include "lockstep/net/job/roster.h"
#include "lockstep/net/socket/unix_socket.h"

namespace lockstep {
namespace {

// What the poller tells apart; links of the centre have the keys that follow.
enum Key : std::uint64_t { kWakeKey, kDoorKey, kMemberKey, kFirstLinkKey };

}  // namespace

ControlLoop::ControlLoop(FailureLatch& latch, const ProgressBook& book, Arrivals& arrivals,
                         std::unique_ptr<Door> door, std::unique_ptr<Centre> centre)
    : latch_(latch),
      book_(book),
      arrivals_(arrivals),
      connected_(centre != nullptr),
      door_(std::move(door)),
      centre_(std::move(centre)),
      next_key_(kFirstLinkKey) {
  poller_.add(wake_.fd(), kWakeKey);
  if (door_) poller_.add(door_->fd(), kDoorKey);
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
    orders_.stop = true;
  }
  wake_.set();
  thread_.join();
}

void ControlLoop::join(std::optional<Link> link, MemberOptions options) {
  auto member = std::make_unique<Member>(
      std::move(options), [this] { return book_.all(); }, Deadline::Clock::now());
  {
    const std::lock_guard lock(mutex_);
    orders_.member = std::move(member);
    orders_.link = std::move(link);
  }
  connected_.store(true, std::memory_order_release);
  wake_.set();
}

RosterMessage ControlLoop::wait_for_roster(Deadline deadline) {
  std::unique_lock lock(mutex_);
  formed_.wait_until(lock, deadline.time(), [this] { return roster_ || latch_.tripped(); });
  if (roster_) return *roster_;
  latch_.check();
  throw Error(ErrorCode::kTimeout, "the job has not formed in time");
}

void ControlLoop::wait_until_all_left(Deadline deadline) {
  std::unique_lock lock(mutex_);
  formed_.wait_until(lock, deadline.time(), [this] { return all_left() || latch_.tripped(); });
}

bool ControlLoop::report(const Error& error) {
  if (!connected_.load(std::memory_order_acquire)) return false;
  {
    const std::lock_guard lock(mutex_);
    orders_.reports.push_back(error);
  }
  wake_.set();
  return true;
}

void ControlLoop::run() {
  while (turn()) {
  }
  const auto now = Deadline::Clock::now();
  const std::vector<Progress> last = book_.all();
  if (member_) member_->leave();
  if (centre_) centre_->leave(last, now);
  send_for_member();
  send_for_centre(now);
  end();
}

void ControlLoop::end() {
  connected_.store(false, std::memory_order_release);
  if (member_link_) member_link_->socket().close_gently();
  for (auto& [key, each] : centre_links_) each.link.socket().close_gently();
  member_link_.reset();
  centre_links_.clear();
  door_.reset();
  formed_.notify_all();
}

ControlLoop::Time ControlLoop::wake_at() const {
  Time wake = Time::max();
  if (door_) wake = std::min(wake, door_->wake_at());
  if (centre_) wake = std::min(wake, centre_->wake_at());
  if (member_) wake = std::min(wake, member_->wake_at());
  return wake;
}

bool ControlLoop::turn() {
  bool go_on = true;
  const auto ready = poller_.wait(Deadline::at(wake_at()));
  const auto now = Deadline::Clock::now();
  // All are heard before silence is judged.
  bool at_door = door_ && now >= door_->wake_at();
  for (const std::uint64_t key : ready) {
    if (key == kWakeKey) {
      wake_.clear();
      go_on = take_orders(now);
    } else if (key == kDoorKey) {
      at_door = true;
    } else if (key == kMemberKey) {
      serve_member(now);
    } else {
      serve_centre_link(key, now);
    }
  }
  if (at_door) {
    for (Arrival& arrival : door_->serve(now)) admit(std::move(arrival), now);
  }
  if (member_) member_->tick(now);
  if (centre_) centre_->tick(now);
  send_for_member();
  send_for_centre(now);
  publish();
  return go_on;
}

bool ControlLoop::take_orders(Time now) {
  Orders orders;
  {
    const std::lock_guard lock(mutex_);
    orders = std::exchange(orders_, {});
  }
  if (orders.member) {
    member_ = std::move(orders.member);
    if (!orders.link) {
      auto [near, far] = unix_socket_pair();
      orders.link.emplace(std::move(near), kMaxRosterBody);
      add_centre_link(Link(std::move(far), kMaxControlBody), std::nullopt, now);
    }
    member_link_ = std::move(orders.link);
    poller_.add(member_link_->socket().fd(), kMemberKey);
    serve_member(now);
  }
  // Without the lock: a report asks for progress, whose source may have locks of its own.
  for (const Error& error : orders.reports) {
    if (member_) {
      member_->report(error);
    } else if (centre_) {
      centre_->report(error, now);
    }
  }
  return !orders.stop;
}

void ControlLoop::admit(Arrival arrival, Time now) {
  if (arrival.purpose == Purpose::kRendezvous) {
    arrival.link.set_limit(kMaxControlBody);
    if (centre_) add_centre_link(std::move(arrival.link), arrival.peer, now);
    return;
  }
  // Only this thread writes the roster, so it may read it without the lock.
  if (member_ && roster_ && !is_member(roster_->roster, arrival.peer)) {
    return arrival.link.socket().close_gently();
  }
  arrivals_.deliver(std::move(arrival));
}

void ControlLoop::add_centre_link(Link link, const std::optional<PeerIdentity>& peer, Time now) {
  const std::uint64_t key = next_key_++;
  poller_.add(link.socket().fd(), key);
  centre_links_.emplace(key, CentreLink{std::move(link)});
  centre_->opened(key, peer, now);
  serve_centre_link(key, now);
}

void ControlLoop::serve_centre_link(std::uint64_t key, Time now) {
  const auto entry = centre_links_.find(key);
  if (entry == centre_links_.end()) return;
  Link& link = entry->second.link;
  link.pump();
  while (const auto message = link.next()) centre_->received(key, *message, now);
  if (!link.failure()) return;
  centre_->closed(key, now);
  link.socket().close_gently();
  centre_links_.erase(entry);
}

void ControlLoop::serve_member(Time now) {
  if (!member_link_) return;
  member_link_->pump();
  while (const auto message = member_link_->next()) {
    member_->received(*message, now);
    if (member_->joined()) member_link_->set_limit(kMaxControlBody);
  }
  if (member_link_->failure()) member_->lost(*member_link_->failure());
}

void ControlLoop::send_for_member() {
  if (!member_link_) return;
  for (SharedBytes& bytes : member_->take_sendings()) member_link_->queue(std::move(bytes));
  member_link_->flush();
  if (!member_->connected()) {
    member_link_->socket().close_gently();
    return member_link_.reset();
  }
  if (member_sending_ != member_link_->wants_to_send()) {
    member_sending_ = !member_sending_;
    poller_.set_sending(member_link_->socket().fd(), kMemberKey, member_sending_);
  }
}

void ControlLoop::send_for_centre(Time now) {
  if (!centre_) return;
  std::set<std::uint64_t> touched;
  std::vector<std::uint64_t> done;
  for (Centre::Sending& sending : centre_->take_sendings()) {
    const auto entry = centre_links_.find(sending.link);
    if (entry == centre_links_.end()) continue;
    if (sending.bytes) entry->second.link.queue(std::move(sending.bytes));
    touched.insert(sending.link);
    if (sending.last) done.push_back(sending.link);
  }
  for (const std::uint64_t key : touched) {
    auto& [link, is_sending] = centre_links_.at(key);
    link.flush();
    if (link.failure()) {
      centre_->closed(key, now);
      done.push_back(key);
    } else if (is_sending != link.wants_to_send()) {
      is_sending = !is_sending;
      poller_.set_sending(link.socket().fd(), key, is_sending);
    }
  }
  for (const std::uint64_t key : done) {
    const auto entry = centre_links_.find(key);
    if (entry == centre_links_.end()) continue;
    entry->second.link.socket().close_gently();
    centre_links_.erase(entry);
  }
}

void ControlLoop::publish() {
  // A process that has the centre and is no rank learns from it what ranks learn as members.
  std::optional<RosterMessage> roster;
  std::optional<Error> failure;
  if (centre_ && !member_) {
    if (!roster_) roster = centre_->roster();
    failure = centre_->verdict();
  }
  if (member_) {
    roster = member_->take_roster();
    failure = member_->failure();
    centre_left_.store(member_->centre_left(), std::memory_order_release);
    connected_.store(member_->connected() && !member_->centre_left(), std::memory_order_release);
  }
  if (failure) latch_.trip(*failure);
  if (centre_) all_left_.store(centre_->all_left(), std::memory_order_release);
  const std::lock_guard lock(mutex_);
  if (roster) {
    roster_ = std::move(roster);
    const std::string warning = centre_ ? fingerprint_warning(roster_->roster) : "";
    if (!warning.empty()) log(LogLevel::kWarning, "{}", warning);
  }
  if (roster_ || latch_.tripped()) formed_.notify_all();
}

}  // namespace lockstep
