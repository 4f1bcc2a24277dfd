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
  GpuReplica(const ReplicaOptions& options, const GpuParts& parts)
      : parts_(parts),
        shard_(options.shard),
        accumulators_(accumulators_of(options)),
        model_(parts.make_model(model_options(options))) {}
  // Ends transfers between GPUs, then the model, before its page-locked memory is freed.
  ~GpuReplica() override {
    communicator_ = nullptr;  // may have gone already: the model does not ask it any more
    if (reducer_) reducer_->abort();
    model_.reset();
  }
  GpuReplica(const GpuReplica&) = delete;
  GpuReplica& operator=(const GpuReplica&) = delete;

  void attach(const ReplicaOptions& options, Communicator& communicator) override {
    LOCKSTEP_CHECK(!attached());
    schedule_ = schedule_lanes(options.partials);
    accumulators_ = accumulators_of(options);
    model_->resize(accumulators_, options.shard);
    shard_ = options.shard;
    kind_ = options.exchange;
    exchanging_ = false;
    communicator_ = &communicator;
    model_->set_patience(
        std::max<std::chrono::nanoseconds>(communicator.patience(), kLeastPatience));
    stage_partials();
    if (kind_ == Exchange::kDevice) connect(options);
  }
  // The accumulators are the GPU's own and stay, and the sum with them.
  void detach() override {
    if (!attached()) return;
    communicator_ = nullptr;
    if (reducer_) reducer_->abort();
    model_->unstage();
    reducer_.reset();
    delivery_ = {};
    partials_.clear();
  }
  bool attached() const override { return communicator_ != nullptr; }

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
  // An exchange between GPUs that has failed also ends, but undone. Whoever has got these results
  // knows that it was done, and may update.
  std::vector<LaneResult> finish_lanes() override {
    std::vector<LaneResult> results = model_->finish_lanes();
    check();
    exchanging_ = false;
    return results;
  }
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
  void update(const UpdateRequest& request) override {
    LOCKSTEP_CHECK(!exchanging_);
    model_->update(request);
  }
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
    check();
    return true;
  }

  std::vector<Blake3Hash> tensor_hashes() const override { return model_->tensor_hashes(); }
  std::size_t state_bytes() const override {
    return (layout().size() * (1 + accumulators_) + 2 * shard_.size()) * sizeof(float);
  }

 private:
  static std::uint32_t accumulators_of(const ReplicaOptions& options) {
    return std::max(options.accumulators, accumulators_for(options.partials));
  }
  GpuModelOptions model_options(const ReplicaOptions& options) {
    return {.model = options.model,
            .precision = options.precision,
            .adamw = options.adamw,
            .rows = options.rows,
            .context = options.context,
            .accumulators = accumulators_,
            .shard = options.shard,
            .recompute = options.recompute,
            .device = options.device,
            .while_waiting = [this] { check(); }};
  }
  // Throws when the job has failed, or what is enqueued between GPUs will never be done.
  void check() {
    if (!attached()) return;
    reducer_ ? reducer_->check() : communicator_->check();
  }
  void connect(const ReplicaOptions& options) {
    const int ranks = communicator_->world_size();
    DeviceReducerOptions how{.owners = options.owners, .native = options.native};
    if (options.sharded) how.shards = shard_sizes(layout().size(), ranks);
    for (int rank = 0; options.sharded && options.buddy && rank < ranks; ++rank) {
      how.buddies.push_back(buddies_of(rank, ranks));
    }
    how.elements = layout().size();
    reducer_ = parts_.make_reducer(*communicator_, how);
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
      partials_.push_back(kind_ == Exchange::kHost ? communicator_->allocate(bytes)
                                                   : Buffer::heap(bytes));
      if (kind_ == Exchange::kHost) model_->stage(accumulator, partials_.back().as<float>());
    }
  }
  // Only the last lane has `ready`, and delivers.
  const GpuDelivery* delivery_for(const RangeReady& ready) {
    if (!ready || kind_ == Exchange::kNone) return nullptr;
    if (kind_ == Exchange::kHost) delivery_.copied = ready;
    exchanging_ = kind_ == Exchange::kDevice && communicator_->world_size() > 1;
    return &delivery_;
  }

  const GpuParts parts_;
  Communicator* communicator_ = nullptr;  // while attached
  Exchange kind_ = Exchange::kNone;
  Range shard_;
  std::uint32_t accumulators_;  // on the GPU
  LaneSchedule schedule_;
  std::unique_ptr<DeviceReducer> reducer_;
  std::vector<Buffer> partials_;
  FloatBuffer host_parameters_;  // allocated when first needed
  std::unique_ptr<GpuModel> model_;
  GpuDelivery delivery_;
  bool exchanging_ = false;  // with other GPUs, since finish_lanes()
};

}  // namespace

std::unique_ptr<Replica> make_gpu_replica(const ReplicaOptions& options, const GpuParts& parts) {
  return std::make_unique<GpuReplica>(options, parts);
}

std::unique_ptr<Replica> make_gpu_replica(const ReplicaOptions& options, Communicator& communicator,
                                          const GpuParts& parts) {
  auto replica = make_gpu_replica(options, parts);
  replica->attach(options, communicator);
  return replica;
}

}  // namespace lockstep
