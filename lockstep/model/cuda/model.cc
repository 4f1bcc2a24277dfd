#include "lockstep/model/cuda/model.h"

#include <cublasLt.h>
#include <cudnn.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/index.h"
#include "lockstep/model/batch.h"
#include "lockstep/model/gpu_memory.h"
#include "lockstep/model/update.h"

namespace lockstep {
namespace {

constexpr int kRunsBeforeGraph = 2;           // that are enqueued call by call
constexpr std::size_t kPiece = 16384;         // elements that one block of AdamW updates
constexpr std::size_t kLeastReady = 1 << 20;  // elements of a range that is told, but the last

float rounded(double value) { return static_cast<float>(value); }

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
  if (const auto line = gpu_memory_refusal(options, free)) throw Error(ErrorCode::kDevice, *line);
  return options;
}

CudaLaneShape shape_of(std::uint32_t accumulator, std::span<const AccumulatorMerge> merges) {
  return {accumulator, {merges.begin(), merges.end()}};
}

LossSum loss_sum(const cuda::LossTotal& total) {
  return {.loss = total.loss, .tokens = total.tokens, .correct = total.correct};
}

double seconds(std::uint64_t begin, std::uint64_t end) {
  return end > begin ? static_cast<double>(end - begin) * 1e-9 : 0;
}

}  // namespace

void CudaCaptured::run(cudaStream_t stream, const std::function<void(bool capturing)>& enqueue) {
  if (runs_ < kRunsBeforeGraph) {
    ++runs_;
    return enqueue(false);
  }
  if (graph_.get() == nullptr) {
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
               "capturing a graph");
    enqueue(true);
    check_cuda(cudaStreamEndCapture(stream, &graph), "capturing a graph");
    cudaGraphExec_t executable = nullptr;
    const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
    static_cast<void>(cudaGraphDestroy(graph));
    check_cuda(status, "making a graph");
    graph_ = CudaGraph(executable);
  }
  check_cuda(cudaGraphLaunch(graph_.get(), stream), "launching a graph");
}

CudaLaneMemory::CudaLaneMemory(std::size_t token_count, std::size_t vocab)
    : tokens(token_count),
      targets(token_count),
      token_begin(vocab + 1),
      token_places(token_count),
      record(1) {}

CudaModel::CudaModel(const GpuModelOptions& options)
    : layout_(checked(options).model),
      options_(options),
      stream_(make_stream()),
      parameters_(layout_.size(), "parameters"),
      rounded_(options.precision == Precision::kBf16 ? layout_.size() : 0, "bf16 parameters"),
      passes_(make_cuda_passes(layout_, {.precision = options.precision,
                                         .rows = options.rows,
                                         .context = options.context,
                                         .recompute = options.recompute,
                                         .plain_attention = options.plain_attention})),
      squares_(norm_blocks(layout_.size()), "norms"),
      tree_scratch_(cuda::tree_scratch(squares_.size()), "norms"),
      record_(1, "losses"),
      bad_losses_(1, "losses"),
      update_(1, "the optimizer"),
      tokens_(static_cast<std::size_t>(options.rows * options.context), "tokens"),
      targets_(tokens_.size(), "tokens"),
      token_begin_(static_cast<std::size_t>(options.model.vocab) + 1, "tokens"),
      token_places_(tokens_.size(), "tokens"),
      host_squares_(squares_.size()),
      host_update_(1),
      done_(make_event()),
      hasher_(layout_) {
  take_accumulators(options.accumulators);
  take_moments(options.shard);
  clear_bad_losses();
  cut_buckets();
}

CudaModel::~CudaModel() {
  constexpr auto kPatience = std::chrono::seconds(10);
  try {
    wait_for_all("ending", {kPatience, {}});
  } catch (const Error&) {  // whatever it is, somebody was told of it before
  }
}

void CudaModel::wait_for_all(const char* operation, const CudaPatience& patience) const {
  for (const cudaStream_t stream : {stream_.get(), staging_.stream(), staging_.upload_stream()}) {
    if (cuda_given_up()) {
      throw Error(ErrorCode::kTimeout,
                  fmt::format("CUDA: {}: the GPU has not answered before", operation));
    }
    check_cuda(cudaEventRecord(done_.get(), stream), operation);
    wait_for(done_.get(), operation, patience);
  }
}

// Graphs have the addresses of accumulators and moments in them: they go before those do.
void CudaModel::take_accumulators(std::uint32_t count) {
  lanes_.clear();
  update_with_norm_ = {};
  update_of_norm_ = {};
  if (count < accumulators_.size()) accumulators_.resize(count);
  while (accumulators_.size() < count) accumulators_.emplace_back(layout_.size(), "gradients");
  std::vector<float*> pointers;
  for (const DeviceArray<float>& accumulator : accumulators_)
    pointers.push_back(accumulator.data());
  staging_.set_accumulators(std::move(pointers));
}

void CudaModel::take_moments(Range shard) {
  update_with_norm_ = {};
  update_of_norm_ = {};
  shard_ = shard;
  const std::vector<cuda::Piece> pieces = cut_pieces(layout_, shard);
  pieces_ = DeviceArray<cuda::Piece>(pieces.size(), "the optimizer");
  copy(pieces_.data(), pieces.data(), pieces.size() * sizeof(cuda::Piece));
  for (DeviceArray<float>* moments : {&first_, &second_}) {
    *moments = {};  // the old ones go first
    *moments = DeviceArray<float>(shard.size(), "moments");
    check_cuda(cudaMemsetAsync(moments->data(), 0, moments->size() * sizeof(float), stream_.get()),
               "clearing moments");
  }
}

void CudaModel::resize(std::uint32_t accumulators, Range shard) {
  wait_for_all("computing", patience());
  if (accumulators != accumulators_.size()) take_accumulators(accumulators);
  if (shard != shard_) take_moments(shard);
}

void CudaModel::unstage() {
  wait_for_all("ending a step", patience());
  staging_.release();
  lanes_enqueued_ = 0;
  clear_bad_losses();
}

std::size_t CudaModel::bytes() const {
  const std::size_t floats =
      parameters_.size() * (1 + accumulators_.size()) + first_.size() + second_.size();
  return passes_->bytes() + floats * sizeof(float) + rounded_.size() * sizeof(__nv_bfloat16);
}

void CudaModel::clear_bad_losses() const {
  check_cuda(cudaMemsetAsync(bad_losses_.data(), 0, sizeof(std::uint32_t), stream_.get()),
             "clearing a count");
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

void CudaModel::wait(const char* operation) const {
  check_cuda(cudaEventRecord(done_.get(), stream_.get()), operation);
  wait_for(done_.get(), operation, patience());
}

void CudaModel::enqueue_copy(void* to, const void* from, std::size_t bytes) const {
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_.get()), "copying");
}

void CudaModel::copy(void* to, const void* from, std::size_t bytes) const {
  wait("computing");  // a copy of memory that is not page-locked waits without a deadline
  enqueue_copy(to, from, bytes);
  wait("copying");
}

void CudaModel::set_parameters(std::span<const float> values) {
  LOCKSTEP_CHECK(values.size() == layout_.size());
  copy(parameters_.data(), values.data(), values.size_bytes());
  round_parameters();
}

void CudaModel::complete_parameters(
    const std::function<void(float* parameters, DeviceStream stream)>& enqueue) {
  // On the stream on which gradients are reduced: all device transfers share it.
  const cudaStream_t stream = staging_.stream();
  check_cuda(cudaEventRecord(done_.get(), stream_.get()), "sharing parameters");
  check_cuda(cudaStreamWaitEvent(stream, done_.get()), "sharing parameters");
  enqueue(parameters_.data(), stream);
  check_cuda(cudaEventRecord(done_.get(), stream), "sharing parameters");
  check_cuda(cudaStreamWaitEvent(stream_.get(), done_.get()), "sharing parameters");
  round_parameters();
  wait("sharing parameters");
}

void CudaModel::round_parameters() {
  if (rounded_.size() == 0) return;
  cuda::round_to(layout_.size(), parameters_.data(), rounded_.data(), stream_.get());
}

void CudaModel::get_parameters(std::span<float> values) const {
  LOCKSTEP_CHECK(values.size() == layout_.size());
  copy(values.data(), parameters_.data(), values.size_bytes());
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

void CudaModel::get_accumulator(std::uint32_t accumulator, std::span<float> values) const {
  LOCKSTEP_CHECK(values.size() == layout_.size());
  staging_.join_uploads(stream_.get());
  copy(values.data(), accumulators_.at(accumulator).data(), values.size_bytes());
}

// The memory of the lane that is enqueued next.
CudaLaneMemory& CudaModel::next_lane() {
  if (lanes_enqueued_ == 0)
    staging_.join_uploads(stream_.get());  // they may be of the same accumulators
  if (lanes_enqueued_ == lane_memory_.size()) {
    lane_memory_.emplace_back(tokens_.size(), static_cast<std::size_t>(options_.model.vocab));
  }
  return lane_memory_[lanes_enqueued_];
}

// The passes know one shape only: rows that are missing are filled with a token whose loss does not
// count.
void CudaModel::send(const Batch& batch, CudaLaneMemory& lane) {
  check_batch(batch, options_.rows, options_.context, options_.model.vocab);
  if (batch.context != options_.context) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a batch with a context of {}, where it is {}", batch.context,
                            options_.context));
  }
  const std::size_t count = batch.tokens.size();
  const std::size_t rest = tokens_.size() - count;
  std::ranges::copy(batch.tokens, lane.tokens.data());
  std::ranges::copy(batch.targets, lane.targets.data());
  std::fill_n(lane.tokens.data() + count, rest, 0);
  std::fill_n(lane.targets.data() + count, rest, -1);
  const std::size_t bytes = tokens_.size() * sizeof(std::int32_t);
  enqueue_copy(tokens_.data(), lane.tokens.data(), bytes);
  enqueue_copy(targets_.data(), lane.targets.data(), bytes);
}

void CudaModel::send_token_index(CudaLaneMemory& lane) {
  index_tokens({lane.tokens.data(), tokens_.size()}, {lane.token_begin.data(), token_begin_.size()},
               {lane.token_places.data(), token_places_.size()});
  enqueue_copy(token_begin_.data(), lane.token_begin.data(),
               token_begin_.size() * sizeof(std::uint32_t));
  enqueue_copy(token_places_.data(), lane.token_places.data(),
               token_places_.size() * sizeof(std::uint32_t));
}

LossSum CudaModel::loss(const Batch& batch) {
  CudaLaneMemory& lane = next_lane();
  send(batch, lane);
  passes_->loss(parameters(), batch_memory(), stream_.get());
  enqueue_copy(&lane.record.data()->total, passes_->loss_total(), sizeof(cuda::LossTotal));
  wait("computing");
  return loss_sum(lane.record.data()->total);
}

// Later tokens do not change what comes before them, so the rest of the context may be anything.
void CudaModel::logits(std::span<const std::int32_t> tokens, std::span<float> out) {
  LOCKSTEP_CHECK(!tokens.empty() && tokens.size() <= index_of(options_.context) &&
                 out.size() == index_of(options_.model.vocab));
  std::vector<std::int32_t> row(index_of(options_.context), 0);
  const std::vector<std::int32_t> targets(row.size(), -1);
  std::ranges::copy(tokens, row.begin());
  send({row, targets, 1, options_.context}, next_lane());
  const void* logits =
      passes_->logits(parameters(), batch_memory(), tokens.size() - 1, stream_.get());
  if (options_.precision == Precision::kF32) return copy(out.data(), logits, out.size_bytes());
  std::vector<std::uint16_t> halves(out.size());
  copy(halves.data(), logits, halves.size() * sizeof(std::uint16_t));
  for (std::size_t i = 0; i < halves.size(); ++i) {
    out[i] = std::bit_cast<float>(static_cast<std::uint32_t>(halves[i]) << 16);  // bf16 to f32
  }
}

void CudaModel::merge(const CudaLaneShape& shape, Range range) {
  for (const auto& [into, from] : shape.merges) {
    cuda::add(range.size(), accumulators_.at(into).data() + range.begin,
              accumulators_.at(from).data() + range.begin, stream_.get());
  }
}

// Everything but the embedding's gradient.
void CudaModel::enqueue_lane(const CudaLaneShape& shape, bool capturing) {
  const unsigned flags = capturing ? cudaEventRecordExternal : cudaEventRecordDefault;
  std::size_t bucket = 0;
  cuda::stamp_time(&record_.data()->begun, stream_.get());
  passes_->gradient(
      parameters(), batch_memory(), accumulators_.at(shape.accumulator).data(),
      {.forward_done = [&] { cuda::stamp_time(&record_.data()->forward_done, stream_.get()); },
       .range_done =
           [&](Range range) {
             merge(shape, range);
             if (buckets_[bucket].range.end != range.end) return;
             check_cuda(
                 cudaEventRecordWithFlags(buckets_[bucket++].computed.get(), stream_.get(), flags),
                 "recording an event");
           }},
      stream_.get());
}

void CudaModel::gradient(const Batch& batch, std::uint32_t accumulator,
                         std::span<const AccumulatorMerge> merges, const GpuDelivery* delivery) {
  const CudaLaneShape shape = shape_of(accumulator, merges);
  CudaLaneMemory& lane = next_lane();
  send(batch, lane);
  lanes_[shape].run(stream_.get(), [&](bool capturing) { enqueue_lane(shape, capturing); });
  send_token_index(lane);  // while the GPU is at work
  passes_->embedding_gradient(batch_memory(), accumulators_.at(accumulator).data(), stream_.get());
  merge(shape, buckets_.back().range);
  check_cuda(cudaEventRecord(buckets_.back().computed.get(), stream_.get()), "recording an event");
  cuda::close_lane(static_cast<const cuda::LossTotal*>(passes_->loss_total()), record_.data(),
                   bad_losses_.data(), stream_.get());
  enqueue_copy(lane.record.data(), record_.data(), sizeof(cuda::LaneRecord));
  ++lanes_enqueued_;
  if (delivery != nullptr) deliver(*delivery);
}

void CudaModel::skip(std::uint32_t accumulator, std::span<const AccumulatorMerge> merges,
                     const GpuDelivery* delivery) {
  *next_lane().record.data() = {};
  check_cuda(cudaMemsetAsync(accumulators_.at(accumulator).data(), 0,
                             layout_.size() * sizeof(float), stream_.get()),
             "clearing a gradient");
  merge(shape_of(accumulator, merges), {0, layout_.size()});
  for (const Bucket& bucket : buckets_) {
    check_cuda(cudaEventRecord(bucket.computed.get(), stream_.get()), "recording an event");
  }
  ++lanes_enqueued_;
  if (delivery != nullptr) deliver(*delivery);
}

std::vector<LaneResult> CudaModel::finish_lanes() {
  wait("computing");
  std::vector<LaneResult> results;
  for (std::size_t i = 0; i < lanes_enqueued_; ++i) {
    const cuda::LaneRecord& record = *lane_memory_[i].record.data();
    results.push_back({loss_sum(record.total), seconds(record.begun, record.forward_done),
                       seconds(record.forward_done, record.backward_done)});
  }
  lanes_enqueued_ = 0;
  clear_bad_losses();
  return results;
}

// A second stream takes every bucket as soon as it is computed.
void CudaModel::deliver(const GpuDelivery& delivery) {
  const cudaStream_t stream = staging_.stream();
  std::vector<float*> accumulators;
  for (const std::uint32_t accumulator : delivery.accumulators)
    accumulators.push_back(accumulators_.at(accumulator).data());
  for (const Bucket& bucket : buckets_) {
    check_cuda(cudaStreamWaitEvent(stream, bucket.computed.get()), "delivering a gradient");
    if (delivery.reduce) {
      delivery.reduce(accumulators, bucket.range, stream);
    } else {
      for (const std::uint32_t accumulator : delivery.accumulators)
        staging_.download(accumulator, bucket.range);
    }
    check_cuda(cudaEventRecord(bucket.delivered.get(), stream), "delivering a gradient");
  }
  if (delivery.reduce) {
    check_cuda(cudaStreamWaitEvent(stream_.get(), buckets_.back().delivered.get()),
               "delivering a gradient");
    return;
  }
  for (const Bucket& bucket : buckets_) {
    wait_for(bucket.delivered.get(), "copying a gradient", patience());
    delivery.copied(bucket.range);
  }
}

void CudaModel::block_squares(Range range, std::span<double> sums) {
  LOCKSTEP_CHECK(range.begin % kNormBlock == 0 && sums.size() == norm_blocks(range.size()));
  staging_.join_uploads(stream_.get());
  cuda::block_squares(range.size(), accumulators_.front().data() + range.begin, squares_.data(),
                      stream_.get());
  enqueue_copy(host_squares_.data(), squares_.data(), sums.size_bytes());
  wait("computing");
  std::copy_n(host_squares_.data(), sums.size(), sums.begin());
}

void CudaModel::update(const UpdateRequest& request) {
  const AdamWOptions& adamw = options_.adamw;
  const auto t = static_cast<double>(request.step + 1);
  *host_update_.data() = {.tokens = static_cast<double>(request.tokens),
                          .clip = request.clip,
                          .norm = request.norm.value_or(0.0),
                          .rate = rounded(request.learning_rate / (1.0 - std::pow(adamw.beta1, t))),
                          .root_scale = rounded(1.0 / std::sqrt(1.0 - std::pow(adamw.beta2, t))),
                          .keep = rounded(1.0 - request.learning_rate * adamw.weight_decay),
                          .factor = 0,
                          .apply = 0};
  const bool given = request.norm.has_value();
  staging_.join_uploads(stream_.get());
  (given ? update_of_norm_ : update_with_norm_).run(stream_.get(), [&](bool) {
    enqueue_update(given);
  });
}

void CudaModel::enqueue_update(bool norm_given) {
  const cudaStream_t stream = stream_.get();
  const double* squares = nullptr;
  enqueue_copy(update_.data(), host_update_.data(), sizeof(cuda::UpdateState));
  if (!norm_given) {
    cuda::block_squares(layout_.size(), accumulators_.front().data(), squares_.data(), stream);
    squares = cuda::tree_sum(squares_.size(), squares_.data(), tree_scratch_.data(), stream);
  }
  cuda::decide_update(squares, bad_losses_.data(), update_.data(), stream);
  const AdamWOptions& adamw = options_.adamw;
  cuda::adamw({.state = update_.data(),
               .beta1 = rounded(adamw.beta1),
               .rest1 = rounded(1.0 - adamw.beta1),
               .beta2 = rounded(adamw.beta2),
               .rest2 = rounded(1.0 - adamw.beta2),
               .eps = rounded(adamw.eps),
               .first_element = shard_.begin,
               .sum = accumulators_.front().data(),
               .parameters = parameters_.data(),
               .first = first_.data(),
               .second = second_.data(),
               .rounded = rounded_.size() > 0 ? rounded_.data() : nullptr},
              pieces_.size(), pieces_.data(), stream);
  enqueue_copy(host_update_.data(), update_.data(), sizeof(cuda::UpdateState));
}

UpdateResult CudaModel::finish_update() {
  wait("updating");
  return {host_update_.data()->norm, host_update_.data()->apply != 0};
}

std::vector<Blake3Hash> CudaModel::tensor_hashes() const {
  hasher_.enqueue(parameters_.data(), stream_.get());
  wait("hashing");
  return hasher_.result();
}

std::optional<std::string> gpu_refusal() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return cudaGetErrorString(status);
  }
  if (count == 0) return "there is none";
  if (!cuda::has_code_for_gpu()) {
    cudaDeviceProp device{};
    check_cuda(cudaGetDeviceProperties(&device, 0), "asking for the kind of GPU");
    return fmt::format(
        "this build has no code for {} (compute capability {}.{}); "
        "-DLOCKSTEP_CUDA_ARCHITECTURES=all configures it for all from 8.0 on",
        device.name, device.major, device.minor);
  }
  return std::nullopt;
}

int gpu_count() {
  int count = 0;
  return !gpu_refusal() && cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

std::string gpu_name() {
  cudaDeviceProp device{};
  check_cuda(cudaGetDeviceProperties(&device, 0), "asking for the GPU's name");
  return device.name;
}

GpuVersions gpu_versions() {
  return {.name = gpu_name(),
          .cuda = std::to_string(CUDART_VERSION),
          .cublas_lt = std::to_string(cublasLtGetVersion()),
          .cudnn = std::to_string(cudnnGetVersion())};
}

std::unique_ptr<GpuModel> make_gpu_model(const GpuModelOptions& options) {
  return std::make_unique<CudaModel>(options);
}

}  // namespace lockstep
