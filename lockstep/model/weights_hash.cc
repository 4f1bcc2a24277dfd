#include "lockstep/model/weights_hash.h"

#include <bit>

#include "lockstep/base/check.h"
#include "lockstep/base/hash/blake3.h"

namespace lockstep {

static_assert(std::endian::native == std::endian::little, "parameters are hashed as they lie");

namespace {

Blake3Hash hash_of(const TensorSpec& tensor, std::span<const float> parameters) {
  return blake3(std::as_bytes(parameters.subspan(tensor.range.begin, tensor.range.size())));
}

}  // namespace

std::vector<Blake3Hash> tensor_hashes(const ParameterLayout& layout,
                                      std::span<const float> parameters, ThreadPool& pool) {
  LOCKSTEP_CHECK(parameters.size() == layout.size());
  const std::span<const TensorSpec> tensors = layout.tensors();
  std::vector<Blake3Hash> hashes(tensors.size());
  pool.run(hashes.size(), [&](std::size_t i) { hashes[i] = hash_of(tensors[i], parameters); });
  return hashes;
}

Blake3Hash hash_of_hashes(std::span<const Blake3Hash> tensors) {
  return blake3(std::as_bytes(tensors));
}

std::string to_weights_hash(const Blake3Hash& hash) { return "blake3:" + to_hex(hash); }

std::string weights_hash(const ParameterLayout& layout, std::span<const float> parameters) {
  LOCKSTEP_CHECK(parameters.size() == layout.size());
  std::vector<Blake3Hash> hashes;
  for (const TensorSpec& tensor : layout.tensors()) hashes.push_back(hash_of(tensor, parameters));
  return to_weights_hash(hash_of_hashes(hashes));
}

}  // namespace lockstep
