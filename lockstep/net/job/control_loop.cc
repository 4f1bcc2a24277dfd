#include "lockstep/net/job/control_loop.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "lockstep/base/host.h"
#include "lockstep/base/log.h"
#include "lockstep/net/job/roster.h"
#include "lockstep/net/socket/unix_socket.h"

namespace lockstep {
namespace {

// What the poller tells apart; links of the centre have the keys that follow.
enum Key : std::uint64_t { kWakeKey, kDoorKey, kMemberKey, kFirstLinkKey };

// Lines of metrics that are kept until somebody takes them: a second of the fastest steps.
constexpr std::size_t kMostLines = 10'000;

}  // namespace

ControlLoop::ControlLoop(std::shared_ptr<Watch> watch, Arrivals& arrivals,
                         std::unique_ptr<Door> door, std::unique_ptr<Centre> centre)
    : arrivals_(arrivals),
      connected_(centre != nullptr),
      watch_(std::move(watch)),
      door_(std::move(door)),
      centre_(std::move(centre)),
      next_key_(kFirstLinkKey) {
  poller_.add(wake_.fd(), kWakeKey);
  if (door_) poller_.add(door_->fd(), kDoorKey);
  const auto failed = [this](const Error& error) {
    watch_->latch.trip(error);
    end();
  };
  thread_.start(
      "the control thread", [this] { run(); }, failed);
}

ControlLoop::~ControlLoop() {
  order([](Orders& orders) { orders.stop = true; });
  thread_.join();
}

void ControlLoop::order(const std::function<void(Orders&)>& change) {
  {
    const std::lock_guard lock(mutex_);
    change(orders_);
  }
  wake_.set();
}

void ControlLoop::join(std::optional<Link> link, MemberOptions options) {
  const auto progress = [this] { return watch_->book.all(); };
  auto member = std::make_unique<Member>(std::move(options), progress, Deadline::Clock::now());
  connected_.store(true, std::memory_order_release);
  order([&](Orders& orders) {
    news_ = {};
    orders.member = std::move(member);
    orders.link = std::move(link);
  });
}

void ControlLoop::join_again(std::shared_ptr<Watch> watch, Standing standing, std::int64_t step) {
  order([&](Orders& orders) {
    news_ = {};
    wanted_ = {};
    orders.join_again = {std::move(watch), standing, step};
  });
}

void ControlLoop::serve(std::unique_ptr<Centre> centre) {
  order([&](Orders& orders) { orders.centre = std::move(centre); });
}

void ControlLoop::ready() {
  order([](Orders& orders) { orders.ready = true; });
}

void ControlLoop::describe(Description description) {
  order([&](Orders& orders) { orders.description = std::move(description); });
}

void ControlLoop::wish(const Wish& wish) {
  order([&](Orders& orders) { orders.wish = wish; });
}

void ControlLoop::ask_flight(std::vector<std::int32_t> but) {
  order([&](Orders& orders) { orders.ask_flight = std::move(but); });
}

void ControlLoop::on_flight_asked(std::function<void()> write) {
  const std::lock_guard lock(mutex_);
  write_flight_ = std::move(write);
}

void ControlLoop::process_ended(std::int32_t pid, std::string how, bool own_fault) {
  order([&](Orders& orders) { orders.ended.push_back({pid, std::move(how), own_fault}); });
}

ControlNews ControlLoop::wait_for_news(const std::function<bool(const ControlNews&)>& enough,
                                       Deadline deadline) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline.time(), [&] { return enough(news_) || ended_; });
  return news_;
}

ControlNews ControlLoop::news() {
  const std::lock_guard lock(mutex_);
  return news_;
}

ControlNews ControlLoop::news_of_a_turn(Deadline deadline) {
  std::unique_lock lock(mutex_);
  const std::uint64_t awaited = turns_ + 2;  // one may be under way
  wake_.set();
  changed_.wait_until(lock, deadline.time(), [&] {
    if (turns_ < awaited) wake_.set();
    return turns_ >= awaited || ended_;
  });
  return news_;
}

std::optional<RosterMessage> ControlLoop::centre_roster() {
  const std::lock_guard lock(mutex_);
  return centre_roster_;
}

std::vector<MemberEvent> ControlLoop::take_events() {
  const std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
}

std::vector<std::string> ControlLoop::take_lines() {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> lines(std::make_move_iterator(lines_.begin()),
                                 std::make_move_iterator(lines_.end()));
  lines_.clear();
  return lines;
}

void ControlLoop::tell(std::string line) {
  order([&](Orders& orders) { orders.lines.push_back(std::move(line)); });
}

Wish ControlLoop::wanted() {
  const std::lock_guard lock(mutex_);
  return wanted_;
}

void ControlLoop::wait_until_all_left(Deadline deadline) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline.time(),
                      [this] { return all_left() || news_.failure || ended_; });
}

bool ControlLoop::report(const Error& error, std::optional<std::uint32_t> generation) {
  if (!connected_.load(std::memory_order_acquire)) return false;
  order([&](Orders& orders) { orders.reports.emplace_back(error, generation); });
  return true;
}

void ControlLoop::run() {
  while (turn()) {
  }
  const auto now = Deadline::Clock::now();
  const std::vector<Progress> last = watch_->book.all();
  if (member_ && centre_) {  // the last word of the one is to reach the other
    send_for_member();
    std::vector<std::uint64_t> keys;
    for (const auto& [key, each] : centre_links_) keys.push_back(key);
    for (const std::uint64_t key : keys) serve_centre_link(key, now);
  }
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
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
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
  slept_ = machine_sleep_.take();
  if (centre_) centre_->machine_slept(slept_);
  if (member_) member_->machine_slept(slept_);
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
  if (centre_) centre_->tick(now);
  // After a late wake-up both may be out of patience. The centre's verdict says more, and is heard
  // next.
  if (member_ && !(centre_ && centre_->verdict())) member_->tick(now);
  send_for_member();
  send_for_centre(now);
  if (centre_ && centre_->resigned()) give_role_up();
  publish();
  return go_on;
}

bool ControlLoop::take_orders(Time now) {
  Orders orders;
  {
    const std::lock_guard lock(mutex_);
    orders = std::exchange(orders_, {});
  }
  if (orders.centre) {
    for (auto& [key, each] : centre_links_) each.link.socket().close_gently();
    centre_links_.clear();
    centre_ = std::move(orders.centre);
    centre_->machine_slept(slept_);  // perhaps it was made before
  }
  if (orders.join_again) {
    watch_ = std::move(orders.join_again->watch);
    if (member_) member_->join_again(orders.join_again->standing, orders.join_again->step, now);
  }
  if (orders.member) {
    if (member_link_) {
      poller_.remove(member_link_->socket().fd());
      member_link_->socket().close_gently();
    }
    member_ = std::move(orders.member);
    member_->machine_slept(slept_);
    member_sending_ = false;
    if (!orders.link) {
      auto [near, far] = unix_socket_pair();
      orders.link.emplace(std::move(near), kMaxRosterBody);
      add_centre_link(Link(std::move(far), kMaxRosterBody), std::nullopt, now);
    }
    member_link_ = std::move(orders.link);
    poller_.add(member_link_->socket().fd(), kMemberKey);
    serve_member(now);
  }
  if (orders.description && member_) member_->describe(std::move(*orders.description));
  if (orders.ready && member_) member_->ready();
  for (const std::string& line : orders.lines) {
    if (member_) member_->tell(line);
  }
  if (orders.wish && centre_) centre_->wish(*orders.wish);
  if (orders.ask_flight && centre_) centre_->ask_flight(this_host(), *orders.ask_flight);
  for (const ProcessEnded& end : orders.ended) {
    if (centre_) centre_->process_ended(this_host(), end.pid, end.how, end.own_fault);
  }
  // Without the lock: a report asks for progress, whose source may have locks of its own.
  for (const auto& [error, generation] : orders.reports) {
    if (member_) {
      member_->report(error);
    } else if (centre_) {
      centre_->report(error, generation, now);
    }
  }
  return !orders.stop;
}

void ControlLoop::admit(Arrival arrival, Time now) {
  if (arrival.purpose == Purpose::kRendezvous) {
    if (!centre_) return redirect(std::move(arrival.link));
    arrival.link.set_limit(kMaxRosterBody);
    return add_centre_link(std::move(arrival.link), arrival.peer, now);
  }
  // Members of a generation that has not reached this process yet may be here already.
  const auto& roster = member_ ? member_->roster() : std::nullopt;
  const bool current = roster && arrival.peer.generation == tag_of(roster->generation);
  if (current && !is_member(roster->roster, arrival.peer)) {
    return arrival.link.socket().close_gently();
  }
  arrivals_.deliver(std::move(arrival));
}

void ControlLoop::redirect(Link link) const {
  // Who stood still for the timeout never becomes the centre: nobody is to wait for it.
  if (member_ && member_->paused()) return link.socket().close_gently();
  std::string address;
  if (member_link_ && member_->connected() && !member_->centre_left()) {
    try {
      address = to_string(member_link_->socket().peer_address());
    } catch (const Error&) {  // it has just broken
    }
  }
  link.socket().send_if_heard(frame(MessageKind::kRedirect, encode_redirect(address)));
  link.socket().close_gently();
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
  while (const auto message = member_link_->next()) member_->received(*message, now);
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

// The members have another centre by now. Callers are told where it is once this process knows.
void ControlLoop::give_role_up() {
  for (auto& [key, each] : centre_links_) each.link.socket().close_gently();
  centre_links_.clear();
  centre_.reset();
  gave_role_up_.store(true, std::memory_order_release);
}

void ControlLoop::publish() {
  const std::lock_guard lock(mutex_);
  ++turns_;
  changed_.notify_all();
  if (orders_.member || orders_.join_again) return;  // what is known is of the one before
  std::optional<Error> failure;
  if (centre_) {
    const auto& roster = centre_->roster();
    if (roster && (!centre_roster_ || centre_roster_->generation != roster->generation)) {
      centre_roster_ = roster;
      const std::string warning = fingerprint_warning(roster->roster);
      if (!warning.empty()) log(LogLevel::kWarning, "{}", warning);
    }
    for (MemberEvent& event : centre_->take_events()) events_.push_back(std::move(event));
    for (std::string& line : centre_->take_lines()) lines_.push_back(std::move(line));
    // Nobody takes them. The first is kept: it tells where the run began.
    while (lines_.size() > kMostLines) lines_.erase(lines_.begin() + 1);
    for (const std::string& refusal : centre_->take_refusals()) {
      log(LogLevel::kWarning, "{}", refusal);
    }
    if (centre_->has_members() && !std::exchange(had_members_, true)) members_.set();
    all_left_.store(centre_->all_left(), std::memory_order_release);
    centre_step_.store(centre_->step(), std::memory_order_relaxed);
    // A process that has the centre and is no rank learns from it what ranks learn as members.
    if (!member_) {
      news_.roster = centre_roster_;
      failure = centre_->verdict();
    }
  }
  if (member_) {
    if (auto roster = member_->take_roster()) {
      arrivals_.begin_generation(tag_of(roster->generation));
      if (door_) door_->set_place(tag_of(roster->generation), member_->rank());
      news_.roster = std::move(roster);
    }
    failure = member_->failure();
    news_.may_go = member_->may_go();
    news_.cut_off = !member_->connected();
    news_.redirect = member_->redirect();
    news_.paused = member_->paused();
    if (member_->welcomed() && !news_.welcome) news_.welcome = member_->description();
    wanted_ = member_->wish();
    if (member_->take_spare()) {
      log(LogLevel::kInfo,
          "all lanes of the job have a worker: this one is a spare, and waits until one of them "
          "goes");
    }
    // Who stood still may be asked after the job's end: the outputs are not its own any more.
    if (member_->take_flight_asked() && !member_->paused() && write_flight_) write_flight_();
    centre_left_.store(member_->centre_left(), std::memory_order_release);
    connected_.store(member_->connected() && !member_->centre_left(), std::memory_order_release);
    if (member_->ended() && !member_->waiting()) watch_->latch.trip(*member_->ended());
  }
  if (failure) {
    watch_->latch.trip(*failure);
    news_.failure = std::move(failure);
  }
  changed_.notify_all();
}

}  // namespace lockstep
