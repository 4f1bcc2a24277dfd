#include "lockstep/comm/mpi/stream.h"

#include <sched.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>

#include "lockstep/base/index.h"
#include "lockstep/comm/mpi/call.h"
#include "lockstep/comm/mpi/mpi.h"
#include "lockstep/comm/transport/mesh_transport.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

constexpr int kTag = 0;
// Copying this much costs less than a message of its own.
constexpr std::size_t kStageBytes = 16 * 1024;
constexpr std::size_t kMostDirectBytes = 1024 * 1024;
// How long a chunk under way is given before its stream may sleep: MPI moves it only when asked.
constexpr auto kFlowTime = 2ms;

}  // namespace

MpiStream::MpiStream(const MpiGroup& group, int peer) : group_(group), peer_(peer) {
  for (Timer& timer : timers_) {
    timer.fd = Descriptor(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
    if (!timer.fd) throw_io("timerfd_create", errno);
  }
}

MpiStream::~MpiStream() {
  for (Stage& stage : stages_) {
    if (stage.request == MPI_REQUEST_NULL) continue;
    group_.world().keep_until_sent(stage.request, std::move(stage.bytes));
  }
}

std::size_t MpiStream::write_some(std::span<const std::byte> head,
                                  std::span<const std::byte> body) {
  std::size_t moved = 0;
  if (head.size() + body.size() <= kStageBytes && !sending_.active()) {
    moved = write_staged(head, body);
  } else if (!head.empty()) {
    moved = write_staged(head, {});
  } else {
    moved = write_direct(body);
  }
  if (moved > 0) timers_[index_of(Direction::kSend)].reset();
  return moved;
}

std::size_t MpiStream::write_staged(std::span<const std::byte> head,
                                    std::span<const std::byte> body) {
  Stage& stage = stages_[next_stage_];
  if (stage.request != MPI_REQUEST_NULL && !test(stage.request)) return 0;
  if (stage.bytes == nullptr) stage.bytes = std::make_unique<std::byte[]>(kStageBytes);
  const std::size_t size = head.size() + body.size();
  copy_bytes(stage.bytes.get(), head.data(), head.size());
  copy_bytes(stage.bytes.get() + head.size(), body.data(), body.size());
  next_stage_ = (next_stage_ + 1) % stages_.size();
  const auto lock = mpi_lock();
  check_mpi(MPI_Isend(stage.bytes.get(), static_cast<int>(size), MPI_BYTE, peer_, kTag,
                      group_.comm(), &stage.request),
            "MPI_Isend");
  return size;
}

std::size_t MpiStream::write_direct(std::span<const std::byte> body) {
  if (!sending_.active()) {
    sending_.bytes = std::min(body.size(), kMostDirectBytes);
    sending_.started = Deadline::Clock::now();
    const auto lock = mpi_lock();
    check_mpi(MPI_Isend(body.data(), static_cast<int>(sending_.bytes), MPI_BYTE, peer_, kTag,
                        group_.comm(), &sending_.request),
              "MPI_Isend");
  }
  return test(sending_.request) ? sending_.bytes : 0;
}

std::size_t MpiStream::read_some(std::span<std::byte> head, std::span<std::byte> body) {
  std::size_t moved = 0;
  if (incoming_taken_ < incoming_size_) {
    moved = take_incoming(head, body);
  } else if ((receiving_.active() || receive_next(head, body)) && test(receiving_.request)) {
    if (straight_) {
      moved = receiving_.bytes;
    } else {
      incoming_size_ = receiving_.bytes;
      incoming_taken_ = 0;
      moved = take_incoming(head, body);
    }
  }
  if (moved > 0) timers_[index_of(Direction::kRecv)].reset();
  return moved;
}

// Begins to receive the next chunk, if there is one.
bool MpiStream::receive_next(std::span<std::byte> head, std::span<std::byte> body) {
  const auto lock = mpi_lock();
  int found = 0;
  MPI_Message message = MPI_MESSAGE_NULL;
  MPI_Status status;
  check_mpi(MPI_Improbe(peer_, kTag, group_.comm(), &found, &message, &status), "MPI_Improbe");
  if (found == 0) return false;
  int size = 0;
  check_mpi(MPI_Get_count(&status, MPI_BYTE, &size), "MPI_Get_count");
  receiving_.bytes = static_cast<std::size_t>(size);
  receiving_.started = Deadline::Clock::now();
  straight_ = head.empty() && receiving_.bytes <= body.size();
  if (!straight_ && receiving_.bytes > incoming_capacity_) {
    incoming_capacity_ = std::max(receiving_.bytes, kStageBytes);
    incoming_ = std::make_unique<std::byte[]>(incoming_capacity_);
  }
  check_mpi(MPI_Imrecv(straight_ ? body.data() : incoming_.get(), size, MPI_BYTE, &message,
                       &receiving_.request),
            "MPI_Imrecv");
  return true;
}

std::size_t MpiStream::take_incoming(std::span<std::byte> head, std::span<std::byte> body) {
  const std::byte* from = incoming_.get() + incoming_taken_;
  const std::size_t there = incoming_size_ - incoming_taken_;
  const std::size_t to_head = std::min(head.size(), there);
  const std::size_t to_body = std::min(body.size(), there - to_head);
  copy_bytes(head.data(), from, to_head);
  copy_bytes(body.data(), from + to_head, to_body);
  incoming_taken_ += to_head + to_body;
  return to_head + to_body;
}

bool MpiStream::prepare_wait(Direction direction, std::vector<pollfd>& fds) {
  const Flow& flow = direction == Direction::kSend ? sending_ : receiving_;
  const auto now = Deadline::Clock::now();
  if (flow.active() && now - flow.started < kFlowTime) {
    if (group_.world().oversubscribed()) ::sched_yield();
    return false;
  }
  if (direction == Direction::kRecv && !flow.active() && chunk_is_there()) return false;
  Timer& timer = timers_[index_of(direction)];
  // Longer naps only once the last one was slept through.
  if (now >= timer.rings) timer.nap = std::clamp(2 * timer.nap, kShortestNap, kLongestNap);
  timer.rings = now + timer.nap;
  itimerspec setting{};
  setting.it_value.tv_nsec = timer.nap.count();
  ::timerfd_settime(timer.fd.get(), 0, &setting, nullptr);
  fds.push_back({timer.fd.get(), POLLIN, 0});
  return true;
}

// MPI_Improbe may look first and make progress then, so what it has just found is seen only now.
bool MpiStream::chunk_is_there() const {
  const auto lock = mpi_lock();
  int found = 0;
  // An error is for read_some() to meet.
  return MPI_Iprobe(peer_, kTag, group_.comm(), &found, MPI_STATUS_IGNORE) != MPI_SUCCESS ||
         found != 0;
}

namespace {

// The streams of a group, each opened on first use.
class MpiStreams final : public Streams {
 public:
  explicit MpiStreams(std::unique_ptr<MpiGroup> group)
      : group_(std::move(group)), streams_(static_cast<std::size_t>(group_->world_size())) {}

  Stream& to(int peer, Deadline) override {
    const std::lock_guard lock(mutex_);
    std::unique_ptr<Stream>& stream = streams_[index_of(peer)];
    if (stream == nullptr) stream = std::make_unique<MpiStream>(*group_, peer);
    return *stream;
  }
  int job_rank(int rank) const override { return group_->job_rank(rank); }
  std::string name_of(int rank) const override { return group_->name_of(rank); }
  Supervisor& supervisor() override { return group_->control(); }
  std::unique_ptr<Streams> split(const std::vector<int>& members, int,
                                 std::uint32_t group) override {
    return std::make_unique<MpiStreams>(group_->split(members, group));
  }
  bool split_waits() const override { return true; }
  // MPI has its own ways within a host.
  SharedSpace* shared_space() override { return nullptr; }
  bool oversubscribed() const override { return group_->world().oversubscribed(); }
  bool spare_cores() const override { return false; }

 private:
  const std::unique_ptr<MpiGroup> group_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Stream>> streams_;  // guarded by mutex_
};

}  // namespace

std::unique_ptr<Transport> make_mpi_transport(const MpiOptions& options) {
  std::unique_ptr<MpiGroup> group = MpiWorld::join(options).group();
  const int rank = group->rank();
  const int world_size = group->world_size();
  return std::make_unique<MeshTransport>(rank, world_size, /*generation=*/0, /*group=*/0,
                                         std::make_unique<MpiStreams>(std::move(group)));
}

}  // namespace lockstep
