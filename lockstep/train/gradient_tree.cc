#include "lockstep/train/gradient_tree.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/comm/kernels/kernels.h"

namespace lockstep {
namespace {

// Elements that one task adds: enough to be worth a task, few enough for all threads to get some.
constexpr std::size_t kPiece = 1 << 16;

// Appends the lanes of `node`, whose sum goes into `accumulator`. `free` are the accumulators that
// may be used besides, in ascending order.
void append_lanes(Range node, std::uint32_t accumulator, std::span<const std::uint32_t> free,
                  LaneSchedule& schedule) {
  if (node.size() == 1) {
    schedule.lanes.push_back({static_cast<std::uint32_t>(node.begin), 0, accumulator, {}});
    return;
  }
  const std::size_t middle = node.begin + tree_split(node.size());
  append_lanes({node.begin, middle}, accumulator, free, schedule);
  append_lanes({middle, node.end}, free[0], free.subspan(1), schedule);
  schedule.lanes.back().merges.push_back({accumulator, free[0]});
}

// The indices of `partials`, large ones first.
std::vector<std::uint32_t> by_size(std::span<const Range> partials) {
  std::vector<std::uint32_t> order(partials.size());
  std::iota(order.begin(), order.end(), 0U);
  std::ranges::stable_sort(order, [&](std::uint32_t a, std::uint32_t b) {
    return partials[a].size() > partials[b].size();
  });
  return order;
}

}  // namespace

std::uint32_t accumulators_for(std::span<const Range> partials) {
  std::uint32_t most = 0;
  std::uint32_t finished = 0;
  for (const std::uint32_t index : by_size(partials)) {
    const auto open = static_cast<std::uint32_t>(std::bit_width(partials[index].size()));
    most = std::max(most, finished++ + open);
  }
  return most;
}

LaneSchedule schedule_lanes(std::span<const Range> partials) {
  LaneSchedule schedule;
  schedule.partials.assign(partials.begin(), partials.end());
  schedule.accumulators = accumulators_for(partials);
  std::vector<std::uint32_t> first_place(partials.size());
  for (std::size_t i = 1; i < partials.size(); ++i) {
    first_place[i] = first_place[i - 1] + static_cast<std::uint32_t>(partials[i - 1].size());
  }
  std::vector<std::uint32_t> free(schedule.accumulators);
  std::iota(free.begin(), free.end(), 0U);
  for (const std::uint32_t index : by_size(partials)) {
    std::erase(free, index);  // holds this partial from now on
    const std::size_t begin = schedule.lanes.size();
    append_lanes(partials[index], index, free, schedule);
    for (std::size_t i = begin; i < schedule.lanes.size(); ++i) {
      schedule.lanes[i].place = first_place[index] + static_cast<std::uint32_t>(i - begin);
    }
  }
  return schedule;
}

GradientTree::GradientTree(LaneSchedule schedule, std::size_t size, const Allocate& allocate,
                           ThreadPool& pool, std::uint32_t accumulators)
    : schedule_(std::move(schedule)), pool_(pool) {
  for (std::uint32_t i = 0; i < std::max(accumulators, schedule_.accumulators); ++i) {
    accumulators_.push_back(allocate(size * sizeof(float)));
  }
}

void GradientTree::set_schedule(LaneSchedule schedule) {
  LOCKSTEP_CHECK(schedule.accumulators <= accumulators_.size());
  schedule_ = std::move(schedule);
}

void GradientTree::ready(std::size_t index, Range range) {
  for (const AccumulatorMerge merge : schedule_.lanes[index].merges) {
    float* into = accumulator(merge.into).data() + range.begin;
    const float* from = accumulator(merge.from).data() + range.begin;
    pool_.run((range.size() + kPiece - 1) / kPiece, [&](std::size_t piece) {
      const std::size_t begin = piece * kPiece;
      combine(ReduceOp::kSum, DataType::kF32, into + begin, into + begin, from + begin,
              std::min(kPiece, range.size() - begin));
    });
  }
}

}  // namespace lockstep
