#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/comm/transport/helper_thread.h"
#include "lockstep/comm/transport/stream.h"
#include "lockstep/comm/transport/transport.h"

namespace lockstep {

// The streams of a group to each of its ranks. There is one class for each medium: LocalStreams
// (threads of a process), MeshStreams (TCP, shared memory) and MpiStreams. Safe to use from several
// threads.
class Streams {
 public:
  virtual ~Streams() = default;
  // The stream to `peer`, opened on first use.
  virtual Stream& to(int peer, Deadline deadline) = 0;
  // The same if it is open, or the peer is about to open it; otherwise null.
  virtual Stream* if_there(int peer, Deadline deadline) { return &to(peer, deadline); }
  // As in Transport.
  virtual bool opened_by(int, std::uint32_t) { return true; }
  virtual std::string name_of(int rank) const = 0;
  // The rank in the whole job, by which errors blame it.
  virtual int job_rank(int rank) const = 0;
  virtual Supervisor& supervisor() = 0;
  virtual std::unique_ptr<Streams> split(const std::vector<int>& members, int rank,
                                         std::uint32_t group) = 0;
  virtual bool split_waits() const { return false; }
  // As in Transport.
  virtual SharedSpace* shared_space() = 0;
  // Whether two ranks share memory. Every two of three do if one of them does with both others.
  virtual bool shares_memory(int rank, int other) const { return rank == other; }
  virtual bool oversubscribed() const = 0;
  virtual bool crowded() const { return false; }
  // Whether every rank of this host has a second core to itself, for large messages.
  virtual bool spare_cores() const = 0;
  // As in Transport.
  virtual int rails() const { return 1; }
};

// Messages over streams: framing, full duplex progress over many peers, deadlines. A waiting rank
// first spins, then sleeps in poll(): the spin saves the wake-up when the peer answers at once, and
// is short because it takes a core.
class MeshTransport final : public Transport {
 public:
  MeshTransport(int rank, int world_size, std::uint32_t generation, std::uint32_t group,
                std::unique_ptr<Streams> streams);
  ~MeshTransport() override;

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  std::string name_of(int rank) const override { return streams_->name_of(rank); }
  int job_rank(int rank) const override { return streams_->job_rank(rank); }
  Supervisor& supervisor() override { return streams_->supervisor(); }
  SharedSpace* shared_space() override { return streams_->shared_space(); }
  std::vector<int> hosts() const override;
  bool oversubscribed() const override { return streams_->oversubscribed(); }
  bool crowded() const override { return streams_->crowded(); }
  int rails() const override { return streams_->rails(); }
  void run(std::span<Transfer> transfers, const MeshFrame& stamp, TransferObserver* observer,
           Deadline deadline) override;
  bool run_if_begun(Transfer& receive, const MeshFrame& stamp, Deadline begin,
                    Deadline deadline) override;
  std::optional<MeshFrame> next_frame(int peer, Deadline deadline) override;
  bool opened_by(int sender, std::uint32_t group) override {
    return streams_->opened_by(sender, group);
  }
  std::unique_ptr<Transport> split(const std::vector<int>& members, std::uint32_t group) override;
  bool split_waits() const override { return streams_->split_waits(); }

 private:
  struct Port;    // one direction of one stream
  struct Active;  // one transfer under way

  Port& port(int peer, Direction direction);
  // The stamp as this group's frames carry it.
  MeshFrame full_stamp(const MeshFrame& stamp) const;
  // Takes the ports of all transfers, and opens their streams.
  void open(std::span<Transfer> transfers, std::span<Active> active, const MeshFrame& full,
            Deadline deadline);
  // Moves all of `active` to their end. With `begin`, false if no byte has moved by then.
  bool move(std::span<Active> active, const MeshFrame& stamp, TransferObserver* observer,
            Deadline deadline, const Deadline* begin = nullptr);
  // Lets the message go that follows `done` on its stream.
  static void pass_turn(std::span<Active> active, const Active& done);
  bool advance(Active& active);
  void fail_transfer(const Active& active, const Error& error);
  void check_frame(Active& active, const MeshFrame& stamp);
  void wait(std::span<Active> active, Deadline deadline);
  void fail_timeout(std::span<Active> active, const MeshFrame& stamp);

  const int rank_;
  const int world_size_;
  const std::uint32_t generation_;
  const std::uint32_t group_;
  const std::unique_ptr<Streams> streams_;
  std::vector<std::unique_ptr<Port>> ports_;  // two per peer
  HelperThread sender_{"the sending thread"};
};

}  // namespace lockstep
