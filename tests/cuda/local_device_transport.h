#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "lockstep/base/cuda/runtime.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/nccl/combine.h"
#include "lockstep/comm/nccl/device_transport.h"

namespace lockstep {

// Where the ranks of LocalDeviceTransport meet.
class LocalDeviceHub {
 public:
  // A send: what it may be read after, and, once it is received, what its sender has to wait for.
  struct Post {
    const float* data = nullptr;
    std::size_t count = 0;
    std::shared_ptr<const CudaEvent> ready;
    std::shared_ptr<const CudaEvent> received;  // guarded by the hub
  };
  using PostPointer = std::shared_ptr<Post>;

  explicit LocalDeviceHub(int world_size_) : world_size(world_size_) {}

  void post(int from, int to, PostPointer post) {
    const std::lock_guard lock(mutex_);
    posts_[{from, to}].push_back(std::move(post));
    changed_.notify_all();
  }
  PostPointer take(int from, int to) {
    std::unique_lock lock(mutex_);
    auto& queue = posts_[{from, to}];
    wait(lock, [&] { return !queue.empty(); });
    PostPointer post = std::move(queue.front());
    queue.pop_front();
    return post;
  }
  void set_received(Post& post, std::shared_ptr<const CudaEvent> event) {
    const std::lock_guard lock(mutex_);
    post.received = std::move(event);
    changed_.notify_all();
  }
  std::shared_ptr<const CudaEvent> wait_received(const Post& post) {
    std::unique_lock lock(mutex_);
    wait(lock, [&] { return post.received != nullptr; });
    return post.received;
  }
  void check() {
    const std::lock_guard lock(mutex_);
    if (aborted_) throw Error(ErrorCode::kAborted, "the test's transport was aborted");
  }
  void abort() noexcept {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
    changed_.notify_all();
  }
  // Transfers that somebody sent and nobody received.
  std::size_t left_over() {
    const std::lock_guard lock(mutex_);
    std::size_t count = 0;
    for (const auto& [ends, queue] : posts_) count += queue.size();
    return count;
  }

  const int world_size;

 private:
  template <typename Ready>
  void wait(std::unique_lock<std::mutex>& lock, Ready ready) {
    const auto until = Deadline::after(std::chrono::seconds(20)).time();
    if (!changed_.wait_until(lock, until, [&] { return aborted_ || ready(); })) {
      throw Error(ErrorCode::kTimeout, "a rank of the test did not come");
    }
    if (aborted_) throw Error(ErrorCode::kAborted, "the test's transport was aborted");
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<int, int>, std::deque<PostPointer>> posts_;  // guarded by mutex_
  bool aborted_ = false;                                          // guarded by mutex_
};

// A transport between threads that share one GPU, each with a stream of its own, which NCCL does
// not do. Only events order the streams, as they do between real GPUs.
class LocalDeviceTransport final : public DeviceTransport {
 public:
  LocalDeviceTransport(std::shared_ptr<LocalDeviceHub> hub, int rank)
      : hub_(std::move(hub)), rank_(rank) {}

  int rank() const override { return rank_; }
  int world_size() const override { return hub_->world_size; }

  void exchange(std::span<const DeviceSend> sends, std::span<const DeviceRecv> recvs,
                DeviceStream stream) override {
    std::vector<LocalDeviceHub::PostPointer> posts;
    const auto ready = mark(stream);
    for (const DeviceSend& send : sends) {
      posts.push_back(std::make_shared<LocalDeviceHub::Post>());
      *posts.back() = {send.data, send.count, ready, nullptr};
      hub_->post(rank_, send.peer, posts.back());
    }
    for (const DeviceRecv& recv : recvs) {
      const auto post = hub_->take(recv.peer, rank_);
      if (post->count != recv.count) {
        throw Error(ErrorCode::kSizeMismatch, "a send and its receive have different sizes");
      }
      check_cuda(cudaStreamWaitEvent(stream, post->ready->get()), "waiting for a sender");
      check_cuda(cudaMemcpyAsync(recv.data, post->data, recv.count * sizeof(float),
                                 cudaMemcpyDeviceToDevice, stream),
                 "receiving");
      hub_->set_received(*post, mark(stream));
    }
    for (const auto& post : posts) {
      check_cuda(cudaStreamWaitEvent(stream, hub_->wait_received(*post)->get()),
                 "waiting for a receiver");
    }
  }

  // In the order of the ranks.
  void all_reduce(float* data, std::size_t count, DeviceStream stream) override {
    std::vector<DeviceSend> sends;
    std::vector<DeviceRecv> recvs;
    std::vector<const float*> inputs;
    std::vector<CombineStep> program;
    for (int rank = 0; rank < hub_->world_size; ++rank) {
      inputs.push_back(data);
      program.push_back({.push = true});
      if (rank > 0) program.push_back({.push = false});
      if (rank == rank_) continue;
      kept_.emplace_back(count, "a test");
      inputs.back() = kept_.back().data();
      sends.push_back({rank, data, count});
      recvs.push_back({rank, kept_.back().data(), count});
    }
    exchange(sends, recvs, stream);
    cuda::combine(program, inputs, data, count, stream);
  }

  void check() override { hub_->check(); }
  void abort() noexcept override { hub_->abort(); }

 private:
  static std::shared_ptr<const CudaEvent> mark(DeviceStream stream) {
    auto event = std::make_shared<const CudaEvent>(make_event());
    check_cuda(cudaEventRecord(event->get(), stream), "marking a place on a stream");
    return event;
  }

  const std::shared_ptr<LocalDeviceHub> hub_;
  const int rank_;
  std::vector<DeviceArray<float>> kept_;
};

}  // namespace lockstep
