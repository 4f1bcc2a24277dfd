#include "lockstep/server/settings.h"

namespace lockstep {
namespace {

// No sane job waits longer, and ten times this still fits the clock.
constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

}  // namespace

std::string_view to_string(Mode mode) {
  switch (mode) {
    case Mode::kVector: return "vector";
    case Mode::kBlocks: return "blocks";
  }
  return "?";
}

Welcome to_welcome(const ServerSettings& settings) {
  const auto timeout = std::chrono::ceil<std::chrono::milliseconds>(settings.timeout);
  return {.timeout_ms = static_cast<std::uint64_t>(timeout.count()),
          .mode = static_cast<std::uint8_t>(settings.mode),
          .average = static_cast<std::uint8_t>(settings.average),
          .total_samples = settings.total_samples,
          .largest_frame = settings.largest_frame};
}

std::optional<ServerSettings> from_welcome(const Welcome& welcome) {
  const auto most = static_cast<std::uint64_t>(kLongestTimeout.count());
  if (welcome.mode > static_cast<std::uint8_t>(Mode::kBlocks) ||
      welcome.average > static_cast<std::uint8_t>(Average::kWeighted) || welcome.timeout_ms == 0 ||
      welcome.timeout_ms > most) {
    return std::nullopt;
  }
  return ServerSettings{
      .mode = static_cast<Mode>(welcome.mode),
      .average = static_cast<Average>(welcome.average),
      .total_samples = welcome.total_samples,
      .timeout = std::chrono::milliseconds(static_cast<std::int64_t>(welcome.timeout_ms)),
      .largest_frame = welcome.largest_frame};
}

Shard shard_of(std::uint64_t step, std::uint64_t total, int workers, int worker) {
  const auto n = static_cast<std::uint64_t>(workers);
  const auto index = static_cast<std::uint64_t>(worker);
  const std::uint64_t each = total / n;
  return {step, index * each, index + 1 == n ? total : (index + 1) * each};
}

}  // namespace lockstep
