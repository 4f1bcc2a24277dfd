#include "lockstep/base/error.h"
#include "lockstep/comm/nccl/device_reducer.h"

namespace lockstep {

std::string nccl_version() { return ""; }

std::optional<std::string> device_reducer_refusal(Communicator&, int) {
  return "this build has no NCCL";
}

std::unique_ptr<DeviceReducer> make_nccl_reducer(Communicator&, const DeviceReducerOptions&) {
  throw Error(ErrorCode::kInvalidArgument, "this build has no NCCL");
}

}  // namespace lockstep
