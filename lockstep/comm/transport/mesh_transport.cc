#include "lockstep/comm/transport/mesh_transport.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/call_check.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

// A waiting rank first tries again and again, which is fastest when the peer runs on another core,
// then sleeps in poll().
constexpr auto kSpinTime = 50us;
// With fewer cores than ranks it gives way instead; below some 32 times, a wake-up costs more.
constexpr unsigned kYieldsWhenOversubscribed = 64;

// A busy rank notices a failure elsewhere after this many turns.
constexpr unsigned kTurnsPerCheck = 64;

// From this size on, waking a second thread for the sends pays.
constexpr std::size_t kSendApart = 512 * 1024;

// How often a sleeping rank looks after the job.
constexpr auto kLookAround = 100ms;

// Bytes of one message moved before the next one gets its turn. See docs/decisions/tcp_writes.md:
// two ranks exchange large messages faster in shorter turns, more ranks do not.
constexpr std::size_t kTurnBytes = 1024 * 1024;
constexpr std::size_t kTurnBytesOfLarge = 256 * 1024;
constexpr std::size_t kLargeMessage = 4 * 1024 * 1024;

}  // namespace

struct MeshTransport::Port {
  std::mutex mutex;            // held by the one thread that uses this direction
  std::uint32_t messages = 0;  // guarded by mutex: how many have passed, for MeshFrame::part
  // Guarded by mutex: what next_frame() has read of the message that comes next.
  MeshFrameBytes head;
  std::size_t head_done = 0;
};

struct MeshTransport::Active {
  Transfer* transfer = nullptr;
  Stream* stream = nullptr;
  std::unique_lock<std::mutex> lock;
  MeshFrameBytes head;
  std::size_t head_done = 0;
  std::uint32_t part = 0;
  bool turn = true;       // the messages before it on its stream are through
  bool followed = false;  // by another message of this run on its stream

  std::size_t size() const { return transfer->layout.bytes(); }
  bool receiving() const { return transfer->direction == Direction::kRecv; }
  bool complete() const { return head_done == kMeshFrameBytes && transfer->done == size(); }
  // Waiting for the network, not for the observer. A frame goes out with the first bytes behind it.
  bool open() const {
    if (!turn) return false;
    if (head_done < kMeshFrameBytes) return receiving() || transfer->limit > 0 || size() == 0;
    return transfer->done < std::min(transfer->limit, size());
  }
  bool same_stream(const Active& other) const {
    return transfer->peer == other.transfer->peer &&
           transfer->direction == other.transfer->direction;
  }
};

MeshTransport::MeshTransport(int rank, int world_size, std::uint32_t generation,
                             std::uint32_t group, std::unique_ptr<Streams> streams)
    : rank_(rank),
      world_size_(world_size),
      generation_(generation),
      group_(group),
      streams_(std::move(streams)) {
  for (int i = 0; i < 2 * world_size; ++i) ports_.push_back(std::make_unique<Port>());
}

MeshTransport::~MeshTransport() = default;

MeshTransport::Port& MeshTransport::port(int peer, Direction direction) {
  return *ports_[index_of(2 * peer + (direction == Direction::kRecv ? 1 : 0))];
}

MeshFrame MeshTransport::full_stamp(const MeshFrame& stamp) const {
  MeshFrame full = stamp;
  full.generation = generation_;
  full.group = group_;
  return full;
}

void MeshTransport::open(std::span<Transfer> transfers, std::span<Active> active,
                         const MeshFrame& full, Deadline deadline) {
  supervisor().latch().check();
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    check_peer(transfers[i].peer, "message");
    active[i].transfer = &transfers[i];
  }
  // Locks are taken in one order on every thread.
  std::sort(active.begin(), active.end(), [](const Active& a, const Active& b) {
    return std::tuple(a.transfer->peer, a.transfer->direction, a.transfer) <
           std::tuple(b.transfer->peer, b.transfer->direction, b.transfer);
  });
  for (std::size_t i = 0; i < active.size(); ++i) {
    Active& a = active[i];
    Port& p = port(a.transfer->peer, a.transfer->direction);
    a.turn = i == 0 || !a.same_stream(active[i - 1]);
    if (a.turn) {
      a.lock = std::unique_lock(p.mutex);
    } else {
      active[i - 1].followed = true;
    }
    a.part = p.messages++;
  }
  try {
    for (Active& a : active) {
      if (a.part == 0) note_wait(job_rank(a.transfer->peer));  // it may have to be connected first
      a.stream = &streams_->to(a.transfer->peer, deadline);
      if (a.part == 0) note_wait(-1);
      if (!a.receiving()) {
        MeshFrame head = full;
        head.part = a.part;
        head.payload = a.size();
        a.head = encode(head);
        continue;
      }
      if (Port& p = port(a.transfer->peer, Direction::kRecv); p.head_done > 0) {
        a.head = p.head;
        a.head_done = std::exchange(p.head_done, 0);
        if (a.head_done == kMeshFrameBytes) check_frame(a, full);
      }
    }
  } catch (const Error& error) {
    supervisor().fail(error);
  }
}

bool MeshTransport::run_if_begun(Transfer& receive, const MeshFrame& stamp, Deadline begin,
                                 Deadline deadline) {
  LOCKSTEP_CHECK(receive.direction == Direction::kRecv);
  const MeshFrame full = full_stamp(stamp);
  std::array<Active, 1> active;
  open({&receive, 1}, active, full, deadline);
  if (move(active, full, nullptr, deadline, &begin)) return true;
  --port(receive.peer, receive.direction).messages;  // the lock is still ours
  note_wait(-1);
  return false;
}

std::optional<MeshFrame> MeshTransport::next_frame(int peer, Deadline deadline) {
  supervisor().latch().check();
  check_peer(peer, "message");
  Transfer nothing{.peer = peer, .direction = Direction::kRecv, .layout = {}};
  Active active;
  active.transfer = &nothing;
  Port& p = port(peer, Direction::kRecv);
  const std::lock_guard lock(p.mutex);
  try {
    active.stream = streams_->if_there(peer, deadline);
    if (active.stream == nullptr) return std::nullopt;
    while (p.head_done < kMeshFrameBytes) {
      const std::size_t read = active.stream->read_some(std::span(p.head).subspan(p.head_done), {});
      if (read == 0) return std::nullopt;
      p.head_done += read;
    }
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kChannelClosed && p.head_done == 0) return std::nullopt;
    fail_transfer(active, error);
  }
  // Bytes that are no frame are found out by whoever receives them.
  return decode_mesh_frame(std::span(p.head)).value_or(MeshFrame{});
}

void MeshTransport::run(std::span<Transfer> transfers, const MeshFrame& stamp,
                        TransferObserver* observer, Deadline deadline) {
  // Sends go up from the next rank, receives down from the one before.
  const auto distance = [&](const Active& a) {
    const int up = (a.transfer->peer - rank_ + world_size_) % world_size_;
    return a.receiving() ? world_size_ - up : up;
  };
  const MeshFrame full = full_stamp(stamp);
  // No allocation for the few transfers of small collectives, where it would be felt.
  std::array<Active, 8> few;
  std::vector<Active> many(transfers.size() > few.size() ? transfers.size() : 0);
  const std::span<Active> active =
      many.empty() ? std::span(few).first(transfers.size()) : std::span(many);
  open(transfers, active, full, deadline);

  // Everybody starts with another peer, so that not all send to the same one at once.
  std::sort(active.begin(), active.end(),
            [&](const Active& a, const Active& b) { return distance(a) < distance(b); });
  std::size_t sent_bytes = 0;
  for (const Active& a : active) sent_bytes += a.receiving() ? 0 : a.size();
  const bool apart = sent_bytes >= kSendApart && streams_->spare_cores() &&
                     (observer == nullptr || !observer->watches_sends());
  if (!apart) {
    move(active, full, observer, deadline);
    return;
  }
  const auto middle = std::stable_partition(active.begin(), active.end(),
                                            [](const Active& a) { return a.receiving(); });
  const std::span received(active.begin(), middle);
  const std::span sent(middle, active.end());
  sender_.start([&] { move(sent, full, nullptr, deadline); });
  try {
    move(received, full, observer, deadline);
  } catch (...) {
    // The sender ends with the job; until then it uses our memory.
    supervisor().fail_quietly(caught_error("receiving"));
    sender_.wait();
    throw;
  }
  if (const std::optional<Error> error = sender_.wait()) supervisor().fail(*error);
}

bool MeshTransport::move(std::span<Active> active, const MeshFrame& stamp,
                         TransferObserver* observer, Deadline deadline, const Deadline* begin) {
  // One without a body may be through: next_frame() has read its frame.
  auto left = static_cast<std::size_t>(
      std::ranges::count_if(active, [](const Active& a) { return !a.complete(); }));
  unsigned turns = 0;
  unsigned idle_turns = 0;
  auto idle_since = Deadline::Clock::time_point();
  while (left > 0) {
    bool moved = false;
    for (Active& a : active) {
      if (!a.open()) continue;
      const bool had_head = a.head_done == kMeshFrameBytes;
      const std::size_t before = a.transfer->done;
      if (!advance(a)) continue;
      moved = true;
      if (a.receiving() && !had_head && a.head_done == kMeshFrameBytes) check_frame(a, stamp);
      if (observer != nullptr && a.transfer->done != before) observer->advanced(*a.transfer);
      if (a.complete()) {
        --left;
        if (a.followed) pass_turn(active, a);
      }
    }
    if (++turns % kTurnsPerCheck == 0) {
      supervisor().latch().check();
      if (left > 0 && deadline.expired()) fail_timeout(active, stamp);
    }
    if (moved) {
      begin = nullptr;
      if (idle_turns > 0) note_wait(-1);
      idle_turns = 0;
      continue;
    }
    // Otherwise the clock is read only once there is nothing to do.
    ++idle_turns;
    const auto now = Deadline::Clock::now();
    if (idle_turns == 1) idle_since = now;
    supervisor().latch().check();
    if (begin != nullptr && now >= begin->time()) return false;
    if (now >= deadline.time()) fail_timeout(active, stamp);
    if (streams_->oversubscribed() && idle_turns <= kYieldsWhenOversubscribed) {
      sched_yield();
    } else if (streams_->oversubscribed() || now - idle_since > kSpinTime) {
      wait(active,
           begin != nullptr ? Deadline::at(std::min(begin->time(), deadline.time())) : deadline);
    }
  }
  return true;
}

void MeshTransport::pass_turn(std::span<Active> active, const Active& done) {
  for (Active& a : active) {
    if (a.part == done.part + 1 && a.same_stream(done)) a.turn = true;
  }
}

bool MeshTransport::advance(Active& a) {
  Transfer& t = *a.transfer;
  const std::size_t ready = std::min(t.limit, a.size()) - t.done;
  std::span<std::byte> body;
  if (ready > 0) {
    body = t.layout.at(t.done);
    const bool large = world_size_ == 2 && a.size() > kLargeMessage;
    body = body.first(std::min({body.size(), ready, large ? kTurnBytesOfLarge : kTurnBytes}));
  }
  const std::span head = std::span(a.head).subspan(a.head_done);
  std::size_t moved = 0;
  try {
    moved = a.receiving() ? a.stream->read_some(head, body) : a.stream->write_some(head, body);
  } catch (const Error& error) {
    fail_transfer(a, error);
  }
  const std::size_t in_head = std::min(moved, head.size());
  a.head_done += in_head;
  t.done += moved - in_head;
  return moved > 0;
}

void MeshTransport::fail_transfer(const Active& active, const Error& error) {
  const int peer = active.transfer->peer;
  supervisor().fail(
      Error(error.code(),
            fmt::format("{} {}: {}", active.receiving() ? "receiving from" : "sending to",
                        name_of(peer), error.message()),
            job_rank(peer)));
}

void MeshTransport::check_frame(Active& a, const MeshFrame& stamp) {
  const int peer = a.transfer->peer;
  const std::optional<MeshFrame> got = decode_mesh_frame(std::span(a.head));
  if (!got) {
    supervisor().fail(Error(ErrorCode::kUnexpectedMessage,
                            fmt::format("{} sent bytes that are no frame", name_of(peer)),
                            job_rank(peer)));
  }
  MeshFrame expected = stamp;
  expected.part = a.part;
  expected.payload = a.size();
  if (*got == expected) return;
  supervisor().fail(frame_mismatch(*got, name_of(peer), job_rank(peer), expected, name_of(rank_)));
}

void MeshTransport::wait(std::span<Active> active, Deadline deadline) {
  std::vector<pollfd> fds;
  fds.push_back({supervisor().latch().fd(), POLLIN, 0});
  bool sleep = true;
  for (Active& a : active) {
    if (a.complete() || !a.open()) continue;
    if (fds.size() == 1) note_wait(job_rank(a.transfer->peer));
    if (!a.stream->prepare_wait(a.transfer->direction, fds)) sleep = false;
  }
  if (sleep && ::poll(fds.data(), fds.size(), deadline.poll_timeout(kLookAround)) == 0) {
    supervisor().look_around();
    for (Active& a : active) {
      try {
        if (!a.complete()) a.stream->check_reach();
      } catch (const Error& error) {
        fail_transfer(a, error);
      }
    }
  }
  for (Active& a : active) {
    if (!a.complete() && a.open()) a.stream->finish_wait(a.transfer->direction);
  }
}

void MeshTransport::fail_timeout(std::span<Active> active, const MeshFrame& stamp) {
  std::string awaited;
  int first = -1;
  for (const Active& a : active) {
    if (a.complete() || !a.open()) continue;
    if (first < 0) first = job_rank(a.transfer->peer);
    if (!awaited.empty()) awaited += ", ";
    awaited += a.receiving() ? "data from " : "room at ";
    awaited += name_of(a.transfer->peer);
  }
  supervisor().fail(
      Error(ErrorCode::kTimeout,
            fmt::format("{}: {} waited in vain for {}", describe(stamp), name_of(rank_), awaited),
            first));
}

std::vector<int> MeshTransport::hosts() const {
  std::vector<int> hosts;
  for (int rank = 0; rank < world_size_; ++rank) {
    int first = 0;
    // Only the first ranks of hosts need a look.
    while (first < rank &&
           (hosts[index_of(first)] != first || !streams_->shares_memory(first, rank)))
      ++first;
    hosts.push_back(first);
  }
  return hosts;
}

std::unique_ptr<Transport> MeshTransport::split(const std::vector<int>& members,
                                                std::uint32_t group) {
  const auto me = std::find(members.begin(), members.end(), rank_);
  LOCKSTEP_CHECK(me != members.end());
  const int rank = static_cast<int>(me - members.begin());
  return std::make_unique<MeshTransport>(rank, static_cast<int>(members.size()), generation_, group,
                                         streams_->split(members, rank, group));
}

}  // namespace lockstep
