#include <numeric>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/float_buffer.h"
#include "lockstep/model/gpu_model.h"
#include "lockstep/train/replica.h"

namespace lockstep {
namespace {

GpuModelOptions model_options(const ReplicaOptions& options, const LaneSchedule& schedule,
                              int device) {
  return {.model = options.model,
          .precision = options.precision,
          .adamw = options.adamw,
          .rows = options.rows,
          .context = options.context,
          .slots = schedule.slots,
          .shard = options.shard,
          .recompute = options.recompute,
          .device = device};
}

// Partial sums are added up on the GPU. When others want them they are copied to the communicator's
// memory, bucket by bucket while the backward pass goes on, and the sum over all lanes is brought
// back before the norm is taken.
class GpuReplica final : public Replica {
 public:
  GpuReplica(const ReplicaOptions& options, Communicator& communicator)
      : exchanged_(options.exchanged),
        shard_(options.shard),
        schedule_(schedule_lanes(options.partials)),
        model_(make_gpu_model(model_options(options, schedule_, communicator.rank()))),
        partial_slots_(schedule_.partials.size()) {
    std::iota(partial_slots_.begin(), partial_slots_.end(), 0U);
    for (const std::uint32_t slot : partial_slots_) {
      partials_.push_back(communicator.allocate(layout().size() * sizeof(float)));
      if (exchanged_) model_->stage(slot, partials_.back().as<float>());
    }
  }
  // What is page-locked for the GPU is the communicator's.
  ~GpuReplica() override { model_.reset(); }
  GpuReplica(const GpuReplica&) = delete;
  GpuReplica& operator=(const GpuReplica&) = delete;

  const ParameterLayout& layout() const override { return model_->layout(); }
  const LaneSchedule& schedule() const override { return schedule_; }

  void set_parameters(std::span<const float> values) override { model_->set_parameters(values); }
  void get_parameters(std::span<float> values) const override {
    model_->get_parameters(values, {0, values.size()});
  }
  Range shard() const override { return shard_; }
  void set_moments(std::span<const float> first, std::span<const float> second) override {
    model_->set_moments(first, second);
  }
  void get_moments(std::span<float> first, std::span<float> second) const override {
    model_->get_moments(first, second);
  }

  LossSum loss(const Batch& batch) override { return model_->loss(batch); }

  LaneResult gradient(const Batch& batch, std::size_t index, const RangeReady& ready) override {
    const LaneWork& lane = schedule_.lanes[index];
    const GpuLaneResult result =
        model_->gradient(batch, lane.slot, merges_of(lane), staged_when(ready), ready);
    return {result.sum, result.forward_seconds, result.backward_seconds};
  }
  void skip(std::size_t index, const RangeReady& ready) override {
    const LaneWork& lane = schedule_.lanes[index];
    model_->skip(lane.slot, merges_of(lane), staged_when(ready), ready);
  }
  std::span<float> partial(std::size_t index) override { return partials_[index].as<float>(); }

  std::span<const float> single_gradient(const Batch& batch, LossSum& sum) override {
    sum = model_->gradient(batch, 0, {}, {}, {}).sum;
    model_->get_slot(0, partial(0));
    return partial(0);
  }

  void block_squares(Range range, std::span<double> sums) override {
    if (exchanged_) model_->upload(0, range);
    model_->block_squares(range, sums);
  }
  void update(float factor, double learning_rate, std::int64_t step) override {
    model_->update(factor, learning_rate, step);
  }
  void complete_parameters(
      const std::function<void(std::span<float> parameters)>& exchange) override {
    if (host_parameters_.size() == 0) host_parameters_ = FloatBuffer(layout().size());
    get_parameters(host_parameters_.span());
    exchange(host_parameters_.span());
    set_parameters(host_parameters_.span());
  }

  std::vector<Blake3Hash> tensor_hashes() const override { return model_->tensor_hashes(); }
  std::size_t state_bytes() const override {
    return (layout().size() * (1 + schedule_.slots) + 2 * shard_.size()) * sizeof(float);
  }

 private:
  static std::vector<SlotMerge> merges_of(const LaneWork& lane) {
    std::vector<SlotMerge> merges;
    for (const LaneMerge& merge : lane.merges) merges.push_back({merge.into, merge.from});
    return merges;
  }
  // Only the last lane's ranges are asked for.
  std::span<const std::uint32_t> staged_when(const RangeReady& ready) const {
    if (!ready || !exchanged_) return {};
    return partial_slots_;
  }

  const bool exchanged_;
  const Range shard_;
  const LaneSchedule schedule_;
  std::unique_ptr<GpuModel> model_;
  std::vector<std::uint32_t> partial_slots_;
  std::vector<Buffer> partials_;
  FloatBuffer host_parameters_;  // when first needed
};

}  // namespace

std::unique_ptr<Replica> make_gpu_replica(const ReplicaOptions& options,
                                          Communicator& communicator) {
  return std::make_unique<GpuReplica>(options, communicator);
}

}  // namespace lockstep
