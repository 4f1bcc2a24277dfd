#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "lockstep/model/config.h"

namespace lockstep {

// Matrix products through cuBLASLt on row-major matrices, aligned to 16 bytes. Inputs are bf16 or
// f32 as the precision says, sums f32. The algorithm of a shape is a function of shape, library and
// kind of GPU, never of timing, and takes no atomics: the same bits in every process and every run.
class CudaProducts {
 public:
  enum class Kind {
    kForward,  // out (tokens x outs) = x (tokens x ins) · w (outs x ins)ᵀ
    kInputs,   // dx (tokens x ins) = dy (tokens x outs) · w (outs x ins)
    kWeights,  // dw (outs x ins) = dy (tokens x outs)ᵀ · x (tokens x ins); f32
  };
  struct Call {
    Kind kind = Kind::kForward;
    std::size_t tokens = 0, ins = 0, outs = 0;
    const void* left = nullptr;   // x, dy, dy
    const void* right = nullptr;  // w, w, x
    void* out = nullptr;          // activations in the precision's type, weights in f32
    const void* add = nullptr;    // what the product is added to, of the type of `out`
    std::size_t outs_stride = 0;  // of rows of `outs` elements, when it is not `outs`
  };

  explicit CudaProducts(Precision precision);
  ~CudaProducts();

  // Enqueues. The algorithm is chosen at the first call of a shape, so one call outside of a
  // captured graph must come first.
  void operator()(const Call& call, cudaStream_t stream);

  // Milliseconds of the algorithms that the library proposes, best guess first; for measuring.
  std::vector<float> time_algorithms(const Call& call, cudaStream_t stream, int repeats);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep
