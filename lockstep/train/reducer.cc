#include "lockstep/train/reducer.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "lockstep/base/canonical_tree.h"
#include "lockstep/base/check.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/call.h"
#include "lockstep/comm/kernels/kernels.h"
#include "lockstep/model/update.h"

namespace lockstep {
namespace {

// Whole norm blocks, so that a bucket's edge is never inside one.
std::vector<Range> cut_buckets(std::size_t size, std::size_t bucket_bytes) {
  const std::size_t block_bytes = kNormBlock * sizeof(float);
  const std::size_t elements = std::max<std::size_t>(1, bucket_bytes / block_bytes) * kNormBlock;
  std::vector<Range> buckets;
  for (std::size_t begin = 0; begin < size; begin += elements) {
    buckets.push_back({begin, std::min(size, begin + elements)});
  }
  return buckets;
}

// The sum of the tails of `lanes` in the canonical tree, number by number.
std::vector<double> tree_sum_of(std::span<const std::vector<double>> lanes) {
  if (lanes.size() == 1) return lanes[0];
  const std::size_t middle = tree_split(lanes.size());
  std::vector<double> sum = tree_sum_of(lanes.first(middle));
  const std::vector<double> right = tree_sum_of(lanes.subspan(middle));
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += right[i];
  return sum;
}

// Gradients as bf16 on the wire. Rounding is to nearest even; NaN stays NaN.
std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t nearest = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const bool nan = (bits & 0x7fffffffU) > 0x7f800000U;
  return static_cast<std::uint16_t>(nan ? 0x7fc0U : nearest);
}

float to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

// value = sum + residual;  rounded = bf16(value);  residual = value - rounded.
void round_with_feedback(std::span<const float> sum, std::span<float> residual,
                         std::span<BFloat16> rounded) {
  LOCKSTEP_CHECK(sum.size() == residual.size() && sum.size() == rounded.size());
  for (std::size_t i = 0; i < sum.size(); ++i) {
    const float value = sum[i] + residual[i];
    const std::uint16_t bits = to_bf16(value);
    rounded[i] = static_cast<BFloat16>(bits);
    residual[i] = value - to_float(bits);
  }
}

void widen(std::span<const BFloat16> values, std::span<float> out) {
  LOCKSTEP_CHECK(values.size() == out.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    out[i] = to_float(static_cast<std::uint16_t>(values[i]));
  }
}

}  // namespace

std::string_view to_string(Reduction reduction) {
  switch (reduction) {
    case Reduction::kTree: return "tree";
    case Reduction::kRing: return "ring";
    case Reduction::kNative: return "native";
    case Reduction::kNccl: return "nccl";
  }
  return "?";
}

bool travels(const ReducerOptions& options, int world_size) {
  if (options.on_device) return false;
  return world_size > 1 || options.wire != DataType::kF32;
}

Range shard_range(std::size_t size, int rank, int world_size) {
  const auto n = static_cast<std::size_t>(world_size);
  const auto r = static_cast<std::size_t>(rank);
  const std::size_t blocks = norm_blocks(size);
  const auto edge = [&](std::size_t part) {
    return std::min(size, blocks * part / n * kNormBlock);
  };
  return {edge(r), edge(r + 1)};
}

std::vector<std::size_t> shard_sizes(std::size_t size, int world_size) {
  std::vector<std::size_t> sizes;
  for (int rank = 0; rank < world_size; ++rank) {
    sizes.push_back(shard_range(size, rank, world_size).size());
  }
  return sizes;
}

Range buddies_of(int rank, int world_size) {
  const int groups = std::max(1, world_size / 2);
  const int group = std::min(rank / 2, groups - 1);
  return {index_of(2 * group), index_of(group + 1 == groups ? world_size : 2 * group + 2)};
}

Range group_range(std::size_t size, int rank, int world_size) {
  const Range ranks = buddies_of(rank, world_size);
  return {shard_range(size, static_cast<int>(ranks.begin), world_size).begin,
          shard_range(size, static_cast<int>(ranks.end) - 1, world_size).end};
}

Range held_range(const ReducerOptions& options, std::size_t size, int rank, int world_size) {
  if (!options.shard) return {0, size};
  return options.buddy ? group_range(size, rank, world_size) : shard_range(size, rank, world_size);
}

GradientReducer::GradientReducer(Communicator& communicator, LeafOwners owners,
                                 std::vector<std::span<float>> partials,
                                 const ReducerOptions& options, std::function<void(Range)> reduced)
    : communicator_(communicator), options_(options), reduced_(std::move(reduced)) {
  set_owners(std::move(owners), std::move(partials));
  const std::size_t size = partials_[0].size();
  buckets_ = cut_buckets(size, options.bucket_bytes);
  shard_ = options.shard ? shard_of(communicator.rank()) : Range{0, size};
  held_ = held_range(options, size, communicator.rank(), communicator.world_size());
  if (options.wire == DataType::kBf16) {
    residual_ = FloatBuffer(size);
    rounded_.resize(size);
  }
}

// The memory that buckets under way use is about to be freed.
GradientReducer::~GradientReducer() {
  for (std::vector<Work>& bucket : works_) {
    for (Work& work : bucket) {
      try {
        work.wait(Deadline::after({}));
      } catch (const Error&) {  // already thrown where it was waited for
      }
    }
  }
}

void GradientReducer::set_owners(LeafOwners owners, std::vector<std::span<float>> partials) {
  LOCKSTEP_CHECK(works_.empty());
  owners_ = std::move(owners);
  nodes_ = owned_nodes(owners_, communicator_.rank());
  partials_ = std::move(partials);
  LOCKSTEP_CHECK(!partials_.empty() && partials_.size() == nodes_.size());
  for (const std::span<float> partial : partials_) {
    LOCKSTEP_CHECK(partial.size() == partials_[0].size());
  }
}

double GradientReducer::traffic() const {
  if (options_.reduction != Reduction::kTree || options_.wire != DataType::kF32) return 1;
  return static_cast<double>(maximal_nodes(owners_).size()) / communicator_.world_size();
}

void GradientReducer::begin(std::int64_t step) {
  LOCKSTEP_CHECK(works_.empty());
  step_ = step;
  final_ = 0;
  told_ = 0;
  withheld_ = 0;
  travelled_ = {};
}

void GradientReducer::ready(Range range) {
  LOCKSTEP_CHECK(range.begin == final_);
  final_ = range.end;
  if (!options_.overlap || !travels(options_, communicator_.world_size())) return;
  while (works_.size() < buckets_.size() && buckets_[works_.size()].end <= final_) {
    std::vector<Call> calls = calls_for(works_.size());
    works_.emplace_back();
    for (Call& call : calls) works_.back().push_back(communicator_.start(std::move(call)));
  }
  while (told_ < works_.size() && works_[told_].back().done()) finish_bucket(told_++);
}

// Waits longer than the bucket's own deadline, which ends it and names the rank at fault.
void GradientReducer::finish_bucket(std::size_t bucket) {
  for (Work& work : works_[bucket]) {
    travelled_ += work.wait(Deadline::after(2 * communicator_.patience())).took;
  }
  tell_reduced(bucket);
}

void GradientReducer::tell_reduced(std::size_t bucket) const {
  if (reduced_ && options_.wire == DataType::kF32) reduced_(buckets_[bucket]);
}

std::vector<Call> GradientReducer::calls_for(std::size_t bucket) {
  const Range range = buckets_[bucket];
  CallOptions options;
  options.step = static_cast<std::uint32_t>(step_);
  options.bucket = static_cast<std::uint32_t>(bucket);
  if (communicator_.finite_only()) withhold_non_finite(range);
  const bool exact = options_.reduction == Reduction::kTree && options_.wire == DataType::kF32;
  std::vector<Call> calls;
  calls.push_back(exact ? tree_call(range, options) : order_free_call(range, options));
  const BufferView sum = options_.wire == DataType::kBf16
                             ? BufferView(std::span(rounded_).subspan(range.begin, range.size()))
                             : BufferView(partials_[0].subspan(range.begin, range.size()));
  for (int turn = 0; turn < buddy_turns(range); ++turn) {
    calls.push_back(buddy_call(turn, range, sum, options));
  }
  return calls;
}

int GradientReducer::buddy_turns(Range range) const {
  if (!options_.shard || !options_.buddy) return 0;
  std::size_t turns = 0;
  for (int rank = 0; rank < communicator_.world_size(); ++rank) {
    if (common_part(shard_of(rank), range).size() == 0) continue;
    turns = std::max(turns, buddies_of(rank, communicator_.world_size()).size() - 1);
  }
  return static_cast<int>(turns);
}

// Through all_to_all, which every engine has; among most ranks it carries nothing.
Call GradientReducer::buddy_call(int turn, Range range, BufferView data,
                                 const CallOptions& options) const {
  const Range buddies = buddies_of(communicator_.rank(), communicator_.world_size());
  const std::size_t distance = static_cast<std::size_t>(turn) + 1;
  std::vector<std::size_t> sent(index_of(communicator_.world_size()));
  std::vector<std::size_t> received(sent.size());
  const auto part_of = [&](std::size_t rank) {
    const Range part = common_part(shard_of(static_cast<int>(rank)), range);
    return Range{part.begin - range.begin, part.end - range.begin};
  };
  Range in{};
  Range out{};
  if (distance < buddies.size()) {
    const std::size_t own = index_of(communicator_.rank());
    const std::size_t place = own - buddies.begin;
    const std::size_t to = buddies.begin + (place + distance) % buddies.size();
    const std::size_t from = buddies.begin + (place + buddies.size() - distance) % buddies.size();
    in = part_of(own);
    out = part_of(from);
    sent[to] = in.size();
    received[from] = out.size();
  }
  return calls::all_to_all(data.slice(in), data.slice(out), std::move(sent), std::move(received),
                           options);
}

void GradientReducer::complete_held(std::span<float> values) {
  LOCKSTEP_CHECK(works_.empty() && values.size() == held_.size());
  for (int turn = 0; turn < buddy_turns({0, partials_[0].size()}); ++turn) {
    communicator_.run(buddy_call(turn, held_, BufferView(values), {}));
  }
}

Call GradientReducer::tree_call(Range range, const CallOptions& options) {
  std::vector<ConstBufferView> partials;
  for (const std::span<float> partial : partials_) {
    partials.emplace_back(std::span<const float>(partial.subspan(range.begin, range.size())));
  }
  const Range own = own_part(range);
  const BufferView out(partials_[0].subspan(own.begin, own.size()));
  if (!options_.shard) {
    return calls::reduce_nodes(std::move(partials), owners_, out, ReduceOp::kSum, options);
  }
  return calls::reduce_scatter_nodes(std::move(partials), owners_, out, shard_counts(range),
                                     ReduceOp::kSum, options);
}

Call GradientReducer::order_free_call(Range range, const CallOptions& options) {
  add_partials(range);
  CallOptions chosen = options;
  if (options_.reduction == Reduction::kRing) chosen.algorithm = Algorithm::kRing;
  if (options_.reduction == Reduction::kNative) chosen.algorithm = Algorithm::kNative;
  const std::span<float> sum = partials_[0].subspan(range.begin, range.size());
  BufferView data(sum);
  if (options_.wire == DataType::kBf16) {
    const std::span<BFloat16> rounded = std::span(rounded_).subspan(range.begin, range.size());
    round_with_feedback(sum, residual_.span().subspan(range.begin, range.size()), rounded);
    data = BufferView(rounded);
  }
  if (!options_.shard) return calls::all_reduce(data, ReduceOp::kSum, chosen);
  const Range own = own_part(range);
  return calls::reduce_scatter(data, data.slice({own.begin - range.begin, own.end - range.begin}),
                               ReduceOp::kSum, shard_counts(range), chosen);
}

void GradientReducer::add_partials(Range range) {
  float* sum = partials_[0].data() + range.begin;
  for (std::size_t i = 1; i < partials_.size(); ++i) {
    combine(ReduceOp::kSum, DataType::kF32, sum, sum, partials_[i].data() + range.begin,
            range.size());
  }
}

void GradientReducer::withhold_non_finite(Range range) {
  for (const std::span<float> partial : partials_) {
    const std::span<float> part = partial.subspan(range.begin, range.size());
    if (find_non_finite(DataType::kF32, part.data(), part.size()) == part.size()) continue;
    withheld_ += 1;
    std::ranges::fill(part, 0.0f);
  }
}

Range GradientReducer::own_part(Range range) const { return common_part(shard_, range); }

Range GradientReducer::shard_of(int rank) const {
  return shard_range(partials_[0].size(), rank, communicator_.world_size());
}

std::vector<std::size_t> GradientReducer::shard_counts(Range range) const {
  std::vector<std::size_t> counts;
  for (int rank = 0; rank < communicator_.world_size(); ++rank) {
    counts.push_back(common_part(shard_of(rank), range).size());
  }
  return counts;
}

std::vector<double> GradientReducer::sum_tails(std::span<const std::vector<double>> lane_tails) {
  std::vector<std::vector<double>> sums;
  std::size_t lane = 0;
  for (const Range node : nodes_) {
    sums.push_back(tree_sum_of(lane_tails.subspan(lane, node.size())));
    sums.back().push_back(lane == 0 ? withheld_ : 0);
    lane += node.size();
  }
  std::vector<ConstBufferView> views;
  for (const std::vector<double>& sum : sums) views.emplace_back(std::span<const double>(sum));
  std::vector<double> total(lane_tails[0].size() + 1);
  CallOptions options;
  options.step = static_cast<std::uint32_t>(step_);
  options.bucket = static_cast<std::uint32_t>(buckets_.size());
  communicator_.reduce_nodes(std::move(views), owners_, std::span(total), ReduceOp::kSum, options);
  return total;
}

bool GradientReducer::wait_until(Deadline deadline) {
  if (options_.overlap) ready({final_, partials_[0].size()});
  for (; told_ < works_.size(); finish_bucket(told_++)) {
    for (const Work& work : works_[told_]) {
      if (!work.wait_until(deadline)) return false;
    }
  }
  return true;
}

ReducedStep GradientReducer::finish(std::span<const std::vector<double>> lane_tails) {
  LOCKSTEP_CHECK(!lane_tails.empty());
  if (options_.overlap) {
    ready({final_, partials_[0].size()});
  } else if (travels(options_, communicator_.world_size())) {
    for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
      for (Call& call : calls_for(bucket)) communicator_.run(std::move(call));
      tell_reduced(bucket);
    }
  }
  while (told_ < works_.size()) finish_bucket(told_++);
  works_.clear();
  std::vector<double> tail = sum_tails(lane_tails);
  if (options_.wire == DataType::kBf16) {
    widen(std::span(rounded_).subspan(held_.begin, held_.size()),
          partials_[0].subspan(held_.begin, held_.size()));
    if (reduced_) reduced_({0, partials_[0].size()});
  }
  const double withheld = tail.back();
  tail.pop_back();
  return {partials_[0], shard_, std::move(tail), withheld, travelled_};
}

}  // namespace lockstep
