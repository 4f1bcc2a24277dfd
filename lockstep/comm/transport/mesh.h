#pragma once

#include <memory>

#include "lockstep/comm/transport/transport.h"
#include "lockstep/comm/types.h"
#include "lockstep/net/job/job.h"

namespace lockstep {

// What carries the bytes between two ranks of a job.
enum class Medium : std::uint8_t {
  kTcp,     // always sockets
  kShared,  // always shared memory; Error{kNoConnection} if a rank is on another host
  kAuto,    // shared memory between ranks of the same host, sockets otherwise
};

// A full mesh among the ranks of `job`; connections open on first use, those to newcomers at once.
// When all ranks share memory the transport has a SharedSpace, and collectives use it. A network
// that acknowledges nothing for `timeout` fails the job.
std::unique_ptr<Transport> make_mesh(JoinedJob job, Medium medium,
                                     Deadline::Clock::duration timeout,
                                     WireCompression compression = WireCompression::kAuto);

}  // namespace lockstep
