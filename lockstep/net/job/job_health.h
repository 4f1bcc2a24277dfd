#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/net/job/supervisor.h"
#include "lockstep/wire/control_messages.h"

namespace lockstep {

// Finds the one cause of a job's failure from what the centre hears. Events and the time go in, a
// verdict comes out; no I/O. The first cause wins and later events change nothing. Used by one
// thread.
//
// The hard part is the cascade: a rank that fails closes its connections, and its neighbours report
// that rank. So a report that accuses another rank waits a short grace for better evidence: that
// some rank died, or that the accused rank itself accuses another.
class JobHealth {
 public:
  using Clock = Deadline::Clock;
  using Time = Clock::time_point;

  // `names[r]` is how messages call rank r. Silence for `timeout` means dead.
  JobHealth(std::vector<std::string> names, Clock::duration timeout, Time now);

  void heartbeat(int rank, std::vector<Progress> progress, Time now);
  void report(int rank, const Report& report, Time now);
  // A newcomer tells why it cannot enter: because it lost a rank, which then dies or falls silent
  // within the grace, or by its own fault.
  void cannot_enter(int rank, const Error& error, Time now);
  // A failure that the centre's own process has found, where it is no rank: `error` says all.
  void centre_report(const std::string& name, const Error& error, Time now);
  // The rank leaves in good order: that its link then closes is no death.
  void goodbye(int rank, std::vector<Progress> progress, Time now);
  void closed(int rank, Time now);
  // To be called at wake_at() at the latest, after all events that happened before.
  void tick(Time now);
  // Decides now what is still open, because the centre leaves.
  void settle();

  Time wake_at() const;
  // Whether every rank is to be asked for its progress; true once for each request.
  bool take_ping();
  const std::optional<Error>& verdict() const { return verdict_; }
  // Whether every rank has said goodbye or died, and nothing is left to decide.
  bool all_left() const {
    return heard_.empty() && (verdict_ || (accusers_.empty() && !question_));
  }

 private:
  struct RankState {
    std::string name;
    Time last_heard{};
    bool departed = false;
    std::vector<Progress> progress;
    std::optional<Error> suspicion;  // the first rank that it accused, and why
    bool enters = false;             // a newcomer, whose suspicion alone counts against itself
  };
  // Heartbeats may be old: before blaming anybody, all ranks are asked where they are now.
  struct Question {
    Time asked;
    Time until;
  };
  struct Overdue {  // a collective's deadline passed at a rank
    int reporter;
    Error error;
  };

  using CallId = std::pair<std::uint64_t, std::uint32_t>;  // sequence number and group
  struct LastEntered {
    std::uint64_t sequence;
    int rank;
  };

  void decide(ErrorCode code, std::string message, int rank);
  void hear(int rank, std::vector<Progress> progress, Time now);
  void set_last_heard(int rank, Time time);
  // Notes what the rank's progress says in the indices below, or takes it out of them again.
  void enter(int rank);
  void erase(int rank);
  void depart(int rank);
  void ask_around(Time now);
  bool all_answered() const;
  // Whether a rank that has answered may still enter the collective that others call differently.
  bool may_learn_more() const;
  void check_mismatch(int rank, Time now);
  std::optional<Error> find_mismatch(std::uint32_t group, std::uint64_t sequence) const;
  std::optional<Error> first_mismatch() const;
  void check_waits(std::uint32_t group);
  void check_wait(int rank, const Progress& at);
  void suspect(int reporter, const Error& error, Time now);
  void resolve_suspicion();
  void resolve_question();
  bool name_absent(int reporter, const Progress& at, const Error& error);
  bool name_idle(int reporter, const Progress& at, const Error& error);
  // The collective of a group that the rank entered last, or the one of that sequence number; null
  // if the rank has not told of it.
  const Progress* find_progress(int rank, std::uint32_t group) const;
  const Progress* find_progress(int rank, std::uint32_t group, std::uint64_t sequence) const;
  bool valid(int rank) const { return rank >= 0 && rank < static_cast<int>(ranks_.size()); }
  std::string seen_by(int reporter, const Error& error) const;

  const Clock::duration timeout_;
  std::vector<RankState> ranks_;
  // Indices over the ranks, so that no event costs more the more ranks there are.
  std::set<std::pair<Time, int>> heard_;                             // those that have not departed
  std::map<CallId, std::map<std::string, int, std::less<>>> calls_;  // how many described it how
  std::map<std::uint32_t, std::set<std::pair<std::uint64_t, int>>> waits_;  // inside a collective
  std::map<std::uint32_t, LastEntered> departed_;  // the one that left after the fewest collectives
  Time last_tick_;
  std::vector<int> accusers_;  // in the order of their reports
  Time grace_ends_{};
  // Others may wait for a rank that has left in order, and tell of it in their next heartbeat only.
  std::optional<Time> ask_at_;
  std::optional<Question> question_;
  std::optional<Overdue> overdue_;  // with a question
  std::optional<Error> mismatch_;   // with a question: the first view of it
  bool ping_ = false;
  std::optional<Error> verdict_;
};

// The same words on the rank that aborts and on all that hear of it.
Error aborted_error(const std::string& name, int rank, std::string_view reason);

// "rank 2 (node7, pid 4711) died: its connection closed" is what people are told of it; beside the
// name, "died: its connection closed" says the same.
std::string without_name(std::string_view why, std::string_view name);

}  // namespace lockstep
