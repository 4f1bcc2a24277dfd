#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/index.h"
#include "lockstep/server/average.h"
#include "lockstep/wire/gradient_messages.h"

namespace lockstep {

// One round of the gradient server: every worker sends the same part of a step's gradient, the
// average goes back to all.
enum class RoundKind : std::uint8_t { kVector, kBlock, kComponent };

struct RoundKey {
  RoundKind kind{};
  std::uint64_t step = 0;
  std::optional<std::uint32_t> block;  // blocks; nothing: the last block, whichever that is
  std::uint8_t component = 0;          // components: 0 lm_head, 1 final_norm, 2 embedding

  bool operator==(const RoundKey&) const = default;
};
// "the gradient vector of step 3", "block 5 of step 3", "component 2 (embedding) of step 3"
std::string describe(const RoundKey& key);
inline constexpr std::uint8_t kComponents = 3;

// What a worker says of its samples, with a vector.
struct WorkerTotals {
  float loss = 0;
  std::uint64_t correct = 0;
  std::uint64_t total = 0;
  bool operator==(const WorkerTotals&) const = default;
};

struct RoundResult {
  RoundKey key;
  std::span<const float> gradients;  // averaged; `keep` holds them
  std::shared_ptr<const void> keep;
  float loss = 0;  // vectors: weighted by samples
  std::uint64_t correct = 0;
  std::uint64_t total = 0;
  std::vector<WorkerTotals> workers;           // vectors: by worker
  std::vector<std::uint32_t> component_sizes;  // blocks
  std::uint32_t num_blocks = 0;
  std::chrono::nanoseconds reduce_time{};  // from the call to the last check
};

// The checks and the arithmetic of a round; no I/O. Every check that fails throws an Error that
// names the worker at fault and both values.
class AverageRound {
 public:
  // `names[w]` is how messages call worker w. `average` is for vectors; blocks and components carry
  // no counts, so theirs is always the mean.
  AverageRound(const RoundKey& key, Average average, std::vector<std::string> names);

  const RoundKey& key() const { return key_; }
  // A gradient of this kind and step is expected from the worker, and no other.
  void check_tag(int worker, WireTag tag) const;

  // The fields ahead of a worker's elements.
  void begin(int worker, const BulkHead& head);
  // The numbers of a vector's foot, known before the foot itself. Only once, and only after
  // begin().
  void set_totals(int worker, float loss, std::uint64_t correct, std::uint64_t total);
  // The worker's elements have to wait for its foot, which has its weight.
  bool waits_for_totals(int worker) const;

  // Nothing until the first worker has begun.
  std::optional<std::uint64_t> count() const { return count_; }
  void set_output(float* elements) { output_ = elements; }
  // All have begun, all weights are known, the output is there: advance() may be called.
  bool ready() const;
  // The next `count` elements of every worker.
  void advance(std::span<const std::byte* const> inputs, std::size_t count);
  // Behind a worker's last element.
  void end(int worker, const BulkFoot& foot);

  bool begun(int worker) const { return workers_[index_of(worker)].begun; }
  bool ended(int worker) const { return workers_[index_of(worker)].ended; }
  bool complete() const;
  // Everything but elements and time.
  RoundResult result() const;

 private:
  struct Worker {
    std::string name;
    bool begun = false;
    bool ended = false;
    std::optional<WorkerTotals> totals;
  };

  [[noreturn]] void fail(ErrorCode code, int worker, const std::string& what) const;
  void check_block(int worker, const BulkHead& head);
  void compare_with_first(int worker, const BulkHead& head);
  std::string element_name(std::uint64_t index) const;
  void prepare();

  RoundKey key_;
  const Average average_;
  std::vector<Worker> workers_;
  std::optional<std::uint64_t> count_;
  int first_ = -1;  // who has begun first
  BulkHead first_head_;
  float* output_ = nullptr;
  std::optional<Averager> averager_;
  std::uint64_t done_ = 0;
};

}  // namespace lockstep
