#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "lockstep/comm/transport/stream.h"
#include "lockstep/comm/transport/transport.h"

namespace lockstep {

struct LocalOptions {
  // Without it the ranks exchange messages only, as if they did not share memory.
  bool shared_memory = true;
  // For tests: the host that each rank pretends to be on. Ranks of different hosts exchange
  // messages only. Empty: all are on one.
  std::vector<int> hosts;
  // For tests: what a rank of the group uses instead of a stream of its own. Null: the stream.
  std::function<std::unique_ptr<Stream>(int rank, std::unique_ptr<Stream> stream)> wrap_stream;
};

// A group of ranks as threads of this process (SimulatedBackend in the original
// crates): rank i is element i,
// to be used by its own thread. The group fails as one; the first cause reaches every rank.
std::vector<std::unique_ptr<Transport>> make_local_group(int world_size,
                                                         const LocalOptions& options = {});

}  // namespace lockstep
