#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/model/gpu_model.h"
#include "lockstep/model/sequence_reader.h"

namespace lockstep {

// What a GPU needs to read sequences of up to `context` tokens with this model: no accumulators,
// hardly any moments. fp32, which every GPU has.
GpuModelOptions gpu_decoder_options(const ModelConfig& model, int context);

// Reads sequences on a GPU. It keeps no keys and values: every call is one forward pass over the
// whole context, which costs a GPU little. One thread.
class GpuDecoder final : public SequenceReader {
 public:
  // The model is made with gpu_decoder_options() for this context, and has its parameters.
  GpuDecoder(std::unique_ptr<GpuModel> model, int context);

  std::span<const float> logits_after(std::span<const std::int32_t> tokens) override;
  std::size_t length() const override { return tokens_.size(); }
  void truncate(std::size_t length) override;

 private:
  const std::unique_ptr<GpuModel> model_;
  const std::size_t context_;
  std::vector<std::int32_t> tokens_;
  std::vector<float> logits_;
};

}  // namespace lockstep
