#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

#include "lockstep/base/deadline.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/collective_stay.h"
#include "lockstep/comm/transport/shared_space.h"
#include "lockstep/comm/transport/transport.h"

namespace lockstep {

// Signals between the ranks of a SharedSpace: who has entered which collective, who has done which
// round. A waiting rank spins briefly, gives way, then sleeps on a futex; it leaves at the deadline
// or when the job fails. One thread at a time.
class BoardSync {
 public:
  BoardSync(Transport& transport, SharedSpace& space, bool oversubscribed);

  // Around a collective, from before begin() to its end, well or not.
  void enter();
  void leave();
  // After leave(), when the job has failed: waits until no other rank is in a collective. All are
  // running, and nobody enters another one. Gives up after ten seconds.
  void await_leaving();

  // Begins the next collective, of which `stay` lasts to the end; afterwards entry(rank) of this
  // rank is the one to fill.
  void begin(const MeshFrame& stamp, CollectiveStay& stay);
  Board& board(int rank) const { return *boards_[index_of(rank)]; }
  Board::Entry& entry(int rank) const { return board(rank).entries[parity()]; }
  std::size_t parity() const { return sequence_ & 1; }

  // Shows this rank's entry to all, enters the collective, then waits for everybody's entries,
  // which must carry the same stamp. `brief`: little is left to do after that.
  void gather_entries(bool brief = false);

  void signal(std::atomic<std::uint64_t> Board::*counter, std::uint64_t value);
  // Waits until `counter` of every rank has reached `value`.
  void await(std::atomic<std::uint64_t> Board::*counter, std::uint64_t value);

  // What `peer` has shown cannot be: the job fails with an Error{kUnexpectedMessage} that names it.
  [[noreturn]] void fail(int peer, std::string_view what) const;

 private:
  template <typename Ready>
  bool look_at(const Ready& ready);
  template <typename Ready>
  void wait_for(int peer, const Ready& ready);
  template <typename Ready>
  void wait_long(int peer, const Ready& ready);
  void store(std::atomic<std::uint64_t>& word, std::uint64_t value);
  void fail_mismatch(int peer);
  void fail_timeout(int peer);

  Transport& transport_;
  SharedSpace& space_;
  Board& own_;
  FailureLatch& latch_;
  const int rank_;
  const int world_size_;
  const bool oversubscribed_;
  std::vector<Board*> boards_;  // of all ranks, once connected

  std::uint64_t sequence_ = 0;
  MeshFrame stamp_;
  std::uint64_t digest_ = 0;
  int repeated_ = 0;  // how often this call has followed itself; kRepeats: that often or more
  CollectiveStay* collective_ = nullptr;
  Deadline deadline_ = Deadline::at({});
};

}  // namespace lockstep
