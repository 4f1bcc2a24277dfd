#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string_view>

#include "lockstep/base/deadline.h"
#include "lockstep/server/average.h"
#include "lockstep/wire/gradient_messages.h"

namespace lockstep {

// What the workers send at every step. Values are part of the protocol.
enum class Mode : std::uint8_t {
  kVector = 0,  // one gradient vector, with loss and counts
  kBlocks = 1,  // block after block, the last first, then lm_head, final_norm and embedding
};
std::string_view to_string(Mode mode);

// The coordinator's settings, which its workers learn when they join.
struct ServerSettings {
  Mode mode = Mode::kVector;
  Average average = Average::kWeighted;
  std::uint64_t total_samples = 0;  // of a step
  Deadline::Clock::duration timeout = std::chrono::seconds(30);
  std::uint32_t largest_frame = 0x7fffffff;  // bytes of one gradient message

  bool operator==(const ServerSettings&) const = default;
};
Welcome to_welcome(const ServerSettings& settings);
// Nothing if a value is unknown or makes no sense.
std::optional<ServerSettings> from_welcome(const Welcome& welcome);

// What people are told of a step: the first is 1, as everywhere in training. On the wire it is 0.
inline std::uint64_t step_number(std::uint64_t step) { return step + 1; }

// The samples [begin, end) of a step.
struct Shard {
  std::uint64_t step = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  std::uint64_t size() const { return end - begin; }
  bool operator==(const Shard&) const = default;
};
// Contiguous, total/workers each; the last worker takes the rest.
Shard shard_of(std::uint64_t step, std::uint64_t total, int workers, int worker);

// A lane sum travels in pieces of at most so many elements, bytes in pieces of as many bytes.
inline constexpr std::size_t kLanePiece = 64 * 1024;
inline constexpr std::size_t kBytesPiece = kLanePiece * sizeof(float);

}  // namespace lockstep
