#include "lockstep/train/level_plan.h"

#include <algorithm>
#include <utility>

#include "lockstep/base/index.h"

namespace lockstep {
namespace {

struct Holder {
  int rank = 0;
  Range range;
};

// Appends where rank `to` gets `wanted` from: itself first, then the lowest rank. False when nobody
// has some of it.
bool append_transfers(Range wanted, int to, std::span<const Holder> holders,
                      std::vector<StateTransfer>& transfers) {
  for (std::size_t begin = wanted.begin; begin < wanted.end;) {
    const Holder* best = nullptr;
    for (const Holder& holder : holders) {
      if (holder.range.begin > begin || holder.range.end <= begin) continue;
      if (best == nullptr || (best->rank != to && holder.rank == to)) best = &holder;
    }
    if (best == nullptr) return false;
    const std::size_t end = std::min(best->range.end, wanted.end);
    transfers.push_back({best->rank, to, {begin, end}});
    begin = end;
  }
  return true;
}

}  // namespace

LevelPlan plan_levelling(std::span<const LevelStanding> ranks, std::size_t size,
                         const ReducerOptions& reducer) {
  const int world_size = static_cast<int>(ranks.size());
  LevelPlan plan;
  plan.updates.resize(ranks.size());
  std::int64_t furthest = -1;
  for (const LevelStanding& rank : ranks) {
    if (rank.has_state) furthest = std::max(furthest, rank.step + (rank.decided ? 1 : 0));
  }
  const auto lose = [&] {
    LevelPlan lost;
    lost.lost = true;
    lost.updates.resize(ranks.size());
    return lost;
  };
  if (furthest < 0) return lose();
  plan.step = furthest;
  plan.closed = true;
  std::vector<Holder> parameters;  // those that are whole come first
  std::vector<Holder> moments;
  for (int r = 0; r < world_size; ++r) {
    const LevelStanding& rank = ranks[index_of(r)];
    if (!rank.has_state) continue;
    const bool there = rank.step == plan.step;
    const bool updated = rank.step + 1 == plan.step && rank.updated;
    plan.updates[index_of(r)] = rank.step + 1 == plan.step && rank.summed && !rank.updated;
    plan.closed = plan.closed && there && rank.closed;
    if (there || (rank.step + 1 == plan.step && rank.decided)) {
      if (plan.teller < 0) plan.teller = r;
      const LevelStanding& best = ranks[index_of(plan.teller)];
      // Who is there knows more than who has only the norm.
      if (std::pair(there, rank.done) > std::pair(best.step == plan.step, best.done)) {
        plan.teller = r;
      }
    }
    if (there) parameters.push_back({r, {0, size}});
    if (updated || plan.updates[index_of(r)]) parameters.push_back({r, rank.held});
    for (const auto& [range, step] : rank.moments) {
      const bool will_be = plan.updates[index_of(r)] && step == rank.step && range == rank.held;
      if (step == plan.step || will_be) moments.push_back({r, range});
    }
  }
  std::stable_partition(parameters.begin(), parameters.end(),
                        [&](const Holder& held) { return held.range.size() == size; });
  for (int r = 0; r < world_size; ++r) {
    const LevelStanding& rank = ranks[index_of(r)];
    const bool there = rank.has_state && rank.step == plan.step;
    if (!there && !append_transfers({0, size}, r, parameters, plan.parameters)) return lose();
    if (!reducer.shard) {
      if (!there && !append_transfers({0, size}, r, parameters, plan.moments)) return lose();
      continue;
    }
    const Range held = held_range(reducer, size, r, world_size);
    if (!append_transfers(held, r, moments, plan.moments)) return lose();
  }
  return plan;
}

}  // namespace lockstep
