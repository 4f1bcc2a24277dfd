#include <cuda_bf16.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/model/cuda/cuda_hash.h"
#include "lockstep/model/cuda/cuda_kernels.h"
#include "lockstep/model/cuda/cuda_memory.h"
#include "lockstep/model/cuda/cuda_passes.h"
#include "lockstep/model/cuda/cuda_staging.h"
#include "lockstep/model/gpu_memory.h"
#include "lockstep/model/gpu_model.h"
#include "lockstep/model/norm.h"
#include "lockstep/model/token_index.h"

namespace lockstep {
namespace {

constexpr std::size_t kPiece = 16384;         // elements that one block of AdamW updates
constexpr std::size_t kLeastReady = 1 << 20;  // elements of a range that is told, but the last
constexpr int kLanesBeforeGraph = 2;          // that are enqueued call by call

float rounded(double value) { return static_cast<float>(value); }

// The layout and memory of a lane that graphs are captured for.
struct LaneShape {
  std::uint32_t slot;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> merges;
  auto operator<=>(const LaneShape&) const = default;
};

struct CapturedLane {
  int runs = 0;
  CudaGraph graph;
};

std::vector<cuda::Piece> cut_pieces(const ParameterLayout& layout, Range range) {
  std::vector<cuda::Piece> pieces;
  for (const TensorSpec& tensor : layout.tensors()) {
    const std::size_t end = std::min(range.end, tensor.range.end);
    for (std::size_t at = std::max(range.begin, tensor.range.begin); at < end; at += kPiece) {
      pieces.push_back(
          {at, static_cast<std::uint32_t>(std::min(kPiece, end - at)), tensor.decay ? 1U : 0U});
    }
  }
  return pieces;
}

class CudaModel final : public GpuModel {
 public:
  explicit CudaModel(const GpuModelOptions& options);

  const ParameterLayout& layout() const override { return layout_; }

  void set_parameters(std::span<const float> values) override;
  void get_parameters(std::span<float> values, Range range) const override;
  void set_moments(std::span<const float> first, std::span<const float> second) override;
  void get_moments(std::span<float> first, std::span<float> second) const override;
  void get_slot(std::uint32_t slot, std::span<float> values) const override;

  LossSum loss(const Batch& batch) override;
  GpuLaneResult gradient(const Batch& batch, std::uint32_t slot, std::span<const SlotMerge> merges,
                         std::span<const std::uint32_t> staged, const RangeReady& ready) override;
  void skip(std::uint32_t slot, std::span<const SlotMerge> merges,
            std::span<const std::uint32_t> staged, const RangeReady& ready) override;

  void stage(std::uint32_t slot, std::span<float> host) override { staging_.attach(slot, host); }
  void upload(std::uint32_t slot, Range range) override {
    staging_.upload(slot, range, stream_.get());
  }

  void block_squares(Range range, std::span<double> sums) override;
  void update(float factor, double learning_rate, std::int64_t step) override;
  std::vector<Blake3Hash> tensor_hashes() const override;
  std::size_t bytes() const override { return bytes_; }

 private:
  // A range of the gradient that is told at once, and when its work on the device is done.
  struct Bucket {
    Range range;
    CudaEvent computed, copied;
  };

  CudaParameters parameters() const { return {parameters_.data(), rounded_.data()}; }
  CudaBatch batch_memory() const {
    return {tokens_.data(), targets_.data(), token_begin_.data(), token_places_.data()};
  }
  std::vector<float*> slot_pointers() const;
  void cut_buckets();
  void send(const Batch& batch);
  void send_token_index();
  void enqueue_lane(const LaneShape& shape, bool capturing);
  void run_lane(const LaneShape& shape);
  void merge(const LaneShape& shape, Range range);
  void record(const CudaEvent& event, bool capturing);
  void deliver(std::span<const std::uint32_t> staged, const RangeReady& ready);
  LossSum receive_loss();
  void wait() const;
  void copy(void* to, const void* from, std::size_t bytes) const;

  const ParameterLayout layout_;
  const GpuModelOptions options_;
  CudaStream stream_;
  DeviceArray<float> parameters_, first_, second_;
  DeviceArray<__nv_bfloat16> rounded_;
  std::vector<DeviceArray<float>> slots_;
  std::unique_ptr<CudaPasses> passes_;
  CudaStaging staging_;
  DeviceArray<cuda::Piece> pieces_;
  DeviceArray<double> squares_;
  DeviceArray<std::int32_t> tokens_, targets_;
  DeviceArray<std::uint32_t> token_begin_, token_places_;
  PinnedArray<std::int32_t> host_tokens_, host_targets_;
  PinnedArray<std::uint32_t> host_begin_, host_places_;
  PinnedArray<cuda::LossTotal> host_total_;
  PinnedArray<double> host_squares_;
  std::vector<Bucket> buckets_;
  CudaEvent begun_, forward_done_, backward_done_;
  std::map<LaneShape, CapturedLane> lanes_;
  mutable CudaHasher hasher_;
  std::size_t bytes_ = 0;
};

// Throws for models that the kernels or the memory do not fit; takes a GPU for this thread.
const GpuModelOptions& checked(const GpuModelOptions& options) {
  const ModelConfig& model = options.model;
  validate(model);
  const auto refuse = [](const std::string& message) {
    throw Error(ErrorCode::kInvalidArgument, "--device cuda " + message);
  };
  const int widest = options.precision == Precision::kBf16 ? 4096 : 2048;
  if (model.hidden > widest) refuse(fmt::format("takes --hidden up to {}", widest));
  if (model.hidden % 16 != 0) refuse("takes a --hidden that is a multiple of 16");
  if (model.intermediate % 8 != 0) refuse("takes an --intermediate that is a multiple of 8");
  if (model.head_dim() % 8 != 0) refuse("takes heads of a width that is a multiple of 8");
  if (model.head_dim() > 128) refuse("takes heads of a width up to 128");
  if (options.rows < 1 || options.context < 1 || options.context > model.context) {
    refuse(fmt::format("cannot hold {} x {} tokens, where the model's context is {}", options.rows,
                       options.context, model.context));
  }
  if (const auto reason = gpu_refusal()) refuse("finds no GPU: " + *reason);
  int count = 0;
  check_cuda(cudaGetDeviceCount(&count), "counting GPUs");
  check_cuda(cudaSetDevice(options.device % count), "choosing a GPU");  // of this thread
  std::size_t free = 0;
  std::size_t total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "asking for free memory");
  if (const auto line = gpu_memory_refusal(options, free)) throw Error(ErrorCode::kIo, *line);
  return options;
}

CudaModel::CudaModel(const GpuModelOptions& options)
    : layout_(checked(options).model),
      options_(options),
      stream_(make_stream()),
      parameters_(layout_.size(), "parameters"),
      first_(options.shard.size(), "moments"),
      second_(options.shard.size(), "moments"),
      rounded_(options.precision == Precision::kBf16 ? layout_.size() : 0, "bf16 parameters"),
      slots_([&] {
        std::vector<DeviceArray<float>> slots;
        for (std::uint32_t i = 0; i < options.slots; ++i)
          slots.emplace_back(layout_.size(), "gradients");
        return slots;
      }()),
      passes_(make_cuda_passes(layout_, {.precision = options.precision,
                                         .rows = options.rows,
                                         .context = options.context,
                                         .recompute = options.recompute})),
      staging_(slot_pointers()),
      squares_(norm_blocks(layout_.size()), "norms"),
      tokens_(static_cast<std::size_t>(options.rows * options.context), "tokens"),
      targets_(tokens_.size(), "tokens"),
      token_begin_(static_cast<std::size_t>(options.model.vocab) + 1, "tokens"),
      token_places_(tokens_.size(), "tokens"),
      host_tokens_(tokens_.size()),
      host_targets_(tokens_.size()),
      host_begin_(token_begin_.size()),
      host_places_(tokens_.size()),
      host_total_(1),
      host_squares_(squares_.size()),
      begun_(make_timer_event()),
      forward_done_(make_timer_event()),
      backward_done_(make_timer_event()),
      hasher_(layout_) {
  const std::vector<cuda::Piece> pieces = cut_pieces(layout_, options.shard);
  pieces_ = DeviceArray<cuda::Piece>(pieces.size(), "the optimizer");
  copy(pieces_.data(), pieces.data(), pieces.size() * sizeof(cuda::Piece));
  check_cuda(cudaMemset(first_.data(), 0, first_.size() * sizeof(float)), "clearing moments");
  check_cuda(cudaMemset(second_.data(), 0, second_.size() * sizeof(float)), "clearing moments");
  cut_buckets();
  bytes_ = passes_->bytes() +
           (layout_.size() * (1 + options.slots) + 2 * options.shard.size()) * sizeof(float) +
           rounded_.size() * sizeof(__nv_bfloat16);
}

std::vector<float*> CudaModel::slot_pointers() const {
  std::vector<float*> pointers;
  for (const DeviceArray<float>& slot : slots_) pointers.push_back(slot.data());
  return pointers;
}

// The ranges in which the passes finish, joined so that none is small; the embedding is the last.
void CudaModel::cut_buckets() {
  const Range embedding = layout_.range(Component::kEmbedding);
  std::vector<std::size_t> ends;
  for (const TensorSpec& tensor : layout_.tensors()) {
    // The rest of a product that finishes several tensors at once.
    const bool within = tensor.component == Component::kGate ||
                        tensor.component == Component::kQuery ||
                        tensor.component == Component::kKey;
    if (!within) ends.push_back(tensor.range.end);
  }
  std::ranges::sort(ends);
  std::size_t begin = 0;
  for (const std::size_t end : ends) {
    const bool last = end == embedding.begin || end == embedding.end;
    if (end - begin < kLeastReady && !last) continue;
    buckets_.push_back({{begin, end}, make_event(), make_event()});
    begin = end;
  }
}

void CudaModel::wait() const { check_cuda(cudaStreamSynchronize(stream_.get()), "computing"); }

void CudaModel::copy(void* to, const void* from, std::size_t bytes) const {
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_.get()), "copying");
  wait();
}

void CudaModel::set_parameters(std::span<const float> values) {
  LOCKSTEP_CHECK(values.size() == layout_.size());
  copy(parameters_.data(), values.data(), values.size_bytes());
  if (rounded_.size() > 0) {
    cuda::round_to(values.size(), parameters_.data(), rounded_.data(), stream_.get());
    wait();
  }
}

void CudaModel::get_parameters(std::span<float> values, Range range) const {
  LOCKSTEP_CHECK(values.size() == layout_.size());
  copy(values.data() + range.begin, parameters_.data() + range.begin, range.size() * sizeof(float));
}

void CudaModel::set_moments(std::span<const float> first, std::span<const float> second) {
  LOCKSTEP_CHECK(first.size() == first_.size() && second.size() == second_.size());
  copy(first_.data(), first.data(), first.size_bytes());
  copy(second_.data(), second.data(), second.size_bytes());
}

void CudaModel::get_moments(std::span<float> first, std::span<float> second) const {
  LOCKSTEP_CHECK(first.size() == first_.size() && second.size() == second_.size());
  copy(first.data(), first_.data(), first.size_bytes());
  copy(second.data(), second_.data(), second.size_bytes());
}

void CudaModel::get_slot(std::uint32_t slot, std::span<float> values) const {
  LOCKSTEP_CHECK(values.size() == layout_.size());
  copy(values.data(), slots_.at(slot).data(), values.size_bytes());
}

// The passes know one shape only: rows that are missing are filled with a token whose loss does not
// count.
void CudaModel::send(const Batch& batch) {
  check_batch(batch, options_.rows, options_.context, options_.model.vocab);
  if (batch.context != options_.context) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a batch with a context of {}, where it is {}", batch.context,
                            options_.context));
  }
  const std::size_t count = batch.tokens.size();
  const std::size_t rest = tokens_.size() - count;
  std::ranges::copy(batch.tokens, host_tokens_.data());
  std::ranges::copy(batch.targets, host_targets_.data());
  std::fill_n(host_tokens_.data() + count, rest, 0);
  std::fill_n(host_targets_.data() + count, rest, -1);
  const std::size_t bytes = tokens_.size() * sizeof(std::int32_t);
  check_cuda(
      cudaMemcpyAsync(tokens_.data(), host_tokens_.data(), bytes, cudaMemcpyDefault, stream_.get()),
      "copying tokens");
  check_cuda(cudaMemcpyAsync(targets_.data(), host_targets_.data(), bytes, cudaMemcpyDefault,
                             stream_.get()),
             "copying targets");
}

void CudaModel::send_token_index() {
  index_tokens({host_tokens_.data(), tokens_.size()}, {host_begin_.data(), token_begin_.size()},
               {host_places_.data(), token_places_.size()});
  check_cuda(cudaMemcpyAsync(token_begin_.data(), host_begin_.data(),
                             token_begin_.size() * sizeof(std::uint32_t), cudaMemcpyDefault,
                             stream_.get()),
             "copying tokens");
  check_cuda(cudaMemcpyAsync(token_places_.data(), host_places_.data(),
                             token_places_.size() * sizeof(std::uint32_t), cudaMemcpyDefault,
                             stream_.get()),
             "copying tokens");
}

LossSum CudaModel::receive_loss() {
  check_cuda(cudaMemcpyAsync(host_total_.data(), passes_->loss_total(), sizeof(cuda::LossTotal),
                             cudaMemcpyDefault, stream_.get()),
             "copying the loss");
  wait();
  return {host_total_.data()->loss, host_total_.data()->tokens};
}

LossSum CudaModel::loss(const Batch& batch) {
  send(batch);
  passes_->loss(parameters(), batch_memory(), stream_.get());
  return receive_loss();
}

void CudaModel::merge(const LaneShape& shape, Range range) {
  for (const auto& [into, from] : shape.merges) {
    cuda::add(range.size(), slots_.at(into).data() + range.begin,
              slots_.at(from).data() + range.begin, stream_.get());
  }
}

void CudaModel::record(const CudaEvent& event, bool capturing) {
  check_cuda(cudaEventRecordWithFlags(event.get(), stream_.get(),
                                      capturing ? cudaEventRecordExternal : cudaEventRecordDefault),
             "recording an event");
}

// Everything but the embedding's gradient.
void CudaModel::enqueue_lane(const LaneShape& shape, bool capturing) {
  std::size_t bucket = 0;
  record(begun_, capturing);
  passes_->gradient(parameters(), batch_memory(), slots_.at(shape.slot).data(),
                    {.forward_done = [&] { record(forward_done_, capturing); },
                     .range_done =
                         [&](Range range) {
                           merge(shape, range);
                           if (buckets_[bucket].range.end == range.end) {
                             record(buckets_[bucket++].computed, capturing);
                           }
                         }},
                    stream_.get());
}

// The first lanes of a shape are enqueued call by call, so that libraries load what they need; then
// they are captured as a graph.
void CudaModel::run_lane(const LaneShape& shape) {
  CapturedLane& lane = lanes_[shape];
  if (lane.runs++ < kLanesBeforeGraph) {
    enqueue_lane(shape, false);
    return;
  }
  if (lane.graph.get() == nullptr) {
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal),
               "capturing a graph");
    enqueue_lane(shape, true);
    check_cuda(cudaStreamEndCapture(stream_.get(), &graph), "capturing a graph");
    cudaGraphExec_t executable = nullptr;
    const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
    static_cast<void>(cudaGraphDestroy(graph));
    check_cuda(status, "making a graph");
    lane.graph = CudaGraph(executable);
  }
  check_cuda(cudaGraphLaunch(lane.graph.get(), stream_.get()), "launching a graph");
}

GpuLaneResult CudaModel::gradient(const Batch& batch, std::uint32_t slot,
                                  std::span<const SlotMerge> merges,
                                  std::span<const std::uint32_t> staged, const RangeReady& ready) {
  LaneShape shape{slot, {}};
  for (const SlotMerge& merge : merges) shape.merges.emplace_back(merge.into, merge.from);
  send(batch);
  run_lane(shape);
  send_token_index();  // while the GPU is at work
  passes_->embedding_gradient(batch_memory(), slots_.at(slot).data(), stream_.get());
  merge(shape, buckets_.back().range);
  record(buckets_.back().computed, false);
  record(backward_done_, false);
  deliver(staged, ready);
  GpuLaneResult result;
  result.sum = receive_loss();
  float milliseconds = 0;
  check_cuda(cudaEventElapsedTime(&milliseconds, begun_.get(), forward_done_.get()), "timing");
  result.forward_seconds = milliseconds / 1e3;
  check_cuda(cudaEventElapsedTime(&milliseconds, forward_done_.get(), backward_done_.get()),
             "timing");
  result.backward_seconds = milliseconds / 1e3;
  if (staged.empty() && ready) {
    for (const Bucket& bucket : buckets_) ready(bucket.range);
  }
  return result;
}

// Copies every bucket of the staged slots as soon as it is computed, and tells of it when it is
// there.
void CudaModel::deliver(std::span<const std::uint32_t> staged, const RangeReady& ready) {
  if (staged.empty()) return;
  for (const Bucket& bucket : buckets_) {
    for (const std::uint32_t slot : staged) {
      staging_.download(slot, bucket.range, bucket.computed.get());
    }
    staging_.mark(bucket.copied.get());
  }
  for (const Bucket& bucket : buckets_) {
    check_cuda(cudaEventSynchronize(bucket.copied.get()), "copying a gradient");
    if (ready) ready(bucket.range);
  }
}

void CudaModel::skip(std::uint32_t slot, std::span<const SlotMerge> merges,
                     std::span<const std::uint32_t> staged, const RangeReady& ready) {
  LaneShape shape{slot, {}};
  for (const SlotMerge& merge : merges) shape.merges.emplace_back(merge.into, merge.from);
  check_cuda(
      cudaMemsetAsync(slots_.at(slot).data(), 0, layout_.size() * sizeof(float), stream_.get()),
      "clearing a gradient");
  merge(shape, {0, layout_.size()});
  for (const Bucket& bucket : buckets_) record(bucket.computed, false);
  deliver(staged, ready);
  wait();
  if (staged.empty() && ready) {
    for (const Bucket& bucket : buckets_) ready(bucket.range);
  }
}

void CudaModel::block_squares(Range range, std::span<double> sums) {
  LOCKSTEP_CHECK(range.begin % kNormBlock == 0 && sums.size() == norm_blocks(range.size()));
  cuda::block_squares(range.size(), slots_.front().data() + range.begin, squares_.data(),
                      stream_.get());
  check_cuda(cudaMemcpyAsync(host_squares_.data(), squares_.data(), sums.size_bytes(),
                             cudaMemcpyDefault, stream_.get()),
             "copying norms");
  wait();
  std::copy_n(host_squares_.data(), sums.size(), sums.begin());
}

void CudaModel::update(float factor, double learning_rate, std::int64_t step) {
  const AdamWOptions& adamw = options_.adamw;
  const auto t = static_cast<double>(step + 1);
  cuda::adamw({.factor = factor,
               .beta1 = rounded(adamw.beta1),
               .rest1 = rounded(1.0 - adamw.beta1),
               .beta2 = rounded(adamw.beta2),
               .rest2 = rounded(1.0 - adamw.beta2),
               .rate = rounded(learning_rate / (1.0 - std::pow(adamw.beta1, t))),
               .root_scale = rounded(1.0 / std::sqrt(1.0 - std::pow(adamw.beta2, t))),
               .eps = rounded(adamw.eps),
               .keep = rounded(1.0 - learning_rate * adamw.weight_decay),
               .first_element = options_.shard.begin,
               .sum = slots_.front().data(),
               .parameters = parameters_.data(),
               .first = first_.data(),
               .second = second_.data(),
               .rounded = rounded_.size() > 0 ? rounded_.data() : nullptr},
              pieces_.size(), pieces_.data(), stream_.get());
}

std::vector<Blake3Hash> CudaModel::tensor_hashes() const {
  return hasher_.hash(parameters_.data(), stream_.get());
}

}  // namespace

std::optional<std::string> gpu_refusal() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return cudaGetErrorString(status);
  }
  if (count == 0) return "there is none";
  return std::nullopt;
}

std::string gpu_name() {
  cudaDeviceProp device{};
  check_cuda(cudaGetDeviceProperties(&device, 0), "asking for the GPU's name");
  return device.name;
}

std::unique_ptr<GpuModel> make_gpu_model(const GpuModelOptions& options) {
  return std::make_unique<CudaModel>(options);
}

}  // namespace lockstep
