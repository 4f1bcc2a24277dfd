#pragma once

#include <cstdint>
#include <optional>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/flight_recorder.h"
#include "lockstep/wire/mesh_frame.h"

namespace lockstep {

// The deadline of calls without one of their own, a millisecond or so early: a clock that is read
// in every call would be felt in the shortest ones, and the recorder's is read in any case.
class RoughDeadline {
 public:
  explicit RoughDeadline(std::chrono::nanoseconds patience) : patience_(patience) {}

  Deadline at(std::uint64_t ticks, std::uint64_t ticks_per_millisecond) {
    if (ticks - made_ > ticks_per_millisecond) {
      made_ = ticks;
      deadline_ = Deadline::roughly_after(patience_);
    }
    return deadline_;
  }

 private:
  std::chrono::nanoseconds patience_;
  std::uint64_t made_ = 0;
  Deadline deadline_ = Deadline::at({});
};

// A rank's stay in one collective: its deadline, and its record. The shortest collectives take as
// long as the ranks wait for each other's parts, and what a rank does before it shows its own part
// delays everybody. So an engine enters when it has shown what it brings. Where it looks for the
// others without a pause, the end is not timed: the time of the last look in vain is taken for it,
// since the next look saw the others and little was left to do. For one thread.
class CollectiveStay {
 public:
  CollectiveStay(const FlightRecorder& recorder, FlightTrack& track, const MeshFrame& stamp,
                 RoughDeadline& patience, const std::optional<Deadline>& deadline)
      : recorder_(recorder),
        track_(track),
        stamp_(stamp),
        patience_(patience),
        deadline_(deadline) {}
  // One that failed is recorded in any case.
  ~CollectiveStay() {
    if (succeeded_ && entered_ && !track_.waits.noted()) [[likely]] {
      track_.ring.leave(number_, looked_ != 0 ? looked_ : recorder_.ticks(), 0);
      return;
    }
    leave_noted();
  }
  CollectiveStay(const CollectiveStay&) = delete;
  CollectiveStay& operator=(const CollectiveStay&) = delete;

  // From now on this rank is in the collective, for whoever asks. An engine calls it before it
  // waits for anybody; further calls change nothing. Returns the collective's deadline.
  Deadline enter() {
    if (entered_) return *deadline_;
    begin_ = recorder_.ticks();
    number_ = track_.ring.enter(FlightCall(stamp_, recorder_.generation()), begin_);
    entered_ = true;
    if (!deadline_) deadline_ = patience_.at(begin_, recorder_.ticks_per_millisecond());
    return *deadline_;
  }
  void succeeded() { succeeded_ = true; }

  // This rank has entered just now, and looks for the others: the collective ends soon after the
  // last look in vain. Where the clock is not the processor's counter, it takes too long to be read
  // so often, and is read at the end.
  void watch() {
    if (recorder_.reads_counter()) looked_ = begin_;
  }
  void looked() {
    if (recorder_.reads_counter()) looked_ = recorder_.ticks();
  }
  // It ends later than that.
  void goes_on() { looked_ = 0; }

 private:
  void leave_noted();

  const FlightRecorder& recorder_;
  FlightTrack& track_;
  const MeshFrame& stamp_;
  RoughDeadline& patience_;
  std::optional<Deadline> deadline_;
  std::uint64_t number_ = 0;
  std::uint64_t begin_ = 0;
  std::uint64_t looked_ = 0;  // 0: the end is not known yet
  bool entered_ = false;
  bool succeeded_ = false;
};

}  // namespace lockstep
