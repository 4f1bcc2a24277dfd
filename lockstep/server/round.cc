#include "lockstep/server/round.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "lockstep/base/check.h"
#include "lockstep/base/index.h"
#include "lockstep/server/settings.h"

namespace lockstep {
namespace {

// Sums of so many samples over all workers stay exact.
constexpr std::uint64_t kMostSamples = std::uint64_t{1} << 48;

WireTag tag_of(RoundKind kind) {
  switch (kind) {
    case RoundKind::kVector: return WireTag::kGradientPayload;
    case RoundKind::kBlock: return WireTag::kBlockGradientPayload;
    case RoundKind::kComponent: return WireTag::kNonBlockGradientPayload;
  }
  return {};
}

std::string list_sizes(const std::vector<std::uint32_t>& sizes) {
  std::string text = fmt::format("{} sizes:", sizes.size());
  constexpr std::size_t kMost = 16;
  for (std::size_t i = 0; i < std::min(sizes.size(), kMost); ++i) {
    text += fmt::format(" {}", sizes[i]);
  }
  return sizes.size() > kMost ? text + " ..." : text;
}

// A worker that sends gradients in the other way was started for a coordinator of another mode.
std::string_view mode_hint(RoundKind expected, WireTag sent) {
  const bool vector = expected == RoundKind::kVector;
  const bool blocks =
      sent == WireTag::kBlockGradientPayload || sent == WireTag::kNonBlockGradientPayload;
  if (vector && blocks) return " (such workers need a coordinator with --mode blocks)";
  if (!vector && sent == WireTag::kGradientPayload) {
    return " (such workers need a coordinator with --mode vector)";
  }
  return "";
}

std::string_view component_name(std::uint8_t component) {
  constexpr std::string_view kNames[kComponents] = {"lm_head", "final_norm", "embedding"};
  return component < kComponents ? kNames[component] : "unknown";
}

}  // namespace

std::string describe(const RoundKey& key) {
  const std::uint64_t step = step_number(key.step);
  switch (key.kind) {
    case RoundKind::kVector: return fmt::format("the gradient vector of step {}", step);
    case RoundKind::kBlock:
      return key.block ? fmt::format("block {} of step {}", *key.block, step)
                       : fmt::format("the last block of step {}", step);
    case RoundKind::kComponent:
      return fmt::format("component {} ({}) of step {}", key.component,
                         component_name(key.component), step);
  }
  return "?";
}

AverageRound::AverageRound(const RoundKey& key, Average average, std::vector<std::string> names)
    : key_(key), average_(key.kind == RoundKind::kVector ? average : Average::kMean) {
  LOCKSTEP_CHECK(!names.empty());
  for (std::string& name : names) workers_.push_back({.name = std::move(name), .totals = {}});
}

void AverageRound::fail(ErrorCode code, int worker, const std::string& what) const {
  throw Error(code, fmt::format("{} {}", workers_[index_of(worker)].name, what), worker);
}

void AverageRound::check_tag(int worker, WireTag tag) const {
  if (tag == tag_of(key_.kind)) return;
  fail(ErrorCode::kUnexpectedMessage, worker,
       fmt::format("sent a {}; a {} is expected, for {}{}", to_string(tag),
                   to_string(tag_of(key_.kind)), describe(key_), mode_hint(key_.kind, tag)));
}

void AverageRound::begin(int worker, const BulkHead& head) {
  check_tag(worker, head.tag);
  if (head.step != key_.step) {
    fail(ErrorCode::kStepMismatch, worker,
         fmt::format("sent a {} of step {}; step {} is expected", to_string(head.tag),
                     step_number(head.step), step_number(key_.step)));
  }
  if (key_.kind == RoundKind::kBlock) check_block(worker, head);
  if (key_.kind == RoundKind::kComponent && head.component != key_.component) {
    fail(ErrorCode::kComponentMismatch, worker,
         fmt::format("sent component {} ({}) of step {}; component {} ({}) is expected",
                     head.component, component_name(head.component), step_number(head.step),
                     key_.component, component_name(key_.component)));
  }
  if (first_ < 0) {
    first_ = worker;
    first_head_ = head;
    count_ = head.count;
  } else {
    compare_with_first(worker, head);
  }
  workers_[index_of(worker)].begun = true;
}

void AverageRound::check_block(int worker, const BulkHead& head) {
  if (head.block_idx >= head.num_blocks) {
    fail(ErrorCode::kBlockMismatch, worker,
         fmt::format("sent block {} of {} blocks", head.block_idx, head.num_blocks));
  }
  const std::uint32_t expected = key_.block.value_or(head.num_blocks - 1);
  if (head.block_idx != expected) {
    fail(ErrorCode::kBlockMismatch, worker,
         fmt::format("sent block {} of step {}; block {} is expected", head.block_idx,
                     step_number(head.step), expected));
  }
  key_.block = expected;
  const auto sum =
      std::accumulate(head.component_sizes.begin(), head.component_sizes.end(), std::uint64_t{0});
  if (sum != head.count) {
    fail(ErrorCode::kSizeMismatch, worker,
         fmt::format("sent {} elements for {}, but component sizes that add up to {}", head.count,
                     describe(key_), sum));
  }
}

void AverageRound::compare_with_first(int worker, const BulkHead& head) {
  const std::string& other = workers_[index_of(first_)].name;
  if (head.count != first_head_.count) {
    fail(ErrorCode::kSizeMismatch, worker,
         fmt::format("sent {} elements for {}, but {} sent {}", head.count, describe(key_), other,
                     first_head_.count));
  }
  if (head.num_blocks != first_head_.num_blocks) {
    fail(ErrorCode::kBlockMismatch, worker,
         fmt::format("has {} blocks, but {} has {}", head.num_blocks, other,
                     first_head_.num_blocks));
  }
  if (head.component_sizes != first_head_.component_sizes) {
    fail(ErrorCode::kComponentMismatch, worker,
         fmt::format("sent {} for {}, but {} sent {}", list_sizes(head.component_sizes),
                     describe(key_), other, list_sizes(first_head_.component_sizes)));
  }
}

void AverageRound::set_totals(int worker, float loss, std::uint64_t correct, std::uint64_t total) {
  Worker& each = workers_[index_of(worker)];
  LOCKSTEP_CHECK(each.begun && !each.totals);
  if (!std::isfinite(loss)) {
    fail(ErrorCode::kNonFinite, worker,
         fmt::format("sent the loss {} at step {}", loss, step_number(key_.step)));
  }
  if (std::max(correct, total) > kMostSamples) {
    fail(ErrorCode::kSizeMismatch, worker,
         fmt::format("says that {} of {} samples of step {} are correct; {} is the most", correct,
                     total, step_number(key_.step), kMostSamples));
  }
  each.totals = WorkerTotals{loss, correct, total};
}

bool AverageRound::waits_for_totals(int worker) const {
  return key_.kind == RoundKind::kVector && average_ == Average::kWeighted &&
         !workers_[index_of(worker)].totals;
}

bool AverageRound::ready() const {
  for (std::size_t i = 0; i < workers_.size(); ++i) {
    if (!workers_[i].begun || waits_for_totals(static_cast<int>(i))) return false;
  }
  return output_ != nullptr;
}

void AverageRound::prepare() {
  std::vector<std::uint64_t> weights;
  for (const Worker& worker : workers_) {
    weights.push_back(worker.totals ? worker.totals->total : 1);
  }
  averager_.emplace(average_, std::move(weights));
}

void AverageRound::advance(std::span<const std::byte* const> inputs, std::size_t count) {
  LOCKSTEP_CHECK(ready() && done_ + count <= *count_);
  if (!averager_) prepare();
  if (const auto defect = averager_->run(inputs, output_ + done_, count)) {
    const std::string element = element_name(done_ + defect->index);
    if (defect->worker >= 0) {
      fail(ErrorCode::kNonFinite, defect->worker,
           fmt::format("sent {} for {}: {}", defect->value, describe(key_), element));
    }
    throw Error(ErrorCode::kNonFinite, fmt::format("the average of {} overflows to {}: {}",
                                                   describe(key_), defect->value, element));
  }
  done_ += count;
}

std::string AverageRound::element_name(std::uint64_t index) const {
  std::uint64_t begin = 0;
  for (std::size_t i = 0; i < first_head_.component_sizes.size(); ++i) {
    const std::uint64_t size = first_head_.component_sizes[i];
    if (index < begin + size) {
      return fmt::format("element {} (component {} of the block, element {} of it)", index, i,
                         index - begin);
    }
    begin += size;
  }
  return fmt::format("element {}", index);
}

void AverageRound::end(int worker, const BulkFoot& foot) {
  Worker& each = workers_[index_of(worker)];
  LOCKSTEP_CHECK(each.begun && !each.ended && done_ == *count_);
  if (key_.kind == RoundKind::kVector) {
    if (!each.totals) {
      set_totals(worker, foot.loss, foot.correct, foot.total);
    } else if (each.totals->total != foot.total || each.totals->correct != foot.correct ||
               std::bit_cast<std::uint32_t>(each.totals->loss) !=
                   std::bit_cast<std::uint32_t>(foot.loss)) {
      fail(ErrorCode::kSizeMismatch, worker,
           fmt::format(
               "announced loss {}, {} of {} correct for step {}, then sent loss {}, {} of {}",
               each.totals->loss, each.totals->correct, each.totals->total, step_number(key_.step),
               foot.loss, foot.correct, foot.total));
    }
  }
  each.ended = true;
}

bool AverageRound::complete() const {
  return std::ranges::all_of(workers_, [](const Worker& worker) { return worker.ended; });
}

RoundResult AverageRound::result() const {
  LOCKSTEP_CHECK(complete());
  RoundResult result;
  result.key = key_;
  result.component_sizes = first_head_.component_sizes;
  result.num_blocks = first_head_.num_blocks;
  if (key_.kind != RoundKind::kVector) return result;
  std::vector<double> losses;
  for (const Worker& worker : workers_) {
    result.workers.push_back(*worker.totals);
    result.correct += worker.totals->correct;
    result.total += worker.totals->total;
    losses.push_back(static_cast<double>(worker.totals->loss) *
                     static_cast<double>(worker.totals->total));
  }
  if (result.total > 0) {
    result.loss = static_cast<float>(tree_sum(losses) / static_cast<double>(result.total));
  }
  return result;
}

}  // namespace lockstep
