#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/comm/nccl/device_transport.h"

struct ncclComm;

namespace lockstep {

// What the ranks of a group must have in common to find each other.
using NcclId = std::array<std::byte, 128>;
// One rank makes it, and must outlive the others' joining. Throws Error{kIo}.
NcclId make_nccl_id();

struct NcclOptions {
  int rank = 0;
  int world_size = 1;
  // How long a call waits for other ranks, or for NCCL's own threads.
  std::chrono::nanoseconds patience = std::chrono::seconds(300);
  // Throws when the job has failed; asked while waiting. None: it never does.
  std::function<void()> check;
  // Tells the job of a failure of NCCL; may throw the job's own cause, if it knows a better one.
  std::function<void(const Error&)> fail;
};

// Over NCCL, without blocking calls: every wait of the host is a loop here, which ends by a
// deadline or when the job fails. A failure aborts NCCL, so that kernels under way end, is told to
// the job, and is thrown again by every later call.
class NcclTransport final : public DeviceTransport {
 public:
  // On the current GPU. Waits until all ranks have come: Error{kTimeout} if they do not.
  NcclTransport(const NcclId& id, NcclOptions options);
  // Aborts: ending NCCL in good order would wait for all ranks, who may be dead.
  ~NcclTransport() override;

  int rank() const override { return options_.rank; }
  int world_size() const override { return options_.world_size; }
  void exchange(std::span<const DeviceSend> sends, std::span<const DeviceRecv> recvs,
                DeviceStream stream) override;
  void all_reduce(float* data, std::size_t count, DeviceStream stream) override;
  void check() override;
  void abort() noexcept override;

 private:
  // Results are ncclResult_t. Returns when `result` has become success; else it has failed.
  void settle(const char* operation, int result);
  void check_job();
  [[noreturn]] void fail(const char* operation, int result);
  [[noreturn]] void fail(const Error& error);
  void close() noexcept;

  const NcclOptions options_;
  ncclComm* comm_ = nullptr;
  std::optional<Error> failure_;  // the first
};

}  // namespace lockstep
