#include "lockstep/comm/transport/local_group.h"

#include <fmt/format.h>

#include <array>
#include <atomic>
#include <map>
#include <mutex>

#include "lockstep/base/cores.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/transport/mesh_transport.h"
#include "lockstep/comm/transport/ring_stream.h"
#include "lockstep/comm/transport/shared_space.h"
#include "lockstep/net/job/job_health.h"

namespace lockstep {
namespace {

std::string thread_name(int rank) { return fmt::format("rank {} (thread)", rank); }

// What the supervisors of all ranks share. One latch for all: threads of a process fail together,
// and nobody has to be told.
struct LocalJob {
  explicit LocalJob(int world_size)
      : books(static_cast<std::size_t>(world_size)), groups(books.size()) {}

  // What JobHealth makes of where everybody is, and of one rank's complaint.
  std::optional<Error> judge(int reporter, const std::optional<Error>& seen) const {
    std::vector<std::string> names;
    for (std::size_t r = 0; r < books.size(); ++r)
      names.push_back(thread_name(static_cast<int>(r)));
    const auto now = Deadline::Clock::now();
    JobHealth health(names, std::chrono::hours(1), now);
    const auto tell = [&] {
      for (std::size_t r = 0; r < books.size(); ++r) {
        if (groups[r].load() == 0) {
          health.goodbye(static_cast<int>(r), books[r].all(), now);
        } else {
          health.heartbeat(static_cast<int>(r), books[r].all(), now);
        }
      }
    };
    tell();
    if (seen) health.report(reporter, {*seen, books[index_of(reporter)].all()}, now);
    tell();  // the answer to the questions that it may have
    health.settle();
    return health.verdict();
  }

  FailureLatch latch;
  // Per rank.
  std::vector<ProgressBook> books;
  std::vector<std::atomic<int>> groups;  // that it is in; without any it has left the job
};

class LocalSupervisor final : public Supervisor {
 public:
  LocalSupervisor(std::shared_ptr<LocalJob> job, int rank) : job_(std::move(job)), rank_(rank) {}

  FailureLatch& latch() override { return job_->latch; }
  [[noreturn]] void fail(const Error& seen) override {
    job_->latch.check();
    const bool ask =
        seen.code() == ErrorCode::kTimeout || seen.code() == ErrorCode::kCollectiveMismatch;
    job_->latch.trip(ask ? job_->judge(rank_, seen).value_or(seen) : seen);
    throw Error(*job_->latch.error());
  }
  void abort(const std::string& reason) override {
    job_->latch.trip(aborted_error(thread_name(rank_), rank_, reason));
  }
  void give_up(const std::string& reason) override {
    job_->latch.trip(
        Error(ErrorCode::kPeerLost, fmt::format("{}: {}", thread_name(rank_), reason), rank_));
  }
  ProgressBook& progress_book() override { return job_->books[index_of(rank_)]; }
  void look_around() override {
    if (const std::optional<Error> cause = job_->judge(rank_, {})) job_->latch.trip(*cause);
  }
  std::atomic<int>& groups() { return job_->groups[index_of(rank_)]; }

 private:
  const std::shared_ptr<LocalJob> job_;
  const int rank_;
};

// All of the process's memory is shared, so an address is its own published number.
class LocalSpace final : public SharedSpace {
 public:
  explicit LocalSpace(int world_size) {
    for (int r = 0; r < world_size; ++r) boards_.push_back(std::make_unique<Board>());
  }
  void connect(Deadline) override {}
  Board& board(int rank) override { return *boards_[index_of(rank)]; }
  std::optional<std::uint64_t> publish(const std::byte* data, std::size_t) const override {
    return reinterpret_cast<std::uint64_t>(data);
  }
  std::byte* locate(int, std::uint64_t published, std::size_t) const override {
    return reinterpret_cast<std::byte*>(published);
  }
  Buffer allocate(std::size_t bytes) override { return Buffer::heap(bytes); }
  bool shares_heap() const override { return true; }

 private:
  std::vector<std::unique_ptr<Board>> boards_;
};

// What the ranks of a group, and of the groups split from it, have in common.
struct Group {
  explicit Group(int n) : world_size(n), space(n) {}

  const int world_size;
  // Per rank of this group.
  std::vector<int> job_ranks;
  std::vector<std::shared_ptr<LocalSupervisor>> supervisors;
  LocalOptions options;
  LocalSpace space;

  // Kept here until all who share it have fetched it.
  struct Pair {
    std::shared_ptr<RingPair> memory;
    std::array<std::shared_ptr<const RingBells>, 2> bells;
  };
  struct Child {
    std::shared_ptr<Group> group;
    std::size_t fetched = 0;
  };
  std::mutex mutex;
  std::map<std::pair<int, int>, Pair> pairs;                             // guarded by mutex
  std::map<std::pair<std::uint32_t, std::vector<int>>, Child> children;  // guarded by mutex

  bool shares_memory(int rank, int other) const {
    if (rank == other) return true;
    const auto host_of = [&](int r) { return options.hosts.at(index_of(job_ranks[index_of(r)])); };
    return options.shared_memory && (options.hosts.empty() || host_of(rank) == host_of(other));
  }

  std::unique_ptr<Stream> connect(int from, int to) {
    const std::lock_guard lock(mutex);
    const std::pair ends(std::min(from, to), std::max(from, to));
    const auto [place, first] = pairs.try_emplace(ends);
    if (first)
      place->second = {std::make_shared<RingPair>(), {make_ring_bells(), make_ring_bells()}};
    const Pair pair = place->second;
    if (!first) pairs.erase(place);
    const std::size_t side = from < to ? 0 : 1;
    std::unique_ptr<Stream> stream = std::make_unique<RingStream>(
        pair.memory, static_cast<int>(side), pair.bells[side], pair.bells[1 - side]);
    if (!options.wrap_stream) return stream;
    return options.wrap_stream(job_ranks[index_of(from)], std::move(stream));
  }

  // Whether one of the two has made the group of that number.
  bool has_child(int first, int second, std::uint32_t group) {
    const std::lock_guard lock(mutex);
    return children.contains({group, {first, second}});
  }

  std::shared_ptr<Group> child(const std::vector<int>& members, std::uint32_t group) {
    const std::lock_guard lock(mutex);
    const auto [place, first] = children.try_emplace({group, members});
    std::shared_ptr<Group> made = place->second.group;
    if (first) {
      made = std::make_shared<Group>(static_cast<int>(members.size()));
      made->options = options;
      for (const int member : members) {
        made->job_ranks.push_back(job_ranks[index_of(member)]);
        made->supervisors.push_back(supervisors[index_of(member)]);
      }
      place->second.group = made;
    }
    if (++place->second.fetched == members.size()) children.erase(place);
    return made;
  }
};

class LocalStreams final : public Streams {
 public:
  LocalStreams(std::shared_ptr<Group> group, int rank)
      : group_(std::move(group)),
        rank_(rank),
        streams_(static_cast<std::size_t>(group_->world_size)),
        oversubscribed_(group_->world_size > available_cores()),
        spare_cores_(available_cores() >= 2 * group_->world_size) {
    own_supervisor().groups().fetch_add(1);
  }
  ~LocalStreams() override { own_supervisor().groups().fetch_sub(1); }

  Stream& to(int peer, Deadline) override {
    const std::lock_guard lock(mutex_);
    std::unique_ptr<Stream>& stream = streams_[index_of(peer)];
    if (stream == nullptr) stream = group_->connect(rank_, peer);
    return *stream;
  }
  bool opened_by(int sender, std::uint32_t group) override {
    return group_->has_child(sender, rank_, group);
  }
  std::string name_of(int rank) const override { return thread_name(job_rank(rank)); }
  int job_rank(int rank) const override { return group_->job_ranks[index_of(rank)]; }
  Supervisor& supervisor() override { return own_supervisor(); }
  SharedSpace* shared_space() override {
    for (int r = 1; r < group_->world_size; ++r) {
      if (!group_->shares_memory(0, r)) return nullptr;
    }
    return group_->options.shared_memory ? &group_->space : nullptr;
  }
  bool shares_memory(int rank, int other) const override {
    return group_->shares_memory(rank, other);
  }
  bool oversubscribed() const override { return oversubscribed_; }
  bool spare_cores() const override { return spare_cores_; }
  std::unique_ptr<Streams> split(const std::vector<int>& members, int rank,
                                 std::uint32_t group) override {
    return std::make_unique<LocalStreams>(group_->child(members, group), rank);
  }

 private:
  LocalSupervisor& own_supervisor() { return *group_->supervisors[index_of(rank_)]; }

  const std::shared_ptr<Group> group_;
  const int rank_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Stream>> streams_;  // guarded by mutex_
  const bool oversubscribed_;
  const bool spare_cores_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> make_local_group(int world_size,
                                                         const LocalOptions& options) {
  if (world_size < 1) {
    throw Error(ErrorCode::kInvalidWorldSize,
                fmt::format("a group needs at least one rank, not {}", world_size));
  }
  auto group = std::make_shared<Group>(world_size);
  const auto job = std::make_shared<LocalJob>(world_size);
  group->options = options;
  std::vector<std::unique_ptr<Transport>> transports;
  for (int r = 0; r < world_size; ++r) {
    group->job_ranks.push_back(r);
    group->supervisors.push_back(std::make_shared<LocalSupervisor>(job, r));
  }
  for (int r = 0; r < world_size; ++r) {
    transports.push_back(std::make_unique<MeshTransport>(r, world_size, 0, 0,
                                                         std::make_unique<LocalStreams>(group, r)));
  }
  return transports;
}

}  // namespace lockstep
