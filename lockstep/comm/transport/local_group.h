#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/comm/communicator.h"
#include "lockstep/comm/transport/transport.h"

namespace lockstep {

// What shall go wrong on a rank of a local group, for tests. Operations are the reads and writes of
// its streams that move at least a byte, counted from 0.
struct LocalFaults {
  std::optional<std::size_t> fail_at;   // this operation throws Error{kIo}
  std::optional<std::size_t> drop_at;   // from this one on, what it writes never arrives
  std::optional<std::size_t> delay_at;  // this one waits for `delay` first
  std::chrono::nanoseconds delay{0};
};

struct LocalOptions {
  std::vector<LocalFaults> faults;  // per rank; empty: none
  // Without it the ranks exchange messages only, as if they did not share memory.
  bool shared_memory = true;
};

// A group of ranks as threads of this process (the seeds' SimulatedBackend): rank i is element i,
// to be used by its own thread. The group fails as one; the first cause reaches every rank.
std::vector<std::unique_ptr<Transport>> make_local_group(int world_size,
                                                         const LocalOptions& options = {});

}  // namespace lockstep
