#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <nccl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "lockstep/base/host.h"
#include "lockstep/comm/nccl/cuda_reducer.h"
#include "lockstep/comm/nccl/nccl_transport.h"

namespace lockstep {
namespace {

// Which GPU a rank has, as it travels: texts, filled up with zeros.
struct Place {
  char host[128];
  char bus_id[32];    // where it is on its host; parts of one GPU (MIG) have the same
  char trouble[160];  // why it does not know
};

void put(std::span<char> field, std::string_view text) {
  std::copy_n(text.data(), std::min(text.size(), field.size() - 1), field.data());
}

// As NCCL tells hosts apart.
std::string host_name() {
  const char* given = std::getenv("NCCL_HOSTID");
  return given != nullptr ? given : this_host().boot_id;
}

Place place_of(int device) {
  Place place{};
  int count = 0;
  cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess) {
    status = cudaDeviceGetPCIBusId(place.bus_id, sizeof(place.bus_id),
                                   device < 0 ? device : device % count);
  }
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // it is told here
    put(place.trouble, fmt::format("GPU {}: {}", device, cudaGetErrorString(status)));
    return place;
  }
  try {
    put(place.host, host_name());
  } catch (const Error& error) {
    put(place.trouble, error.message());
  }
  return place;
}

}  // namespace

std::string nccl_version() {
  int code = 0;
  if (ncclGetVersion(&code) != ncclSuccess) return "of an unknown version";
  return fmt::format("{}.{}.{}", code / 10000, code / 100 % 100, code % 100);
}

std::optional<std::string> device_reducer_refusal(Communicator& communicator, int device) {
  const Place own = place_of(device);
  std::vector<Place> places(static_cast<std::size_t>(communicator.world_size()));
  communicator.all_gather(ConstBufferView(&own, sizeof(Place), DataType::kU8),
                          BufferView(places.data(), places.size() * sizeof(Place), DataType::kU8));
  for (std::size_t rank = 0; rank < places.size(); ++rank) {
    if (places[rank].trouble[0] == '\0') continue;
    return fmt::format("rank {} cannot tell its GPU: {}", rank, places[rank].trouble);
  }
  // NCCL refuses this too, but later and in other words on every rank.
  for (std::size_t b = 1; b < places.size(); ++b) {
    for (std::size_t a = 0; a < b; ++a) {
      if (std::strcmp(places[a].host, places[b].host) == 0 &&
          std::strcmp(places[a].bus_id, places[b].bus_id) == 0) {
        return fmt::format("ranks {} and {} share a GPU", a, b);
      }
    }
  }
  return std::nullopt;
}

std::unique_ptr<DeviceReducer> make_nccl_reducer(Communicator& communicator,
                                                 const DeviceReducerOptions& options) {
  try {
    NcclId id{};
    if (communicator.rank() == 0) id = make_nccl_id();
    communicator.broadcast(BufferView(id.data(), id.size(), DataType::kU8), 0);
    NcclOptions nccl;
    nccl.rank = communicator.rank();
    nccl.world_size = communicator.world_size();
    nccl.patience = communicator.patience();
    nccl.check = [&communicator] { communicator.check(); };
    nccl.fail = [&communicator](const Error& error) { communicator.fail(error); };
    return std::make_unique<CudaReducer>(std::make_unique<NcclTransport>(id, std::move(nccl)),
                                         options);
  } catch (const Error& error) {
    communicator.fail(error);  // the others wait for this rank
  }
}

}  // namespace lockstep
