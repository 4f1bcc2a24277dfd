#include "lockstep/comm/flight_recorder.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <fstream>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/whole_number.h"

namespace lockstep {

// All zeros but for the mark is a recorder that has recorded nothing.
struct FlightMemory {
  static constexpr std::uint64_t kMark = 0x4c4b'5346'4c54'0003;  // changes with the layout
  static constexpr std::size_t kTracks = 4;
  static constexpr std::size_t kMostWords = 512;

  struct TrackHead {
    std::uint32_t group = 0;
    std::uint32_t in_use = 0;
    std::uint64_t taken = 0;  // n-th track that was ever taken; 0: never
  };
  struct Place {
    std::int32_t rank = 0;
    std::int32_t world_size = 0;  // 0: none yet
    std::uint32_t generation = 0;
    std::uint32_t tag = 0;
  };

  std::uint64_t mark;
  std::uint64_t counter;  // whether ticks are those of the processor's counter
  std::uint64_t begin_ticks;
  std::uint64_t begin_clock;
  std::atomic<std::uint64_t> pid;
  SeqLock<Place> place;
  std::atomic<std::uint32_t> generation;  // that of `place`, and cheaper
  std::atomic<std::uint32_t> written;     // the generation, once its file is there
  std::atomic<std::uint64_t> left_out;
  std::atomic<std::uint32_t> words_size;
  std::array<char, kMostWords> words;
  std::array<TrackHead, kTracks> heads;  // of the writer
  FlightRing<FlightPhase> phases;
  std::array<FlightTrack, kTracks> tracks;
};

namespace {

constexpr std::uint64_t kFailedBit = std::uint64_t{1} << 63;
constexpr int kRankShift = 42;  // below: nanoseconds, up to more than an hour
constexpr std::uint64_t kMostNanoseconds = (std::uint64_t{1} << kRankShift) - 1;
constexpr std::uint64_t kMostRank = (std::uint64_t{1} << (63 - kRankShift)) - 1;

FlightMemory* map_memory(int file) {
  const int sharing = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* memory = ::mmap(nullptr, sizeof(FlightMemory), PROT_READ | PROT_WRITE, sharing, file, 0);
  if (memory == MAP_FAILED) throw_io("mapping the flight recorder's memory", errno);
  return static_cast<FlightMemory*>(memory);
}

}  // namespace

bool FlightClock::counter_is_even() {
#if defined(__x86_64__)
  static const bool even = [] {
    std::string source;
    std::ifstream("/sys/devices/system/clocksource/clocksource0/current_clocksource") >> source;
    return source == "tsc";
  }();
  return even;
#else
  return false;
#endif
}

std::uint64_t FlightClock::read_clock() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(time).count());
}

MeshFrame FlightCall::frame() const {
  MeshFrame frame;
  frame.kind = static_cast<std::uint8_t>(codes_);
  frame.type = static_cast<std::uint8_t>(codes_ >> 8);
  frame.op = static_cast<std::uint8_t>(codes_ >> 16);
  frame.algorithm = static_cast<std::uint8_t>(codes_ >> 24);
  frame.generation = static_cast<std::uint32_t>(codes_ >> 32);
  frame.group = static_cast<std::uint32_t>(group_and_bucket_);
  frame.bucket = static_cast<std::uint32_t>(group_and_bucket_ >> 32);
  frame.sequence = sequence_;
  frame.count = count_;
  frame.shape = shape_;
  frame.step = static_cast<std::uint32_t>(step_);
  return frame;
}

std::uint64_t pack(const CollectiveEnd& end) {
  std::uint64_t note = std::min(end.longest.nanoseconds, kMostNanoseconds);
  if (end.longest.rank >= 0) {
    note |= std::min<std::uint64_t>(static_cast<std::uint64_t>(end.longest.rank) + 1, kMostRank)
            << kRankShift;
  }
  return end.failed ? note | kFailedBit : note;
}

CollectiveEnd unpack_end(std::uint64_t note) {
  CollectiveEnd end;
  end.failed = (note & kFailedBit) != 0;
  end.longest.rank = static_cast<int>((note & ~kFailedBit) >> kRankShift) - 1;
  end.longest.nanoseconds = note & kMostNanoseconds;
  return end;
}

FlightRecorder::FlightRecorder() : memory_(map_memory(-1)) { begin(); }

FlightRecorder::FlightRecorder(Descriptor file) {
  const off_t size = ::lseek(file.get(), 0, SEEK_END);
  if (size != static_cast<off_t>(sizeof(FlightMemory))) {
    throw Error(ErrorCode::kIo, "the flight recorder's memory has another size");
  }
  memory_ = map_memory(file.get());
  begin();
}

FlightRecorder::~FlightRecorder() { ::munmap(memory_, sizeof(FlightMemory)); }

void FlightRecorder::begin() {
  counter_ = FlightClock::counter_is_even();
  memory_->counter = counter_ ? 1 : 0;
  memory_->begin_clock = FlightClock::read_clock();
  memory_->begin_ticks = ticks();
  memory_->pid = static_cast<std::uint64_t>(::getpid());
  memory_->mark = FlightMemory::kMark;
}

std::pair<std::unique_ptr<FlightRecorder>, Descriptor> FlightRecorder::share() {
  Descriptor file(::memfd_create("lockstep-flight", MFD_CLOEXEC));
  if (!file) throw_io("memfd_create", errno);
  if (::ftruncate(file.get(), sizeof(FlightMemory)) != 0) {
    throw_io("making the flight recorder's memory", errno);
  }
  Descriptor own(::dup(file.get()));
  if (!own) throw_io("dup", errno);
  return {std::make_unique<FlightRecorder>(std::move(own)), std::move(file)};
}

void FlightRecorder::set_place(int rank, int world_size, std::uint32_t generation,
                               std::uint32_t tag) {
  memory_->place.store({rank, world_size, generation, tag});
  memory_->generation.store(generation, std::memory_order_relaxed);
}

void FlightRecorder::set_last_words(std::string_view words) {
  const std::lock_guard lock(mutex_);
  const std::size_t size = std::min(words.size(), memory_->words.size());
  memory_->words_size.store(0, std::memory_order_release);
  std::copy_n(words.data(), size, memory_->words.data());
  memory_->words_size.store(static_cast<std::uint32_t>(size), std::memory_order_release);
}

void FlightRecorder::set_written() { memory_->written = memory_->generation.load() + 1; }

bool FlightRecorder::written() const {
  return memory_->written.load() == memory_->generation.load() + 1;
}

std::uint32_t FlightRecorder::generation() const {
  return memory_->generation.load(std::memory_order_relaxed);
}

FlightTrack* FlightRecorder::take_track(std::uint32_t group) {
  const std::lock_guard lock(mutex_);
  std::size_t best = FlightMemory::kTracks;
  std::uint64_t newest = 0;
  for (std::size_t i = 0; i < FlightMemory::kTracks; ++i) {
    const FlightMemory::TrackHead& head = memory_->heads[i];
    newest = std::max(newest, head.taken);
    if (head.in_use != 0) continue;
    // The group's own; otherwise the one that was taken longest ago, or never.
    const bool own = head.taken != 0 && head.group == group;
    if (own || best == FlightMemory::kTracks || head.taken < memory_->heads[best].taken) best = i;
    if (own) break;
  }
  if (best == FlightMemory::kTracks) {
    memory_->left_out.fetch_add(1);
    return nullptr;
  }
  for (const FlightMemory::TrackHead& head : memory_->heads) newest = std::max(newest, head.taken);
  memory_->heads[best] = {group, 1, newest + 1};
  return &memory_->tracks[best];
}

void FlightRecorder::drop_track(FlightTrack* track) {
  const std::lock_guard lock(mutex_);
  memory_->heads[static_cast<std::size_t>(track - memory_->tracks.data())].in_use = 0;
}

FlightRing<FlightPhase>& FlightRecorder::phases() { return memory_->phases; }

FlightSnapshot FlightRecorder::snapshot() const {
  FlightSnapshot snapshot;
  const FlightMemory& memory = *memory_;
  const std::uint64_t now_ticks = ticks();
  const std::uint64_t now_clock = FlightClock::read_clock();
  const auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
  const auto passed_ticks = static_cast<double>(now_ticks - memory.begin_ticks);
  const auto passed = static_cast<double>(now_clock - memory.begin_clock);
  const double rate = passed_ticks > 0 ? passed / passed_ticks : 1.0;
  // Back from now: what was recorded last is told most exactly. The memory may be another
  // process's, which can have crashed: what cannot be is now.
  const auto time_of = [&](std::uint64_t at) {
    if (at == 0) return std::int64_t{0};
    const auto back = static_cast<double>(static_cast<std::int64_t>(now_ticks - at)) * rate;
    const auto whole = whole_number<std::int64_t>(std::trunc(back)).value_or(0);
    return static_cast<std::int64_t>(now_clock - static_cast<std::uint64_t>(whole));
  };
  snapshot.taken = static_cast<std::int64_t>(now_clock);
  snapshot.unix_offset = std::chrono::nanoseconds(since_1970).count() - snapshot.taken;
  const auto place = memory.place.try_load().value_or(FlightMemory::Place{});
  snapshot.rank = place.world_size > 0 ? place.rank : -1;
  snapshot.world_size = place.world_size;
  snapshot.generation = place.generation;
  snapshot.tag = place.tag;
  snapshot.pid = static_cast<std::int64_t>(memory.pid.load());
  const std::size_t words = memory.words_size.load(std::memory_order_acquire);
  snapshot.last_words.assign(memory.words.data(), std::min(words, memory.words.size()));
  snapshot.left_out = memory.left_out.load();

  // The rank goes on meanwhile: what comes from now on is left out.
  const std::uint64_t phases = memory.phases.count();
  for (std::uint64_t i = memory.phases.first(); i < phases; ++i) {
    const auto entry = memory.phases.at(i);
    if (!entry) continue;
    const FlightPhase& what = entry->what;
    snapshot.phases.push_back({{what.name.data(), ::strnlen(what.name.data(), what.name.size())},
                               what.step,
                               what.lane,
                               what.generation,
                               time_of(entry->begin),
                               time_of(entry->end),
                               unpack_end(entry->note).failed});
  }
  for (std::size_t t = 0; t < FlightMemory::kTracks; ++t) {
    const FlightTrack& track = memory.tracks[t];
    const std::uint64_t collectives = track.ring.count();
    for (std::uint64_t i = track.ring.first(); i < collectives; ++i) {
      const auto entry = track.ring.at(i);
      if (!entry) continue;
      FlightSnapshot::Collective each{
          .call = entry->what.frame(), .begin = time_of(entry->begin), .end = time_of(entry->end)};
      const CollectiveEnd end = unpack_end(entry->note);
      each.failed = end.failed;
      each.waited_for = end.longest.rank;
      each.waited = static_cast<std::int64_t>(end.longest.nanoseconds);
      const bool under_way = entry->end == 0 && i + 1 == collectives;
      if (under_way && track.waits.rank() >= 0) {
        each.waited_for = track.waits.rank();
        each.waited = static_cast<std::int64_t>(track.waits.waited());
      }
      snapshot.collectives.push_back(each);
    }
  }
  std::ranges::stable_sort(snapshot.collectives, {}, &FlightSnapshot::Collective::begin);
  return snapshot;
}

PhaseRecord::PhaseRecord(FlightRecorder& recorder, std::string_view name, std::int64_t step,
                         int lane)
    : recorder_(recorder), exceptions_(std::uncaught_exceptions()), number_([&] {
        FlightPhase phase;
        const std::size_t size = std::min(name.size(), phase.name.size() - 1);
        std::copy_n(name.data(), size, phase.name.data());
        phase.step = step;
        phase.lane = lane;
        phase.generation = recorder.generation();
        return recorder.phases().enter(phase, recorder.ticks());
      }()) {}

PhaseRecord::~PhaseRecord() {
  const bool failed = std::uncaught_exceptions() > exceptions_;
  recorder_.phases().leave(number_, recorder_.ticks(), pack({.failed = failed, .longest = {}}));
}

}  // namespace lockstep
