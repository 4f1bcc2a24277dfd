#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/base/descriptor.h"
#include "lockstep/base/seq_lock.h"
#include "lockstep/comm/wait_note.h"
#include "lockstep/wire/mesh_frame.h"

// What a rank did last, in memory of fixed size: its collectives and the phases of its steps. To
// record one costs two readings of the processor's clock and some stores to a cache line that
// nobody else writes; of the shortest collectives this is done while they wait. The memory holds no
// addresses, so that a launcher which has made it for a rank reads it when the rank is blocked,
// stopped or dead.

namespace lockstep {

// The cheapest clock of this processor: the counter that the kernel's own clock is made of, where
// it counts evenly; otherwise that clock. The same for all processes of a host.
class FlightClock {
 public:
  static bool counter_is_even();
  // Of a millisecond, give or take half.
  static std::uint64_t ticks_per_millisecond(bool counter) {
    constexpr std::uint64_t kCounted = 3'000'000, kNanoseconds = 1'000'000;
    return counter ? kCounted : kNanoseconds;
  }
  static std::uint64_t read(bool counter) { return counter ? read_counter() : read_clock(); }
  static std::uint64_t read_clock();  // nanoseconds of the steady clock

 private:
  static std::uint64_t read_counter() {
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#else
    return read_clock();
#endif
  }
};

// The last kSlots things of one kind. One thread writes at a time, and writers follow each other
// in order. Any thread or process reads. All zeros is an empty ring.
template <typename What>
class FlightRing {
 public:
  static constexpr std::size_t kSlots = 1024;

  struct Entry {
    What what{};
    std::uint64_t begin = 0;  // ticks
    std::uint64_t end = 0;    // ticks; 0: under way
    std::uint64_t note = 0;   // as leave() was told
  };

  // How many have been entered, and so the number of the next one.
  std::uint64_t count() const { return count_.load(std::memory_order_acquire); }

  std::uint64_t enter(const What& what, std::uint64_t ticks) {
    const std::uint64_t number = count_.load(std::memory_order_relaxed);
    Slot& slot = slots_[number % kSlots];
    slot.end.store(0, std::memory_order_relaxed);
    slot.note.store(0, std::memory_order_relaxed);
    slot.begun.store({what, number, ticks});
    count_.store(number + 1, std::memory_order_release);
    return number;
  }
  void leave(std::uint64_t number, std::uint64_t ticks, std::uint64_t note) {
    Slot& slot = slots_[number % kSlots];
    slot.note.store(note, std::memory_order_relaxed);
    slot.end.store(ticks, std::memory_order_release);
    // The next writer would wait for these lines, and the others for its first word to them.
    const auto* next = reinterpret_cast<const char*>(&slots_[(number + 1) % kSlots]);
    __builtin_prefetch(next, 1);
    __builtin_prefetch(next + sizeof(Slot) / 2, 1);
  }

  // Nothing if it has been overwritten, or its writer is stopped or dead in the middle of it.
  std::optional<Entry> at(std::uint64_t number) const {
    const Slot& slot = slots_[number % kSlots];
    const std::optional<Begun> begun = slot.begun.try_load();
    if (!begun || begun->number != number) return std::nullopt;
    const std::uint64_t end = slot.end.load(std::memory_order_acquire);
    const std::uint64_t note = slot.note.load(std::memory_order_acquire);
    const std::optional<Begun> again = slot.begun.try_load();
    if (!again || again->number != number) return std::nullopt;
    if (end == 0) return Entry{begun->what, begun->begin};
    // A processor may read its clock a little early.
    return Entry{begun->what, begun->begin, std::max(end, begun->begin), note};
  }
  // The oldest that may still be there.
  std::uint64_t first() const {
    const std::uint64_t entered = count();
    return entered > kSlots ? entered - kSlots : 0;
  }

 private:
  struct Begun {
    What what{};
    std::uint64_t number = 0;
    std::uint64_t begin = 0;
  };
  struct alignas(128) Slot {  // two cache lines, never three
    SeqLock<Begun> begun;
    std::atomic<std::uint64_t> end;
    std::atomic<std::uint64_t> note;
  };

  std::atomic<std::uint64_t> count_;
  std::array<Slot, kSlots> slots_;
};

// A phase: a part of a step, or what a rank does between steps.
struct FlightPhase {
  std::array<char, 24> name{};
  std::int64_t step = 0;
  std::int32_t lane = -1;  // -1: of none
  std::uint32_t generation = 0;
};

// What a rank called, of a frame's fields all that its messages have in common. They are put
// together from registers: a frame has just been written field by field when it is recorded, and to
// copy it whole would wait for all these stores.
class FlightCall {
 public:
  FlightCall() = default;
  // `generation`: its number, not its tag as in `frame`.
  FlightCall(const MeshFrame& frame, std::uint32_t generation)
      : codes_(frame.kind | std::uint64_t{frame.type} << 8 | std::uint64_t{frame.op} << 16 |
               std::uint64_t{frame.algorithm} << 24 | std::uint64_t{generation} << 32),
        group_and_bucket_(frame.group | std::uint64_t{frame.bucket} << 32),
        sequence_(frame.sequence),
        count_(frame.count),
        shape_(frame.shape),
        step_(frame.step) {}

  // With the number of the generation.
  MeshFrame frame() const;

 private:
  std::uint64_t codes_ = 0;
  std::uint64_t group_and_bucket_ = 0;
  std::uint64_t sequence_ = 0;
  std::uint64_t count_ = 0;
  std::uint64_t shape_ = 0;
  std::uint64_t step_ = 0;
};

// The collectives of one communicator after another with the same group number.
struct FlightTrack {
  FlightRing<FlightCall> ring;
  WaitNote waits;
};
// How a collective ended, as FlightRing has it in `note`.
struct CollectiveEnd {
  bool failed = false;
  WaitNote::Longest longest;
};
std::uint64_t pack(const CollectiveEnd& end);
CollectiveEnd unpack_end(std::uint64_t note);

struct FlightMemory;

// All that a recorder remembers, copied out of its memory. Times are nanoseconds of the steady
// clock of the host; 0: has not ended.
struct FlightSnapshot {
  struct Phase {
    std::string name;
    std::int64_t step = 0;
    int lane = -1;
    std::uint32_t generation = 0;
    std::int64_t begin = 0;
    std::int64_t end = 0;
    bool failed = false;  // an exception ended it
  };
  struct Collective {
    MeshFrame call;  // with the generation's number
    std::int64_t begin = 0;
    std::int64_t end = 0;
    bool failed = false;
    int waited_for = -1;  // a rank of the job
    std::int64_t waited = 0;
  };
  int rank = -1;  // -1: it never had one
  int world_size = 0;
  std::uint32_t generation = 0;
  std::uint32_t tag = 0;
  std::int64_t pid = 0;
  std::string last_words;
  std::int64_t taken = 0;
  std::int64_t unix_offset = 0;  // nanoseconds to add for the time since 1970
  std::uint64_t left_out = 0;    // communicators for which there was no track
  std::vector<Phase> phases;     // in the order in which they began
  std::vector<Collective> collectives;
};

// The recorder of one rank; lives as long as its place in the job. Recording is for the rank's own
// threads, one at a time per track; everything else is callable from any thread.
class FlightRecorder {
 public:
  // With memory of its own.
  FlightRecorder();
  // In a file that share() of another process has made. Throws Error{kIo} where it is none.
  explicit FlightRecorder(Descriptor file);
  ~FlightRecorder();
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  // Memory that a child inherits and this process can read: its recorder, and the descriptor that
  // the child gives to its own. `pid` may be set later.
  static std::pair<std::unique_ptr<FlightRecorder>, Descriptor> share();

  // The rank's place from now on. `tag` tells generations of different runs apart.
  void set_place(int rank, int world_size, std::uint32_t generation, std::uint32_t tag);
  // Why this rank fails, for whoever reads the memory after its end. Cut after some 500 bytes.
  void set_last_words(std::string_view words);
  // A file has been written of what this rank did in the generation.
  void set_written();
  bool written() const;

  // The track of a communicator; null when too many are in use. Given back by drop_track(), after
  // which its contents stay until another one needs the room.
  FlightTrack* take_track(std::uint32_t group);
  void drop_track(FlightTrack* track);
  std::uint32_t generation() const;

  std::uint64_t ticks() const { return FlightClock::read(counter_); }
  bool reads_counter() const { return counter_; }
  std::uint64_t ticks_per_millisecond() const {
    return FlightClock::ticks_per_millisecond(counter_);
  }
  FlightRing<FlightPhase>& phases();

  FlightSnapshot snapshot() const;

 private:
  void begin();

  FlightMemory* memory_ = nullptr;
  bool counter_ = false;
  std::mutex mutex_;
};

// Records a phase while it lives. `name` is cut after 23 bytes.
class PhaseRecord {
 public:
  PhaseRecord(FlightRecorder& recorder, std::string_view name, std::int64_t step, int lane = -1);
  ~PhaseRecord();
  PhaseRecord(const PhaseRecord&) = delete;
  PhaseRecord& operator=(const PhaseRecord&) = delete;

 private:
  FlightRecorder& recorder_;
  const int exceptions_;  // under way when it began
  const std::uint64_t number_;
};

}  // namespace lockstep
