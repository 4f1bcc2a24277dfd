#pragma once

#include <span>
#include <string>
#include <vector>

#include "lockstep/base/hash/blake3.h"
#include "lockstep/base/thread_pool.h"
#include "lockstep/model/layout.h"

namespace lockstep {

// "blake3:<64 hex digits>": the BLAKE3 of the concatenated BLAKE3s of the tensors, in the order of
// layout.tensors(), each hashed as row-major little-endian f32.
std::string weights_hash(const ParameterLayout& layout, std::span<const float> parameters);

// The same in two steps: of every tensor, then of all of them.
std::vector<Blake3Hash> tensor_hashes(const ParameterLayout& layout,
                                      std::span<const float> parameters, ThreadPool& pool);
Blake3Hash hash_of_hashes(std::span<const Blake3Hash> tensors);
std::string to_weights_hash(const Blake3Hash& hash);

}  // namespace lockstep
