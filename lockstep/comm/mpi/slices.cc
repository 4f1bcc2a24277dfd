#include "lockstep/comm/mpi/slices.h"

#include <algorithm>
#include <cstring>

namespace lockstep {

void MpiSlices::take_all() {
  data_ = vector_;
  counts_.clear();
  displacements_.clear();
  for (const Piece& piece : pieces_) {
    counts_.push_back(static_cast<int>(piece.count));
    displacements_.push_back(static_cast<int>(piece.begin));
  }
}

void MpiSlices::take_round(std::size_t round, std::size_t slice, Scratch& scratch, bool fill) {
  data_ = scratch.get(pieces_.size() * slice * element_);
  taken_.clear();
  counts_.clear();
  displacements_.clear();
  int place = 0;
  for (const Piece& piece : pieces_) {
    const std::size_t skipped = std::min(piece.count, round * slice);
    const Piece part{piece.begin + skipped, std::min(slice, piece.count - skipped)};
    if (fill && part.count > 0) {
      std::memcpy(data_ + static_cast<std::size_t>(place) * element_,
                  vector_ + part.begin * element_, part.count * element_);
    }
    taken_.push_back(part);
    counts_.push_back(static_cast<int>(part.count));
    displacements_.push_back(place);
    place += counts_.back();
  }
}

void MpiSlices::put_round() {
  for (std::size_t i = 0; i < taken_.size(); ++i) {
    if (taken_[i].count == 0) continue;
    std::memcpy(vector_ + taken_[i].begin * element_,
                data_ + static_cast<std::size_t>(displacements_[i]) * element_,
                taken_[i].count * element_);
  }
}

}  // namespace lockstep
