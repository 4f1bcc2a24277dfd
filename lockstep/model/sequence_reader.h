#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace lockstep {

// Reads one sequence of tokens and says what may follow it, wherever that is computed.
class SequenceReader {
 public:
  virtual ~SequenceReader() = default;

  // Reads `tokens`, at least one, and returns the logits after the last of them: vocab floats,
  // valid until the next call. Throws Error{kInvalidArgument} when the context is full or a token
  // is not in the vocabulary.
  virtual std::span<const float> logits_after(std::span<const std::int32_t> tokens) = 0;

  virtual std::size_t length() const = 0;  // tokens read
  // Forgets everything but the first `length` tokens.
  virtual void truncate(std::size_t length) = 0;
};

}  // namespace lockstep
