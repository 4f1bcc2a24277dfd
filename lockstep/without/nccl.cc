#include "lockstep/base/error.h"
#include "lockstep/comm/nccl/device_exchange.h"

namespace lockstep {

std::optional<std::string> device_exchange_refusal(Communicator&, int) {
  return "this build has no NCCL";
}

std::unique_ptr<DeviceExchange> make_nccl_exchange(Communicator&, const DeviceExchangeOptions&) {
  throw Error(ErrorCode::kInvalidArgument, "this build has no NCCL");
}

}  // namespace lockstep
