#include <cstdlib>
#include <cstring>

#include "lockstep/wire/mesh_frame.h"

// Whatever decodes must encode to the same bytes.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  if (size < kMeshFrameBytes) return 0;
  MeshFrameBytes bytes;
  std::memcpy(bytes.data(), data, kMeshFrameBytes);
  const auto frame = decode_mesh_frame(bytes);
  if (frame && encode(*frame) != bytes) std::abort();
  return 0;
}
