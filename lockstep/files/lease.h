#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/base/deadline.h"
#include "lockstep/base/thread.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/files/storage.h"

namespace lockstep {

// The lease file in the folder of a run.
inline constexpr const char* kLeaseFile = "lease.json";

// Who holds a folder, as the lease file says it.
struct LeaseRecord {
  std::string job;
  std::string generation;
  std::string member;  // the holder; no two holders are called the same
  std::string host;    // its name, for people
  // The holder's process: known again by those who see the same processes under the same numbers.
  std::string process_space;
  std::int64_t process = 0;
  std::uint64_t process_began = 0;
  std::chrono::milliseconds term{0};
  std::uint64_t counter = 0;  // renewals

  bool operator==(const LeaseRecord&) const = default;
};
std::string to_json(const LeaseRecord& record);
// Nothing for any other text.
std::optional<LeaseRecord> parse_lease(std::string_view text);

// Decides who may hold a lease, from what one member reads in the file and its own clock. Pure. No
// clock of another host counts, nor what the file system says of times:
//
// - A holder renews the counter every fifth of the term. It holds nothing once it has not renewed
//   for a whole term, because it was stopped or its disk was.
// - Others take the lease when they have seen it unchanged for a whole term, or when they know that
//   the process of its holder has ended. A time in which they themselves stood still counts
//   nothing.
// - Who has lost it takes it back only if nobody else has had it since: its own file is still
// there.
// - Who replaces the file holds the lease only if the file is still its own a while later: of those
//   that replace it at once, the last one wins. (That is Fischer's algorithm for mutual exclusion.)
class LeaseRule {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::steady_clock::duration;

  // What is in the file now.
  struct Look {
    bool there = false;
    std::string text;                   // as it stands there
    std::optional<LeaseRecord> record;  // what it says, if it can be read
    bool ended = false;                 // its holder's process is known to have ended
    bool lives = false;                 // is known to live
    bool unreadable = false;            // something is there, and nobody knows what it says
  };
  enum class Act {
    kNothing,
    kCreate,   // make the file, unless somebody else has
    kReplace,  // put one's own in its place
    kRenew,    // count on, in one's own file
  };

  LeaseRule(std::string member, Duration term);

  // What to do now. Call it at least every look_interval() and carry the act out at once.
  Act next(const Look& look, Time now);
  // How that went. `began` is when the file was looked at.
  void done(Act act, bool succeeded, Time began);

  bool held(const Look& look, Time now) const;
  // This member had it, and its own file no longer stands there: it does not come back.
  bool lost(const Look& look) const { return had_it_ && !look.unreadable && !is_own(look); }
  // Nobody else can have it yet, whether it could be read just now or not.
  bool keeps() const { return state_ == State::kHeld; }
  bool settling() const { return state_ == State::kSettling; }
  // Somebody has renewed the lease while this member waited for it.
  bool seen_renewed() const { return seen_renewed_; }
  Duration look_interval() const { return term_ / 10; }

 private:
  enum class State : std::uint8_t { kWaiting, kSettling, kHeld };

  bool is_own(const Look& look) const;
  void begin_waiting(const Look& look, Time now);
  Act wait(const Look& look, Time now);

  const std::string member_;
  const Duration term_;
  State state_ = State::kWaiting;
  Time renewed_{};                      // while held: when the renewal began that was the last
  Time settled_at_{};                   // while settling
  Duration settle_{};                   // for the replacement under way
  std::optional<std::string> watched_;  // while waiting: the text, unchanged for `silence_`
  Duration silence_{};
  Time looked_{};
  bool seen_renewed_ = false;
  bool had_it_ = false;  // once
};

// Holds the folder of a run: its holder alone renames, removes and appends there. The lease is a
// file that its holder counts on in, so it works between hosts and where the file system has no
// locks, and a holder that is stopped loses it. Whoever writes asks held() before every rename,
// removal or append. Thread-safe.
class Lease {
 public:
  struct Options {
    std::string folder;
    std::string job;
    std::string generation;
    std::string member;
    std::chrono::nanoseconds term{0};  // a holder that is silent for so long has lost it
    // For tests: the time, from a clock that goes on while the machine sleeps. Without a thread
    // turn() is called by the owner.
    std::function<LeaseRule::Time()> clock = {};
    bool thread = true;
    Storage* storage = &disk();
  };
  // A process of this host that was killed a moment ago may still be ending.
  static constexpr std::chrono::seconds kPatience{5};

  // Tries to get the lease from now on. The folder must be there when it is to be held.
  explicit Lease(Options options);
  // Gives it back.
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  // For a run that begins: returns when the lease is held. Throws Error{kInvalidArgument} that
  // names the other run when its holder renews it, or is a process of this host that lives and
  // still does so after `patience`; Error{kTimeout} with what stands in the way, at the deadline,
  // or after `patience` where the folder cannot be written to.
  void take(Deadline deadline, std::chrono::nanoseconds patience = kPatience);
  // Waits until the lease is held; false at the deadline, and once it is lost to another holder or
  // given back.
  bool wait(Deadline deadline);
  // It is never held again: others need not wait for it, and who waits here waits no longer. Takes
  // no time but for a look at the file.
  void give_back();

  // Whether it is held: reads the file now.
  bool held();
  // Throws Error{kIo} that says `what` is not done and who has the lease, unless it is held. Where
  // the file cannot be read for a moment, it is read again until the term is over.
  void require(const std::string& what);

  // For those who write to the folder; the lease must outlive it.
  WriteGuard guard();

  // The holder has come into another generation.
  void set_generation(const std::string& generation);

  // Looks once and does what is due; called by the thread.
  void turn();

 private:
  bool look();  // does what is due and tells whether the lease is held
  LeaseRule::Look read() const;
  // False when another one has made the file meanwhile.
  bool write_lease(LeaseRule::Act act, const std::string& text);
  bool carry_out(LeaseRule::Act act);
  std::string other_holder() const;

  const Options options_;
  const std::string path_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  LeaseRule rule_;
  LeaseRecord own_;
  std::unique_ptr<File> file_;  // the lease as we have made it, whatever stands there now
  bool holding_ = false;        // as of the last turn
  bool lost_ = false;           // as of the last turn
  bool ends_ = false;
  bool other_lives_ = false;  // as of the last turn: on this host
  std::string problem_;       // of the last act

  Thread thread_;
};

}  // namespace lockstep
