#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "lockstep/comm/types.h"

namespace lockstep::cli {

// What the ranks put into an all-reduce, and what must come out. Values are small whole numbers, so
// that every type adds them exactly in any order. They repeat with a prime period, so that a chunk
// in the wrong place is noticed.
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

}  // namespace lockstep::cli
