#include "tests/support/survival_simulator.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/random.h"

namespace lockstep::test {
namespace {

using namespace std::chrono_literals;

constexpr int kLanes = 8;
constexpr std::uint64_t kScheduleStream = 2;
// More events than any schedule needs that does not run in circles.
constexpr std::uint64_t kMostEvents = 400'000;
constexpr int kMostAttempts = 3;

std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = a * 0x9e3779b97f4a7c15U + b + 0x7f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

MemberId make_member_id(std::uint64_t number, std::uint64_t kind) {
  MemberId id{};
  for (std::size_t i = 0; i < 8; ++i) id[i] = static_cast<std::byte>(mix(number, kind) >> (8 * i));
  return id;
}

Error lost_rank(ErrorCode code, const char* text, int rank) { return Error(code, text, rank); }

std::pair<int, int> pair_of(int a, int b) { return std::minmax(a, b); }

constexpr std::array<std::string_view, 4> kCalls{"level", "step", "part", "finish"};

}  // namespace

SurvivalSimulator::Options SurvivalSimulator::drawn(std::uint64_t seed) {
  std::uint64_t index = 0;
  const auto draw = [&](std::uint64_t below) { return random_u64(seed, 0, index++) % below; };
  Options options;
  options.seed = seed;
  options.members = 2 + static_cast<int>(draw(5));
  options.centre = static_cast<CentreKind>(draw(3));
  options.steps = 3 + static_cast<std::int64_t>(draw(12));
  options.faults = 1 + static_cast<int>(draw(4));
  options.faults_while_forming = draw(8) == 0;
  options.min_workers = draw(6) == 0 ? 2 : 1;
  options.most_workers = draw(4) == 0 ? static_cast<std::uint32_t>(options.members) : 0;
  if (draw(4) == 0) options.longest_delay = 200ms;
  options.compute = std::chrono::milliseconds(200 + draw(1500));
  return options;
}

SurvivalSimulator::SurvivalSimulator(const Options& options) : options_(options) {
  states_.push_back(mix(options.seed, 77));
  quiet_since_ = now_;
}
SurvivalSimulator::~SurvivalSimulator() = default;

std::uint64_t SurvivalSimulator::draw() {
  return random_u64(options_.seed, kScheduleStream, draws_++);
}

SurvivalSimulator::Duration SurvivalSimulator::draw_time(Duration least, Duration most) {
  const auto span = static_cast<std::uint64_t>((most - least).count());
  return least + Duration(span == 0 ? 0 : draw(span));
}

void SurvivalSimulator::broke(std::string what) {
  if (broken_.empty()) broken_ = std::move(what);
  if (options_.trace) fmt::print(stderr, "BROKEN: {}\n", broken_);
}

void SurvivalSimulator::tell(int process, std::string_view what) {
  if (!options_.trace) return;
  const auto since = now_ - Time{} - std::chrono::hours(1);
  fmt::print(stderr, "{:9.3f} process {}: {}\n", std::chrono::duration<double>(since).count(),
             process, what);
}

// The undisturbed run.
std::uint64_t SurvivalSimulator::state_after(std::int64_t step) {
  while (static_cast<std::int64_t>(states_.size()) <= step) {
    std::uint64_t sum = 0;
    const std::uint64_t next = states_.size() - 1;
    for (std::uint64_t lane = 0; lane < kLanes; ++lane) sum += mix(next, lane);
    states_.push_back(mix(states_.back(), sum));
  }
  return states_[static_cast<std::size_t>(step)];
}

// --- Events -------------------------------------------------------------------------------------

void SurvivalSimulator::schedule(Time time, Event event) {
  std::size_t index = events_.size();
  if (free_events_.empty()) {
    events_.push_back(std::move(event));
  } else {
    index = free_events_.back();
    free_events_.pop_back();
    events_[index] = std::move(event);
  }
  due_.push_back({std::max(time, now_), order_++, index});
  std::push_heap(due_.begin(), due_.end(), std::greater<>());
}

void SurvivalSimulator::transmit(Event event) {
  const Duration most = slow_ && chance(3) ? slowest() : options_.longest_delay;
  Time arrival = now_ + draw_time(most / 2, most);
  if (event.process == event.from) arrival = now_ + 20us;
  if (event.connection >= 0) {
    Time& last = connections_[static_cast<std::size_t>(event.connection)]
                     .last[static_cast<std::size_t>(event.end)];
    last = arrival = std::max(last, arrival);
  }
  schedule(arrival, std::move(event));
}

void SurvivalSimulator::happen(std::size_t index) {
  const Event& event = events_[index];
  if (event.from >= 0 && event.from != event.process && is_cut(event.from, event.process)) {
    held_.emplace_back(pair_of(event.from, event.process), index);
    return;
  }
  if (event.process >= 0 && at(event.process).stopped && event.kind != Kind::kRevive) {
    if (event.kind == Kind::kWake) {
      at(event.process).wake = Time::max();
      free_events_.push_back(index);
    } else {
      at(event.process).unread.push_back(index);
    }
    return;
  }
  Event taken = std::move(events_[index]);
  free_events_.push_back(index);
  const int number = taken.process;
  switch (taken.kind) {
    case Kind::kFault: return inject();
    case Kind::kHeal: {
      if (taken.from == -2) {
        slow_ = false;
        return;
      }
      const std::pair<int, int> ends(taken.connection, taken.end);
      const auto entry = cuts_.find(ends);
      if (entry == cuts_.end() || entry->second > now_) return;
      cuts_.erase(entry);
      tell(ends.first, fmt::format("reaches process {} again", ends.second));
      std::vector<std::size_t> released;
      std::erase_if(held_, [&](const auto& each) {
        if (each.first == ends) released.push_back(each.second);
        return each.first == ends;
      });
      for (const std::size_t each : released) happen(each);
      return;
    }
    case Kind::kRestart: {
      --restarts_pending_;
      if (number == hub_ && hub_ >= 0) {
        tell(hub_, "the coordinator is started anew");
        at(hub_).alive = true;
        at(hub_).centre = make_centre(hub_, std::nullopt);
        turn(hub_);
      } else if (counts_.finished == 0) {
        const int added = add_newcomer();
        if (added >= 0) at(added).attempts = static_cast<int>(taken.number);
      }
      return;
    }
    case Kind::kRevive: {
      Process& process = at(number);
      if (!process.alive || !process.stopped) return;
      process.stopped = false;
      if (!process.slept && process.roster && now_ - process.stopped_at >= options_.timeout) {
        process.slept = process.stopped_at;
        process.steps_since = 0;
      }
      tell(number, "wakes");
      std::deque<std::size_t> unread = std::exchange(process.unread, {});
      // What came over links is heard before anything is judged.
      std::deque<std::size_t> later;
      for (const std::size_t each : unread) {
        const Kind kind = events_[each].kind;
        if (kind == Kind::kBytes || kind == Kind::kClose || kind == Kind::kDial) {
          Event heard = std::move(events_[each]);
          free_events_.push_back(each);
          reach(process, number, heard);
        } else {
          later.push_back(each);
        }
      }
      turn(number);
      for (const std::size_t each : later) happen(each);
      return;
    }
    default: break;
  }
  Process& process = at(number);
  if (!process.alive) {
    if (taken.kind == Kind::kDial) {
      transmit({.kind = Kind::kRefuse,
                .process = taken.from,
                .from = number,
                .connection = taken.connection,
                .end = 0});
    }
    return;
  }
  reach(process, number, taken);
  // The control thread may hear more before it goes on.
  const bool is_heard = taken.kind == Kind::kBytes || taken.kind == Kind::kClose;
  if (is_heard && chance(8))
    return schedule(now_ + 300us, {.kind = Kind::kWake, .process = number});
  turn(number);
}

void SurvivalSimulator::reach(Process& process, int number, Event& event) {
  Connection* connection =
      event.connection < 0 ? nullptr : &connections_[static_cast<std::size_t>(event.connection)];
  const auto link = static_cast<Centre::LinkId>(event.connection);
  switch (event.kind) {
    case Kind::kDial: {
      connection->accepted = true;
      const Process& caller = at(event.from);
      transmit({.kind = Kind::kAccept,
                .process = event.from,
                .from = number,
                .connection = event.connection,
                .end = 0});
      if (process.centre) {
        const bool fresh = caller.roster.has_value();
        process.centre->opened(
            link, PeerIdentity{caller.card.id, fresh ? -1 : caller.card.rank, 0, 0}, now_);
        return;
      }
      if (process.member && process.member->paused()) return close_link(event.connection, 1);
      std::string address;
      if (process.member && process.link >= 0 && process.member->connected() &&
          !process.member->centre_left()) {
        const int other = connections_[static_cast<std::size_t>(process.link)].ends[1];
        address = at(other).card.mesh_address;
      }
      transmit({.kind = Kind::kBytes,
                .process = event.from,
                .from = number,
                .connection = event.connection,
                .end = 0,
                .bytes = shared_frame(MessageKind::kRedirect, encode_redirect(address))});
      close_link(event.connection, 1);
      return;
    }
    case Kind::kAccept:
      if (process.call != event.connection) return close_link(event.connection, 0);
      process.call = -1;
      ++process.epoch;
      if (process.phase == Phase::kCalling) {
        take_member(number, event.connection, member_options(process));
        process.phase = Phase::kJoining;
      } else {
        take_member(number, event.connection, member_options(process));
        process.phase = Phase::kAsking;
      }
      return;
    case Kind::kRefuse:
      if (process.call == event.connection) call_over(number, true);
      return;
    case Kind::kBytes:
      ++counts_.messages;
      if (event.end == 1) {
        if (process.centre && connection->open[1]) {
          process.centre->received(link, parser_.parse(event.bytes), now_);
        }
      } else if (process.link == event.connection) {
        process.member->received(parser_.parse(event.bytes), now_);
      }
      if (counts_.messages == fault_at_message_) {
        fault_at_message_ = UINT64_MAX;
        schedule(now_, {.kind = Kind::kFault});
      }
      return;
    case Kind::kClose:
      connection->open[static_cast<std::size_t>(event.end)] = false;
      if (event.end == 1) {
        if (process.centre) process.centre->closed(link, now_);
      } else if (process.link == event.connection) {
        process.member->lost(Error(ErrorCode::kChannelClosed, "closed"));
      }
      return;
    case Kind::kWake: process.wake = Time::max(); return;
    case Kind::kTrain: {
      if (event.number != process.epoch) return;
      switch (process.phase) {
        case Phase::kCalling: {
          if (process.call >= 0) return call_over(number, false);
          if (now_ >= process.deadline) return end_process(number, "found no job");
          return dial(number, process.first_address, process.deadline);
        }
        case Phase::kPreparing: return start_regroup(number, Standing::kPrepared);
        case Phase::kSearching: return search_on(number);
        case Phase::kSeeking: return call_over(number, false);
        case Phase::kEntering:
        case Phase::kReady:
        case Phase::kCollective:
          if (process.seen && !process.latch) {
            process.latch = process.seen;
            survive(number);
          }
          return;
        case Phase::kComputing: return enter_collective(number, Call::kStep);
        default: return;
      }
    }
    case Kind::kPatience:
      if (event.number != process.regroups) return;
      process.out_of_patience = true;
      return;
    case Kind::kComplete:
      if (process.generation == event.generation) complete(number, event.number);
      return;
    case Kind::kOverdue: {
      const bool waits =
          process.phase == Phase::kEntering || process.phase == Phase::kReady || process.inside;
      if (process.generation != event.generation || process.sequence != event.number || !waits ||
          process.seen || process.latch) {
        return;
      }
      if (process.phase == Phase::kReady && event.end == 0) return;  // that is for the centre
      const Generation& generation = *process.generation;
      int missing = -1;
      for (int rank = 0; rank < static_cast<int>(generation.processes.size()); ++rank) {
        const auto index = static_cast<std::size_t>(rank);
        const bool there = process.phase != Phase::kCollective
                               ? generation.entering[index]
                               : generation.collectives.at(process.sequence).entered[index];
        if (rank != process.rank && (!there || is_cut(number, generation.processes[index]))) {
          missing = rank;
          break;
        }
      }
      if (missing < 0 && process.phase != Phase::kReady) {  // it is about to end
        return schedule(now_ + options_.timeout / 5, std::move(event));
      }
      return fail(number, lost_rank(ErrorCode::kTimeout, "did not come in time", missing));
    }
    case Kind::kMeshClosed:
      if (process.generation == event.generation) {
        mesh_closed(number, static_cast<int>(event.number));
      }
      return;
    default: LOCKSTEP_CHECK(false);
  }
}

bool SurvivalSimulator::next_event() {
  if (due_.empty()) return false;
  std::pop_heap(due_.begin(), due_.end(), std::greater<>());
  const Due due = due_.back();
  due_.pop_back();
  now_ = due.time;
  ++counts_.events;
  happen(due.event);
  return true;
}

// --- Processes ----------------------------------------------------------------------------------

int SurvivalSimulator::add_process() {
  const int number = static_cast<int>(processes_.size());
  Process& process = processes_.emplace_back();
  Card& card = process.card;
  card.rank = -1;
  card.world_size = 0;
  card.version = "1.0";
  card.id = make_member_id(static_cast<std::uint64_t>(number), 1);
  card.pid = 1000 + number;
  card.host = {"node" + std::to_string(number / 8), "boot", 7};
  card.mesh_address = fmt::format("10.0.{}.{}:5000", number / 250, number % 250 + 1);
  card.fingerprint = "x86-64-v4";
  addresses_[card.mesh_address] = number;
  return number;
}

CentreCard SurvivalSimulator::centre_card(int number) const {
  const Process& process = processes_[static_cast<std::size_t>(number)];
  const bool is_hub = number == hub_;
  return {is_hub ? -1 : 0, is_hub ? "the launcher" : "", process.card.host.hostname,
          process.card.pid};
}

std::unique_ptr<Centre> SurvivalSimulator::make_centre(int number,
                                                       std::optional<Inheritance> inherited) {
  CentreOptions options{.card = centre_card(number),
                        .world_size = options_.members,
                        .version = "1.0",
                        .timeout = options_.timeout,
                        .patience = 10 * options_.timeout,
                        .member = {},
                        .make_id = [this] { return make_member_id(options_.seed, ++ids_ + 9); }};
  if (number != hub_) options.member = at(number).card.id;
  options.moves = options_.centre != CentreKind::kHome;
  if (!inherited) return std::make_unique<Centre>(std::move(options), now_);
  options.world_size = static_cast<int>(inherited->roster.roster.size());
  return std::make_unique<Centre>(std::move(options), std::move(*inherited), now_);
}

void SurvivalSimulator::start() {
  if (options_.centre != CentreKind::kRank) {
    hub_ = add_process();
    at(hub_).centre = make_centre(hub_, std::nullopt);
  }
  for (int i = 0; i < options_.members; ++i) start_founder(add_process());
}

void SurvivalSimulator::start_founder(int number) {
  Process& process = at(number);
  const int rank = number - (hub_ >= 0 ? 1 : 0);
  if (options_.centre != CentreKind::kHome) {
    process.card.rank = rank;
    process.card.world_size = options_.members;
  }
  process.founder = true;
  ++running_;
  process.deadline = now_ + options_.timeout;
  if (hub_ < 0 && rank == 0) {
    process.centre = make_centre(number, std::nullopt);
    take_member(number, -1, member_options(process));
    process.phase = Phase::kJoining;
  } else {
    process.first_address = at(hub_ >= 0 ? hub_ : 0).card.mesh_address;
    process.phase = Phase::kCalling;
    dial(number, process.first_address, process.deadline);
  }
  turn(number);
}

// Somebody starts a worker and points it at the launcher, or at any member that lives.
int SurvivalSimulator::add_newcomer() {
  std::vector<int> there = workers();
  if (hub_ >= 0 && at(hub_).alive && at(hub_).centre) there = {hub_};
  if (there.empty()) return -1;
  const int number = add_process();
  Process& process = at(number);
  process.first_address = at(there[draw(there.size())]).card.mesh_address;
  process.phase = Phase::kCalling;
  process.deadline = now_ + options_.timeout;
  ++running_;
  tell(number, "starts, a newcomer, and calls " + process.first_address);
  dial(number, process.first_address, process.deadline);
  turn(number);
  return number;
}

std::vector<int> SurvivalSimulator::workers() const {
  std::vector<int> found;
  for (int i = 0; i < static_cast<int>(processes_.size()); ++i) {
    const Process& process = processes_[static_cast<std::size_t>(i)];
    if (process.alive && i != hub_) found.push_back(i);
  }
  return found;
}

MemberOptions SurvivalSimulator::member_options(const Process& process) const {
  MemberOptions options{.card = process.card,
                        .patience = 10 * options_.timeout,
                        .timeout = options_.timeout,
                        .survives = true,
                        .min_workers = options_.min_workers};
  if (process.phase == Phase::kCalling || !process.roster) return options;
  options.last = process.roster;
  options.standing = process.standing;
  options.step = std::max<std::int64_t>(process.step, 0);
  options.description = process.description;
  options.paused = process.member->paused();
  return options;
}

void SurvivalSimulator::take_member(int number, int link, MemberOptions options) {
  Process& process = at(number);
  if (process.link >= 0) close_link(process.link, 0);
  if (link < 0) {  // the centre of this process
    link = static_cast<int>(connections_.size());
    connections_.push_back({.ends = {number, number}});
    process.centre->opened(static_cast<Centre::LinkId>(link), std::nullopt, now_);
  }
  process.link = link;
  process.news.reset();
  const auto progress = [&process]() -> std::vector<Progress> {
    if (process.sequence == 0 || !process.generation) return {};
    const auto& collective = process.generation->collectives.at(process.sequence);
    return {{0, process.sequence, process.inside,
             std::string(kCalls[static_cast<std::size_t>(collective.call)]), -1}};
  };
  process.member = std::make_unique<Member>(std::move(options), progress, now_);
}

void SurvivalSimulator::dial(int number, const std::string& address, Time until) {
  Process& process = at(number);
  if (options_.trace) tell(number, "calls " + address);
  const auto found = addresses_.find(address);
  const int connection = static_cast<int>(connections_.size());
  const int target = found == addresses_.end() ? number : found->second;
  connections_.push_back({.ends = {number, target}});
  process.call = connection;
  transmit({.kind = found == addresses_.end() ? Kind::kRefuse : Kind::kDial,
            .process = target,
            .from = number,
            .connection = connection,
            .end = found == addresses_.end() ? 0 : 1});
  schedule(until, {.kind = Kind::kTrain, .process = number, .number = ++process.epoch});
}

void SurvivalSimulator::call_over(int number, bool refused) {
  Process& process = at(number);
  process.call = -1;
  ++process.epoch;
  if (process.phase == Phase::kSeeking) {
    process.search->unreachable(now_);
    return search_on(number);
  }
  if (!refused || now_ >= process.deadline || process.redirected) {
    return end_process(number, "did not reach the job");
  }
  schedule(now_ + 50ms, {.kind = Kind::kTrain, .process = number, .number = process.epoch});
}

void SurvivalSimulator::close_link(int index, int end) {
  Connection& connection = connections_[static_cast<std::size_t>(index)];
  if (!std::exchange(connection.open[static_cast<std::size_t>(end)], false)) return;
  transmit({.kind = Kind::kClose,
            .process = connection.ends[static_cast<std::size_t>(1 - end)],
            .from = connection.ends[static_cast<std::size_t>(end)],
            .connection = index,
            .end = 1 - end});
}

void SurvivalSimulator::turn(int number) {
  Process& process = at(number);
  for (;;) {
    if (!process.alive) return;
    if (process.member) process.member->tick(now_);
    if (process.centre) process.centre->tick(now_);
    send_all(number);
    watch_events(number);
    if (number == hub_ || !advance(number)) break;
  }
  set_wake(number);
}

void SurvivalSimulator::send_all(int number) {
  Process& process = at(number);
  const auto send = [&](int link, int end, SharedBytes bytes) {
    const Connection& connection = connections_[static_cast<std::size_t>(link)];
    transmit({.kind = Kind::kBytes,
              .process = connection.ends[static_cast<std::size_t>(end)],
              .from = number,
              .connection = link,
              .end = end,
              .bytes = std::move(bytes)});
  };
  if (process.member) {
    for (SharedBytes& bytes : process.member->take_sendings()) {
      if (process.link >= 0) send(process.link, 1, std::move(bytes));
    }
    if (!process.member->connected() && process.link >= 0) {
      close_link(std::exchange(process.link, -1), 0);
    }
  }
  if (!process.centre) return;
  for (Centre::Sending& sending : process.centre->take_sendings()) {
    const int link = static_cast<int>(sending.link);
    if (!connections_[static_cast<std::size_t>(link)].open[1]) continue;
    if (sending.bytes) send(link, 0, std::move(sending.bytes));
    if (sending.last) close_link(link, 1);
  }
  if (process.centre->resigned()) {
    tell(number, "is the centre no more");
    process.centre.reset();
  }
}

void SurvivalSimulator::watch_events(int number) {
  Process& process = at(number);
  if (!process.centre) return;
  for (const MemberEvent& event : process.centre->take_events()) {
    const auto found = addresses_.find(event.card.mesh_address);
    if (found == addresses_.end()) continue;  // a member whom a centre that was started anew awaits
    const Process& whom = at(found->second);
    if (!event.departure || event.departure->kind == Departure::Kind::kLeft) continue;
    process.expelled.insert(found->second);
    // Who is lost to a slow network may find that the job has ended when it comes back.
    if (now_ <= slow_until_) at(found->second).touched = true;
    tell(number,
         fmt::format("as the centre loses process {}: {}", found->second, event.departure->why));
    // Who has another centre was not lost to it.
    const int other =
        whom.link < 0 ? number : connections_[static_cast<std::size_t>(whom.link)].ends[1];
    // A newcomer that reports that it cannot reach somebody is not let in. On a slow network what
    // others report of a worker may come long before its own word.
    if (whom.alive && !whom.touched && !process.touched && !process.heir_of_touched &&
        other == number && !whom.newcomer && now_ > slow_until_) {
      broke(fmt::format("process {} was expelled, though no fault touched it: {}", found->second,
                        event.departure->why));
    }
  }
  const auto& roster = process.centre->roster();
  if (roster && process.formed != roster->generation) {
    process.formed = roster->generation;
    std::vector<int> members;
    for (const Card& card : roster->roster) members.push_back(addresses_.at(card.mesh_address));
    if (was_replaced(number, members)) {
      broke(fmt::format("process {} stood still for the timeout, and formed a generation", number));
    }
  }
}

// Whether others have formed a generation without the process since it stood still. One that has
// any of `needed` does not count: the process can do nothing without them.
bool SurvivalSimulator::was_replaced(int number, const std::vector<int>& needed) {
  const Process& process = at(number);
  if (!process.slept || !process.roster || options_.centre == CentreKind::kHome) return false;
  return std::ranges::any_of(generations_, [&](const auto& entry) {
    const Generation& generation = *entry.second;
    const auto& in = generation.processes;
    return generation.formed > *process.slept && generation.centre != process.card.pid &&
           std::ranges::find(in, number) == in.end() &&
           std::ranges::find_first_of(in, needed) == in.end() &&
           std::ranges::any_of(process.roster->roster, [&](const Card& card) {
             const int other = addresses_.at(card.mesh_address);
             return !process.expelled.contains(other) && std::ranges::find(in, other) != in.end();
           });
  });
}

void SurvivalSimulator::set_wake(int number) {
  Process& process = at(number);
  Time wake = Time::max();
  if (process.member) wake = std::min(wake, process.member->wake_at());
  if (process.centre) wake = std::min(wake, process.centre->wake_at());
  if (wake >= process.wake) return;
  process.wake = wake;
  schedule(wake, {.kind = Kind::kWake, .process = number});
}

// What the training thread does with what has become known. Returns whether it did something.
bool SurvivalSimulator::advance(int number) {
  Process& process = at(number);
  if (!process.member) return false;
  Member& member = *process.member;
  if (auto roster = member.take_roster()) process.news = std::move(roster);
  if (!process.latch && member.ended() && !member.waiting()) process.latch = member.ended();
  if (!process.latch && member.failure()) process.latch = member.failure();
  const auto failure = [&] { return std::string(member.failure()->what()); };
  switch (process.phase) {
    case Phase::kJoining:
      if (process.news) {
        enter(number, *std::exchange(process.news, std::nullopt));
      } else if (member.failure()) {
        end_process(number, failure());
      } else if (member.welcomed()) {
        process.description = member.description();
        process.newcomer = true;
        process.phase = Phase::kPreparing;
        schedule(now_ + draw_time(1ms, options_.timeout / 2),
                 {.kind = Kind::kTrain, .process = number, .number = ++process.epoch});
      } else if (!member.connected()) {
        if (!member.redirect() || member.redirect()->empty()) {
          end_process(number, "nobody knows where the centre is");
        } else {
          process.redirected = true;
          process.phase = Phase::kCalling;
          dial(number, *member.redirect(), now_ + options_.timeout);
        }
      } else {
        return false;
      }
      return true;
    case Phase::kWaiting:
    case Phase::kAsking:
      if (process.news) {
        enter(number, *std::exchange(process.news, std::nullopt));
      } else if (member.failure()) {
        end_process(number, failure());
      } else if (!member.connected()) {
        if (process.phase == Phase::kWaiting) {
          find_centre(number);
        } else {
          if (member.redirect()) {
            process.search->redirected(*member.redirect(), now_);
          } else {
            process.search->unreachable(now_);
          }
          search_on(number);
        }
      } else if (process.out_of_patience) {
        end_process(number, "the next generation has not formed in time");
      } else {
        return false;
      }
      return true;
    case Phase::kEntering:
    case Phase::kCollective:
      if (!process.latch) return false;
      survive(number);
      return true;
    case Phase::kReady:
      if (process.latch) {
        survive(number);
      } else if (member.may_go()) {
        const Generation& generation = *process.generation;
        for (std::size_t rank = 0; rank < generation.ready.size(); ++rank) {
          if (!generation.ready[rank] && at(generation.processes[rank]).alive) {
            broke(fmt::format("process {} may go before rank {} of generation {} is ready", number,
                              rank, generation.name.number));
          }
        }
        process.newcomer = false;
        enter_collective(number, Call::kLevel);
      } else {
        return false;
      }
      return true;
    default: return false;
  }
}

// --- Regrouping ---------------------------------------------------------------------------------

void SurvivalSimulator::start_regroup(int number, Standing standing) {
  Process& process = at(number);
  leave_generation(number, false);
  process.latch.reset();
  process.seen.reset();
  process.news.reset();
  process.standing = standing;
  process.out_of_patience = false;
  process.phase = Phase::kWaiting;
  ++process.epoch;
  schedule(now_ + 10 * options_.timeout + 1s,
           {.kind = Kind::kPatience, .process = number, .number = ++process.regroups});
  tell(number,
       fmt::format("regroups (standing {}) at step {}", static_cast<int>(standing), process.step));
  process.member->join_again(standing, std::max<std::int64_t>(process.step, 0), now_);
}

void SurvivalSimulator::find_centre(int number) {
  Process& process = at(number);
  if (!process.roster) return end_process(number, "the centre of the job is gone");
  const bool is_home = options_.centre == CentreKind::kHome;
  process.search.emplace(*process.roster, process.rank, is_home ? at(hub_).card.mesh_address : "",
                         now_);
  tell(number, "looks for the centre");
  if (process.member->redirect()) process.search->redirected(*process.member->redirect(), now_);
  search_on(number);
}

void SurvivalSimulator::search_on(int number) {
  using Kinds = Succession::Action::Kind;
  Process& process = at(number);
  const bool may_serve = !process.member->paused() && options_.centre != CentreKind::kHome;
  Succession::Action action = process.search->next(may_serve, now_);
  switch (action.kind) {
    case Kinds::kGiveUp: return end_process(number, "nobody has become the centre");
    case Kinds::kWait:
      process.phase = Phase::kSearching;
      schedule(action.until, {.kind = Kind::kTrain, .process = number, .number = ++process.epoch});
      return;
    case Kinds::kServe:
      tell(number, "is the centre now");
      if (was_replaced(number, {})) {
        broke(fmt::format("process {} stood still for the timeout, and became the centre", number));
      }
      process.heir_of_touched = centre_touched_;
      process.centre = make_centre(
          number, Inheritance{*process.roster, process.description.value_or(Description()),
                              std::move(action.lost)});
      process.phase = Phase::kWaiting;
      return take_member(number, -1, member_options(process));
    case Kinds::kCall:
      process.phase = Phase::kSeeking;
      return dial(number, action.address, action.until);
  }
}

void SurvivalSimulator::enter(int number, RosterMessage roster) {
  Process& process = at(number);
  auto& generation = generations_[tag_of(roster.generation)];
  std::vector<int> numbers;
  for (const Card& card : roster.roster) numbers.push_back(addresses_.at(card.mesh_address));
  if (!generation) {
    ++counts_.generations;
    generation = std::make_shared<Generation>();
    generation->name = roster.generation;
    generation->formed = now_;
    generation->centre = roster.centre.pid;
    generation->processes = numbers;
    generation->entering.resize(numbers.size());
    generation->gone.resize(numbers.size());
    generation->ready.resize(numbers.size());
    std::vector<int> sorted = numbers;
    std::ranges::sort(sorted);
    if (std::ranges::adjacent_find(sorted) != sorted.end()) broke("a process has two ranks");
    if (!formed_) {
      formed_ = true;
      if (options_.faults > 0 && !options_.faults_while_forming) start_faults();
    }
  }
  if (generation->processes != numbers || generation->name != roster.generation) {
    broke(fmt::format("process {} has another roster of generation {} than others", number,
                      roster.generation.number));
  }
  const auto own = std::ranges::find(numbers, number);
  if (own == numbers.end()) return broke("a roster without its reader");
  process.rank = static_cast<int>(own - numbers.begin());
  process.roster = std::move(roster);
  process.generation = generation;
  process.sequence = 0;
  process.inside = false;
  process.closed.clear();
  process.torn = 0;
  process.phase = Phase::kEntering;
  ++process.epoch;
  if (process.roster->centre.pid != process.card.pid) process.slept.reset();
  tell(number, fmt::format("rank {} of {} in generation {}", process.rank, numbers.size(),
                           process.roster->generation.number));
  generation->entering[static_cast<std::size_t>(process.rank)] = true;
  for (std::size_t rank = 0; rank < numbers.size(); ++rank) {
    if (!generation->gone[rank] && at(numbers[rank]).alive) continue;
    transmit({.kind = Kind::kMeshClosed,
              .process = number,
              .from = numbers[rank],
              .number = rank,
              .generation = generation});
  }
  schedule(now_ + options_.timeout,
           {.kind = Kind::kOverdue, .process = number, .number = 0, .generation = generation});
  schedule(
      now_ + 10 * options_.timeout,
      {.kind = Kind::kOverdue, .process = number, .end = 1, .number = 0, .generation = generation});
  if (std::ranges::count(generation->entering, false) > 0) return;
  for (const int other : numbers) {
    if (!at(other).alive || at(other).generation != generation) continue;
    schedule(now_ + draw_time(options_.longest_delay, 3 * options_.longest_delay),
             {.kind = Kind::kComplete, .process = other, .number = 0, .generation = generation});
  }
}

// The process closes its connections of the generation. Who is torn out may leave things unsent.
void SurvivalSimulator::leave_generation(int number, bool torn) {
  Process& process = at(number);
  if (!process.generation) return;
  const auto generation = std::exchange(process.generation, nullptr);
  generation->gone[static_cast<std::size_t>(process.rank)] = true;
  process.inside = false;
  for (const int other : generation->processes) {
    if (other == number || !at(other).alive || at(other).generation != generation) continue;
    if (torn && chance(2)) at(other).torn = at(other).sequence;
    transmit({.kind = Kind::kMeshClosed,
              .process = other,
              .from = number,
              .number = static_cast<std::uint64_t>(process.rank),
              .generation = generation});
  }
}

void SurvivalSimulator::mesh_closed(int number, int rank) {
  Process& process = at(number);
  process.closed.insert(rank);
  if (process.seen || process.latch) return;
  if (process.phase == Phase::kEntering) {
    return fail(number, lost_rank(ErrorCode::kNoConnection, "refused", rank));
  }
  if (!process.inside) return;
  const Collective& collective = process.generation->collectives.at(process.sequence);
  if (!collective.entered[static_cast<std::size_t>(rank)] || process.torn == process.sequence) {
    fail(number, lost_rank(ErrorCode::kChannelClosed, "closed its connection", rank));
  }
}

// The rank tells the centre what it saw, and waits for its word.
void SurvivalSimulator::fail(int number, const Error& seen) {
  Process& process = at(number);
  if (process.latch) return survive(number);
  tell(number, fmt::format("sees: {} (rank {})", seen.what(), seen.rank()));
  if (process.member->connected() && !process.member->centre_left()) {
    process.member->report(seen);
    process.seen = seen;
    schedule(now_ + std::min<Duration>(options_.timeout, 1s),
             {.kind = Kind::kTrain, .process = number, .number = ++process.epoch});
    return;
  }
  process.latch = seen;
  survive(number);
}

void SurvivalSimulator::survive(int number) {
  Process& process = at(number);
  const Error cause = *process.latch;
  if (process.member->failure()) return end_process(number, process.member->failure()->what());
  const bool enters = process.phase == Phase::kEntering || process.phase == Phase::kReady;
  if (enters && process.newcomer && cause.rank() == process.rank) {
    return end_process(number, "a newcomer of no use");
  }
  const bool parts = process.phase == Phase::kCollective &&
                     process.generation->collectives.at(process.sequence).call == Call::kPart;
  if (parts && process.leaving) return finish(number, "left");
  const Standing broken = process.newcomer ? Standing::kEnters : Standing::kBroken;
  start_regroup(number, parts ? process.standing : broken);
}

void SurvivalSimulator::end_process(int number, std::string_view why) {
  tell(number, fmt::format("ends: {}", why));
  Process& process = at(number);
  const bool retries = !process.founder && process.attempts < kMostAttempts;
  const int attempts = process.attempts;
  if (!process.touched && formed_ && !disturbed_forming_ && process.founder &&
      options_.min_workers == 1 && !(centre_touched_ && counts_.finished > 0)) {
    broke(fmt::format("process {} ended, though no fault touched it: {}", number, why));
  }
  finish(number, "failed");
  if (retries) replace_later(attempts + 1);
}

// The process ends by itself: it says goodbye.
void SurvivalSimulator::finish(int number, std::string_view how) {
  Process& process = at(number);
  tell(number, how);
  if (process.member) process.member->leave();
  if (process.centre) process.centre->leave({}, now_);
  send_all(number);
  die(number, false);
}

void SurvivalSimulator::die(int number, bool torn) {
  Process& process = at(number);
  if (!process.alive) return;
  leave_generation(number, torn);
  process.alive = false;
  process.stopped = false;
  process.unread.clear();
  process.phase = Phase::kEnded;
  process.call = -1;
  process.link = -1;
  process.member.reset();
  process.centre.reset();
  process.wake = Time::max();
  for (int i = 0; i < static_cast<int>(connections_.size()); ++i) {
    for (const int end : {0, 1}) {
      if (connections_[static_cast<std::size_t>(i)].ends[static_cast<std::size_t>(end)] == number) {
        close_link(i, end);
      }
    }
  }
  if (number != hub_) --running_;
  quiet_since_ = std::max(quiet_since_, now_);
}

// --- Training -----------------------------------------------------------------------------------

void SurvivalSimulator::begin_step(int number) {
  Process& process = at(number);
  if (process.step == options_.steps) return enter_collective(number, Call::kFinish);
  if (process.roster->too_few) {  // it saves, and waits for others
    process.standing = Standing::kWaits;
    return enter_collective(number, Call::kPart);
  }
  process.phase = Phase::kComputing;
  const Duration longest = chance(8) ? 4 * options_.compute : options_.compute;
  schedule(now_ + draw_time(longest / 2, longest),
           {.kind = Kind::kTrain, .process = number, .number = ++process.epoch});
}

void SurvivalSimulator::enter_collective(int number, Call call) {
  Process& process = at(number);
  if (process.latch) {
    process.phase = Phase::kCollective;
    if (process.sequence == 0 || call != Call::kPart)
      return start_regroup(number, Standing::kBroken);
    return start_regroup(number, process.standing);
  }
  const auto size = process.generation->processes.size();
  const std::uint64_t sequence = ++process.sequence;
  Collective& collective = process.generation->collectives[sequence];
  if (collective.entered.empty()) {
    collective.entered.resize(size);
    collective.call = call;
    collective.step = call == Call::kLevel ? 0 : process.step;
  }
  if (collective.call != call || (call != Call::kLevel && collective.step != process.step)) {
    broke(fmt::format("process {} calls {} at step {}, others call {} at step {}", number,
                      kCalls[static_cast<std::size_t>(call)], process.step,
                      kCalls[static_cast<std::size_t>(collective.call)], collective.step));
  }
  process.inside = true;
  process.phase = Phase::kCollective;
  collective.entered[static_cast<std::size_t>(process.rank)] = true;
  ++collective.count;
  if (process.step > collective.best_step) {
    collective.best_step = process.step;
    collective.best_state = process.state;
  }
  if (call == Call::kStep) {
    const auto begin = static_cast<std::size_t>(process.rank) * kLanes / size;
    const auto end = static_cast<std::size_t>(process.rank + 1) * kLanes / size;
    for (std::size_t lane = begin; lane < end; ++lane) {
      collective.sum += mix(static_cast<std::uint64_t>(process.step), lane);
    }
    collective.regroup = collective.regroup || process.member->wish().regroup;
    if (process.wants_to_leave) collective.leavers.insert(process.rank);
  }
  for (const int rank : process.closed) {
    if (collective.entered[static_cast<std::size_t>(rank)]) continue;
    return fail(number, lost_rank(ErrorCode::kChannelClosed, "closed its connection", rank));
  }
  schedule(now_ + options_.timeout, {.kind = Kind::kOverdue,
                                     .process = number,
                                     .number = sequence,
                                     .generation = process.generation});
  if (collective.count < static_cast<int>(size)) return;
  for (const int other : process.generation->processes) {
    if (!at(other).alive || at(other).generation != process.generation) continue;
    schedule(now_ + draw_time(options_.longest_delay / 2, 2 * options_.longest_delay),
             {.kind = Kind::kComplete,
              .process = other,
              .number = sequence,
              .generation = process.generation});
  }
}

void SurvivalSimulator::complete(int number, std::uint64_t sequence) {
  Process& process = at(number);
  const bool enters = sequence == 0 && process.phase == Phase::kEntering;
  if (process.sequence != sequence || process.seen || process.latch ||
      !(enters || process.inside)) {
    return;
  }
  if (process.torn == sequence && sequence > 0) return;
  for (const int other : process.generation->processes) {
    if (other == number || !is_cut(number, other)) continue;
    return schedule(now_ + options_.timeout / 10, {.kind = Kind::kComplete,
                                                   .process = number,
                                                   .number = sequence,
                                                   .generation = process.generation});
  }
  if (enters) {
    if (!process.description) {
      process.description = Description{options_.most_workers, {std::byte{1}}};
      process.member->describe(*process.description);
    }
    if (process.roster->generation.number == 1) return enter_collective(number, Call::kLevel);
    process.generation->ready[static_cast<std::size_t>(process.rank)] = true;
    process.phase = Phase::kReady;
    return process.member->ready();
  }
  process.inside = false;
  const Collective& collective = process.generation->collectives.at(sequence);
  switch (collective.call) {
    case Call::kLevel:
      process.step = std::max<std::int64_t>(collective.best_step, 0);
      process.state = collective.best_step < 0 ? states_.front() : collective.best_state;
      return begin_step(number);
    case Call::kStep: {
      commit(number, collective.sum);
      process.leaving = collective.leavers.contains(process.rank);
      if (collective.leavers.size() == collective.entered.size()) {
        process.leaving = false;  // all ask: that would be a stop
      }
      if (!collective.regroup && collective.leavers.empty()) return begin_step(number);
      process.standing = Standing::kBoundary;
      return enter_collective(number, Call::kPart);
    }
    case Call::kPart:
      if (process.leaving) return finish(number, "left");
      return start_regroup(number, process.standing);
    case Call::kFinish: ++counts_.finished; return finish(number, "finished");
  }
}

void SurvivalSimulator::commit(int number, std::uint64_t sum) {
  Process& process = at(number);
  process.state = mix(process.state, sum);
  ++process.step;
  ++counts_.commits;
  // Two steps may be made of what came while it stood still; a third shows that the others are
  // there.
  if (++process.steps_since == 3 && process.generation->processes.size() > 1) process.slept.reset();
  quiet_since_ = std::max(quiet_since_, now_);
  if (options_.trace) tell(number, fmt::format("commits step {}", process.step));
  if (process.state != state_after(process.step)) {
    broke(fmt::format("process {} commits step {} with a wrong state", number, process.step));
  }
}

// --- Faults -------------------------------------------------------------------------------------

bool SurvivalSimulator::is_cut(int a, int b) const {
  return !cuts_.empty() && cuts_.contains(pair_of(a, b));
}

void SurvivalSimulator::touch(int number) {
  at(number).touched = true;
  centre_touched_ = centre_touched_ || at(number).centre;
}

void SurvivalSimulator::cut(int a, int b, Duration duration) {
  if (a == b) return;
  Time& until = cuts_.try_emplace(pair_of(a, b), now_).first->second;
  until = std::max(until, now_ + duration);
  for (const int each : {a, b}) touch(each);
  last_fault_end_ = std::max(last_fault_end_, until);
  tell(a, fmt::format("is cut off from process {}", b));
  const auto [first, second] = pair_of(a, b);
  schedule(until, {.kind = Kind::kHeal, .connection = first, .end = second});
}

void SurvivalSimulator::stop(int number, Duration duration) {
  Process& process = at(number);
  if (!process.alive || process.stopped) return;
  watch_events(number);  // what it did until now
  tell(number, "is stopped");
  process.stopped = true;
  touch(number);
  process.stopped_at = now_;
  last_fault_end_ = std::max(last_fault_end_, now_ + duration);
  schedule(now_ + duration, {.kind = Kind::kRevive, .process = number});
}

void SurvivalSimulator::kill(int number) {
  if (!at(number).alive) return;
  tell(number, "is killed");
  touch(number);
  die(number, true);
}

void SurvivalSimulator::replace_later(int attempts) {
  ++restarts_pending_;
  const Duration delay = draw_time(10ms, 2 * options_.timeout);
  last_fault_end_ = std::max(last_fault_end_, now_ + delay);
  schedule(now_ + delay, {.kind = Kind::kRestart, .number = static_cast<std::uint64_t>(attempts)});
}

void SurvivalSimulator::start_faults() {
  faults_left_ = options_.faults;
  if (options_.faults_while_forming) disturbed_forming_ = true;
  next_fault();
}

// Half of the faults come at a message, so that they meet every message of a regroup.
void SurvivalSimulator::next_fault() {
  if (faults_left_ == 0) return;
  const bool first = faults_left_ == options_.faults;
  if (!first && chance(2)) {
    fault_at_message_ = counts_.messages + 1 + draw(12U * static_cast<unsigned>(options_.members));
    last_fault_end_ = std::max(last_fault_end_, now_);
  } else {
    const Duration most = first ? options_.steps * options_.compute : 2 * options_.timeout;
    schedule(now_ + draw_time(0s, most), {.kind = Kind::kFault});
  }
}

void SurvivalSimulator::inject() {
  --faults_left_;
  last_fault_end_ = std::max(last_fault_end_, now_);
  const Duration timeout = options_.timeout;
  std::vector<int> targets = workers();
  if (targets.empty()) return next_fault();
  const bool hub_lives = hub_ >= 0 && at(hub_).alive;
  if (hub_lives && chance(4)) targets = {hub_};
  const int target = targets[draw(targets.size())];
  const bool is_hub = target == hub_;
  switch (draw(10)) {
    case 0:
    case 1:
    case 2:
      kill(target);
      if (is_hub) {
        if (options_.centre == CentreKind::kHome) {
          ++restarts_pending_;
          const Duration delay = draw_time(10ms, 2 * timeout);
          last_fault_end_ = std::max(last_fault_end_, now_ + delay);
          schedule(now_ + delay, {.kind = Kind::kRestart, .process = hub_});
        }
      } else if (chance(2)) {
        replace_later(0);
      }
      break;
    case 3:
    case 4: stop(target, draw_time(timeout / 10, 3 * timeout)); break;
    case 5: {
      std::vector<int> others = workers();
      if (hub_lives) others.push_back(hub_);
      cut(target, others[draw(others.size())], draw_time(timeout / 10, 4 * timeout));
      break;
    }
    case 6: {  // two halves
      std::vector<int> all = workers();
      if (hub_lives) all.push_back(hub_);
      const std::uint64_t side = draw();
      const Duration duration = draw_time(timeout / 10, 4 * timeout);
      for (std::size_t i = 0; i < all.size(); ++i) {
        for (std::size_t j = i + 1; j < all.size(); ++j) {
          if (((side >> (i % 64)) & 1) != ((side >> (j % 64)) & 1)) cut(all[i], all[j], duration);
        }
      }
      break;
    }
    case 7:
      if (is_hub) break;
      at(target).wants_to_leave = true;
      touch(target);
      tell(target, "wants to leave");
      break;
    case 8:
      if (chance(2)) {
        slow_ = true;
        const Duration duration = draw_time(timeout / 10, 2 * timeout);
        slow_until_ = std::max(slow_until_, now_ + duration + slowest());
        last_fault_end_ = std::max(last_fault_end_, now_ + duration);
        schedule(now_ + duration, {.kind = Kind::kHeal, .from = -2});
      } else if (!is_hub && at(target).generation && !at(target).stopped) {  // fails by itself
        touch(target);
        tell(target, "gives up");
        at(target).member->report(Error(ErrorCode::kPeerLost, "out of memory", at(target).rank));
        finish(target, "gave up");
        replace_later(0);
      }
      break;
    default: add_newcomer(); break;
  }
  next_fault();
}

// --- The run ------------------------------------------------------------------------------------

std::string SurvivalSimulator::run() {
  start();
  if (options_.faults_while_forming) start_faults();
  while (broken_.empty()) {
    if (running_ == 0 && restarts_pending_ == 0) break;
    if (!next_event()) {
      broke("nothing happens any more, but workers live");
      break;
    }
    if (counts_.events > kMostEvents) {
      broke("the job runs in circles");
      break;
    }
    if (fault_at_message_ != UINT64_MAX || faults_left_ > 0) {
      if (now_ > last_fault_end_ + 3 * options_.timeout) {  // the message does not come
        if (fault_at_message_ != UINT64_MAX) {
          fault_at_message_ = UINT64_MAX;
          schedule(now_, {.kind = Kind::kFault});
        }
      }
    }
    const Time quiet = std::max(quiet_since_, last_fault_end_);
    if (now_ - quiet > kBound * options_.timeout) {
      broke(fmt::format("no step has committed for {} timeouts", kBound));
    }
  }
  if (broken_.empty() && !disturbed_forming_ && options_.min_workers == 1 &&
      counts_.finished == 0) {
    const bool any = std::ranges::any_of(
        processes_, [](const Process& process) { return process.founder && !process.touched; });
    if (any) broke("a founder that no fault touched did not finish the run");
  }
  return broken_;
}

}  // namespace lockstep::test
