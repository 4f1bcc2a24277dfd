#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/model/cpu/adamw.h"
#include "lockstep/model/cpu/transformer.h"
#include "lockstep/model/weights_hash.h"
#include "lockstep/train/replica.h"

namespace lockstep {
namespace {

class CpuReplica final : public Replica {
 public:
  CpuReplica(const ReplicaOptions& options, ThreadPool& pool)
      : pool_(pool),
        transformer_(options.model, options.precision, pool, options.rows, options.context,
                     options.recompute),
        parameters_(layout().size()),
        adamw_(layout(), options.adamw, options.shard) {}

  void attach(const ReplicaOptions& options, Communicator& communicator) override {
    LOCKSTEP_CHECK(!attached());
    kept_sum_ = FloatBuffer();
    if (options.shard != shard()) {
      adamw_ = AdamW(layout(), options.adamw, {0, 0});  // the old moments go first
      adamw_ = AdamW(layout(), options.adamw, options.shard);
    }
    sharded_ = options.sharded;
    tree_.emplace(
        schedule_lanes(options.partials), layout().size(),
        [&](std::size_t bytes) { return communicator.allocate(bytes); }, pool_,
        options.accumulators);
  }
  void detach() override {
    if (!attached()) return;
    if (sharded_) {
      kept_sum_ = FloatBuffer(shard().size());
      std::ranges::copy(held_sum(), kept_sum_.data());
    }
    tree_.reset();
    lanes_.clear();
  }
  bool attached() const override { return tree_.has_value(); }

  const ParameterLayout& layout() const override { return transformer_.layout(); }
  const LaneSchedule& schedule() const override { return tree_->schedule(); }
  void set_owners(const LeafOwners& owners, int rank) override {
    tree_->set_schedule(schedule_lanes(owned_nodes(owners, rank)));
  }

  void set_parameters(std::span<const float> values) override {
    LOCKSTEP_CHECK(values.size() == parameters_.size());
    std::ranges::copy(values, parameters_.data());
  }
  void get_parameters(std::span<float> values) const override {
    LOCKSTEP_CHECK(values.size() == parameters_.size());
    std::ranges::copy(parameters_.span(), values.begin());
  }

  Range shard() const override { return adamw_.range(); }
  void set_moments(std::span<const float> first, std::span<const float> second) override {
    LOCKSTEP_CHECK(first.size() == shard().size() && second.size() == shard().size());
    std::ranges::copy(first, adamw_.first_moment().begin());
    std::ranges::copy(second, adamw_.second_moment().begin());
  }
  void get_moments(std::span<float> first, std::span<float> second) const override {
    LOCKSTEP_CHECK(first.size() == shard().size() && second.size() == shard().size());
    std::ranges::copy(adamw_.first_moment(), first.begin());
    std::ranges::copy(adamw_.second_moment(), second.begin());
  }

  LossSum loss(const Batch& batch) override { return transformer_.loss(parameters_.span(), batch); }

  void gradient(const Batch& batch, std::size_t index, const RangeReady& ready) override {
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    LaneResult result;
    result.sum = transformer_.gradient(parameters_.span(), batch, tree_->lane_gradient(index),
                                       [&](Range range) { finish_range(index, range, ready); });
    const auto middle = transformer_.forward_ended();
    result.forward_seconds = std::chrono::duration<double>(middle - begin).count();
    result.backward_seconds = std::chrono::duration<double>(Clock::now() - middle).count();
    lanes_.push_back(result);
  }

  void skip(std::size_t index, const RangeReady& ready) override {
    std::ranges::fill(tree_->lane_gradient(index), 0.0f);
    finish_range(index, {0, layout().size()}, ready);
    lanes_.emplace_back();
  }

  std::vector<LaneResult> finish_lanes() override { return std::exchange(lanes_, {}); }

  std::span<float> partial(std::size_t index) override { return tree_->partial(index); }
  void reduced(Range) override {}

  std::span<const float> single_gradient(const Batch& batch, LossSum& sum) override {
    sum = transformer_.gradient(parameters_.span(), batch, partial(0));
    return partial(0);
  }

  std::span<const float> reduced_sum() override { return partial(0); }

  void block_squares(Range range, std::span<double> sums) override {
    lockstep::block_squares(partial(0).subspan(range.begin, range.size()), pool_, sums);
  }

  void update(const UpdateRequest& request) override {
    LOCKSTEP_CHECK(attached() || request.norm);
    const auto finite = [](const LaneResult& lane) { return std::isfinite(lane.sum.loss); };
    if (!request.norm) norm_sums_.resize(norm_blocks(layout().size()));
    updated_.norm =
        request.norm ? *request.norm : std::sqrt(sum_of_squares(partial(0), pool_, norm_sums_));
    updated_.done =
        std::isfinite(updated_.norm) && request.tokens > 0 && std::ranges::all_of(lanes_, finite);
    if (!updated_.done) return;
    adamw_.step(parameters_.span(), held_sum(),
                gradient_factor(updated_.norm, request.tokens, request.clip), request.learning_rate,
                request.step, pool_);
  }
  UpdateResult finish_update() override { return updated_; }

  void complete_parameters(const std::function<void(std::span<float> parameters)>& fill) override {
    fill(parameters_.span());
  }

  std::vector<Blake3Hash> tensor_hashes() const override {
    return lockstep::tensor_hashes(layout(), parameters_.span(), pool_);
  }

  std::size_t state_bytes() const override {
    const std::size_t accumulators = attached() ? tree_->accumulators() : 0;
    const std::size_t floats = layout().size() * (1 + accumulators) + 2 * shard().size();
    return floats * sizeof(float);
  }

 private:
  void finish_range(std::size_t index, Range range, const RangeReady& ready) {
    tree_->ready(index, range);
    if (ready) ready(range);
  }
  // shard() of the sum over all lanes.
  std::span<const float> held_sum() {
    if (!attached()) return kept_sum_.span();
    return partial(0).subspan(shard().begin, shard().size());
  }

  ThreadPool& pool_;
  Transformer transformer_;
  FloatBuffer parameters_;
  AdamW adamw_;
  std::optional<GradientTree> tree_;  // while attached
  bool sharded_ = false;
  FloatBuffer kept_sum_;           // held_sum() while detached, with shards
  std::vector<LaneResult> lanes_;  // since finish_lanes()
  std::vector<double> norm_sums_;
  UpdateResult updated_;
};

}  // namespace

std::unique_ptr<Replica> make_cpu_replica(const ReplicaOptions& options, ThreadPool& pool) {
  return std::make_unique<CpuReplica>(options, pool);
}

std::unique_ptr<Replica> make_cpu_replica(const ReplicaOptions& options, Communicator& communicator,
                                          ThreadPool& pool) {
  auto replica = make_cpu_replica(options, pool);
  replica->attach(options, communicator);
  return replica;
}

}  // namespace lockstep
