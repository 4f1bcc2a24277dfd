#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/transport/stream.h"
#include "lockstep/comm/wait_note.h"
#include "lockstep/net/job/supervisor.h"
#include "lockstep/wire/mesh_frame.h"

namespace lockstep {

class SharedSpace;

// A message of so many bytes can be sent before its receiver reads it, on every transport. Larger
// ones may have to wait for it, and so may one that follows others that nobody has read.
inline constexpr std::size_t kSentAhead = 8 * 1024;

// Where the bytes of a message lie. A message has one or more *rows* of equal length (several when
// a rank sends the partial sums of several tree nodes). Rows travel interleaved by *segment*:
// segment 0 of every row, then segment 1 of every row, and so on, so that the receiver can combine
// a segment as soon as it has it from everybody.
struct Layout {
  std::span<std::byte* const> rows;
  std::size_t row_bytes = 0;
  std::size_t segment_bytes = 0;  // 0: the row is one segment
  // 0: a row is whole in memory. Otherwise its memory holds this many segments, used cyclically.
  std::size_t window_segments = 0;

  std::size_t bytes() const { return rows.size() * row_bytes; }
  // The contiguous memory that holds the message's bytes from `offset` on, to the end of the
  // segment. `offset` < bytes().
  std::span<std::byte> at(std::size_t offset) const;
};

// One message to or from a peer. `limit` holds it back: bytes beyond it are not ready to be sent,
// or have no room to be received into, until the observer raises it.
struct Transfer {
  int peer = 0;
  Direction direction = Direction::kSend;
  Layout layout;
  std::size_t limit = 0;
  std::size_t done = 0;
};

// Told whenever `done` of a transfer has grown; may raise limits.
class TransferObserver {
 public:
  virtual ~TransferObserver() = default;
  virtual void advanced(Transfer& transfer) = 0;
  // Whether it must hear of sends too; otherwise they may be moved by another thread.
  virtual bool watches_sends() const = 0;
};

// Point-to-point messages between the ranks of a group (Backend in the original crates). Every call
// returns by its deadline, with an Error that names the peer if it must. Safe to use from several
// threads on different peers. After a failure the group is dead: every call throws the same first
// cause.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  // "rank 2 (10.0.0.3:4711)", for messages to people.
  virtual std::string name_of(int rank) const = 0;
  // The rank in the whole job, by which errors blame it.
  virtual int job_rank(int rank) const = 0;
  virtual Supervisor& supervisor() = 0;
  // The memory that all ranks of the group share, or null.
  virtual SharedSpace* shared_space() = 0;
  // Where each rank is: the lowest rank of the group that shares memory with it, itself if none
  // below does. Two ranks with the same one share memory. The same on all ranks that were told the
  // same medium.
  virtual std::vector<int> hosts() const;
  // Whether this host has fewer cores than ranks of the job: then a waiting rank gives way at once.
  virtual bool oversubscribed() const = 0;
  // Whether all ranks of the job are on one host with fewer cores; the same on all ranks.
  virtual bool crowded() const = 0;
  // On how many rails a large reduction is best moved, each by a thread of its own on every rank;
  // the same on all ranks.
  virtual int rails() const { return 1; }

  // Runs all transfers at once, full duplex; those to or from the same peer one after the other, in
  // their order. Every message carries `stamp`; one that arrives with another stamp fails the
  // group. `observer` may be null.
  virtual void run(std::span<Transfer> transfers, const MeshFrame& stamp,
                   TransferObserver* observer, Deadline deadline) = 0;
  // Runs one receive, unless none of its bytes has come by `begin`: returns false then, as if it
  // had not been called.
  virtual bool run_if_begun(Transfer& receive, const MeshFrame& stamp, Deadline begin,
                            Deadline deadline) = 0;

  // The frame of the next message from `peer`, if it has begun to arrive; the message is received
  // later, as if nobody had looked. Waits for nobody, and says nothing of a peer that has left.
  virtual std::optional<MeshFrame> next_frame(int peer, Deadline deadline) = 0;
  // Whether `sender` has begun to open the group {sender, this rank} of that number.
  virtual bool opened_by(int sender, std::uint32_t group) = 0;

  // A group of some of these ranks, with streams of its own; `members` in the order of their new
  // ranks. All members call it with the same arguments; no group of theirs has had the number
  // `group` before.
  virtual std::unique_ptr<Transport> split(const std::vector<int>& members,
                                           std::uint32_t group) = 0;
  // Whether split() waits for the other members.
  virtual bool split_waits() const { return false; }

  // Returns when the bytes are under way, which up to kSentAhead of them are without their reader.
  void send(int to, std::span<const std::byte> data, Deadline deadline);
  void recv(int from, std::span<std::byte> data, Deadline deadline);
  // Receives a message if one begins to arrive by `begin` (recv_timeout there). Otherwise
  // returns false: nothing is received, nothing is broken, and the group can be used as before. A
  // message that has begun is there by the deadline, or the group fails.
  bool recv_if_begun(int from, std::span<std::byte> data, Deadline begin, Deadline deadline);
  // Sends and receives at once, so that two ranks can exchange messages of any size.
  void exchange(int to, std::span<const std::byte> out, int from, std::span<std::byte> in,
                Deadline deadline);
  void barrier(Deadline deadline);
  // The rank of the job that this one has been waiting for lately, -1 if it is busy itself. Says
  // who holds up a collective that does not end. Callable from any thread.
  virtual int waits_for() const { return waits_->rank(); }
  void note_wait(int job_rank) { waits_->set(job_rank); }
  // Before the first message: where waits are noted. It must outlive the transport.
  virtual void note_waits_in(WaitNote& waits) { waits_ = &waits; }

  // Ends the group on every rank at once; callable from any thread.
  void abort(const std::string& reason) { supervisor().abort(reason); }

 protected:
  // Throws Error{kInvalidRank} or Error{kSelfSend}.
  void check_peer(int peer, const char* operation) const;

 private:
  WaitNote own_waits_;
  WaitNote* waits_ = &own_waits_;
};

}  // namespace lockstep
