// Milliseconds of every algorithm that cuBLASLt proposes for the products of a training step, one
// line per product: what the table in lockstep/model/cuda/products.cc is written from.
// usage: cuda_products [MODEL BATCH]...
#include <cublasLt.h>
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "lockstep/base/cuda/runtime.h"
#include "lockstep/model/config.h"
#include "lockstep/model/cuda/passes.h"
#include "lockstep/model/cuda/products.h"

namespace {

using lockstep::CudaProducts;
using Kind = CudaProducts::Kind;

struct Operands {
  lockstep::DeviceMemory left, right, out;
};

const char* name_of(Kind kind) {
  return kind == Kind::kForward ? "kForward" : kind == Kind::kInputs ? "kInputs" : "kWeights";
}

void measure(CudaProducts& products, const Operands& operands, cudaStream_t stream, Kind kind,
             std::size_t tokens, std::size_t ins, std::size_t outs, bool add) {
  constexpr int kRepeats = 20;
  const CudaProducts::Call call{kind,
                                tokens,
                                ins,
                                outs,
                                operands.left.data(),
                                operands.right.data(),
                                operands.out.data(),
                                add ? operands.out.data() : nullptr};
  std::vector<float> least = products.time_algorithms(call, stream, kRepeats);
  for (int round = 0; round < 2; ++round) {
    const std::vector<float> again = products.time_algorithms(call, stream, kRepeats);
    for (std::size_t i = 0; i < least.size(); ++i) least[i] = std::min(least[i], again[i]);
  }
  const auto best = std::ranges::min_element(least);
  fmt::print("{{Kind::{}, {}, {}, {}, {}}},  // {:.3f} ms, the first {:.3f}:", name_of(kind),
             tokens, ins, outs, best - least.begin(), *best, least.front());
  for (const float time : least) fmt::print(" {:.3f}", time);
  fmt::print("\n");
  std::fflush(stdout);
}

// Bits that are neither zeros nor large: random mantissas with exponents around 1.
lockstep::DeviceMemory noise(std::size_t bytes) {
  std::vector<std::uint16_t> host(1 << 22);
  std::uint32_t state = 1;
  for (std::uint16_t& value : host) {
    state = state * 1664525U + 1013904223U;
    value = static_cast<std::uint16_t>(0x3e00U | ((state >> 16) & 0x81ffU));
  }
  lockstep::DeviceMemory memory(bytes, "a product");
  for (std::size_t at = 0; at < bytes; at += host.size() * 2) {
    lockstep::check_cuda(cudaMemcpy(static_cast<std::byte*>(memory.data()) + at, host.data(),
                                    std::min(host.size() * 2, bytes - at), cudaMemcpyDefault),
                         "copying");
  }
  return memory;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.empty()) arguments = {"124m", "64", "350m", "32"};
  const lockstep::CudaStream stream = lockstep::make_stream();
  CudaProducts products(lockstep::Precision::kBf16);
  fmt::print("cuBLASLt {}\n", cublasLtGetVersion());
  for (std::size_t i = 0; i + 1 < arguments.size(); i += 2) {
    const lockstep::ModelConfig model = *lockstep::named_model(arguments[i]);
    const auto size = [](int value) { return static_cast<std::size_t>(value); };
    const std::size_t tokens = std::stoul(arguments[i + 1]) * size(model.context);
    const std::size_t hidden = size(model.hidden);
    const std::size_t inner = size(model.intermediate);
    const std::size_t vocab = size(model.vocab);
    const std::size_t chunk = lockstep::logits_chunk(tokens, vocab, 2);
    const Operands operands{noise(2 * std::max(tokens * 2 * inner, chunk * vocab)),
                            noise(2 * std::max(tokens * 2 * inner, chunk * vocab)),
                            noise(4 * std::max(tokens * 2 * inner, chunk * vocab))};
    struct Product {
      std::size_t tokens, ins, outs;
      bool add, add_weights;
    };
    for (const Product& product :
         {Product{tokens, hidden, hidden + 2 * size(model.kv_hidden()), false, false},
          Product{tokens, hidden, hidden, true, false},
          Product{tokens, hidden, 2 * inner, false, false},
          Product{tokens, inner, hidden, true, false},
          Product{chunk, hidden, vocab, false, true}}) {
      for (const Kind kind : {Kind::kForward, Kind::kInputs, Kind::kWeights}) {
        const bool add =
            kind == Kind::kForward ? product.add : kind == Kind::kWeights && product.add_weights;
        measure(products, operands, stream.get(), kind, product.tokens, product.ins, product.outs,
                add);
      }
    }
  }
}
