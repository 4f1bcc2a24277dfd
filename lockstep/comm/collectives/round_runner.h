#pragma once

#include "lockstep/comm/collectives/plan.h"
#include "lockstep/comm/scratch.h"
#include "lockstep/comm/transport/transport.h"

namespace lockstep {

// Carries out rounds of a plan whose received ranges are copied or merged one by one; kTree rounds
// are NodeReduction's. Merged ranges go through two segments of temporary memory each.
class RoundRunner {
 public:
  RoundRunner(Transport& transport, Scratch& scratch, std::size_t segment_bytes)
      : transport_(transport), scratch_(scratch), segment_bytes_(segment_bytes) {}

  // Sends ranges of `from`, receives into ranges of `to`; often the same buffer.
  void run(const Round& round, const std::byte* from, std::byte* to, DataType type, ReduceOp op,
           const MeshFrame& stamp, Deadline deadline) const;
  void run(const Plan& plan, BufferView data, ReduceOp op, const MeshFrame& stamp,
           Deadline deadline) const;

 private:
  Transport& transport_;
  Scratch& scratch_;
  const std::size_t segment_bytes_;
};

}  // namespace lockstep
