#include "lockstep/run/original_star.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/index.h"
#include "lockstep/wire/gradient_messages.h"

namespace lockstep {
namespace {

// In the order of their numbers on the wire.
constexpr Component kOfTheWholeModel[] = {Component::kLmHead, Component::kFinalNorm,
                                          Component::kEmbedding};

std::vector<Range> block_ranges(const ParameterLayout& layout, int block) {
  std::vector<Range> ranges;
  for (int i = 0; i < kBlockComponents; ++i) {
    ranges.push_back(layout.range(static_cast<Component>(i), block));
  }
  return ranges;
}

std::vector<Range> tensor_ranges(const ParameterLayout& layout) {
  std::vector<Range> ranges;
  for (const TensorSpec& tensor : layout.tensors()) ranges.push_back(tensor.range);
  return ranges;
}

std::vector<std::uint32_t> sizes_of(std::span<const Range> ranges) {
  std::vector<std::uint32_t> sizes;
  for (const Range range : ranges) sizes.push_back(static_cast<std::uint32_t>(range.size()));
  return sizes;
}

// The longest message of a step.
BulkHead longest_message(const ParameterLayout& layout, Mode mode) {
  BulkHead longest;
  longest.tag = WireTag::kGradientPayload;
  longest.count = layout.size();
  if (mode == Mode::kVector) return longest;
  longest.tag = WireTag::kBlockGradientPayload;
  longest.component_sizes = sizes_of(block_ranges(layout, 0));
  longest.count = std::accumulate(longest.component_sizes.begin(), longest.component_sizes.end(),
                                  std::uint64_t{0});
  for (const Component component : kOfTheWholeModel) {
    BulkHead other;
    other.tag = WireTag::kNonBlockGradientPayload;
    other.count = layout.range(component).size();
    if (frame_length(other) > frame_length(longest)) longest = other;
  }
  return longest;
}

WorkerOptions checked(WorkerOptions worker, const ParameterLayout& layout, Mode mode) {
  const BulkHead longest = longest_message(layout, mode);
  if (frame_length(longest) > kOriginalLargestFrame) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("this model needs a {} of {} bytes, but programs of the original "
                    "protocol take {} at most{}",
                    to_string(longest.tag), frame_length(longest), kOriginalLargestFrame,
                    mode == Mode::kVector ? "; --protocol original sends smaller ones" : ""));
  }
  worker.original = true;
  return worker;
}

// The samples of the lanes that a rank has, which are neighbours.
Range samples_of(const LeafOwners& owners, int rank, std::uint64_t micro_batch) {
  const auto first = std::ranges::find(owners, rank) - owners.begin();
  const auto count = std::ranges::count(owners, rank);
  return {static_cast<std::size_t>(first) * micro_batch,
          static_cast<std::size_t>(first + count) * micro_batch};
}

}  // namespace

OriginalStar::OriginalStar(WorkerOptions worker, Mode mode, const TrainerOptions& how)
    : layout_(how.model),
      mode_(mode),
      global_batch_(how.global_batch),
      client_(checked(std::move(worker), layout_, mode)) {
  if (mode_ == Mode::kBlocks) {
    share_ = samples_of(lane_owners(how, total_workers()), worker_id(), how.micro_batch);
  }
}

std::optional<Range> OriginalStar::next_share() {
  if (mode_ == Mode::kBlocks) return share_;
  const auto shard = client_.next_shard();
  if (!shard) return std::nullopt;
  if (shard->end > global_batch_) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} deals out samples [{}, {}) of a step, but a step has {} "
                            "(--global-batch): start it with --total-samples {}",
                            coordinator(), shard->begin, shard->end, global_batch_, global_batch_));
  }
  step_ = shard->step;
  return Range{shard->begin, shard->end};
}

std::optional<OutsideAverage::Averaged> OriginalStar::average(std::span<float> mean,
                                                              const LossSum& own) {
  if (mode_ == Mode::kVector) return Averaged{average_vector(mean, own)};
  if (!average_blocks(mean)) return std::nullopt;
  ++step_;
  return Averaged{};
}

double OriginalStar::average_vector(std::span<float> mean, const LossSum& own) {
  const std::vector<Range> ranges = tensor_ranges(layout_);
  gather(mean, ranges);
  const double tokens = static_cast<double>(own.tokens);
  client_.send_gradient(
      step_, message_, own.tokens > 0 ? static_cast<float>(own.loss / tokens) : 0.0f,
      static_cast<std::uint64_t>(own.correct), static_cast<std::uint64_t>(own.tokens));
  const float loss = client_.receive_averaged(step_, message_);
  scatter(ranges, mean);
  return loss;
}

bool OriginalStar::average_blocks(std::span<float> mean) {
  for (int block = layout_.config().layers - 1; block >= 0; --block) {
    if (!average_block(mean, block)) return false;
  }
  for (std::uint8_t number = 0; number < std::size(kOfTheWholeModel); ++number) {
    const Range range[] = {layout_.range(kOfTheWholeModel[number])};
    gather(mean, range);
    client_.send_component(step_, number, message_);
    client_.receive_averaged_component(step_, number, message_);
    scatter(range, mean);
  }
  return true;
}

bool OriginalStar::average_block(std::span<float> mean, int block) {
  const std::vector<Range> ranges = block_ranges(layout_, block);
  const std::vector<std::uint32_t> sizes = sizes_of(ranges);
  const auto number = static_cast<std::uint32_t>(block);
  gather(mean, ranges);
  client_.send_block(step_, number, static_cast<std::uint32_t>(layout_.config().layers), message_,
                     sizes);
  const auto received = client_.receive_averaged_block(step_, number, message_);
  if (!received && block + 1 == layout_.config().layers) return false;
  if (!received) {
    throw Error(ErrorCode::kAborted, fmt::format("{} has ended the job in the middle of step {}",
                                                 coordinator(), step_number(step_)));
  }
  if (*received != sizes) {
    throw Error(ErrorCode::kComponentMismatch,
                fmt::format("{} sent the average of block {} of step {} with other component sizes",
                            coordinator(), block, step_number(step_)));
  }
  scatter(ranges, mean);
  return true;
}

void OriginalStar::gather(std::span<const float> flat, std::span<const Range> ranges) {
  message_.clear();
  for (const Range range : ranges) {
    const auto part = flat.subspan(range.begin, range.size());
    message_.insert(message_.end(), part.begin(), part.end());
  }
}

void OriginalStar::scatter(std::span<const Range> ranges, std::span<float> flat) const {
  auto from = message_.begin();
  for (const Range range : ranges) {
    const auto next = from + static_cast<std::ptrdiff_t>(range.size());
    std::copy(from, next, flat.begin() + static_cast<std::ptrdiff_t>(range.begin));
    from = next;
  }
}

}  // namespace lockstep
