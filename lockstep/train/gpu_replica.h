#pragma once

#include <functional>
#include <memory>

#include "lockstep/comm/nccl/device_exchange.h"
#include "lockstep/model/gpu_model.h"
#include "lockstep/train/replica.h"

namespace lockstep {

// What a replica on a GPU is made of. Tests have parts that need no GPU.
struct GpuParts {
  std::function<std::unique_ptr<GpuModel>(const GpuModelOptions&)> make_model = make_gpu_model;
  std::function<std::unique_ptr<DeviceExchange>(Communicator&, const DeviceExchangeOptions&)>
      make_exchange = make_nccl_exchange;
};

std::unique_ptr<Replica> make_gpu_replica(const ReplicaOptions& options, Communicator& communicator,
                                          const GpuParts& parts);

}  // namespace lockstep
