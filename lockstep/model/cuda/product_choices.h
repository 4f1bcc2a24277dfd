#pragma once

#include <cstddef>

#include "lockstep/model/cuda/products.h"

namespace lockstep {

// Which of the algorithms that cuBLASLt proposes for a product is the fastest: measured once per
// shape on an H200 (bench/cuda_products), never at run time, so that the bits of a product do not
// depend on timing. 0, the library's own choice, for all others.
std::size_t preferred_proposal(const CudaProducts::Call& call);

}  // namespace lockstep
