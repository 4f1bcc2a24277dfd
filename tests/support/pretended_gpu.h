#pragma once

#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "lockstep/base/check.h"
#include "lockstep/comm/nccl/device_reducer.h"
#include "lockstep/model/cpu/adamw.h"
#include "lockstep/model/cpu/transformer.h"
#include "lockstep/model/gpu_model.h"
#include "lockstep/model/weights_hash.h"
#include "lockstep/train/replica.h"

namespace lockstep::test {

// A GpuModel that computes as the CPU does, to the bit, and keeps what a GPU would keep to itself:
// accumulators are seen where they are copied to, uploads count when they are joined, results come
// when they are waited for, and memory of the host that nothing was copied to holds no numbers.
class PretendedGpu final : public GpuModel {
 public:
  explicit PretendedGpu(const GpuModelOptions& options)
      : options_(options),
        transformer_(options.model, options.precision, pool_, options.rows, options.context),
        adamw_(layout(), options.adamw, options.shard),
        parameters_(layout().size()),
        accumulators_(options.accumulators, std::vector<float>(layout().size())),
        hosts_(options.accumulators) {}

  const ParameterLayout& layout() const override { return transformer_.layout(); }

  void set_patience(std::chrono::nanoseconds) override {}
  void resize(std::uint32_t accumulators, Range shard) override {
    if (accumulators != accumulators_.size()) {
      const float none = std::numeric_limits<float>::quiet_NaN();
      accumulators_.assign(accumulators, std::vector<float>(layout().size(), none));
    }
    if (shard != adamw_.range()) adamw_ = AdamW(layout(), options_.adamw, shard);
    hosts_.resize(accumulators);
  }

  void set_parameters(std::span<const float> values) override {
    parameters_.assign(values.begin(), values.end());
  }
  void get_parameters(std::span<float> values) const override {
    copy(parameters_, values, {0, values.size()});
  }
  void set_moments(std::span<const float> first, std::span<const float> second) override {
    std::ranges::copy(first, adamw_.first_moment().begin());
    std::ranges::copy(second, adamw_.second_moment().begin());
  }
  void get_moments(std::span<float> first, std::span<float> second) const override {
    std::ranges::copy(adamw_.first_moment(), first.begin());
    std::ranges::copy(adamw_.second_moment(), second.begin());
  }
  void get_accumulator(std::uint32_t accumulator, std::span<float> values) const override {
    copy(accumulators_.at(accumulator), values, {0, values.size()});
  }
  void complete_parameters(
      const std::function<void(float* parameters, DeviceStream stream)>& enqueue) override {
    enqueue(parameters_.data(), nullptr);
  }

  LossSum loss(const Batch& batch) override { return transformer_.loss(parameters_, batch); }
  void logits(std::span<const std::int32_t> tokens, std::span<float> out) override {
    const std::vector<std::int32_t> targets(tokens.size(), -1);
    std::vector<float> all(tokens.size() * out.size());
    transformer_.logits(parameters_, {tokens, targets, 1, static_cast<int>(tokens.size())}, all);
    std::ranges::copy(std::span(all).last(out.size()), out.begin());
  }
  void gradient(const Batch& batch, std::uint32_t accumulator,
                std::span<const AccumulatorMerge> merges, const GpuDelivery* delivery) override {
    join_uploads();
    const LossSum sum = transformer_.gradient(parameters_, batch, accumulators_.at(accumulator));
    lanes_.push_back({sum, 0.001, 0.002});
    finish(merges, delivery);
  }
  void skip(std::uint32_t accumulator, std::span<const AccumulatorMerge> merges,
            const GpuDelivery* delivery) override {
    std::ranges::fill(accumulators_.at(accumulator), 0.0F);
    lanes_.emplace_back();
    finish(merges, delivery);
  }
  std::vector<LaneResult> finish_lanes() override { return std::exchange(lanes_, {}); }

  void stage(std::uint32_t accumulator, std::span<float> host) override {
    LOCKSTEP_CHECK(hosts_.at(accumulator).empty());  // what was there before is given up
    std::ranges::fill(host, std::numeric_limits<float>::quiet_NaN());
    hosts_.at(accumulator) = host;
  }
  void unstage() override {
    join_uploads();
    hosts_.assign(hosts_.size(), {});
    lanes_.clear();
  }
  void page_lock(std::span<float>) override {}
  void upload(std::uint32_t accumulator, Range range) override {
    uploads_.emplace_back(accumulator, range);
  }

  void block_squares(Range range, std::span<double> sums) override {
    join_uploads();
    lockstep::block_squares(std::span(accumulators_[0]).subspan(range.begin, range.size()), pool_,
                            sums);
  }
  void update(const UpdateRequest& request) override {
    join_uploads();
    std::vector<double> sums(norm_blocks(layout().size()));
    updated_.norm =
        request.norm ? *request.norm : std::sqrt(sum_of_squares(accumulators_[0], pool_, sums));
    updated_.done = std::isfinite(updated_.norm) && request.tokens > 0;
    for (const LaneResult& lane : lanes_) updated_.done &= std::isfinite(lane.sum.loss);
    if (!updated_.done) return;
    adamw_.step(parameters_, held_sum(),
                gradient_factor(updated_.norm, request.tokens, request.clip), request.learning_rate,
                request.step, pool_);
  }
  UpdateResult finish_update() override {
    if (options_.while_waiting) options_.while_waiting();
    return std::exchange(updated_, {std::numeric_limits<double>::quiet_NaN(), false});
  }

  std::vector<Blake3Hash> tensor_hashes() const override {
    return lockstep::tensor_hashes(layout(), parameters_, pool_);
  }
  std::size_t bytes() const override { return 0; }

 private:
  std::span<const float> held_sum() const {
    const Range range = adamw_.range();
    return std::span(accumulators_[0]).subspan(range.begin, range.size());
  }
  static void copy(std::span<const float> from, std::span<float> to, Range range) {
    std::ranges::copy(from.subspan(range.begin, range.size()),
                      to.subspan(range.begin, range.size()).begin());
  }
  void join_uploads() {
    for (const auto& [accumulator, range] : std::exchange(uploads_, {})) {
      copy(hosts_.at(accumulator), accumulators_.at(accumulator), range);
    }
  }
  void finish(std::span<const AccumulatorMerge> merges, const GpuDelivery* delivery) {
    for (const AccumulatorMerge& merge : merges) {
      std::vector<float>& into = accumulators_.at(merge.into);
      for (std::size_t i = 0; i < into.size(); ++i) into[i] += accumulators_.at(merge.from)[i];
    }
    if (delivery == nullptr) return;
    std::vector<float*> pointers;
    for (const std::uint32_t accumulator : delivery->accumulators)
      pointers.push_back(accumulators_.at(accumulator).data());
    constexpr std::size_t kBucket = 5000;
    for (std::size_t begin = 0; begin < layout().size(); begin += kBucket) {
      const Range range{begin, std::min(layout().size(), begin + kBucket)};
      if (delivery->reduce) {
        delivery->reduce(pointers, range, nullptr);
        continue;
      }
      for (const std::uint32_t accumulator : delivery->accumulators) {
        copy(accumulators_.at(accumulator), hosts_.at(accumulator), range);
      }
      delivery->copied(range);
    }
  }

  const GpuModelOptions options_;
  mutable ThreadPool pool_{1};
  Transformer transformer_;
  AdamW adamw_;
  std::vector<float> parameters_;
  std::vector<std::vector<float>> accumulators_;
  std::vector<std::span<float>> hosts_;
  std::vector<std::pair<std::uint32_t, Range>> uploads_;
  std::vector<LaneResult> lanes_;
  UpdateResult updated_;
};

// Sums among such models: the communicator's own collectives on their memory.
class PretendedReducer final : public DeviceReducer {
 public:
  PretendedReducer(Communicator& communicator, DeviceReducerOptions options)
      : communicator_(communicator), options_(std::move(options)) {}

  void set_owners(const LeafOwners& owners) override { options_.owners = owners; }
  void reduce(std::span<float* const> partials, Range piece, DeviceStream) override {
    std::vector<ConstBufferView> views;
    for (const float* partial : partials) {
      views.emplace_back(std::span<const float>(partial + piece.begin, piece.size()));
    }
    std::vector<float> sum(piece.size());
    communicator_.reduce_nodes(std::move(views), options_.owners, std::span(sum));
    const Range held = held_elements();
    for (std::size_t i = 0; i < piece.size();
         ++i) {  // where it is nothing of this rank's, no number
      const std::size_t at = piece.begin + i;
      const bool own = at >= held.begin && at < held.end;
      partials[0][at] = own ? sum[i] : std::numeric_limits<float>::quiet_NaN();
    }
  }
  void all_gather(float* values, DeviceStream) override {
    const Range range = elements_of({own_rank(), own_rank() + 1});
    const std::vector<float> own(values + range.begin, values + range.end);
    communicator_.all_gather(std::span<const float>(own), std::span(values, options_.elements),
                             options_.shards);
  }
  void check() override {}
  void abort() noexcept override {}

 private:
  std::size_t own_rank() const { return static_cast<std::size_t>(communicator_.rank()); }
  Range elements_of(Range ranks) const {
    const auto first = options_.shards.begin();
    const auto sum = [&](std::size_t count) {
      return std::accumulate(first, first + static_cast<std::ptrdiff_t>(count), std::size_t{0});
    };
    return {sum(ranks.begin), sum(ranks.end)};
  }
  Range held_elements() const {
    if (options_.shards.empty()) return {0, options_.elements};
    return elements_of(options_.buddies.empty() ? Range{own_rank(), own_rank() + 1}
                                                : options_.buddies[own_rank()]);
  }

  Communicator& communicator_;
  DeviceReducerOptions options_;
};

// The parts of a replica on such a GPU.
inline GpuParts pretended_parts() {
  return {
      .make_model =
          [](const GpuModelOptions& options) { return std::make_unique<PretendedGpu>(options); },
      .make_reducer =
          [](Communicator& communicator, const DeviceReducerOptions& options) {
            return std::make_unique<PretendedReducer>(communicator, options);
          }};
}

}  // namespace lockstep::test
