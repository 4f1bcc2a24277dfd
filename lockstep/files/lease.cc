#include "lockstep/files/lease.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <ctime>
#include <fstream>
#include <sstream>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/host.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/files/json.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

constexpr const char* kLeaseFormat = "lockstep lease";
constexpr std::size_t kLongestLease = 4096;
// How long a replacement of a lease whose holder has ended may be under way on this host.
constexpr auto kLocalSettle = 100ms;
// How soon a file that could not be read is read again.
constexpr auto kLookAgain = 100ms;

// Steady, and goes on while the machine sleeps.
LeaseRule::Time boot_time() {
  timespec now{};
  ::clock_gettime(CLOCK_BOOTTIME, &now);
  return LeaseRule::Time(std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec));
}

struct ProcessState {
  char state = '?';
  std::uint64_t began = 0;  // in ticks since the boot
};
// Nothing where the system does not tell.
std::optional<ProcessState> process_state(std::int64_t process) {
  std::ifstream file(fmt::format("/proc/{}/stat", process));
  std::string text;
  if (!std::getline(file, text)) return std::nullopt;
  // The name, in parentheses, may hold anything.
  std::istringstream words(text.substr(std::min(text.size(), text.rfind(')') + 1)));
  ProcessState found;
  words >> found.state;
  constexpr int kBetween = 18;  // fields between the state and the start
  std::string skipped;
  for (int i = 0; i < kBetween; ++i) words >> skipped;
  words >> found.began;
  if (!words) return std::nullopt;
  return found;
}

// Whether the holder's process has ended; nothing where that cannot be known.
std::optional<bool> has_ended(const LeaseRecord& holder) {
  if (holder.process <= 0 || holder.process_space != own_process_space()) return std::nullopt;
  if (::kill(static_cast<pid_t>(holder.process), 0) != 0 && errno == ESRCH) return true;
  const auto found = process_state(holder.process);
  if (!found) return std::nullopt;
  return found->state == 'Z' || found->state == 'X' || found->began != holder.process_began;
}

}  // namespace

std::string to_json(const LeaseRecord& record) {
  const Json json = {{"format", kLeaseFormat},
                     {"job", record.job},
                     {"generation", record.generation},
                     {"member", record.member},
                     {"host", record.host},
                     {"process_space", record.process_space},
                     {"process", record.process},
                     {"process_began", record.process_began},
                     {"term_ms", record.term.count()},
                     // The same length always: it is written over the one before.
                     {"counter", fmt::format("{:020}", record.counter)}};
  return to_text(json) + "\n";
}

std::optional<LeaseRecord> parse_lease(std::string_view text) {
  const Json json = parse_json(text);
  JsonReader reader(json);
  LeaseRecord record;
  if (reader.text("format") != kLeaseFormat) reader.fail("another format");
  record.job = reader.text("job");
  record.generation = reader.text("generation");
  record.member = reader.text("member");
  record.host = reader.text("host");
  record.process_space = reader.text("process_space");
  record.process = static_cast<std::int64_t>(reader.whole("process", INT32_MAX));
  record.process_began = reader.whole("process_began");
  constexpr std::uint64_t kLongestTerm = 1'000'000'000'000;
  record.term = std::chrono::milliseconds(reader.whole("term_ms", kLongestTerm));
  const std::string counter = reader.text("counter");
  const bool digits = !counter.empty() && counter.size() <= 20 &&
                      counter.find_first_not_of("0123456789") == std::string::npos;
  if (reader.problem() || !digits) return std::nullopt;
  record.counter = std::strtoull(counter.c_str(), nullptr, 10);
  return record;
}

LeaseRule::LeaseRule(std::string member, Duration term) : member_(std::move(member)), term_(term) {}

bool LeaseRule::is_own(const Look& look) const {
  return look.record && look.record->member == member_;
}

bool LeaseRule::held(const Look& look, Time now) const {
  return state_ == State::kHeld && now - renewed_ < term_ && is_own(look);
}

void LeaseRule::begin_waiting(const Look& look, Time now) {
  state_ = State::kWaiting;
  watched_ = look.text;
  silence_ = {};
  looked_ = now;
}

LeaseRule::Act LeaseRule::next(const Look& look, Time now) {
  // One read that fails tells nothing: who has the lease looks again, until its term is over.
  if (look.unreadable && state_ != State::kWaiting && now - renewed_ < term_) return Act::kNothing;
  if (state_ == State::kSettling && now >= settled_at_) {
    if (is_own(look) && now - renewed_ < term_) {
      state_ = State::kHeld;
      had_it_ = true;
    } else {
      begin_waiting(look, now);
    }
  }
  switch (state_) {
    case State::kSettling: return Act::kNothing;
    case State::kWaiting: return wait(look, now);
    case State::kHeld: break;
  }
  // What stands there after a whole term may be about to be taken, even if it is still our own.
  if (now - renewed_ >= term_ || (look.there && !is_own(look))) {
    begin_waiting(look, now);
    return Act::kNothing;
  }
  if (!look.there) return Act::kCreate;
  return now - renewed_ >= term_ / 5 ? Act::kRenew : Act::kNothing;
}

LeaseRule::Act LeaseRule::wait(const Look& look, Time now) {
  // Who has had it comes back to its own file only: others may have had theirs, and be done.
  if (had_it_ && !is_own(look)) return Act::kNothing;
  if (!look.there) return Act::kCreate;
  const auto& record = look.record;
  if (!watched_ || *watched_ != look.text) {
    const auto before = watched_ ? parse_lease(*watched_) : std::nullopt;
    if (before && record && before->member == record->member && before->counter < record->counter) {
      seen_renewed_ = true;
    }
    begin_waiting(look, now);
  } else {
    // A pause of our own, in which we have seen nothing, counts as one look.
    silence_ += std::min(now - looked_, 2 * look_interval());
    looked_ = now;
  }
  if (look.ended) {
    settle_ = std::min<Duration>(kLocalSettle, term_ / 5);
    return Act::kReplace;
  }
  // A holder with a longer term renews less often.
  const Duration term = record ? std::max<Duration>(term_, record->term) : term_;
  if (silence_ < term) return Act::kNothing;
  settle_ = term_ / 5;
  return Act::kReplace;
}

void LeaseRule::done(Act act, bool succeeded, Time began) {
  if (!succeeded) return;
  switch (act) {
    case Act::kNothing: return;
    case Act::kRenew: renewed_ = began; return;
    case Act::kCreate:
      state_ = State::kHeld;
      had_it_ = true;
      renewed_ = began;
      return;
    case Act::kReplace:
      state_ = State::kSettling;
      renewed_ = began;
      settled_at_ = began + settle_;
      return;
  }
}

Lease::Lease(Options options)
    : options_([&] {
        if (!options.clock) options.clock = boot_time;
        return std::move(options);
      }()),
      path_(options_.folder + "/" + kLeaseFile),
      rule_(options_.member, options_.term) {
  own_.job = options_.job;
  own_.generation = options_.generation;
  own_.member = options_.member;
  own_.host = this_host().hostname;
  own_.process_space = own_process_space();
  own_.process = ::getpid();
  if (const auto self = process_state(own_.process)) own_.process_began = self->began;
  own_.term = std::chrono::ceil<std::chrono::milliseconds>(options_.term);
  if (!options_.thread) return;
  turn();
  thread_.start(
      "the thread of the lease",
      [this] {
        std::unique_lock lock(mutex_);
        while (!ends_) {
          const auto pause = std::min<LeaseRule::Duration>(rule_.look_interval(), 1s);
          changed_.wait_for(lock, rule_.settling() ? pause / 4 : pause, [this] { return ends_; });
          if (ends_) return;
          lock.unlock();
          turn();
          lock.lock();
        }
      },
      [](const Error& error) {
        log(LogLevel::kError, "the lease is no longer renewed: {}", error.what());
      });
}

Lease::~Lease() {
  give_back();
  thread_.join();
}

void Lease::give_back() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(ends_, true)) return;
  holding_ = false;
  changed_.notify_all();
  try {
    // While its own file stands there nobody else holds anything. If somebody takes it between the
    // two, that holder finds no file and makes it again.
    if (const LeaseRule::Look found = read();
        found.record && found.record->member == options_.member) {
      options_.storage->open_folder(options_.folder)->remove(kLeaseFile);
    }
  } catch (const Error&) {  // others will see that nobody renews it
  }
}

LeaseRule::Look Lease::read() const {
  LeaseRule::Look look;
  try {
    // On network file systems, opening the folder asks the server which file the name means now.
    const auto folder = options_.storage->find_folder(options_.folder);
    const auto file = folder ? folder->find(kLeaseFile) : nullptr;
    if (!file) return look;
    look.there = true;
    look.text = file->text(kLongestLease);
  } catch (const Error&) {
    look.there = look.unreadable = true;  // it may be anybody's
    return look;
  }
  look.record = parse_lease(look.text);
  const auto ended = look.record ? has_ended(*look.record) : std::nullopt;
  look.ended = ended == true;
  look.lives = ended == false;
  return look;
}

// Nothing here is synced: after a crash of the machine nobody holds anything.
bool Lease::write_lease(LeaseRule::Act act, const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  // Into our own file: if another one has taken its place meanwhile, this changes nothing.
  if (act == LeaseRule::Act::kRenew) {
    file_->write_at(0, bytes);
    return true;
  }
  const auto folder = options_.storage->open_folder(options_.folder);
  const std::string mine = fmt::format("{}.{}.tmp", kLeaseFile, options_.member);
  folder->remove(mine);
  auto file = folder->open(mine, Folder::Mode::kCreate);
  file->write_at(0, bytes);
  if (act == LeaseRule::Act::kReplace) {
    folder->rename(mine, kLeaseFile);
  } else {
    const bool made = folder->link(mine, kLeaseFile);
    folder->remove(mine);
    if (!made) return false;
  }
  file_ = std::move(file);
  return true;
}

bool Lease::carry_out(LeaseRule::Act act) {
  LeaseRecord next = own_;
  ++next.counter;
  try {
    if (!write_lease(act, to_json(next))) return false;
    file_->send();
  } catch (const Error& error) {
    problem_ = error.message();
    return false;
  }
  own_ = next;
  problem_.clear();
  return true;
}

bool Lease::look() {
  if (ends_) return false;
  const LeaseRule::Time now = options_.clock();
  const LeaseRule::Look look = read();
  const LeaseRule::Act act = rule_.next(look, now);
  if (act != LeaseRule::Act::kNothing) rule_.done(act, carry_out(act), now);
  const LeaseRule::Look found = act == LeaseRule::Act::kCreate ? read() : look;
  const bool holds = rule_.held(found, now);
  lost_ = rule_.lost(found);
  other_lives_ = look.lives && !holds && look.record->member != options_.member;
  if (std::exchange(holding_, holds) != holds || lost_ || rule_.seen_renewed()) {
    changed_.notify_all();
  }
  return holds;
}

void Lease::turn() {
  const std::lock_guard lock(mutex_);
  look();
}

void Lease::take(Deadline deadline, std::chrono::nanoseconds patience) {
  std::unique_lock lock(mutex_);
  const auto known = [this] { return holding_ || rule_.seen_renewed(); };
  const auto soon = std::min(deadline.time(), Deadline::after(patience).time());
  if (!changed_.wait_until(lock, soon, known) && !other_lives_ && problem_.empty()) {
    changed_.wait_until(lock, deadline.time(), known);
  }
  if (holding_) return;
  if (rule_.seen_renewed() || other_lives_) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("another run ({}) is writing to {}: wait for it or choose another "
                            "folder",
                            other_holder(), options_.folder));
  }
  throw Error(ErrorCode::kTimeout, fmt::format("{} is not free: {}", options_.folder,
                                               problem_.empty() ? other_holder() : problem_));
}

bool Lease::wait(Deadline deadline) {
  std::unique_lock lock(mutex_);
  look();  // what was so at the last turn may be long ago
  changed_.wait_until(lock, deadline.time(), [this] { return holding_ || lost_ || ends_; });
  return holding_;
}

bool Lease::held() {
  const std::lock_guard lock(mutex_);
  return look();
}

void Lease::require(const std::string& what) {
  std::unique_lock lock(mutex_);
  // Who turns the lease by hand has a time of its own.
  const Deadline deadline = Deadline::after(options_.thread ? options_.term : 0ns);
  while (!look() && !ends_ && rule_.keeps() && !deadline.expired()) {
    changed_.wait_for(lock, std::min<LeaseRule::Duration>(rule_.look_interval(), kLookAgain));
  }
  if (holding_) return;
  throw Error(ErrorCode::kIo,
              fmt::format("{} is not done: this process does not hold {} ({})", what,
                          options_.folder, problem_.empty() ? other_holder() : problem_));
}

WriteGuard Lease::guard() {
  return {[this](const std::string& path) { require("writing " + path); }, options_.member};
}

void Lease::set_generation(const std::string& generation) {
  const std::lock_guard lock(mutex_);
  own_.generation = generation;
  if (!look()) return;
  const LeaseRule::Time now = options_.clock();
  rule_.done(LeaseRule::Act::kRenew, carry_out(LeaseRule::Act::kRenew), now);
}

std::string Lease::other_holder() const {
  const LeaseRule::Look look = read();
  if (!look.there) return "nobody holds it yet";
  if (!look.record) return fmt::format("{} says nothing that can be read", path_);
  if (look.record->member == options_.member) {
    return fmt::format("it stood still for longer than {}", format_duration(options_.term));
  }
  return fmt::format("job {}, process {} on {}", look.record->job, look.record->process,
                     look.record->host);
}

}  // namespace lockstep
