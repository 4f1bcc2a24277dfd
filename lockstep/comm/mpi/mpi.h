#pragma once

#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>

#include "lockstep/comm/engine.h"
#include "lockstep/comm/transport/transport.h"

namespace lockstep {

// Over an MPI world, with whatever fabric and launcher it has. MPI moves the data; our own control
// links watch over the ranks, so that a dead, stopped or absent one is named as everywhere.
//
// A process is in one MPI world, which it joins with the first of the calls below and leaves at
// exit: then it waits for the others, watched by the control links, and ends MPI if nobody else
// had started it. A failure is final for the whole process. When it exits after one, or with a
// status other than 0, MPI_Abort ends all ranks: MPI_Finalize would wait for a dead peer.
//
// All ranks make the same calls in the same order; where there are several, their communicators
// need group numbers of their own, because they share the control links. Failures are as in
// join_job(), and Error{kIo} for what MPI itself reports.
struct MpiOptions {
  std::chrono::nanoseconds timeout = std::chrono::seconds(30);  // that of the first call holds
  std::string interface;  // of the control links; empty: loopback on one host, else the way out
  // Of MPI's own collectives: one call moves at most this many elements, so that an int can count
  // them. Tests make it small to reach the paths of large messages.
  std::size_t most_elements = std::size_t{1} << 30;
};

// Which MPI this was built with, "" if none; the functions below it then throw
// Error{kInvalidArgument}.
std::string mpi_library();
// Whether the environment looks like a rank that mpirun or srun started; also in a build without
// MPI.
inline bool started_by_mpi() {
  // Set by Open MPI, by MPICH and its relatives, and by whatever else speaks PMIx.
  return std::getenv("OMPI_COMM_WORLD_RANK") != nullptr || std::getenv("PMI_RANK") != nullptr ||
         std::getenv("PMIX_RANK") != nullptr;
}

// Point to point; our collectives and canonical order on top (PlanEngine).
std::unique_ptr<Transport> make_mpi_transport(const MpiOptions& options = {});

// MPI's own collectives (Algorithm::kNative). Order-free: the order of additions, overflow and the
// treatment of NaN and -0 in min and max are MPI's choice, except that f16, bf16 and u8 are
// combined by our kernels. reduce_nodes adds a rank's own partials first. Every call is preceded by
// a reduction of 32 bytes in which the ranks compare what they are about to do: some 2 us between
// two ranks of a host.
std::unique_ptr<Engine> make_mpi_engine(const MpiOptions& options = {});

}  // namespace lockstep
