#include "lockstep/comm/collectives/board_sync.h"

#include <fmt/format.h>
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include "lockstep/comm/call_check.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

// A call that has followed itself so often has written its stamp into both slots.
constexpr int kRepeats = 2;
// How often a short collective looks first, with the time of every look, which takes 10 ns.
constexpr int kTimedLooks = 30;
// Looks at the word this often before the first system call; about 20 us on another core's word.
// With fewer cores than ranks the peer needs our core, so giving way is what makes progress.
constexpr int kEagerLooks = 200;
constexpr int kPausedLooks = 400;
constexpr int kLooksOversubscribed = 10;
constexpr int kYieldsOversubscribed = 50;
// Then gives way to others for this long, then sleeps.
constexpr auto kYieldTime = 200us;
constexpr auto kYieldTimeOversubscribed = 2ms;
// A failure elsewhere is noticed after at most this.
constexpr auto kNap = 20ms;

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen,
                std::chrono::nanoseconds timeout) {
  timespec limit{};
  limit.tv_sec = static_cast<time_t>(timeout.count() / 1'000'000'000);
  limit.tv_nsec = static_cast<long>(timeout.count() % 1'000'000'000);
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Makes every processor that runs a rank execute a full fence.
void fence_all() { ::syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0); }

void register_for_barriers() {
  if (::syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0) != 0) {
    throw_io("membarrier", errno);
  }
}

// Whether both have the same digest for sure. In a loop of the same collective they do.
bool same_call(const MeshFrame& a, const MeshFrame& b) {
  return a.kind == b.kind && a.type == b.type && a.op == b.op && a.algorithm == b.algorithm &&
         a.generation == b.generation && a.group == b.group && a.bucket == b.bucket &&
         a.step == b.step && a.count == b.count && a.shape == b.shape;
}

std::uint64_t digest_of(const MeshFrame& s) {
  const auto mix = [](std::uint64_t hash, std::uint64_t word) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
    return hash ^ (hash >> 32);
  };
  const std::uint64_t codes = s.kind | std::uint64_t{s.type} << 8 | std::uint64_t{s.op} << 16 |
                              std::uint64_t{s.algorithm} << 24 | std::uint64_t{s.generation} << 32;
  std::uint64_t hash = mix(1, codes);
  hash = mix(hash, s.group | std::uint64_t{s.bucket} << 32);
  hash = mix(hash, s.step);
  hash = mix(hash, s.count);
  return mix(hash, s.shape);
}

}  // namespace

BoardSync::BoardSync(Transport& transport, SharedSpace& space, bool oversubscribed)
    : transport_(transport),
      space_(space),
      own_(space.board(transport.rank())),
      latch_(transport.supervisor().latch()),
      rank_(transport.rank()),
      world_size_(transport.world_size()),
      oversubscribed_(oversubscribed) {
  register_for_barriers();
}

// No fence here either: await_leaving() makes this processor execute one, so that either we see
// that the job has failed or it sees us inside.
void BoardSync::enter() {
  own_.inside.store(1, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

void BoardSync::leave() { own_.inside.store(0, std::memory_order_release); }

void BoardSync::await_leaving() {
  fence_all();
  const Deadline deadline = Deadline::after(10s);
  for (int rank = 0; rank < world_size_; ++rank) {
    const std::atomic<std::uint32_t>& inside = space_.board(rank).inside;
    while (inside.load(std::memory_order_acquire) != 0 && !deadline.expired()) sched_yield();
  }
}

void BoardSync::begin(const MeshFrame& stamp, CollectiveStay& stay) {
  latch_.check();
  if (boards_.empty()) [[unlikely]] {
    try {
      space_.connect(stay.enter());
    } catch (const Error& error) {
      transport_.supervisor().fail(error);
    }
    for (int r = 0; r < world_size_; ++r) boards_.push_back(&space_.board(r));
  }
  if (sequence_ > 0 && same_call(stamp, stamp_)) {
    // A stamp has just been written piece by piece: to copy it whole would wait for the pieces.
    stamp_.sequence = stamp.sequence;
    repeated_ = std::min(repeated_ + 1, kRepeats);
  } else {
    stamp_ = stamp;
    digest_ = digest_of(stamp);
    repeated_ = 0;
  }
  collective_ = &stay;
  ++sequence_;
}

void BoardSync::store(std::atomic<std::uint64_t>& word, std::uint64_t value) {
  word.store(value, std::memory_order_release);
  // No fence, which would wait for the cache line: whoever goes to sleep makes this processor
  // execute one (fence_all), so that either we see the sleeper or it sees the value.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (own_.sleepers.load(std::memory_order_relaxed) != 0) [[unlikely]] {
    own_.bell.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(own_.bell);
  }
}

void BoardSync::gather_entries(bool brief) {
  if (repeated_ < kRepeats) {
    own_.stamps[parity()] = stamp_;
  } else {
    own_.stamps[parity()].sequence = stamp_.sequence;
  }
  Board::Entry& mine = entry(rank_);
  mine.digest = digest_;
  store(mine.sequence, sequence_);
  deadline_ = collective_->enter();
  brief = brief && repeated_ > 0;  // the first may have had to connect
  if (brief) collective_->watch();
  for (int i = 1; i < world_size_; ++i) {
    const int peer = rank_ + i < world_size_ ? rank_ + i : rank_ + i - world_size_;
    const Board::Entry& theirs = entry(peer);
    const auto there = [word = &theirs.sequence, sequence = sequence_] {
      return word->load(std::memory_order_acquire) == sequence;
    };
    if (!brief || !look_at(there)) wait_for(peer, there);
    if (theirs.digest != digest_) [[unlikely]]
      fail_mismatch(peer);
  }
}

void BoardSync::signal(std::atomic<std::uint64_t> Board::*counter, std::uint64_t value) {
  store(own_.*counter, value);
}

void BoardSync::await(std::atomic<std::uint64_t> Board::*counter, std::uint64_t value) {
  for (int i = 1; i < world_size_; ++i) {
    const int peer = rank_ + i < world_size_ ? rank_ + i : rank_ + i - world_size_;
    const std::atomic<std::uint64_t>& word = board(peer).*counter;
    wait_for(peer, [&word, value] { return word.load(std::memory_order_acquire) >= value; });
  }
}

// Looks and tells the time of it. Whether it is ready.
template <typename Ready>
bool BoardSync::look_at(const Ready& ready) {
  if (ready()) return true;
  // With fewer cores than ranks the next look comes after another rank had this one's core.
  for (int i = 1; i < kTimedLooks && !oversubscribed_; ++i) {
    collective_->looked();
    if (ready()) return true;
  }
  collective_->goes_on();
  return false;
}

template <typename Ready>
void BoardSync::wait_for(int peer, const Ready& ready) {
  const int looks = oversubscribed_ ? kLooksOversubscribed : kEagerLooks;
  for (int i = 0; i < looks; ++i) {
    if (ready()) return;
  }
  if (oversubscribed_) {
    for (int i = 0; i < kYieldsOversubscribed; ++i) {
      sched_yield();
      if (ready()) return;
    }
  } else {
    for (int i = 0; i < kPausedLooks; ++i) {
      pause_briefly();
      if (ready()) return;
    }
  }
  wait_long(peer, ready);
}

template <typename Ready>
void BoardSync::wait_long(int peer, const Ready& ready) {
  Board& peer_board = board(peer);
  const auto start = Deadline::Clock::now();
  const auto yield_time = oversubscribed_ ? kYieldTimeOversubscribed : kYieldTime;
  while (!ready()) {
    latch_.check();
    const auto now = Deadline::Clock::now();
    if (now >= deadline_.time()) fail_timeout(peer);
    if (now - start < yield_time) {
      sched_yield();
      continue;
    }
    transport_.note_wait(transport_.job_rank(peer));
    peer_board.sleepers.fetch_add(1, std::memory_order_seq_cst);
    fence_all();
    const std::uint32_t seen = peer_board.bell.load(std::memory_order_seq_cst);
    if (!ready()) {
      futex_wait(peer_board.bell, seen,
                 std::min<std::chrono::nanoseconds>(kNap, deadline_.time() - now));
    }
    peer_board.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (Deadline::Clock::now() - now >= kNap) transport_.supervisor().look_around();
  }
  transport_.note_wait(-1);
}

void BoardSync::fail_mismatch(int peer) {
  const MeshFrame& theirs = board(peer).stamps[parity()];
  transport_.supervisor().fail(Error(
      ErrorCode::kCollectiveMismatch,
      fmt::format("{} called {}, {} called {}, as collective {}", transport_.name_of(peer),
                  describe(theirs), transport_.name_of(rank_), describe(stamp_), stamp_.sequence),
      transport_.job_rank(peer)));
}

void BoardSync::fail(int peer, std::string_view what) const {
  const Error seen(ErrorCode::kUnexpectedMessage,
                   fmt::format("collective {}, {}: {} {}", stamp_.sequence, describe(stamp_),
                               transport_.name_of(peer), what),
                   transport_.job_rank(peer));
  transport_.supervisor().fail(seen);
  throw Error(seen);  // never: but GCC does not see it through a virtual call
}

void BoardSync::fail_timeout(int peer) {
  transport_.supervisor().fail(
      Error(ErrorCode::kTimeout,
            fmt::format("collective {}, {}: {} waited in vain for {}", stamp_.sequence,
                        describe(stamp_), transport_.name_of(rank_), transport_.name_of(peer)),
            transport_.job_rank(peer)));
}

}  // namespace lockstep
