#include "lockstep/comm/mpi/mpi.h"

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::kInvalidArgument,
              "built without MPI; install libopenmpi-dev or libmpich-dev and build again");
}

}  // namespace

std::string mpi_library() { return ""; }
std::unique_ptr<Transport> make_mpi_transport(const MpiOptions&) { refuse(); }
std::unique_ptr<Engine> make_mpi_engine(const MpiOptions&) { refuse(); }

}  // namespace lockstep
