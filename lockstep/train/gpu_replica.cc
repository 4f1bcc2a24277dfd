#include <algorithm>
#include <chrono>
#include <numeric>

#include "lockstep/base/check.h"
#include "lockstep/base/float_buffer.h"
#include "lockstep/train/reducer.h"
#include "lockstep/train/replica.h"

namespace lockstep {
namespace {

// The shortest timeout for a wait for the GPU. The timeout of the job is about other workers and
// may be shorter.
constexpr auto kLeastPatience = std::chrono::minutes(1);

// Partials are added up on the GPU. They go to other ranks from GPU to GPU, or through the host:
// they are copied to memory of the communicator, bucket by bucket during the backward pass, and the
// sum over all lanes is copied back before its norm is computed.
class GpuReplica final : public Replica {
 public:
  GpuReplica(const ReplicaOptions& options, Communicator& communicator, const GpuParts& parts)
      : kind_(options.exchange),
        shard_(options.shard),
        communicator_(communicator),
        schedule_(schedule_lanes(options.partials)),
        accumulators_(std::max(options.accumulators, schedule_.accumulators)),
        model_(parts.make_model(model_options(options, communicator))) {
    stage_partials();
    if (kind_ == Exchange::kDevice) connect(options, communicator, parts);
  }
  // Ends transfers between GPUs, then the model, before its page-locked memory is freed.
  ~GpuReplica() override {
    if (reducer_) reducer_->abort();
    model_.reset();
  }
  GpuReplica(const GpuReplica&) = delete;
  GpuReplica& operator=(const GpuReplica&) = delete;

  const ParameterLayout& layout() const override { return model_->layout(); }
  const LaneSchedule& schedule() const override { return schedule_; }
  void set_owners(const LeafOwners& owners, int rank) override {
    schedule_ = schedule_lanes(owned_nodes(owners, rank));
    LOCKSTEP_CHECK(schedule_.accumulators <= accumulators_);
    stage_partials();
    if (reducer_) reducer_->set_owners(owners);
  }

  void set_parameters(std::span<const float> values) override { model_->set_parameters(values); }
  void get_parameters(std::span<float> values) const override { model_->get_parameters(values); }
  Range shard() const override { return shard_; }
  void set_moments(std::span<const float> first, std::span<const float> second) override {
    model_->set_moments(first, second);
  }
  void get_moments(std::span<float> first, std::span<float> second) const override {
    model_->get_moments(first, second);
  }

  LossSum loss(const Batch& batch) override { return model_->loss(batch); }

  void gradient(const Batch& batch, std::size_t index, const RangeReady& ready) override {
    const LaneWork& lane = schedule_.lanes[index];
    model_->gradient(batch, lane.accumulator, lane.merges, delivery_for(ready));
    if (ready && kind_ != Exchange::kHost) ready({0, layout().size()});
  }
  void skip(std::size_t index, const RangeReady& ready) override {
    const LaneWork& lane = schedule_.lanes[index];
    model_->skip(lane.accumulator, lane.merges, delivery_for(ready));
    if (ready && kind_ != Exchange::kHost) ready({0, layout().size()});
  }
  std::vector<LaneResult> finish_lanes() override { return model_->finish_lanes(); }
  std::span<float> partial(std::size_t index) override { return partials_[index].as<float>(); }
  void reduced(Range range) override {
    const Range part = common_part(shard_, range);
    if (part.size() > 0) model_->upload(0, part);
  }

  std::span<const float> single_gradient(const Batch& batch, LossSum& sum) override {
    model_->gradient(batch, 0, {});
    sum = model_->finish_lanes().front().sum;
    model_->get_accumulator(0, partial(0));
    return partial(0);
  }

  std::span<const float> reduced_sum() override {
    if (kind_ != Exchange::kHost) model_->get_accumulator(0, partial(0));
    return partial(0);
  }
  void block_squares(Range range, std::span<double> sums) override {
    model_->block_squares(range, sums);
  }
  void update(const UpdateRequest& request) override { model_->update(request); }
  UpdateResult finish_update() override { return model_->finish_update(); }
  void complete_parameters(const std::function<void(std::span<float> parameters)>& fill) override {
    if (host_parameters_.size() == 0) {
      host_parameters_ = FloatBuffer(layout().size());
      model_->page_lock(host_parameters_.span());
    }
    get_parameters(host_parameters_.span());
    fill(host_parameters_.span());
    set_parameters(host_parameters_.span());
  }

  bool complete_on_device() override {
    if (!reducer_) return false;
    model_->complete_parameters([this](float* parameters, DeviceStream stream) {
      reducer_->all_gather(parameters, stream);
    });
    return true;
  }

  std::vector<Blake3Hash> tensor_hashes() const override { return model_->tensor_hashes(); }
  std::size_t state_bytes() const override {
    return (layout().size() * (1 + accumulators_) + 2 * shard_.size()) * sizeof(float);
  }

 private:
  GpuModelOptions model_options(const ReplicaOptions& options, Communicator& communicator) {
    return {.model = options.model,
            .precision = options.precision,
            .adamw = options.adamw,
            .rows = options.rows,
            .context = options.context,
            .accumulators = accumulators_,
            .shard = options.shard,
            .recompute = options.recompute,
            .device = options.device,
            .patience = std::max<std::chrono::nanoseconds>(communicator.patience(), kLeastPatience),
            .while_waiting = [this, &communicator] {
              reducer_ ? reducer_->check() : communicator.check();
            }};
  }
  void connect(const ReplicaOptions& options, Communicator& communicator, const GpuParts& parts) {
    reducer_ = parts.make_reducer(
        communicator,
        {.owners = options.owners,
         .native = options.native,
         .shards = options.sharded ? shard_sizes(layout().size(), communicator.world_size())
                                   : std::vector<std::size_t>(),
         .elements = layout().size()});
    delivery_.reduce = [this](std::span<float* const> accumulators, Range range,
                              DeviceStream stream) {
      reducer_->reduce(accumulators, range, stream);
    };
  }
  // Every partial needs memory on the host; what is there once is kept.
  void stage_partials() {
    delivery_.accumulators.resize(schedule_.partials.size());
    std::iota(delivery_.accumulators.begin(), delivery_.accumulators.end(), 0U);
    const std::size_t bytes = layout().size() * sizeof(float);
    while (partials_.size() < schedule_.partials.size()) {
      const auto accumulator = static_cast<std::uint32_t>(partials_.size());
      partials_.push_back(kind_ == Exchange::kHost ? communicator_.allocate(bytes)
                                                   : Buffer::heap(bytes));
      if (kind_ == Exchange::kHost) model_->stage(accumulator, partials_.back().as<float>());
    }
  }
  // Only the last lane has `ready`, and delivers.
  const GpuDelivery* delivery_for(const RangeReady& ready) {
    if (!ready || kind_ == Exchange::kNone) return nullptr;
    if (kind_ == Exchange::kHost) delivery_.copied = ready;
    return &delivery_;
  }

  const Exchange kind_;
  const Range shard_;
  Communicator& communicator_;
  LaneSchedule schedule_;
  const std::uint32_t accumulators_;  // on the GPU
  std::unique_ptr<DeviceReducer> reducer_;
  std::vector<Buffer> partials_;
  FloatBuffer host_parameters_;  // allocated when first needed
  std::unique_ptr<GpuModel> model_;
  GpuDelivery delivery_;
};

}  // namespace

std::unique_ptr<Replica> make_gpu_replica(const ReplicaOptions& options, Communicator& communicator,
                                          const GpuParts& parts) {
  return std::make_unique<GpuReplica>(options, communicator, parts);
}

}  // namespace lockstep
