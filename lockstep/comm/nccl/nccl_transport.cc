#include "lockstep/comm/nccl/nccl_transport.h"

#include <fmt/format.h>
#include <nccl.h>

#include <cstring>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "lockstep/base/cuda/runtime.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/thread.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

static_assert(sizeof(ncclUniqueId) == sizeof(NcclId));

// What NCCL says about a broken peer is the echo of that rank's failure. The job's control links
// know more, but not always sooner.
constexpr auto kEcho = 1s;

// An abort takes some milliseconds.
constexpr auto kAbort = 30s;

// Most waits are for a thread of NCCL's that takes some microseconds; others are for ranks.
class Pause {
 public:
  void operator()() const {
    if (Deadline::Clock::now() - began_ < 1ms) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(200us);
    }
  }

 private:
  const Deadline::Clock::time_point began_ = Deadline::Clock::now();
};

std::string describe(const char* operation, ncclResult_t result, ncclComm_t comm) {
  std::string text = fmt::format("NCCL: {}: {}", operation, ncclGetErrorString(result));
  const char* detail = ncclGetLastError(comm);
  if (detail != nullptr && *detail != '\0') text += fmt::format(" ({})", detail);
  return text + "; NCCL_DEBUG=WARN makes it say more";
}

// NCCL's abort waits for its kernels and threads, without a deadline of its own. One that does not
// end is left behind, and the GPU with it.
void abort_in_time(ncclComm* comm) {
  int device = 0;
  static_cast<void>(cudaGetDevice(&device));
  const auto ended = std::make_shared<std::promise<void>>();
  std::future<void> end = ended->get_future();
  Thread thread;
  thread.start(
      "the thread that aborts NCCL",
      [comm, device, ended] {
        static_cast<void>(cudaSetDevice(device));
        static_cast<void>(ncclCommAbort(comm));  // nobody could do anything about its result
        ended->set_value();
      },
      [](const Error&) {});
  if (end.wait_for(kAbort) == std::future_status::ready) return thread.join();
  give_up_cuda();
  thread.detach();
}

}  // namespace

NcclId make_nccl_id() {
  ncclUniqueId made;
  const ncclResult_t result = ncclGetUniqueId(&made);
  if (result != ncclSuccess) {
    throw Error(ErrorCode::kIo, describe("making an id for the ranks", result, nullptr));
  }
  NcclId id;
  std::memcpy(id.data(), &made, sizeof(made));
  return id;
}

NcclTransport::NcclTransport(const NcclId& id, NcclOptions options) : options_(std::move(options)) {
  ncclUniqueId unique;
  std::memcpy(&unique, id.data(), sizeof(unique));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  try {
    settle("bringing the ranks together",
           ncclCommInitRankConfig(&comm_, options_.world_size, unique, options_.rank, &config));
  } catch (...) {
    close();  // no destructor will
    throw;
  }
}

NcclTransport::~NcclTransport() { close(); }

void NcclTransport::close() noexcept {
  ncclComm* comm = std::exchange(comm_, nullptr);
  if (comm == nullptr || cuda_given_up()) return;  // the latter: it would wait for the GPU
  try {
    abort_in_time(comm);
  } catch (const Error&) {  // no thread to be had
    static_cast<void>(ncclCommAbort(comm));
  }
}

void NcclTransport::abort() noexcept {
  if (!failure_) failure_ = Error(ErrorCode::kAborted, "the exchange between GPUs was aborted");
  close();
}

void NcclTransport::fail(const Error& error) {
  failure_ = error;
  close();
  try {
    if (options_.fail) options_.fail(error);
  } catch (const Error& cause) {
    failure_ = cause;
  }
  throw Error(*failure_);
}

void NcclTransport::fail(const char* operation, int result) {
  const auto code = static_cast<ncclResult_t>(result);
  const Error error(ErrorCode::kIo, describe(operation, code, comm_));
  if (code == ncclRemoteError) {
    const Pause pause;
    for (const Deadline deadline = Deadline::after(kEcho); !deadline.expired(); pause())
      check_job();
  }
  fail(error);
}

void NcclTransport::check_job() {
  if (!options_.check) return;
  try {
    options_.check();
  } catch (const Error& cause) {
    failure_ = cause;
    close();
    throw;
  }
}

void NcclTransport::settle(const char* operation, int result) {
  const Deadline deadline = Deadline::after(options_.patience);
  const Pause pause;
  while (result == ncclInProgress) {
    check_job();
    if (deadline.expired()) {
      fail(Error(ErrorCode::kTimeout,
                 fmt::format("NCCL: {}: rank {} of {} ranks has waited {:.1f} s; another rank did "
                             "not come to the same call, or NCCL cannot reach it (NCCL_DEBUG=INFO "
                             "shows the network that it uses, NCCL_SOCKET_IFNAME chooses it)",
                             operation, options_.rank, options_.world_size,
                             std::chrono::duration<double>(options_.patience).count())));
    }
    pause();
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
    result = asked == ncclSuccess ? state : asked;
  }
  if (result != ncclSuccess) fail(operation, result);
}

void NcclTransport::check() {
  if (failure_) throw Error(*failure_);
  check_job();
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
  const ncclResult_t result = asked == ncclSuccess ? state : asked;
  if (result != ncclSuccess && result != ncclInProgress) fail("transfers under way", result);
}

void NcclTransport::exchange(std::span<const DeviceSend> sends, std::span<const DeviceRecv> recvs,
                             DeviceStream stream) {
  check();
  if (sends.empty() && recvs.empty()) return;
  ncclResult_t result = ncclGroupStart();
  if (result != ncclSuccess) fail("sending and receiving", result);
  // Within a group a call succeeds or fails at once.
  for (const DeviceSend& send : sends) {
    if (result != ncclSuccess) break;
    result = ncclSend(send.data, send.count, ncclFloat32, send.peer, comm_, stream);
  }
  for (const DeviceRecv& recv : recvs) {
    if (result != ncclSuccess) break;
    result = ncclRecv(recv.data, recv.count, ncclFloat32, recv.peer, comm_, stream);
  }
  const ncclResult_t ended = ncclGroupEnd();  // in any case: the group is the thread's
  // Only when this has settled are the transfers on the stream.
  settle("sending and receiving", result == ncclSuccess ? ended : result);
}

void NcclTransport::all_reduce(float* data, std::size_t count, DeviceStream stream) {
  check();
  if (count == 0) return;
  settle("all-reduce", ncclAllReduce(data, data, count, ncclFloat32, ncclSum, comm_, stream));
}

}  // namespace lockstep
