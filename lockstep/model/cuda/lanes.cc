#include <fmt/format.h>

#include <algorithm>
#include <cstddef>

#include "lockstep/base/error.h"
#include "lockstep/model/cuda/model.h"
#include "lockstep/model/token_index.h"

namespace lockstep {
namespace {

constexpr int kRunsBeforeGraph = 2;  // that are enqueued call by call

CudaLaneShape shape_of(std::uint32_t accumulator, std::span<const AccumulatorMerge> merges) {
  return {accumulator, {merges.begin(), merges.end()}};
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
  return {lane.record.data()->total.loss, lane.record.data()->total.tokens};
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
    results.push_back({{record.total.loss, record.total.tokens},
                       seconds(record.begun, record.forward_done),
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

}  // namespace lockstep
