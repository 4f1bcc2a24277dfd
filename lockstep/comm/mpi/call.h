#pragma once

#include <mpi.h>

#include <chrono>
#include <mutex>

#include "lockstep/base/deadline.h"
#include "lockstep/net/job/supervisor.h"

namespace lockstep {

// Whoever waits for MPI asks it again after a nap: MPI has nothing that would wake it.
inline constexpr std::chrono::nanoseconds kShortestNap = std::chrono::microseconds(50);
inline constexpr std::chrono::nanoseconds kLongestNap = std::chrono::milliseconds(1);

// To be held around every MPI call. Locks nothing where MPI takes calls from many threads at once.
std::unique_lock<std::mutex> mpi_lock();
// Called once, when MPI has said what it can do.
void set_mpi_serialized(bool serialized);

// Throws Error{kIo} with MPI's own words unless `code` is MPI_SUCCESS.
void check_mpi(int code, const char* call);

// Whether `request` has ended; gives MPI the chance to make progress.
bool test(MPI_Request& request);

struct Patience {
  Deadline deadline;
  const FailureLatch* latch = nullptr;
  // MPI moves data only while it is called, so the wait does not sleep for as long as moving this
  // many bytes may take.
  std::size_t bytes = 0;
  bool oversubscribed = false;  // then it gives way to other processes all the time
};

// Tests until `request` has ended (true) or the deadline has passed (false). Throws the latch's
// error when it trips.
bool await(MPI_Request& request, const Patience& patience);

}  // namespace lockstep
