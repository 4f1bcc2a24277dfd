#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/index.h"
#include "lockstep/comm/mpi/world.h"

namespace lockstep {

// Some ranks of the world, with a communicator that nobody else uses. MPI reports its errors on it
// as codes.
class MpiGroup {
 public:
  // Takes over `comm`. `members[r]` is the world's rank of our rank r.
  MpiGroup(MpiWorld& world, MPI_Comm comm, std::vector<int> members);
  // Collective by the standard; in Open MPI and MPICH it waits for nobody.
  ~MpiGroup();
  MpiGroup(const MpiGroup&) = delete;
  MpiGroup& operator=(const MpiGroup&) = delete;

  MpiWorld& world() const { return world_; }
  MPI_Comm comm() const { return comm_; }
  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(members_.size()); }
  // By the world's ranks, which is what the control plane and people know.
  int job_rank(int rank) const { return members_[index_of(rank)]; }
  std::string name_of(int rank) const { return world_.name_of(job_rank(rank)); }
  ControlPlane& control() const { return world_.control(); }

  // As Transport::split.
  std::unique_ptr<MpiGroup> split(const std::vector<int>& members, std::uint32_t group) const;

 private:
  MpiWorld& world_;
  const MPI_Comm comm_;
  const std::vector<int> members_;
  int rank_ = 0;
};

}  // namespace lockstep
