#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/descriptor.h"
#include "lockstep/comm/flight_recorder.h"
#include "lockstep/launch/rank_lines.h"
#include "lockstep/net/job/blame.h"

namespace lockstep {

// A rank that the launcher has started: its process, what the launcher knows of it, and how it
// ended.
struct StartedRank {
  int place = 0;                  // among the ranks of the launcher
  int rank = 0;                   // in the newest generation that it was in; -1: in none yet
  std::uint32_t generation = 0;   // that one
  std::int64_t joined_after = 0;  // steps that were done when it came to be in one
  bool worked = false;            // it took part in a step
  std::optional<std::int64_t> first_step;  // with lanes that it began, once we have looked
  std::optional<Deadline> lost;            // to the job: it ends by itself until then, or is killed
  bool killed_by_us = false;               // for that reason
  bool left_over = false;                  // it came too late, and is ended
  pid_t pid = -1;
  bool running = true;
  int status = 0;       // as waitpid() gives it; 0 for one that has left
  bool left = false;    // before the end
  Descriptor messages;  // the read end of its stderr
  RankLines lines;
  std::shared_ptr<FlightRecorder> flight;  // the memory that we share with it; null when given back

  // Takes notice if it has ended; `flags` are those of waitpid(). False if it still runs, or has
  // been noticed before.
  bool reap(int flags);
  // It is there, but does not run.
  bool is_stopped() const;
  // As its flight recorder tells: it has begun lanes, and so is in a job; it has begun lanes of a
  // step after its first one, too.
  bool has_begun_lanes();
  bool has_gone_on();

  // The rest is of one that has ended.

  // A run may start workers anew for months. Whether it has begun lanes is known later, too.
  void give_flight_back();

  // It came to the end of the run.
  bool finished() const { return !running && status == 0 && !left; }
  bool was_killed() const;
  int exit_code() const;
  // A signal that asks to end was its end, or it says so by its exit code.
  bool ended_as_told() const;
  // All ranks of a job come to these ends alike: no loss, whatever survives losses.
  bool ended_for_all() const;
  bool failed_by_itself() const { return status != 0 && !was_killed() && !ended_as_told(); }
  Evidence evidence() const;
  // "rank 2 (pid 4711) was killed by signal 9 (Killed)"
  std::string describe_end() const;
};

}  // namespace lockstep
