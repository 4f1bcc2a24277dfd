#include "lockstep/train/gradient_tree.h"

#include <algorithm>
#include <utility>

#include "lockstep/comm/kernels/kernels.h"

namespace lockstep {
namespace {

// Elements that one task adds: enough to be worth a task, few enough for all threads to get some.
constexpr std::size_t kPiece = 1 << 16;

// Appends the lanes of `node`, whose sum goes into `accumulator`; later accumulators are free.
void append_lanes(Range node, std::uint32_t accumulator, LaneSchedule& schedule) {
  if (node.size() == 1) {
    schedule.lanes.push_back({static_cast<std::uint32_t>(node.begin), accumulator, {}});
    schedule.accumulators = std::max(schedule.accumulators, accumulator + 1);
    return;
  }
  const std::size_t middle = node.begin + tree_split(node.size());
  append_lanes({node.begin, middle}, accumulator, schedule);
  append_lanes({middle, node.end}, accumulator + 1, schedule);
  schedule.lanes.back().merges.push_back({accumulator, accumulator + 1});
}

}  // namespace

LaneSchedule schedule_lanes(std::span<const Range> partials) {
  LaneSchedule schedule;
  schedule.partials.assign(partials.begin(), partials.end());
  for (std::uint32_t i = 0; i < partials.size(); ++i) {
    append_lanes(partials[i], i, schedule);  // earlier accumulators hold earlier partials
  }
  return schedule;
}

GradientTree::GradientTree(LaneSchedule schedule, std::size_t size, const Allocate& allocate,
                           ThreadPool& pool)
    : schedule_(std::move(schedule)), pool_(pool) {
  for (std::uint32_t i = 0; i < schedule_.accumulators; ++i) {
    accumulators_.push_back(allocate(size * sizeof(float)));
  }
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
