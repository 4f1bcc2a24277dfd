#include "lockstep/train/lane_balance.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/index.h"
#include "lockstep/base/whole_number.h"
#include "lockstep/train/gradient_tree.h"

namespace lockstep {
namespace {

// How far from the exact share a cut may be, in lanes, so that there are fewer partials.
constexpr std::size_t kLeastSlack = 8;
constexpr std::size_t kMostSlack = 64;
// Deals are compared whose slowest rank takes so much longer than in the best one.
constexpr std::array kAllowances = {1.0, 1.05, 1.1, 1.2, 1.4};
constexpr std::int64_t kLongestPause = 64;
constexpr std::size_t kParts = 4;  // of a window, each of which must speak for a move

constexpr std::size_t kImpossible = std::numeric_limits<std::size_t>::max();

// Appends the maximal nodes of T(node) inside of `run`.
void append_nodes_of_run(Range run, Range node, std::vector<Range>& nodes) {
  const Range inside = common_part(run, node);
  if (inside.size() == 0) return;
  if (inside == node) {
    nodes.push_back(node);
    return;
  }
  const std::size_t middle = node.begin + tree_split(node.size());
  append_nodes_of_run(run, {node.begin, middle}, nodes);
  append_nodes_of_run(run, {middle, node.end}, nodes);
}

// All runs that a deal may be made of: rank r's begins at one of cuts[r] and ends at one of
// cuts[r + 1].
struct Runs {
  struct Run {
    double seconds = 0;
    std::size_t partials = kImpossible;
  };
  std::vector<std::vector<std::size_t>> cuts;
  std::vector<std::vector<Run>> of_rank;  // [rank][begin * cuts[rank + 1].size() + end]

  const Run& at(std::size_t rank, std::size_t begin, std::size_t end) const {
    return of_rank[rank][begin * cuts[rank + 1].size() + end];
  }
};

Runs possible_runs(std::size_t lanes, std::span<const double> seconds_per_lane,
                   std::span<const std::uint32_t> most_accumulators) {
  const std::size_t ranks = seconds_per_lane.size();
  const std::size_t slack = std::clamp(lanes / (4 * ranks), kLeastSlack, kMostSlack);
  double speed = 0;
  for (const double seconds : seconds_per_lane) speed += 1 / seconds;
  Runs runs;
  runs.cuts.push_back({0});
  double before = 0;
  for (std::size_t rank = 1; rank < ranks; ++rank) {
    before += 1 / seconds_per_lane[rank - 1];
    // Times that differ beyond all measure leave no share to speak of; each is as good as another.
    const double exact = std::floor(static_cast<double>(lanes) * before / speed);
    const std::size_t share = std::min(whole_number<std::size_t>(exact).value_or(0), lanes);
    const std::size_t least = rank;  // a lane for everybody
    const std::size_t most = lanes - (ranks - rank);
    const std::size_t first = std::clamp(share - std::min(share, slack), least, most);
    const std::size_t last = std::clamp(share + slack, least, most);
    std::vector<std::size_t>& cuts = runs.cuts.emplace_back();
    for (std::size_t cut = first; cut <= last; ++cut) cuts.push_back(cut);
  }
  runs.cuts.push_back({lanes});
  std::vector<Range> nodes;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    std::vector<Runs::Run>& list = runs.of_rank.emplace_back();
    for (const std::size_t begin : runs.cuts[rank]) {
      for (const std::size_t end : runs.cuts[rank + 1]) {
        Runs::Run& run = list.emplace_back();
        if (begin >= end) continue;
        nodes.clear();
        append_nodes_of_run({begin, end}, {0, lanes}, nodes);
        if (accumulators_for(nodes) > most_accumulators[rank]) continue;
        run = {static_cast<double>(end - begin) * seconds_per_lane[rank], nodes.size()};
      }
    }
  }
  return runs;
}

struct Deal {
  std::vector<std::size_t> ends;  // by rank; empty: there is none
  std::size_t partials = 0;
  double seconds = 0;  // of the slowest rank
};

// The deal with the fewest partials among those in which no rank takes longer than `limit`.
Deal fewest_partials(const Runs& runs, double limit) {
  const std::size_t ranks = runs.of_rank.size();
  std::vector<std::size_t> partials = {0};  // of ranks so far, by the cut they end at
  std::vector<std::vector<std::size_t>> came_from(ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const std::size_t ends = runs.cuts[rank + 1].size();
    std::vector<std::size_t> next(ends, kImpossible);
    came_from[rank].resize(ends);
    for (std::size_t begin = 0; begin < partials.size(); ++begin) {
      if (partials[begin] == kImpossible) continue;
      for (std::size_t end = 0; end < ends; ++end) {
        const Runs::Run& run = runs.at(rank, begin, end);
        if (run.partials == kImpossible || run.seconds > limit) continue;
        if (partials[begin] + run.partials >= next[end]) continue;
        next[end] = partials[begin] + run.partials;
        came_from[rank][end] = begin;
      }
    }
    partials = std::move(next);
  }
  Deal deal;
  if (partials[0] == kImpossible) return deal;
  deal.partials = partials[0];
  deal.ends.resize(ranks);
  std::size_t end = 0;
  for (std::size_t rank = ranks; rank-- > 0;) {
    const std::size_t begin = came_from[rank][end];
    deal.ends[rank] = runs.cuts[rank + 1][end];
    deal.seconds = std::max(deal.seconds, runs.at(rank, begin, end).seconds);
    end = begin;
  }
  return deal;
}

// The time of the slowest rank in the best deal; infinite when there is none.
double shortest_possible(const Runs& runs) {
  std::vector<double> limits;
  for (const auto& list : runs.of_rank) {
    for (const Runs::Run& run : list) {
      if (run.partials != kImpossible) limits.push_back(run.seconds);
    }
  }
  std::ranges::sort(limits);
  const auto shortest = std::ranges::partition_point(
      limits, [&](double limit) { return fewest_partials(runs, limit).ends.empty(); });
  return shortest == limits.end() ? std::numeric_limits<double>::infinity() : *shortest;
}

}  // namespace

std::vector<std::uint32_t> lanes_by_rank(const LeafOwners& owners, int world_size) {
  std::vector<std::uint32_t> lanes(index_of(world_size));
  for (const int owner : owners) ++lanes[index_of(owner)];
  return lanes;
}

std::vector<std::uint32_t> accumulators_by_rank(const LeafOwners& owners, int world_size) {
  std::vector<std::uint32_t> accumulators;
  for (int rank = 0; rank < world_size; ++rank) {
    accumulators.push_back(accumulators_for(owned_nodes(owners, rank)));
  }
  return accumulators;
}

std::uint32_t most_accumulators(const LeafOwners& owners, int world_size) {
  return std::ranges::max(accumulators_by_rank(owners, world_size)) + 1;
}

LeafOwners deal_lanes(std::size_t lanes, std::span<const double> seconds_per_lane,
                      std::span<const std::uint32_t> most_accumulators,
                      double seconds_per_partial) {
  LOCKSTEP_CHECK(lanes >= seconds_per_lane.size() &&
                 seconds_per_lane.size() == most_accumulators.size());
  const Runs runs = possible_runs(lanes, seconds_per_lane, most_accumulators);
  const double shortest = shortest_possible(runs);
  Deal best;
  double best_seconds = std::numeric_limits<double>::infinity();
  for (const double allowance : kAllowances) {
    Deal deal = fewest_partials(runs, shortest * allowance);
    if (deal.ends.empty()) return {};
    const double seconds = deal.seconds + static_cast<double>(deal.partials) * seconds_per_partial;
    if (seconds >= best_seconds) continue;
    best_seconds = seconds;
    best = std::move(deal);
  }
  LeafOwners owners;
  for (std::size_t rank = 0; rank < best.ends.size(); ++rank) {
    owners.resize(best.ends[rank], static_cast<int>(rank));
  }
  return owners;
}

LaneBalance::LaneBalance(LeafOwners owners, int world_size, const LaneBalanceOptions& options)
    : options_(options),
      world_size_(world_size),
      most_accumulators_(index_of(world_size), most_accumulators(owners, world_size)),
      owners_(std::move(owners)),
      to_skip_(options.warmup) {
  LOCKSTEP_CHECK(options.window >= static_cast<std::int64_t>(kParts));
}

bool LaneBalance::add_step(std::span<const PhaseTimes> phases) {
  LOCKSTEP_CHECK(phases.size() == index_of(world_size_));
  if (to_skip_ > 0) {
    --to_skip_;
    return false;
  }
  Step step;
  step.communication = std::numeric_limits<double>::infinity();
  for (const PhaseTimes& times : phases) {
    const double communication = times[Phase::kCommunication];
    step.compute.push_back(times.compute());
    step.communication = std::min(step.communication, communication);
    step.total = std::max(step.total, times.compute() + communication);
  }
  window_seconds_ += std::ranges::max(step.compute);
  window_.push_back(std::move(step));
  if (std::ssize(window_) < options_.window || window_seconds_ < options_.seconds) return false;
  const bool moved = decide();
  window_.clear();
  window_seconds_ = 0;
  return moved;
}

LaneBalance::Times LaneBalance::mean(std::span<const Step> steps) const {
  Times times;
  times.per_lane.resize(index_of(world_size_));
  for (const Step& step : steps) {
    for (std::size_t rank = 0; rank < times.per_lane.size(); ++rank) {
      times.per_lane[rank] += step.compute[rank];
    }
    times.communication += step.communication;
    times.total += step.total;
  }
  const auto count = static_cast<double>(steps.size());
  const std::vector<std::uint32_t> lanes = lanes_by_rank(owners_, world_size_);
  for (std::size_t rank = 0; rank < times.per_lane.size(); ++rank) {
    times.per_lane[rank] /= count * lanes[rank];
  }
  times.communication /= count;
  times.total /= count;
  return times;
}

// The time of a step with `owners`, where `times` were measured with owners_.
double LaneBalance::expected(const LeafOwners& owners, const Times& times) const {
  const std::vector<std::uint32_t> lanes = lanes_by_rank(owners, world_size_);
  double slowest = 0;
  for (std::size_t rank = 0; rank < lanes.size(); ++rank) {
    slowest = std::max(slowest, lanes[rank] * times.per_lane[rank]);
  }
  const auto partials = static_cast<double>(maximal_nodes(owners).size());
  return slowest +
         times.communication * partials / static_cast<double>(maximal_nodes(owners_).size());
}

bool LaneBalance::promises(const LeafOwners& owners, const Times& times) const {
  return expected(owners, times) < (1 - options_.gain) * expected(owners_, times);
}

bool LaneBalance::decide() {
  const std::span<const Step> steps = window_;
  const Times times = mean(steps);
  if (!before_.empty()) {
    LeafOwners before = std::exchange(before_, {});
    if (times.total >= before_seconds_) {
      pause_ = std::clamp<std::int64_t>(2 * pause_, 2, kLongestPause);
      pause_left_ = pause_;
      return change_to(std::move(before));
    }
    pause_ = 0;
  }
  if (pause_left_ > 0) {
    --pause_left_;
    return false;
  }
  double speed = 0;  // lanes a second, of all ranks
  for (const double seconds : times.per_lane) {
    if (!(seconds > 0)) return false;  // a clock that does not tell
    speed += 1 / seconds;
  }
  // Most often the exact shares would gain too little, and nothing has to be tried.
  const double current = expected(owners_, times);
  const double ideal = static_cast<double>(owners_.size()) / speed;
  if (ideal >= (1 - options_.gain) * current) return false;
  const auto partials = static_cast<double>(maximal_nodes(owners_).size());
  LeafOwners dealt = deal_lanes(owners_.size(), times.per_lane, most_accumulators_,
                                times.communication / partials);
  if (dealt.empty()) return false;
  for (std::size_t part = 0; part < kParts; ++part) {
    const std::size_t begin = steps.size() * part / kParts;
    const std::size_t end = steps.size() * (part + 1) / kParts;
    if (!promises(dealt, mean(steps.subspan(begin, end - begin)))) return false;
  }
  before_ = owners_;
  before_seconds_ = times.total;
  return change_to(std::move(dealt));
}

bool LaneBalance::change_to(LeafOwners owners) {
  owners_ = std::move(owners);
  to_skip_ = options_.warmup;
  return true;
}

}  // namespace lockstep
