#include <fmt/format.h>

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/model/cuda/cuda_model.h"
#include "lockstep/model/token_index.h"

namespace lockstep {
namespace {

constexpr int kLanesBeforeGraph = 2;  // that are enqueued call by call

}  // namespace

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

void CudaModel::merge(const CudaLaneShape& shape, Range range) {
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
void CudaModel::enqueue_lane(const CudaLaneShape& shape, bool capturing) {
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
void CudaModel::run_lane(const CudaLaneShape& shape) {
  CudaCapturedLane& lane = lanes_[shape];
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
  CudaLaneShape shape{slot, {}};
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
  CudaLaneShape shape{slot, {}};
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

}  // namespace lockstep
