#include "lockstep/model/weights_hash.h"

#include <bit>

#include "lockstep/base/blake3.h"
#include "lockstep/base/check.h"

namespace lockstep {

static_assert(std::endian::native == std::endian::little, "parameters are hashed as they lie");

std::string weights_hash(const ParameterLayout& layout, std::span<const float> parameters) {
  LOCKSTEP_CHECK(parameters.size() == layout.size());
  Blake3 all;
  for (const TensorSpec& tensor : layout.tensors()) {
    all.update(blake3(std::as_bytes(parameters.subspan(tensor.range.begin, tensor.range.size()))));
  }
  return "blake3:" + to_hex(all.finish());
}

}  // namespace lockstep
