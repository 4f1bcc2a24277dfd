#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "lockstep/comm/engine.h"
#include "lockstep/comm/transport.h"

namespace lockstep {

// Over an MPI world, with whatever fabric and launcher it has. MPI moves the data; our own control
// links watch over the ranks, so that a dead, stopped or absent one is named as everywhere.
struct MpiOptions {
  std::chrono::nanoseconds timeout = std::chrono::seconds(30);
  std::string token;      // of the control links; made up by rank 0 if empty
  std::string interface;  // of the control links
};

// Which MPI this was built with, "" if none. Every function below throws Error{kInvalidArgument}
// without one.
std::string mpi_library();
// Whether the environment looks like a rank that mpirun or srun started.
bool started_by_mpi();

// Point to point; our collectives and canonical order on top (PlanEngine).
std::unique_ptr<Transport> make_mpi_transport(const MpiOptions& options);
// MPI's own collectives: order-free (Algorithm::kNative).
std::unique_ptr<Engine> make_mpi_engine(const MpiOptions& options);

}  // namespace lockstep
