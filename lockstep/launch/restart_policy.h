#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

// How a process has ended: by a signal, or with an exit code.
struct ProcessEnd {
  bool killed = false;
  int number = 0;  // of the signal, or the exit code

  // From what waitpid() gives.
  static ProcessEnd of(int status);
  // The process did it to itself: it failed, or a signal such as SIGSEGV ended it. Others are
  // killed from outside.
  bool own_fault() const;
};
// "was killed by signal 9 (Killed)", "failed, with exit code 1"
std::string to_string(const ProcessEnd& end);

// Which lost workers are started anew, and when. Pure: ends and the time go in, places to start
// come out. A place is a worker's number among those of a launcher.
//
// - A worker that ended in order stays away: exit 0 (it has left), wrong usage, a halt of the run,
//   or a signal that asks to end.
// - The others come back after 0.5 s, then 1 s, 2 s and so on up to 30 s. A worker that lasted for
//   five minutes begins with 0.5 s again.
// - After three starts in a row without a step in which it took part a worker is given up.
class RestartPolicy {
 public:
  using Time = std::chrono::steady_clock::time_point;
  static constexpr int kStartsWithoutStep = 3;
  static constexpr std::chrono::milliseconds kFirstPause{500};
  static constexpr std::chrono::milliseconds kLongestPause{30'000};
  static constexpr std::chrono::minutes kLastsWell{5};

  // The worker in this place was started, the first time or anew.
  void started(int place, Time now);
  // It has taken part in a step that is done. May come late, when it has ended already.
  void took_part(int place);
  // It has ended. False: it stays away. Otherwise it waits for its time to be started anew.
  bool ended(int place, const ProcessEnd& end, Time now);
  // Nobody is started any more: the run ends, or is to fail at the first loss.
  void stop();

  struct Due {
    int place = 0;
    bool given_up = false;  // it has been started too often; else start it now
    bool operator==(const Due&) const = default;
  };
  // The places whose time has come, once each.
  std::vector<Due> take_due(Time now);
  // When there is something to take; nothing while nobody waits.
  std::optional<Time> next() const;
  // How long this place waits, or waited last; for messages.
  std::chrono::milliseconds pause_of(int place) const;

 private:
  struct Place {
    Time started{};
    int starts = 0;  // anew, since it last took part in a step
    std::chrono::milliseconds pause{0};
    std::optional<Time> due;
  };
  std::map<int, Place> places_;
  bool stopped_ = false;
};

}  // namespace lockstep
