#include "lockstep/comm/mpi/slices.h"

#include <algorithm>
#include <cstring>

namespace lockstep {

void MpiSlices::take_all() {
  data_ = vector_;
  counts_.clear();
  displacements_.clear();
  for (const Range& chunk : chunks_) {
    counts_.push_back(static_cast<int>(chunk.size()));
    displacements_.push_back(static_cast<int>(chunk.begin));
  }
}

void MpiSlices::take_round(std::size_t round, std::size_t slice, Scratch& scratch, bool fill) {
  data_ = scratch.get(chunks_.size() * slice * element_);
  taken_.clear();
  counts_.clear();
  displacements_.clear();
  int place = 0;
  for (const Range& chunk : chunks_) {
    const std::size_t begin = chunk.begin + round * slice;
    const Range some = common_part({begin, begin + slice}, chunk);
    if (fill && some.size() > 0) {
      std::memcpy(data_ + static_cast<std::size_t>(place) * element_,
                  vector_ + some.begin * element_, some.size() * element_);
    }
    taken_.push_back(some);
    counts_.push_back(static_cast<int>(some.size()));
    displacements_.push_back(place);
    place += counts_.back();
  }
}

void MpiSlices::put_round() {
  for (std::size_t i = 0; i < taken_.size(); ++i) {
    if (taken_[i].size() == 0) continue;
    std::memcpy(vector_ + taken_[i].begin * element_,
                data_ + static_cast<std::size_t>(displacements_[i]) * element_,
                taken_[i].size() * element_);
  }
}

}  // namespace lockstep
