#include "lockstep/comm/kernels/outcome.h"

#include "lockstep/comm/buffer.h"
#include "lockstep/comm/kernels/kernels.h"

namespace lockstep {

Outcome outcome_of(const Call& call, int rank) {
  const bool to_root =
      call.collective == Collective::kReduce || call.collective == Collective::kGather;
  if (!call.options.check_finite || (to_root && rank != call.root)) return {};
  const std::size_t found = find_non_finite(call.out.type(), call.out.data(), call.out.count());
  if (found == call.out.count()) return {};
  return {found};
}

Outcome run_alone(const Call& call) {
  if (call.owners.empty()) {
    copy_bytes(call.out.data(), call.in.data(), call.out.bytes());
  } else {
    // One rank owns every lane, so its one partial is the sum.
    copy_bytes(call.out.data(), call.partials[0].data(), call.out.bytes());
    if (call.op == ReduceOp::kMean && call.owners.size() > 1) {
      finish_mean(call.out.type(), call.out.data(), call.out.count(),
                  static_cast<int>(call.owners.size()));
    }
  }
  return outcome_of(call, /*rank=*/0);
}

}  // namespace lockstep
