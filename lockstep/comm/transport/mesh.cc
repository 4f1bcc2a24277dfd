#include "lockstep/comm/transport/mesh.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <mutex>

#include "lockstep/base/index.h"
#include "lockstep/comm/transport/arena.h"
#include "lockstep/comm/transport/mesh_transport.h"
#include "lockstep/comm/transport/ring_stream.h"
#include "lockstep/comm/transport/shared_space.h"
#include "lockstep/comm/transport/tcp_stream.h"
#include "lockstep/net/job/roster.h"
#include "lockstep/net/socket/unix_socket.h"

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kPauseBetweenCalls{20};

// More gain little, and take cores from computing. See docs/decisions/tcp_rails.md.
constexpr int kMostRails = 4;

bool is_one_crowded_host(const Roster& roster) {
  const bool one_host = std::all_of(roster.begin(), roster.end(), [&](const Card& card) {
    return same_host(card.host, roster.front().host);
  });
  return one_host && cores_for_each(roster, 0) == 0;
}

// What all groups of a process have in common.
struct Hub {
  Hub(JoinedJob joined, Medium wanted, Deadline::Clock::duration limit, WireCompression compress)
      : job(std::move(joined)),
        medium(wanted),
        timeout(limit),
        compression(compress),
        crowded(is_one_crowded_host(job.roster)),
        rails(std::clamp(least_cores_for_each(job.roster), 1, kMostRails)) {}

  JoinedJob job;
  const Medium medium;
  const Deadline::Clock::duration timeout;
  const WireCompression compression;
  const bool crowded;
  const int rails;

  const Card& card(int job_rank) const { return job.roster[index_of(job_rank)]; }
  const Card& own_card() const { return card(job.rank()); }

  bool share_memory(const Card& a, const Card& b) const {
    return medium != Medium::kTcp && same_host(a.host, b.host) && !a.unix_name.empty() &&
           !b.unix_name.empty();
  }
  bool shares_memory_with(int job_rank) const { return share_memory(card(job_rank), own_card()); }

  // How many ranks of other hosts this one exchanges with at the same time, in large collectives:
  // ranks that share memory share that work.
  int partners() const {
    const auto here = std::ranges::count_if(
        job.roster, [&](const Card& card) { return same_host(card.host, own_card().host); });
    const auto elsewhere = std::ranges::ssize(job.roster) - here;
    return static_cast<int>(medium == Medium::kTcp ? elsewhere : (elsewhere + here - 1) / here);
  }

  // Made when the first group with shared memory needs it.
  std::shared_ptr<Arena> arena() {
    const std::lock_guard lock(mutex);
    if (made == nullptr) made = Arena::create();
    return made;
  }

  std::mutex mutex;
  std::shared_ptr<Arena> made;  // guarded by mutex
};

// The boards of a group's ranks, and what their arenas hold, as this rank maps them.
class MeshSpace final : public SharedSpace {
 public:
  // The own board is a file of its own: peers may still read it when this rank has moved on, so it
  // must live until the last of them has let it go.
  MeshSpace(std::shared_ptr<Arena> arena, int rank, int world_size)
      : arena_(std::move(arena)),
        own_board_(make_memfd("lockstep-board", sizeof(Board))),
        boards_(static_cast<std::size_t>(world_size)),
        arenas_(boards_.size()) {
    boards_[index_of(rank)] = Mapping::of(own_board_, sizeof(Board));
    open_.store(1);
  }

  std::array<int, 2> own_files() const { return {own_board_.get(), arena_->file().get()}; }
  void add(int peer, const Descriptor& board, const Descriptor& arena) {
    const auto index = index_of(peer);
    boards_[index] = Mapping::of(board, sizeof(Board));
    arenas_[index] = Mapping::of(arena, 1);
    open_.fetch_add(1);
  }
  void set_connector(std::function<void(Deadline)> connector) { connector_ = std::move(connector); }

  void connect(Deadline deadline) override {
    if (open_.load(std::memory_order_acquire) < boards_.size()) [[unlikely]]
      connector_(deadline);
  }
  Board& board(int rank) override {
    return *reinterpret_cast<Board*>(boards_[index_of(rank)]->data());
  }
  std::optional<std::uint64_t> publish(const std::byte* data, std::size_t bytes) const override {
    return arena_->offset_of(data, bytes);
  }
  std::byte* locate(int rank, std::uint64_t published, std::size_t bytes) const override {
    const auto& theirs = arenas_[index_of(rank)];
    const std::size_t size = theirs != nullptr ? theirs->size() : arena_->size();
    if (published > size || bytes > size - published) return nullptr;
    return (theirs != nullptr ? theirs->data() : arena_->data()) + published;
  }
  Buffer allocate(std::size_t bytes) override { return arena_->allocate(bytes); }

 private:
  const std::shared_ptr<Arena> arena_;
  const Descriptor own_board_;
  std::vector<std::shared_ptr<Mapping>> boards_;
  std::vector<std::shared_ptr<Mapping>> arenas_;  // null for the own rank
  std::atomic<std::size_t> open_{0};
  std::function<void(Deadline)> connector_;
};

// Streams to the members of one group. Between two ranks the one with the higher job rank connects,
// the other finds the connection at its door. In a group of two that was split off the first one
// does: it is the sender where the group is for messages, so that the receiver's door tells who
// wants to send.
class MeshStreams final : public Streams {
 public:
  MeshStreams(std::shared_ptr<Hub> hub, std::vector<int> members, int rank, std::uint32_t group)
      : hub_(std::move(hub)), members_(std::move(members)), rank_(rank), group_(group) {
    for (std::size_t i = 0; i < members_.size(); ++i) {
      peers_.push_back(std::make_unique<Peer>());
    }
    const bool all_shared =
        members_.size() > 1 && std::all_of(members_.begin(), members_.end(), [&](int member) {
          return hub_->shares_memory_with(member);
        });
    if (all_shared) {
      space_ = std::make_unique<MeshSpace>(hub_->arena(), rank_, static_cast<int>(members_.size()));
      space_->set_connector([this](Deadline deadline) {
        for (int peer = 0; peer < static_cast<int>(members_.size()); ++peer) {
          if (peer != rank_) to(peer, deadline);
        }
      });
    } else if (hub_->medium == Medium::kShared && members_.size() > 1) {
      refuse_remote_ranks();
    }
    const int cores = cores_for_each(hub_->job.roster, hub_->job.rank());
    oversubscribed_ = cores < 1;
    spare_cores_ = cores >= 2;
  }

  Stream& to(int peer, Deadline deadline) override {
    Peer& other = *peers_[index_of(peer)];
    const std::lock_guard lock(other.mutex);
    if (other.stream == nullptr) other.stream = open(peer, deadline);
    return *other.stream;
  }
  Stream* if_there(int peer, Deadline deadline) override {
    {
      const Peer& other = *peers_[index_of(peer)];
      const std::lock_guard lock(other.mutex);
      if (other.stream != nullptr) return other.stream.get();
    }
    return opened_by(peer, group_) ? &to(peer, deadline) : nullptr;
  }
  bool opened_by(int sender, std::uint32_t group) override {
    return hub_->job.control->arrivals().is_there(awaited_of(sender, group));
  }
  std::string name_of(int rank) const override { return lockstep::name_of(card(rank)); }
  int job_rank(int rank) const override { return members_[index_of(rank)]; }
  Supervisor& supervisor() override { return *hub_->job.control; }
  SharedSpace* shared_space() override { return space_.get(); }
  bool shares_memory(int rank, int other) const override {
    return rank == other || hub_->share_memory(card(rank), card(other));
  }
  bool oversubscribed() const override { return oversubscribed_; }
  bool crowded() const override { return hub_->crowded; }
  bool spare_cores() const override { return spare_cores_; }
  int rails() const override { return hub_->rails; }
  std::unique_ptr<Streams> split(const std::vector<int>& members, int rank,
                                 std::uint32_t group) override {
    std::vector<int> job_ranks;
    for (const int member : members) job_ranks.push_back(job_rank(member));
    return std::make_unique<MeshStreams>(hub_, std::move(job_ranks), rank, group);
  }

 private:
  struct Peer {
    mutable std::mutex mutex;
    std::unique_ptr<Stream> stream;  // guarded by mutex
  };

  const Card& card(int rank) const { return hub_->card(job_rank(rank)); }

  void refuse_remote_ranks() const {
    for (std::size_t i = 0; i < members_.size(); ++i) {
      if (hub_->shares_memory_with(members_[i])) continue;
      throw Error(
          ErrorCode::kNoConnection,
          fmt::format("{} cannot share memory with {}: they are on different hosts; use the "
                      "transport auto or tcp",
                      lockstep::name_of(hub_->own_card()), name_of(static_cast<int>(i))),
          members_[i]);
    }
  }

  bool connects_to(int peer) const {
    if (group_ != 0 && members_.size() == 2) return rank_ == 0;
    return hub_->job.rank() > job_rank(peer);
  }

  std::unique_ptr<Stream> open(int peer, Deadline deadline) {
    Socket socket = connects_to(peer) ? call(peer, deadline) : await_call(peer, deadline);
    socket.set_peer(name_of(peer), job_rank(peer));
    if (hub_->shares_memory_with(job_rank(peer))) return share_memory(peer, socket, deadline);
    tune_tcp(socket, hub_->timeout);
    return std::make_unique<TcpStream>(std::move(socket), hub_->timeout, hub_->compression,
                                       hub_->partners());
  }

  Socket await_call(int peer, Deadline deadline) {
    ControlPlane& control = *hub_->job.control;
    Arrival arrival =
        control.arrivals().wait_for(awaited_of(peer, group_), deadline, control.latch());
    return std::move(arrival.link.socket());
  }

  Arrivals::Awaited awaited_of(int peer, std::uint32_t group) const {
    return {card(peer).id,   hub_->job.identity.generation, group, name_of(peer), job_rank(peer),
            purpose_to(peer)};
  }

  Purpose purpose_to(int peer) const {
    return hub_->shares_memory_with(job_rank(peer)) ? Purpose::kShared : Purpose::kMesh;
  }

  // A rank's door is open whatever the rank itself is doing, so the timeout is time enough.
  Socket call(int peer, Deadline deadline) {
    const FailureLatch* latch = &hub_->job.control->latch();
    const bool shared = hub_->shares_memory_with(job_rank(peer));
    deadline = earlier(deadline, Deadline::after(hub_->timeout));
    while (true) {
      try {
        Socket socket = shared ? connect_unix(card(peer).unix_name, deadline, latch)
                               : connect_tcp(mesh_address_of(peer), deadline, latch);
        require_meant(peer, client_handshake(socket, hub_->job.identity, purpose_to(peer), group_,
                                             deadline, latch));
        return socket;
      } catch (const Error& error) {
        latch->check();
        if (error.code() == ErrorCode::kChannelClosed && !deadline.expired()) {
          // Closed without a word: too many were at the door. Call again.
          ::poll(nullptr, 0, deadline.poll_timeout(kPauseBetweenCalls));
          continue;
        }
        throw failed_call(peer, error);
      }
    }
  }

  Error failed_call(int peer, const Error& error) const {
    const std::string text = fmt::format("{}: {}", name_of(peer), error.message());
    switch (error.code()) {
      case ErrorCode::kIo:
        return Error(error.code(), text);  // the peer is not to blame
      // Nobody answers, or a stranger that has its address now.
      case ErrorCode::kTimeout:
      case ErrorCode::kAuthentication:
      case ErrorCode::kUnexpectedMessage:
        return Error(ErrorCode::kNoConnection, text, job_rank(peer));
      default: return Error(error.code(), text, job_rank(peer));
    }
  }

  // Whoever answers has proved that it holds the job's secret, but any member does. A listener that
  // does not know this generation yet tells no rank.
  void require_meant(int peer, const PeerIdentity& answered) const {
    if (answered.id == card(peer).id && (answered.rank == job_rank(peer) || answered.rank == -1)) {
      return;
    }
    throw Error(ErrorCode::kNoConnection,
                fmt::format("another process answered at its address{}",
                            answered.rank < 0 ? "" : fmt::format(": rank {}", answered.rank)));
  }

  SocketAddress mesh_address_of(int peer) const {
    const std::optional<SocketAddress> address = SocketAddress::parse(card(peer).mesh_address);
    if (address) return *address;
    throw Error(ErrorCode::kUnexpectedMessage,
                fmt::format("it gave the address '{}'", card(peer).mesh_address));
  }

  // Memory that cannot be shared is the fault of the peer that gave it.
  std::unique_ptr<Stream> share_memory(int peer, const Socket& socket, Deadline deadline) {
    try {
      return exchange_memory(peer, socket, deadline);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnexpectedMessage || error.rank() >= 0) throw;
      throw Error(error.code(), fmt::format("{}: {}", name_of(peer), error.message()),
                  job_rank(peer));
    }
  }

  // The connecting side brings the rings; both show board and arena when the whole group shares
  // memory.
  std::unique_ptr<Stream> exchange_memory(int peer, const Socket& socket, Deadline deadline) {
    const FailureLatch* latch = &hub_->job.control->latch();
    const bool connects = connects_to(peer);
    Descriptor file;
    std::array<std::shared_ptr<const RingBells>, 2> bells;
    if (connects) {
      file = make_memfd("lockstep-rings", sizeof(RingPair));
      bells = {make_ring_bells(), make_ring_bells()};
      const std::array<int, 5> sent{file.get(), bells[0]->data.get(), bells[0]->room.get(),
                                    bells[1]->data.get(), bells[1]->room.get()};
      send_descriptors(socket, sent, deadline, latch);
    } else {
      std::vector<Descriptor> got = receive_descriptors(socket, 5, deadline, latch);
      file = std::move(got[0]);
      bells = {received_ring_bells(std::move(got[1]), std::move(got[2])),
               received_ring_bells(std::move(got[3]), std::move(got[4]))};
    }
    if (space_ != nullptr) exchange_files(peer, socket, deadline);
    const std::shared_ptr<Mapping> mapping = Mapping::of(file, sizeof(RingPair));
    const std::shared_ptr<RingPair> rings(mapping, reinterpret_cast<RingPair*>(mapping->data()));
    const std::size_t side = connects ? 0 : 1;
    return std::make_unique<RingStream>(rings, static_cast<int>(side), bells[side],
                                        bells[1 - side]);
  }

  void exchange_files(int peer, const Socket& socket, Deadline deadline) {
    const FailureLatch* latch = &hub_->job.control->latch();
    send_descriptors(socket, space_->own_files(), deadline, latch);
    const std::vector<Descriptor> theirs = receive_descriptors(socket, 2, deadline, latch);
    space_->add(peer, theirs[0], theirs[1]);
  }

  const std::shared_ptr<Hub> hub_;
  const std::vector<int> members_;  // job ranks, in the order of the group's ranks
  const int rank_;
  const std::uint32_t group_;
  bool oversubscribed_ = false;
  bool spare_cores_ = false;
  std::unique_ptr<MeshSpace> space_;  // null unless the whole group shares memory
  std::vector<std::unique_ptr<Peer>> peers_;
};

}  // namespace

std::unique_ptr<Transport> make_mesh(JoinedJob job, Medium medium,
                                     Deadline::Clock::duration timeout,
                                     WireCompression compression) {
  const int rank = job.rank();
  const int world_size = job.world_size();
  const std::uint32_t generation = job.identity.generation;
  std::vector<int> members(static_cast<std::size_t>(world_size));
  for (int r = 0; r < world_size; ++r) members[index_of(r)] = r;
  // Newcomers connect to all at once: one that cannot reach somebody must not enter.
  const bool later = job.generation.number > 1;
  const int first_new = later ? world_size - job.newcomers : world_size;
  auto hub = std::make_shared<Hub>(std::move(job), medium, timeout, compression);
  auto streams = std::make_unique<MeshStreams>(std::move(hub), std::move(members), rank, 0);
  for (int peer = rank >= first_new ? 0 : first_new; peer < world_size; ++peer) {
    if (peer != rank) streams->to(peer, Deadline::after(timeout));
  }
  return std::make_unique<MeshTransport>(rank, world_size, generation, 0, std::move(streams));
}

}  // namespace lockstep
