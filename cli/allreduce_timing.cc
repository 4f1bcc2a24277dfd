#include "cli/allreduce_timing.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lockstep/base/log.h"
#include "lockstep/base/random.h"
#include "lockstep/comm/call.h"

namespace lockstep::cli {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr std::size_t kMostWithoutBarrier = 64 * 1024;
constexpr int kFewestIterations = 3;
constexpr int kMostIterations = 20000;

constexpr std::size_t kPeriod = 4093;

// 256 is the last whole number before bf16 has gaps.
unsigned whole_value(std::size_t index, int rank, int world_size) {
  const int distinct = std::clamp(256 / world_size, 2, 13);
  return static_cast<unsigned>((index + 5 * static_cast<std::size_t>(rank)) %
                               static_cast<std::size_t>(distinct));
}

// As the elements of a gradient are: about a normal distribution, and random in nearly all bits.
// They are so few that f32 adds those of all ranks exactly.
double gradient_value(std::size_t index, int rank, int world_size) {
  const int bits =
      std::max(23 - static_cast<int>(std::bit_width(static_cast<unsigned>(world_size - 1))), 4);
  std::int64_t sum = -(std::int64_t{2} << bits);
  for (const std::uint32_t word :
       philox({static_cast<std::uint32_t>(index)}, {static_cast<std::uint32_t>(rank)})) {
    sum += word >> (32 - bits);
  }
  return static_cast<double>(sum) * 0x1p-30;
}

double value_of(DataType type, std::size_t index, int rank, int world_size) {
  return type == DataType::kF32 ? gradient_value(index, rank, world_size)
                                : whole_value(index, rank, world_size);
}

std::uint16_t to_f16(unsigned value) {
  if (value == 0) return 0;
  const int exponent = std::bit_width(value) - 1;
  return static_cast<std::uint16_t>(((exponent + 15) << 10) | ((value << (10 - exponent)) & 0x3ff));
}

std::uint16_t to_bf16(unsigned value) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(value)) >> 16);
}

template <typename T>
void put(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

void put_value(DataType type, std::byte* to, double value) {
  switch (type) {
    case DataType::kF32: return put(to, static_cast<float>(value));
    case DataType::kF64: return put(to, value);
    case DataType::kF16: return put(to, to_f16(static_cast<unsigned>(value)));
    case DataType::kBf16: return put(to, to_bf16(static_cast<unsigned>(value)));
    case DataType::kI32: return put(to, static_cast<std::int32_t>(value));
    case DataType::kI64: return put(to, static_cast<std::int64_t>(value));
    case DataType::kU8: return put(to, static_cast<std::uint8_t>(value));
  }
}

// What the ranks put into an all-reduce, and what must come out. Every type adds these values
// exactly in any order: those of f32 are like a gradient's, all others are small whole numbers.
// They repeat with a prime period, so that a chunk in the wrong place is noticed.
class AllReducePattern {
 public:
  AllReducePattern(DataType type, int rank, int world_size);

  void write_input(BufferView data) const;
  // The first element that differs from the sum of all ranks' input.
  std::optional<std::size_t> find_difference(ConstBufferView data) const;

 private:
  const DataType type_;
  std::vector<std::byte> input_;     // one period
  std::vector<std::byte> expected_;  // likewise
};

AllReducePattern::AllReducePattern(DataType type, int rank, int world_size)
    : type_(type), input_(kPeriod * size_of(type)), expected_(kPeriod * size_of(type)) {
  for (std::size_t i = 0; i < kPeriod; ++i) {
    double sum = 0;
    for (int r = 0; r < world_size; ++r) sum += value_of(type, i, r, world_size);
    put_value(type, input_.data() + i * size_of(type), value_of(type, i, rank, world_size));
    put_value(type, expected_.data() + i * size_of(type), sum);
  }
}

void AllReducePattern::write_input(BufferView data) const {
  for (std::size_t done = 0; done < data.bytes(); done += input_.size()) {
    std::memcpy(data.data() + done, input_.data(), std::min(input_.size(), data.bytes() - done));
  }
}

std::optional<std::size_t> AllReducePattern::find_difference(ConstBufferView data) const {
  for (std::size_t done = 0; done < data.bytes(); done += expected_.size()) {
    const std::size_t count = std::min(expected_.size(), data.bytes() - done);
    if (std::memcmp(data.data() + done, expected_.data(), count) == 0) continue;
    const auto [at, unused] =
        std::mismatch(data.data() + done, data.data() + done + count, expected_.data());
    return static_cast<std::size_t>(at - data.data()) / size_of(type_);
  }
  return std::nullopt;
}

class AllReduceTimer {
 public:
  AllReduceTimer(Communicator& communicator, std::size_t bytes, const TimingOptions& options)
      : communicator_(communicator),
        options_(options),
        pattern_(options.type, communicator.rank(), communicator.world_size()),
        memory_(options.plain_memory ? Buffer::heap(bytes) : communicator.allocate(bytes)),
        data_(memory_.data(), bytes / size_of(options.type), options.type) {
    call_options_.algorithm = options.algorithm;
  }

  Timing run() {
    Timing timing;
    timing.algorithm = chosen_algorithm();
    iterate();
    timing.correct = check();

    std::vector<double> times(static_cast<std::size_t>(choose_iterations()));
    for (double& time : times) time = iterate();
    timing.correct = check() && timing.correct;

    communicator_.all_reduce(std::span(times), ReduceOp::kMax);
    std::ranges::sort(times);
    timing.least = Seconds(times.front());
    timing.median = Seconds(times[times.size() / 2]);
    timing.p99 = Seconds(times[times.size() * 99 / 100]);
    return timing;
  }

 private:
  Algorithm chosen_algorithm() {
    return communicator_.algorithm_for(calls::all_reduce(data_, ReduceOp::kSum, call_options_));
  }

  // In seconds, on this rank.
  double iterate() {
    pattern_.write_input(data_);
    if (data_.bytes() > kMostWithoutBarrier) communicator_.barrier();
    const auto start = Clock::now();
    communicator_.all_reduce(data_, ReduceOp::kSum, call_options_);
    return Seconds(Clock::now() - start).count();
  }

  bool check() {
    const auto wrong = pattern_.find_difference(data_);
    if (wrong) {
      log(LogLevel::kError, "all_reduce of {} bytes: element {} is wrong on rank {}", data_.bytes(),
          *wrong, communicator_.rank());
    }
    std::vector<std::int32_t> right = {wrong ? 0 : 1};
    communicator_.all_reduce(std::span(right), ReduceOp::kMin);
    return right[0] == 1;
  }

  // Warms up; rank 0's estimate holds for all.
  int choose_iterations() {
    const int trials = data_.bytes() <= kMostWithoutBarrier ? 50 : 2;
    const auto start = Clock::now();
    for (int i = 0; i < trials; ++i) iterate();
    const double each = Seconds(Clock::now() - start).count() / trials;
    std::vector<std::int32_t> chosen = {options_.iterations.value_or(
        static_cast<int>(std::clamp(Seconds(options_.duration).count() / each,
                                    double{kFewestIterations}, double{kMostIterations})))};
    communicator_.broadcast(std::span(chosen), 0);
    return chosen[0];
  }

  Communicator& communicator_;
  const TimingOptions& options_;
  const AllReducePattern pattern_;
  const Buffer memory_;
  const BufferView data_;
  CallOptions call_options_;
};

}  // namespace

Timing time_all_reduce(Communicator& communicator, std::size_t bytes,
                       const TimingOptions& options) {
  return AllReduceTimer(communicator, bytes, options).run();
}

}  // namespace lockstep::cli
