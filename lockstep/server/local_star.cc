#include "lockstep/server/local_star.h"

#include <fmt/format.h>

#include <utility>

#include "lockstep/net/socket/unix_socket.h"

namespace lockstep {

LocalStar make_local_star(const ServerOptions& options) {
  LocalStar star;
  star.server = std::make_unique<GradientServer>(std::nullopt, options);
  for (int worker = 0; worker < options.workers; ++worker) {
    auto [ours, theirs] = unix_socket_pair();
    ours.set_peer(fmt::format("thread {}", worker), worker);
    theirs.set_peer("the coordinator (this process)", -1);
    star.server->adopt(std::move(ours), worker);
    star.ends.push_back(std::move(theirs));
  }
  return star;
}

}  // namespace lockstep
