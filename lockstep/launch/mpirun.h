#pragma once

#include <string>
#include <vector>

namespace lockstep {

// Becomes the mpirun of an MPI, named as mpi_library() does; it starts the ranks and is told that
// they may share cores. Throws if there is none.
[[noreturn]] void become_mpirun(const std::string& library, int ranks,
                                const std::vector<std::string>& arguments);

}  // namespace lockstep
