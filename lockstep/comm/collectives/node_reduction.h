#pragma once

#include <optional>
#include <span>

#include "lockstep/comm/scratch.h"
#include "lockstep/comm/transport/transport.h"
#include "lockstep/comm/tree_inputs.h"

namespace lockstep {

// The round of a reduction in which every rank sends chunk r of its partials to rank r, and
// combines its own chunk of everybody's partials along the canonical tree, segment by segment as
// they arrive. The temporary memory is two segments per partial received: a rank that is far ahead
// waits rather than fill the memory of one that is behind. Where all want the whole vector, what is
// combined follows behind the partials in the same round.
struct NodeReduction {
  DataType type = DataType::kF32;
  ReduceOp op = ReduceOp::kSum;
  const TreeInputs* inputs = nullptr;
  std::span<const std::byte* const> partials;  // of this rank
  std::span<const Range> chunks;               // per rank, in elements
  std::byte* out = nullptr;  // this rank's chunk; may lie in a partial, at its place
  // The whole vector, where the chunks of the others shall come, too, or null. It may be a partial.
  std::byte* gathered = nullptr;
  bool one_thread = false;  // sends and receives; `gathered` needs it
  std::size_t segment_bytes = 0;
  bool check_finite = false;

  // Returns the first element of its own chunk that is not finite, if asked to look for it.
  std::optional<std::size_t> run(Transport& transport, Scratch& scratch, const MeshFrame& stamp,
                                 Deadline deadline) const;
};

}  // namespace lockstep
