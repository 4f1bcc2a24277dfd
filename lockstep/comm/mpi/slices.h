#pragma once

#include <cstddef>
#include <vector>

#include "lockstep/base/range.h"
#include "lockstep/comm/scratch.h"

namespace lockstep {

// One side of a collective, a vector cut into chunks, as MPI wants it: counts and displacements as
// ints. A vector too long for that goes in rounds; round k moves *slice* k of every chunk, through
// scratch memory.
class MpiSlices {
 public:
  MpiSlices(const std::byte* data, std::vector<Range> chunks, std::size_t element)
      : vector_(const_cast<std::byte*>(data)), chunks_(std::move(chunks)), element_(element) {}

  // The whole vector, where it is.
  void take_all();
  // Slice `round` of every chunk, side by side in `scratch`; filled if it is to be sent.
  void take_round(std::size_t round, std::size_t slice, Scratch& scratch, bool fill);
  // Puts what the last round received in its place.
  void put_round();

  std::byte* data() const { return data_; }
  const int* counts() const { return counts_.data(); }
  const int* displacements() const { return displacements_.data(); }

 private:
  std::byte* const vector_;
  const std::vector<Range> chunks_;
  const std::size_t element_;

  std::byte* data_ = nullptr;
  std::vector<Range> taken_;
  std::vector<int> counts_;
  std::vector<int> displacements_;
};

}  // namespace lockstep
