#include "lockstep/comm/mpi/world.h"

#include <fmt/format.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>

#include "lockstep/base/cores.h"
#include "lockstep/base/hash/blake3.h"
#include "lockstep/base/host.h"
#include "lockstep/base/log.h"
#include "lockstep/base/thread.h"
#include "lockstep/comm/mpi/group.h"
#include "lockstep/net/socket/interface.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

// So that the other ranks can still say why they failed before MPI ends them.
constexpr auto kLastWords = 250ms;
// For what MPI has taken and not sent yet, where nothing else sees to it.
constexpr auto kLastBytes = 2s;

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

// MPICH before 4.2 may hang in MPI_Finalize over UCX and TCP: a rank waits there for others that no
// longer move data (https://github.com/pmodels/mpich/pull/6596).
bool finalize_may_hang() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  int major = 0;
  int minor = 0;
  return std::sscanf(text, "MPICH Version: %d.%d", &major, &minor) == 2 &&
         std::pair(major, minor) < std::pair(4, 2) && std::strstr(text, "ch4:ucx") != nullptr;
}

// What of MPI_Finalize the launcher hears, in the words of PMI 1. A rank that ends without them has
// it kill the other ranks of its host.
void finalize_for_launcher() {
  const char* descriptor = std::getenv("PMI_FD");
  if (descriptor == nullptr) return;
  constexpr std::string_view kGoodbye = "cmd=finalize\n";
  const int launcher = std::atoi(descriptor);
  if (::write(launcher, kGoodbye.data(), kGoodbye.size()) < 0) return;
  pollfd answer{launcher, POLLIN, 0};
  ::poll(&answer, 1, static_cast<int>(std::chrono::milliseconds(kLastBytes).count()));
}

// MPI_Finalize has no deadline of its own, and a rank may still die in it.
void finalize_within(std::chrono::nanoseconds timeout) {
  Thread watch;
  watch.start(
      "the watch over MPI_Finalize",
      [timeout] {
        std::this_thread::sleep_for(timeout);
        log(LogLevel::kError, "MPI_Finalize did not end in time: a rank has gone");
        ::_exit(1);
      },
      [](const Error&) {});
  watch.detach();
  MPI_Finalize();
}

void at_exit(int status, void*) {
  Process& p = process();
  if (mpi_finalized()) return;
  if (status != 0 || p.world == nullptr || !p.world->usable()) end_job(p, status);
  const std::chrono::nanoseconds timeout = p.world->timeout();
  const bool skip = p.world->skips_finalize();
  try {
    p.world->leave();
  } catch (const Error& error) {
    log(LogLevel::kError, "{}", error.what());
    end_job(p, status);
  }
  if (!p.started_mpi) return;
  if (skip) {
    finalize_for_launcher();
  } else {
    finalize_within(timeout);
  }
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

Blake3Hash hash_of(const HostIdentity& host) {
  const std::string text = fmt::format("{} {}", host.boot_id, host.network_namespace);
  return blake3(std::as_bytes(std::span(text)));
}

// How the others find rank 0, as it travels through MPI.
struct Invitation {
  char host[64];
  char token[33];
  std::uint16_t port;
};

// Where the others can reach this host.
SocketAddress own_address(const MpiOptions& options, bool one_host) {
  if (!options.interface.empty()) return interface_address(options.interface, AF_INET);
  if (one_host) return SocketAddress::loopback_v4();
  try {  // by whichever interface leads out of this host; nothing is sent there
    return local_address_toward(*SocketAddress::parse("198.51.100.1:9"));
  } catch (const Error& error) {
    throw Error(
        ErrorCode::kNoConnection,
        fmt::format("no way out of this host; name the interface to use ({})", error.message()));
  }
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

MpiWorld::MpiWorld(const MpiOptions& options) : timeout_(options.timeout) {
  const Deadline deadline = Deadline::after(timeout_);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
  MPI_Comm_size(MPI_COMM_WORLD, &world_size_);
  comm_ = duplicate(MPI_COMM_WORLD, nullptr, deadline);
  compare_hosts(deadline);
  join_job(options, deadline);
}

MpiWorld::~MpiWorld() = default;

void MpiWorld::meet(MPI_Request& request, const FailureLatch* latch, Deadline deadline,
                    const char* step) const {
  if (await(request, {.deadline = deadline, .latch = latch})) return;
  throw Error(ErrorCode::kTimeout,
              fmt::format("joining the MPI world: rank {} of {} waited in vain for the others ({})",
                          rank_, world_size_, step));
}

MPI_Comm MpiWorld::duplicate(MPI_Comm comm, const FailureLatch* latch, Deadline deadline) const {
  MPI_Comm copy = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  {
    const auto lock = mpi_lock();
    check_mpi(MPI_Comm_idup(comm, &copy, &request), "MPI_Comm_idup");
  }
  meet(request, latch, deadline, "a communicator");
  const auto lock = mpi_lock();
  check_mpi(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return copy;
}

void MpiWorld::compare_hosts(Deadline deadline) {
  // mpirun may have bound every rank to cores of its own.
  struct Place {
    Blake3Hash host;
    std::array<char, 224> cores;
  };
  Place own{hash_of(this_host()), {}};
  const std::string cores = core_list(own_cores());
  if (cores.size() < own.cores.size()) std::ranges::copy(cores, own.cores.begin());
  std::vector<Place> all(static_cast<std::size_t>(world_size_));
  MPI_Request request = MPI_REQUEST_NULL;
  {
    const auto lock = mpi_lock();
    check_mpi(MPI_Iallgather(&own, sizeof own, MPI_BYTE, all.data(), sizeof own, MPI_BYTE, comm_,
                             &request),
              "MPI_Iallgather");
  }
  meet(request, nullptr, deadline, "names of hosts");
  std::vector<std::string> lists;
  for (const Place& place : all) {
    if (place.host == own.host) lists.emplace_back(place.cores.data());
  }
  const int here = static_cast<int>(lists.size());
  one_host_ = here == world_size_;
  oversubscribed_ = here > count_cores(lists);
}

void MpiWorld::join_job(const MpiOptions& options, Deadline deadline) {
  Invitation invitation{};
  std::optional<Socket> listener;
  if (rank_ == 0 && world_size_ > 1) {
    listener = listen_tcp(own_address(options, one_host_));
    const SocketAddress bound = listener->local_address();
    const std::string host = bound.host();
    const std::string token = to_string(random_member_id());
    std::copy_n(host.data(), std::min(host.size(), sizeof invitation.host - 1), invitation.host);
    std::copy_n(token.data(), std::min(token.size(), sizeof invitation.token - 1),
                invitation.token);
    invitation.port = bound.port();
  }
  MPI_Request request = MPI_REQUEST_NULL;
  {
    const auto lock = mpi_lock();
    check_mpi(MPI_Ibcast(&invitation, sizeof invitation, MPI_BYTE, 0, comm_, &request),
              "MPI_Ibcast");
  }
  meet(request, nullptr, deadline, "the address of rank 0");

  JobOptions job;
  job.rank = rank_;
  job.world_size = world_size_;
  job.master_host = invitation.host;
  job.master_port = invitation.port;
  job.token = invitation.token;
  job.interface = options.interface;
  job.timeout = timeout_;
  job.listens = false;  // data goes through MPI alone
  job_ = lockstep::join_job(job, std::move(listener));
}

std::unique_ptr<MpiGroup> MpiWorld::group() {
  const FailureLatch& latch = control().latch();
  latch.check();
  try {
    const MPI_Comm comm = duplicate(comm_, &latch, Deadline::after(timeout_));
    std::vector<int> everybody;
    for (int r = 0; r < world_size_; ++r) everybody.push_back(r);
    return std::make_unique<MpiGroup>(*this, comm, std::move(everybody));
  } catch (const Error& error) {
    control().fail(error);
  }
}

void MpiWorld::keep_until_sent(MPI_Request request, std::unique_ptr<std::byte[]> bytes) {
  const std::lock_guard lock(mutex_);
  sending_.push_back({request, std::move(bytes)});
  if (!usable()) return;
  std::erase_if(sending_, [](Sending& sending) { return test(sending.request); });
}

void MpiWorld::leave() {
  const auto meet = [this](const Patience& patience) {
    MPI_Request request = MPI_REQUEST_NULL;
    {
      const auto lock = mpi_lock();
      check_mpi(MPI_Ibarrier(comm_, &request), "MPI_Ibarrier");
    }
    return await(request, patience);
  };
  // The same patience as with any collective.
  if (!meet({.deadline = Deadline::after(10 * timeout_), .latch = &control().latch()})) {
    control().fail(Error(ErrorCode::kTimeout,
                         fmt::format("{} waited in vain at exit for the others", name_of(rank_))));
  }
  // Without MPI_Finalize nothing would move what others still wait for in that barrier. Who waits
  // in vain for a second one has left the first behind.
  if (skips_finalize()) meet({.deadline = Deadline::after(kLastBytes)});
  job_.control.reset();
}

bool MpiWorld::skips_finalize() const { return !one_host_ && finalize_may_hang(); }

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
