#pragma once

#include <functional>
#include <memory>

#include "lockstep/comm/engine.h"
#include "lockstep/comm/mpi/group.h"
#include "lockstep/comm/mpi/slices.h"

namespace lockstep {

// MPI's own collectives, in their non-blocking form, so that deadlines and the latch hold.
class MpiEngine final : public Engine {
 public:
  MpiEngine(std::unique_ptr<MpiGroup> group, std::size_t most_elements);

  int rank() const override { return group_->rank(); }
  int world_size() const override { return group_->world_size(); }
  std::string name_of(int rank) const override { return group_->name_of(rank); }
  Supervisor& supervisor() override { return group_->control(); }
  Algorithm choose(const Call& call) const override;
  Outcome run(const Call& call, const MeshFrame& stamp, CollectiveStay& stay) override;
  std::unique_ptr<Engine> split(const std::vector<int>& members, std::uint32_t group) override;
  bool split_waits() const override { return true; }
  Buffer allocate(std::size_t bytes) override { return Buffer::heap(bytes); }

 private:
  struct Running {
    const Call& call;
    const MeshFrame& stamp;
    Deadline deadline;
    // Of all ranks, once they agree: elements of a vector, elements of a chunk of one.
    std::uint64_t most_total = 0;
    std::uint64_t most_chunk = 0;

    DataType type() const { return call.out.type(); }
    std::size_t element() const { return size_of(type()); }
  };
  // Starts a non-blocking operation and returns MPI's code.
  using Start = std::function<int(MPI_Request* request)>;
  using StartPart = std::function<int(std::size_t begin, int count, MPI_Request* request)>;

  // Fails unless all ranks are about to do the same; learns the largest sizes among them.
  void agree(Running& running);
  void explain_difference(const Running& running);
  // Fails unless this rank expects what the others send.
  void compare_counts(const Running& running);

  void complete(const Running& running, const char* operation, const Start& start);
  // Cuts a vector of `count` elements, which all ranks have, so that an int can count them.
  void in_parts(const Running& running, const char* operation, std::size_t count,
                const StartPart& start);
  // In one go, or in rounds where somebody's vector is too long for that. `whole` tells which.
  void in_rounds(const Running& running, const char* operation, MpiSlices& sent,
                 MpiSlices& received, const std::function<int(bool whole, MPI_Request*)>& start);

  void all_reduce(const Running& running);
  void reduce(const Running& running);
  void reduce_scatter(const Running& running, ConstBufferView in);
  void reduce_nodes(const Running& running);
  void all_gather(const Running& running);
  void broadcast(const Running& running);
  void gather(const Running& running);
  void scatter(const Running& running);
  void all_to_all(const Running& running);

  const std::unique_ptr<MpiGroup> group_;
  const std::size_t most_elements_;
  Scratch vector_;
  Scratch sent_;
  Scratch received_;
};

}  // namespace lockstep
