#include "cli/rank_environment.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <string_view>

#include "lockstep/base/error.h"
#include "lockstep/net/roster.h"

namespace lockstep::cli {
namespace {

struct Names {
  const char* rank;
  const char* world_size;
};
constexpr Names kLaunchers[] = {
    {kRankVariable, kWorldSizeVariable},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    {"PMI_RANK", "PMI_SIZE"},
};

int number_in(const char* name, int least, int most) {
  const char* value = std::getenv(name);
  if (value == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the environment is incomplete: {} is not set", name));
  }
  const std::string_view text(value);
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < least || number > most) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}={} is not a number from {} to {}", name, text, least, most));
  }
  return number;
}

}  // namespace

std::optional<RankEnvironment> rank_environment() {
  for (const auto& [rank, world_size] : kLaunchers) {
    if (std::getenv(rank) == nullptr && std::getenv(world_size) == nullptr) continue;
    RankEnvironment found;
    found.world_size = number_in(world_size, 1, kMaxWorldSize);
    found.rank = number_in(rank, 0, found.world_size - 1);
    if (found.world_size == 1) return found;
    if (std::getenv(kListenerVariable) != nullptr && found.rank == 0) {
      found.listener = number_in(kListenerVariable, 3, 1 << 20);
    }
    const char* host = std::getenv(kMasterHostVariable);
    if (host != nullptr) {
      found.master_host = host;
      found.master_port = static_cast<std::uint16_t>(number_in(kMasterPortVariable, 1, 65535));
    }
    return found;
  }
  return std::nullopt;
}

}  // namespace lockstep::cli
