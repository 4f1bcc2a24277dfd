#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/comm/buffer.h"
#include "lockstep/comm/call.h"
#include "lockstep/comm/wait_note.h"
#include "lockstep/net/job/supervisor.h"
#include "lockstep/wire/mesh_frame.h"

namespace lockstep {

class CollectiveStay;

// What carries out collectives: plans over a Transport (PlanEngine), MPI's own (MpiEngine) or a
// gradient server (ServerEngine). A Communicator hands an engine one completed call at
// a time, in the same order on all ranks.
class Engine {
 public:
  virtual ~Engine() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual std::string name_of(int rank) const = 0;
  // The rank in the whole job, by which errors blame it.
  virtual int job_rank(int rank) const { return rank; }
  virtual Supervisor& supervisor() = 0;

  // The algorithm that `call` will use: its own choice, or the table's. Throws
  // Error{kInvalidArgument} if the engine does not offer the one asked for.
  virtual Algorithm choose(const Call& call) const = 0;
  // `stamp` carries the sequence number and, in a group of two ranks or more, the algorithm. The
  // engine of such a group calls stay.enter(), which returns the deadline.
  virtual Outcome run(const Call& call, const MeshFrame& stamp, CollectiveStay& stay) = 0;
  // As in Transport. Where there are no messages between two ranks, opened_by() throws
  // Error{kInvalidArgument}.
  virtual std::optional<MeshFrame> next_frame(int, Deadline) { return std::nullopt; }
  virtual bool opened_by(int, std::uint32_t) {
    throw Error(ErrorCode::kInvalidArgument,
                "this transport has no messages between two ranks; use another one");
  }
  // As Transport::split.
  virtual std::unique_ptr<Engine> split(const std::vector<int>& members, std::uint32_t group) = 0;
  // Whether split() waits for the other members.
  virtual bool split_waits() const { return false; }
  virtual Buffer allocate(std::size_t bytes) = 0;
  // Sums of values that are not finite end the job, instead of being results like any other.
  virtual bool finite_only() const { return false; }
  // As Transport::waits_for. Callable from any thread.
  virtual int waits_for() const { return -1; }
  // As Transport::note_waits_in. An engine that does not know whom it waits for notes nothing.
  virtual void note_waits_in(WaitNote&) {}
};

}  // namespace lockstep
