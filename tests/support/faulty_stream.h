#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/transport/stream.h"

namespace lockstep::test {

// What shall go wrong on a rank of a local group. Operations are the reads and writes of its
// streams that move at least a byte, counted from 0.
struct LocalFaults {
  std::optional<std::size_t> fail_at;     // this operation throws Error{kIo}
  std::optional<std::size_t> exhaust_at;  // this one throws std::bad_alloc
  std::optional<std::size_t> drop_at;     // from this one on, what it writes never arrives
  std::optional<std::size_t> delay_at;    // this one waits for `delay` first
  std::chrono::nanoseconds delay{0};
};

// Counts the operations of a rank and makes the chosen ones go wrong.
class FaultPlan {
 public:
  explicit FaultPlan(const LocalFaults& faults) : faults_(faults) {}

  // Called before an operation that would move bytes; true if what it writes shall be lost.
  bool next() {
    const std::size_t index = count_.fetch_add(1);
    if (faults_.fail_at == index) throw Error(ErrorCode::kIo, "injected failure");
    if (faults_.exhaust_at == index) throw std::bad_alloc();
    if (faults_.delay_at == index) std::this_thread::sleep_for(faults_.delay);
    return faults_.drop_at && index >= *faults_.drop_at;
  }

 private:
  const LocalFaults faults_;
  std::atomic<std::size_t> count_{0};
};

class FaultyStream final : public Stream {
 public:
  FaultyStream(std::unique_ptr<Stream> inner, std::shared_ptr<FaultPlan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)) {}

  std::size_t write_some(std::span<const std::byte> head,
                         std::span<const std::byte> body) override {
    if (plan_->next()) return head.size() + body.size();
    return inner_->write_some(head, body);
  }
  std::size_t read_some(std::span<std::byte> head, std::span<std::byte> body) override {
    const std::size_t moved = inner_->read_some(head, body);
    if (moved > 0) plan_->next();
    return moved;
  }
  bool prepare_wait(Direction direction, std::vector<pollfd>& fds) override {
    return inner_->prepare_wait(direction, fds);
  }
  void finish_wait(Direction direction) override { inner_->finish_wait(direction); }

 private:
  const std::unique_ptr<Stream> inner_;
  const std::shared_ptr<FaultPlan> plan_;
};

// For LocalOptions::wrap_stream; `faults` are those of each rank.
inline std::function<std::unique_ptr<Stream>(int, std::unique_ptr<Stream>)> make_faulty(
    const std::vector<LocalFaults>& faults) {
  std::vector<std::shared_ptr<FaultPlan>> plans;
  for (const LocalFaults& each : faults) plans.push_back(std::make_shared<FaultPlan>(each));
  return [plans](int rank, std::unique_ptr<Stream> stream) {
    return std::make_unique<FaultyStream>(std::move(stream), plans.at(index_of(rank)));
  };
}

}  // namespace lockstep::test
