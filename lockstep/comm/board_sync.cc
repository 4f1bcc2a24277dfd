#include "lockstep/comm/board_sync.h"

#include <fmt/format.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

#include "lockstep/comm/call.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

// Looks at the word this often before the first system call; about 20 us on another core's word.
constexpr int kEagerLooks = 200;
constexpr int kPausedLooks = 400;
// Then gives way to others for this long, then sleeps. With fewer cores than ranks the peer needs
// our core, so giving way is what makes progress.
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

std::uint64_t digest_of(const MeshFrame& s) {
  const auto mix = [](std::uint64_t hash, std::uint64_t word) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
    return hash ^ (hash >> 32);
  };
  const std::uint64_t codes = s.kind | std::uint64_t{s.type} << 8 | std::uint64_t{s.op} << 16 |
                              std::uint64_t{s.algorithm} << 24 | std::uint64_t{s.generation} << 32;
  std::uint64_t hash = mix(1, codes);
  hash = mix(hash, s.channel | std::uint64_t{s.bucket} << 32);
  hash = mix(hash, s.step);
  hash = mix(hash, s.count);
  return mix(hash, s.shape);
}

}  // namespace

BoardSync::BoardSync(Transport& transport, SharedSpace& space, bool oversubscribed)
    : transport_(transport),
      space_(space),
      own_(space.board(transport.rank())),
      oversubscribed_(oversubscribed) {}

void BoardSync::begin(const MeshFrame& stamp, Deadline deadline) {
  transport_.supervisor().latch().check();
  space_.connect(deadline);
  stamp_ = stamp;
  digest_ = digest_of(stamp);
  deadline_ = deadline;
  ++sequence_;
}

void BoardSync::store(std::atomic<std::uint64_t>& word, std::uint64_t value) {
  // Sequentially consistent, as is the sleeper's count: one of the two sees the other.
  word.store(value, std::memory_order_seq_cst);
  if (own_.sleepers.load(std::memory_order_seq_cst) != 0) [[unlikely]] {
    own_.bell.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(own_.bell);
  }
}

void BoardSync::exchange_slots() {
  own_.stamps[parity()] = stamp_;
  Board::Slot& mine = slot(transport_.rank());
  mine.digest = digest_;
  store(mine.sequence, sequence_);
  const int n = transport_.world_size();
  for (int i = 1; i < n; ++i) {
    const int peer = (transport_.rank() + i) % n;
    const Board::Slot& theirs = slot(peer);
    wait_for(peer,
             [&] { return theirs.sequence.load(std::memory_order_acquire) == sequence_; });
    if (theirs.digest != digest_) [[unlikely]] fail_mismatch(peer);
  }
}

void BoardSync::signal(std::atomic<std::uint64_t> Board::*counter, std::uint64_t value) {
  store(own_.*counter, value);
}

void BoardSync::await(std::atomic<std::uint64_t> Board::*counter, std::uint64_t value) {
  const int n = transport_.world_size();
  for (int i = 1; i < n; ++i) {
    const int peer = (transport_.rank() + i) % n;
    const std::atomic<std::uint64_t>& word = space_.board(peer).*counter;
    wait_for(peer, [&] { return word.load(std::memory_order_acquire) >= value; });
  }
}

template <typename Ready>
void BoardSync::wait_for(int peer, const Ready& ready) {
  for (int i = 0; i < kEagerLooks; ++i) {
    if (ready()) return;
  }
  if (!oversubscribed_) {
    for (int i = 0; i < kPausedLooks; ++i) {
      if (ready()) return;
      pause_briefly();
    }
  }
  wait_long(peer, ready);
}

template <typename Ready>
void BoardSync::wait_long(int peer, const Ready& ready) {
  FailureLatch& latch = transport_.supervisor().latch();
  Board& board = space_.board(peer);
  const auto start = Deadline::Clock::now();
  const auto yield_time = oversubscribed_ ? kYieldTimeOversubscribed : kYieldTime;
  while (!ready()) {
    latch.check();
    const auto now = Deadline::Clock::now();
    if (now >= deadline_.time()) fail_timeout(peer);
    if (now - start < yield_time) {
      sched_yield();
      continue;
    }
    board.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const std::uint32_t seen = board.bell.load(std::memory_order_seq_cst);
    if (!ready()) {
      futex_wait(board.bell, seen, std::min<std::chrono::nanoseconds>(kNap, deadline_.time() - now));
    }
    board.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
}

void BoardSync::fail_mismatch(int peer) {
  const MeshFrame& theirs = space_.board(peer).stamps[parity()];
  transport_.supervisor().fail(Error(
      ErrorCode::kCollectiveMismatch,
      fmt::format("{} called {}, {} called {}, as collective {}", transport_.name_of(peer),
                  describe(theirs), transport_.name_of(transport_.rank()), describe(stamp_),
                  stamp_.sequence),
      peer));
}

void BoardSync::fail_timeout(int peer) {
  transport_.supervisor().fail(
      Error(ErrorCode::kTimeout,
            fmt::format("collective {}, {}: {} waited in vain for {}", stamp_.sequence,
                        describe(stamp_), transport_.name_of(transport_.rank()),
                        transport_.name_of(peer)),
            peer));
}

}  // namespace lockstep
