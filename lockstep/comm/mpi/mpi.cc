#include "lockstep/comm/mpi/mpi.h"

#include <algorithm>
#include <array>
#include <cstdlib>

namespace lockstep {

bool started_by_mpi() {
  // Set by Open MPI, by MPICH and its relatives, and by whatever else speaks PMIx.
  constexpr std::array kNames = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"};
  return std::ranges::any_of(kNames, [](const char* name) { return std::getenv(name) != nullptr; });
}

}  // namespace lockstep
