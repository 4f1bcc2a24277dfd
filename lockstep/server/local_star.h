#pragma once

#include <memory>
#include <vector>

#include "lockstep/server/gradient_server.h"

namespace lockstep {

// A gradient server and its workers inside one process, over channels instead of connections: one
// thread drives the server, worker i builds its WorkerClient from ends[i] on a thread of its own.
struct LocalStar {
  std::unique_ptr<GradientServer> server;
  std::vector<Socket> ends;
};
LocalStar make_local_star(const ServerOptions& options);

}  // namespace lockstep
