#include <fmt/format.h>
#include <stdlib.h>
#include <unistd.h>

#include <sstream>
#include <thread>

#include "lockstep/base/log.h"
#include "lockstep/comm/mpi/world.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

// So that the other ranks can still say why they failed before MPI ends them.
constexpr auto kLastWords = 250ms;

// What a process has one of because MPI has. Never destroyed: exit() comes by in any order.
struct Process {
  std::mutex mutex;
  bool started_mpi = false;         // guarded by mutex, as the rest
  bool joining = false;             // begun; for good, unless there is a world
  std::unique_ptr<MpiWorld> world;  // null before and after
};

Process& process() {
  static Process* const process = new Process;
  return *process;
}

bool mpi_finalized() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  return finalized != 0;
}

[[noreturn]] void end_job(Process& p, int status) {
  if (p.world != nullptr && p.world->usable()) {
    p.world->control().abort(fmt::format("it exits with status {}", status));
  }
  // The control thread goes on, so that they all hear of it.
  std::this_thread::sleep_for(kLastWords);
  // No lock: a thread that hangs in MPI may hold it.
  MPI_Abort(MPI_COMM_WORLD, status != 0 ? status : 1);
  ::_exit(status != 0 ? status : 1);
}

// MPI_Finalize has no deadline of its own, and a rank may still die in it.
void finalize_within(std::chrono::nanoseconds timeout) {
  std::thread([timeout] {
    std::this_thread::sleep_for(timeout);
    log(LogLevel::kError, "MPI_Finalize did not end in time: a rank has gone");
    ::_exit(1);
  }).detach();
  MPI_Finalize();
}

void at_exit(int status, void*) {
  Process& p = process();
  if (mpi_finalized()) return;
  if (status != 0 || p.world == nullptr || !p.world->usable()) end_job(p, status);
  const std::chrono::nanoseconds timeout = p.world->timeout();
  try {
    p.world->leave();
  } catch (const Error& error) {
    log(LogLevel::kError, "{}", error.what());
    end_job(p, status);
  }
  if (p.started_mpi) finalize_within(timeout);
}

void start_mpi(Process& p) {
  int started = 0;
  MPI_Initialized(&started);
  int provided = MPI_THREAD_SINGLE;
  if (started != 0) {
    MPI_Query_thread(&provided);
  } else {
    if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided) != MPI_SUCCESS) {
      throw Error(ErrorCode::kIo, "MPI_Init_thread failed");
    }
    p.started_mpi = true;
  }
  set_mpi_serialized(provided < MPI_THREAD_MULTIPLE);
}

}  // namespace

MpiWorld& MpiWorld::join(const MpiOptions& options) {
  Process& p = process();
  const std::lock_guard lock(p.mutex);
  if (p.world != nullptr) return *p.world;
  if (p.joining || mpi_finalized()) {
    throw Error(ErrorCode::kInvalidArgument, "this process has left its MPI world");
  }
  start_mpi(p);
  p.joining = true;
  ::on_exit(at_exit, nullptr);
  p.world = std::make_unique<MpiWorld>(options);
  return *p.world;
}

bool MpiWorld::usable() const {
  return job_.control != nullptr && !control().latch().tripped() && !mpi_finalized();
}

std::string mpi_library() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  // "Open MPI v4.1.4, package: ..." or "MPICH Version: 4.0.2\n..."
  const std::string all(text, static_cast<std::size_t>(length));
  std::istringstream line(all.substr(0, all.find_first_of(",\n")));
  std::string name;
  for (std::string word; line >> word;) {
    if (word != "Version:") name += (name.empty() ? "" : " ") + word;
  }
  return name;
}

}  // namespace lockstep
