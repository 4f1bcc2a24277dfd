#include "tests/support/job_simulator.h"

#include <algorithm>
#include <utility>

namespace lockstep::test {
namespace {

Card make_card(const JobSimulator::Options& options, int member) {
  Card card;
  card.rank = options.gives_ranks ? -1 : member;
  card.world_size = options.gives_ranks ? 0 : options.members;
  card.version = "1.0";
  for (std::size_t i = 0; i < 4; ++i) card.id[i] = static_cast<std::byte>(member >> (8 * i));
  card.id[15] = std::byte{1};
  card.pid = 1000 + member;
  card.host = {"node" + std::to_string(member / 8), "6a1f7c5e-0d1b-4b5f-9d8c-1a2b3c4d5e6f", 7};
  card.mesh_address = "10.0.0." + std::to_string(member / 8 % 250) + ":5000";
  card.unix_name = "lockstep-0123456789abcdef0123456789abcdef";
  card.fingerprint = "x86-64-v4, glibc 2.36";
  card.cores = "0-7";
  return card;
}

CentreOptions centre_options(const JobSimulator::Options& options) {
  return {.card = {-1, "the coordinator", "node0", 1},
          .world_size = options.members,
          .version = "1.0",
          .timeout = options.timeout};
}

}  // namespace

JobSimulator::JobSimulator(const Options& options)
    : options_(options), centre_(centre_options(options), now_) {
  members_.resize(at(options.members));
  wake_centre(centre_.wake_at());
}

void JobSimulator::schedule(Time time, std::function<void()> action) {
  events_.push({std::max(time, now_), order_++, std::move(action)});
}

void JobSimulator::deliver(Way& way, std::function<void()> action) {
  const auto most = static_cast<double>(options_.longest_delay.count());
  const double share = (1 + random_f32(options_.seed, 0, draws_++)) / 2;
  const Time arrival = now_ + Clock::duration(static_cast<std::int64_t>(most * share));
  way.last_arrival = std::max(way.last_arrival, arrival);  // a connection keeps its order
  schedule(way.last_arrival, std::move(action));
}

void JobSimulator::start(int member) {
  Node& node = members_[at(member)];
  node.running = node.linked = true;
  node.machine = std::make_unique<Member>(
      MemberOptions{.card = make_card(options_, member), .patience = options_.timeout},
      [&node] { return node.progress; }, now_);
  const Card card = make_card(options_, member);
  deliver(node.to_centre, [this, member, card] {
    centre_.opened(link_of(member), PeerIdentity{card.id, card.rank, 0}, now_);
    carry_out_centre();
  });
  carry_out(member);
}

void JobSimulator::start_all() {
  for (int member = 0; member < options_.members; ++member) start(member);
}

void JobSimulator::close_from_member(int member) {
  Node& node = members_[at(member)];
  if (!std::exchange(node.linked, false)) return;
  deliver(node.to_centre, [this, member] {
    if (centre_gone_) return;
    centre_.closed(link_of(member), now_);
    carry_out_centre();
  });
}

void JobSimulator::kill(int member) {
  members_[at(member)].running = false;
  close_from_member(member);
}

void JobSimulator::stop(int member) { members_[at(member)].stopped = true; }

void JobSimulator::wake(int member) {
  Node& node = members_[at(member)];
  node.stopped = false;
  for (const auto& action : std::exchange(node.unread, {})) action();
  node.machine->tick(now_);
  carry_out(member);
}

void JobSimulator::leave(int member) {
  members_[at(member)].machine->leave();
  carry_out(member);
  kill(member);
}

void JobSimulator::report(int member, const Error& error) {
  members_[at(member)].machine->report(error);
  carry_out(member);
}

void JobSimulator::centre_leaves() {
  centre_.leave({}, now_);
  carry_out_centre();
  centre_gone_ = true;
  for (int member = 0; member < options_.members; ++member) close_from_centre(member);
}

void JobSimulator::close_from_centre(int member) {
  to_member(member, [this, member] {
    members_[at(member)].machine->lost(Error(ErrorCode::kChannelClosed, "closed"));
  });
}

void JobSimulator::set_progress(int member, std::vector<Progress> progress) {
  members_[at(member)].progress = std::move(progress);
}

void JobSimulator::to_member(int member, std::function<void()> action) {
  Node& node = members_[at(member)];
  deliver(node.to_member, [this, &node, member, action = std::move(action)] {
    if (!node.running || !node.linked) return;
    if (node.stopped) {
      node.unread.push_back(action);
      return;
    }
    action();
    static_cast<void>(node.machine->take_roster());
    node.machine->tick(now_);
    carry_out(member);
  });
}

void JobSimulator::carry_out(int member) {
  Node& node = members_[at(member)];
  for (const SharedBytes& bytes : node.machine->take_sendings()) {
    if (!node.linked) continue;
    ++messages_;
    bytes_ += bytes->size();
    deliver(node.to_centre, [this, member, bytes] {
      if (centre_gone_) return;
      centre_.received(link_of(member), parser_.parse(bytes), now_);
      carry_out_centre();
    });
  }
  if (!node.machine->connected()) close_from_member(member);
  wake_member(member, node.machine->wake_at());
}

void JobSimulator::carry_out_centre() {
  centre_.tick(now_);
  for (const Centre::Sending& sending : centre_.take_sendings()) {
    const int member = member_of(sending.link);
    if (sending.bytes) {
      ++messages_;
      bytes_ += sending.bytes->size();
      to_member(member, [this, member, bytes = sending.bytes] {
        members_[at(member)].machine->received(parser_.parse(bytes), now_);
      });
    }
    if (sending.last) close_from_centre(member);
  }
  wake_centre(centre_.wake_at());
}

void JobSimulator::wake_member(int member, Time time) {
  if (time == Time::max()) return;
  auto& scheduled = member_wakes_.try_emplace(member, Time::max()).first->second;
  if (scheduled <= time) return;
  scheduled = time;
  schedule(time, [this, member, time] {
    Node& node = members_[at(member)];
    Time& next = member_wakes_[member];
    if (next == time) next = Time::max();
    if (!node.running || node.stopped) return;
    node.machine->tick(now_);
    carry_out(member);
  });
}

void JobSimulator::wake_centre(Time time) {
  if (time >= centre_wake_) return;
  centre_wake_ = time;
  schedule(time, [this, time] {
    if (centre_wake_ == time) centre_wake_ = Time::max();
    if (centre_gone_) return;
    carry_out_centre();
  });
}

bool JobSimulator::run_until(const std::function<bool()>& done, Clock::duration longest) {
  const Time limit = now_ + longest;
  while (!done()) {
    if (events_.empty() || events_.top().time > limit) {
      now_ = limit;
      return done();
    }
    const Event event = events_.top();
    events_.pop();
    now_ = std::max(now_, event.time);
    event.action();
  }
  return true;
}

void JobSimulator::run_for(Clock::duration duration) {
  run_until([] { return false; }, duration);
}

bool JobSimulator::all_formed() const {
  return std::ranges::all_of(
      members_, [](const Node& node) { return node.machine && node.machine->joined(); });
}

std::optional<Error> JobSimulator::common_failure() const {
  const Error* common = nullptr;
  for (const Node& node : members_) {
    if (!node.running || node.stopped) continue;
    if (!node.machine->failure()) return std::nullopt;
    if (common != nullptr && std::string(common->what()) != node.machine->failure()->what()) {
      return std::nullopt;
    }
    common = &*node.machine->failure();
  }
  return common != nullptr ? std::optional(*common) : std::nullopt;
}

}  // namespace lockstep::test
