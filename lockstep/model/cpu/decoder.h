#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/base/float_buffer.h"
#include "lockstep/base/thread_pool.h"
#include "lockstep/model/cpu/layers.h"
#include "lockstep/model/layout.h"
#include "lockstep/model/sequence_reader.h"

namespace lockstep {

// Reads one sequence token by token, keeping the keys and values of what it has read. The logits
// are those of Transformer::logits, to the bit, however the sequence is cut into calls.
class Decoder final : public SequenceReader {
 public:
  // `parameters` must outlive the decoder. Sequences of up to layout.config().context tokens.
  Decoder(const ParameterLayout& layout, std::span<const float> parameters, Precision precision,
          ThreadPool& pool);

  std::span<const float> logits_after(std::span<const std::int32_t> tokens) override;
  std::size_t length() const override { return length_; }
  void truncate(std::size_t length) override;

 private:
  void read(std::span<const std::int32_t> tokens);

  const ParameterLayout& layout_;
  std::span<const float> parameters_;
  std::size_t context_, hidden_, kv_hidden_, intermediate_, vocab_;
  Layers layers_;
  std::size_t length_ = 0;
  std::vector<FloatBuffer> caches_;  // per block: a row of keys, then values, per position
  FloatBuffer stream_, sublayer_, normed_, rstd_, qkv_, attended_, lse_, gate_up_, act_, logits_;
};

}  // namespace lockstep
