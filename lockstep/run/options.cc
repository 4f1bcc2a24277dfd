#include "lockstep/run/options.h"

#include <fmt/format.h>

#include <charconv>

namespace lockstep {

std::optional<SaveEvery> parse_save_every(std::string_view text) {
  std::int64_t count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  constexpr std::int64_t kMost = std::int64_t{1} << 50;
  if (error != std::errc() || count < 0 || count > kMost) return std::nullopt;
  const std::string_view unit = text.substr(static_cast<std::size_t>(end - text.data()));
  if (unit.empty()) return SaveEvery{count, {}};
  if (count == 0 || count > 1'000'000) return std::nullopt;
  if (unit == "s") return SaveEvery{0, std::chrono::seconds(count)};
  if (unit == "m") return SaveEvery{0, std::chrono::minutes(count)};
  if (unit == "h") return SaveEvery{0, std::chrono::hours(count)};
  return std::nullopt;
}

std::string to_string(const SaveEvery& every) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(every.interval).count();
  if (seconds == 0) return fmt::format("{}", every.steps);
  if (seconds % 3600 == 0) return fmt::format("{}h", seconds / 3600);
  if (seconds % 60 == 0) return fmt::format("{}m", seconds / 60);
  return fmt::format("{}s", seconds);
}

}  // namespace lockstep
