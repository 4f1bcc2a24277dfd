#include "lockstep/comm/collectives/algorithm_table.h"

#include <fmt/format.h>

#include <limits>
#include <span>

#include "lockstep/base/error.h"
#include "lockstep/comm/collectives/shared_collectives.h"
#include "lockstep/comm/collectives/two_level_collectives.h"

namespace lockstep {
namespace {

constexpr std::size_t kAny = std::numeric_limits<std::size_t>::max();

// All-reduce over messages: the first row that fits decides. Measured on loopback TCP; see
// docs/decisions/algorithm_table.md.
struct Row {
  int most_ranks;
  std::size_t most_bytes;
  Algorithm algorithm;
};
constexpr Row kAllReduce[] = {
    {2, 16 * 1024, Algorithm::kPair},
    {8, 2 * 1024, Algorithm::kPair},
    {std::numeric_limits<int>::max(), 2 * 1024, Algorithm::kTree},
    {std::numeric_limits<int>::max(), kAny, Algorithm::kDirect},
};
// Where ranks share cores, the work of all of them together takes the time, so the algorithm with
// the fewest messages wins.
constexpr Row kCrowdedAllReduce[] = {
    {2, 16 * 1024, Algorithm::kPair},
    {std::numeric_limits<int>::max(), 64 * 1024, Algorithm::kTree},
    {std::numeric_limits<int>::max(), kAny, Algorithm::kDirect},
};
constexpr std::size_t kSmallBroadcast = 32 * 1024;
// From this size on two levels were never slower than one, on 2 to 3 hosts with 2 to 4 ranks.
constexpr std::size_t kTwoLevels = 8 * 1024;

Algorithm from_table(const Call& call, int world_size, bool crowded) {
  const std::size_t bytes = call.total * size_of(call.out.type());
  switch (call.collective) {
    case Collective::kAllReduce:
      for (const Row& row : crowded ? std::span<const Row>(kCrowdedAllReduce) : kAllReduce) {
        if (world_size <= row.most_ranks && bytes <= row.most_bytes) return row.algorithm;
      }
      return Algorithm::kDirect;
    case Collective::kBroadcast:
    case Collective::kReduce:
      return bytes <= kSmallBroadcast || world_size == 2 ? Algorithm::kTree : Algorithm::kDirect;
    default: return Algorithm::kDirect;
  }
}

}  // namespace

bool offers(Collective collective, Algorithm algorithm, Sharing sharing) {
  switch (algorithm) {
    case Algorithm::kAuto: return true;
    case Algorithm::kNative: return false;
    case Algorithm::kShared:
      return sharing == Sharing::kAll && SharedCollectives::supports(collective);
    case Algorithm::kTwoLevel:
      return sharing == Sharing::kHosts && TwoLevelCollectives::supports(collective);
    case Algorithm::kDirect: return true;
    case Algorithm::kPair:
    case Algorithm::kHalvingDoubling: return collective == Collective::kAllReduce;
    case Algorithm::kRing:
      return collective == Collective::kAllReduce || collective == Collective::kReduceScatter ||
             collective == Collective::kAllGather;
    case Algorithm::kTree:
      return collective == Collective::kAllReduce || collective == Collective::kBroadcast ||
             collective == Collective::kReduce;
  }
  return false;
}

Algorithm choose_algorithm(const Call& call, int world_size, Sharing sharing, bool crowded) {
  const Algorithm asked = call.options.algorithm;
  if (asked == Algorithm::kAuto) {
    if (sharing == Sharing::kAll && SharedCollectives::supports(call, world_size)) {
      return Algorithm::kShared;
    }
    const std::size_t bytes = call.total * size_of(call.out.type());
    if (sharing == Sharing::kHosts && bytes >= kTwoLevels &&
        TwoLevelCollectives::supports(call, world_size)) {
      return Algorithm::kTwoLevel;
    }
    return from_table(call, world_size, crowded);
  }
  if (!offers(call.collective, asked, sharing) ||
      (asked == Algorithm::kShared && !SharedCollectives::supports(call, world_size)) ||
      (asked == Algorithm::kTwoLevel && !TwoLevelCollectives::supports(call, world_size))) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} does not offer the algorithm {} here", to_string(call.collective),
                            to_string(asked)));
  }
  return asked;
}

}  // namespace lockstep
