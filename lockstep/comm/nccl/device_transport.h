#pragma once

#include <cstddef>
#include <span>

#include "lockstep/comm/nccl/device_reducer.h"

namespace lockstep {

// Floats on the device that go to, or come from, another rank's device.
struct DeviceSend {
  int peer = 0;
  const float* data = nullptr;
  std::size_t count = 0;
};

struct DeviceRecv {
  int peer = 0;
  float* data = nullptr;
  std::size_t count = 0;
};

// What moves floats between the GPUs of a group, enqueued on a stream. All ranks make matching
// calls in the same order. After a failure every call throws it again. One thread at a time, on
// whose current GPU the transport was made.
class DeviceTransport {
 public:
  virtual ~DeviceTransport() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // All transfers at once. Between two ranks they match in the order in which they are listed;
  // nothing that is received may overlap what is sent.
  virtual void exchange(std::span<const DeviceSend> sends, std::span<const DeviceRecv> recvs,
                        DeviceStream stream) = 0;
  // data = the sum of everybody's data, in an order of its own.
  virtual void all_reduce(float* data, std::size_t count, DeviceStream stream) = 0;

  // As in DeviceReducer.
  virtual void check() = 0;
  virtual void abort() noexcept = 0;
};

}  // namespace lockstep
