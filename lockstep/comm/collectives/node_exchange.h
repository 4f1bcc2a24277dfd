#pragma once

#include <span>
#include <vector>

#include "lockstep/comm/buffer.h"
#include "lockstep/comm/call.h"
#include "lockstep/comm/transport/transport.h"

namespace lockstep {

// Scratch memory that grows to the largest size asked for and is kept.
class Scratch {
 public:
  std::byte* get(std::size_t bytes) {
    if (buffer_.bytes() < bytes) buffer_ = Buffer::heap(bytes);
    return buffer_.data();
  }

 private:
  Buffer buffer_;
};

// Which values a tree reduction combines: rank r brings rows_of[r] *rows*, whole vectors, and leaf
// i of `program` is row sources[i].row of rank sources[i].rank.
struct TreeInputs {
  struct Source {
    int rank;
    std::size_t row;
  };
  std::vector<std::size_t> rows_of;
  std::size_t most_rows = 1;
  std::vector<Source> sources;
  std::vector<CombineStep> program;
  int leaves = 1;

  // One row per rank: leaf = rank.
  static TreeInputs ranks(int world_size);
  // The partial sums of the nodes that each rank owns.
  static TreeInputs nodes(const LeafOwners& owners, int world_size);
};

// The round of a reduction in which every rank sends its rows' part of pieces[r] to rank r and
// combines pieces[rank] of everybody's rows along the canonical tree, segment by segment as they
// arrive. Temporary memory: two segments per row received.
struct NodeExchange {
  DataType type = DataType::kF32;
  ReduceOp op = ReduceOp::kSum;
  const TreeInputs* inputs = nullptr;
  std::span<const std::byte* const> rows;  // of this rank
  std::span<const Range> pieces;           // in elements
  std::byte* out = nullptr;                // this rank's piece; may lie in a row, at its place
  std::size_t segment_bytes = 0;
  bool check_finite = false;

  // Returns the first element of the own piece that is not finite, if asked to look for it.
  std::optional<std::size_t> run(Transport& transport, Scratch& scratch, const MeshFrame& stamp,
                                 Deadline deadline) const;
};

}  // namespace lockstep
