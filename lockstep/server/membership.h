#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/index.h"

namespace lockstep {

// What a worker of the gradient server says about itself, and where it is.
struct WorkerCard {
  std::string node_id;
  std::uint32_t gpu_count = 0;
  std::string backend;
  std::string address;
  bool ours = true;  // it sends heartbeats; a worker of the original protocol does not
  int place = -1;    // the one it is to have; -1: any
};

// Who works for a gradient server, and who has died. Events and the time go in, decisions come out;
// no I/O. Used by one thread.
//
// One knob T: silence for T means dead, heartbeats go every T/5, and 10·T is what a worker that is
// alive may take to join or to bring its part of a round.
class Membership {
 public:
  using Clock = Deadline::Clock;
  using Time = Clock::time_point;

  Membership(int workers, Clock::duration timeout, Time now);

  int size() const { return static_cast<int>(workers_.size()); }
  Clock::duration timeout() const { return timeout_; }

  // The place it asks for, the lowest free one if it asks for none, or why it gets none.
  struct Admission {
    int worker = -1;
    std::string refusal;
  };
  [[nodiscard]] Admission join(const WorkerCard& card, Time now);
  // The worker went away before all were there; another may take its place.
  void forget(int worker);
  // All places are taken. From then on nobody joins and nobody is forgotten.
  bool complete() const { return present_ == size(); }
  // "worker 2 (node-b, 10.0.0.3:4711)"
  const std::string& name(int worker) const { return at(worker).name; }
  const WorkerCard& card(int worker) const { return at(worker).card; }

  // Something came from the worker or, where it sends no heartbeats, went to it.
  void heard(int worker, Time now) { at(worker).last_heard = now; }
  // Whether the worker's silence means anything: not while we do not listen to it, nor while a
  // worker without heartbeats owes nothing.
  void watch(int worker, bool watched, Time now);
  // The worker owes its part of `what` from now on, or has brought it.
  void owe(int worker, const std::string& what, Time now);
  void brought(int worker) { at(worker).owes.clear(); }
  // The worker has brought what it could and waits for others, as we do: its time begins again.
  void excuse(int worker, Time now) { at(worker).owes_since = now; }
  const std::string& owes(int worker) const { return at(worker).owes; }

  // Whoever has died or is overdue, or that not all came in time (then of rank -1). To be called
  // at wake_at() at the latest, after all events that happened before. Time in which it was not
  // called, far beyond that, counts against nobody.
  std::optional<Error> judge(Time now);
  // Whether heartbeats are to be sent; true once for each time.
  bool take_heartbeat(Time now);
  Time wake_at() const;

 private:
  struct Worker {
    bool present = false;
    WorkerCard card;
    std::string name;
    Time last_heard{};
    bool watched = false;
    std::string owes;
    Time owes_since{};
  };

  Worker& at(int worker) { return workers_[index_of(worker)]; }
  const Worker& at(int worker) const { return workers_[index_of(worker)]; }
  Error missing() const;

  const Clock::duration timeout_;
  const Time join_limit_;
  std::vector<Worker> workers_;
  int present_ = 0;
  Time next_heartbeat_;
  Time last_look_;
};

inline constexpr int kOverdueFactor = 10;  // times the timeout

}  // namespace lockstep
