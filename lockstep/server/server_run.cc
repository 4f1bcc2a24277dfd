#include "lockstep/server/server_run.h"

#include <utility>

#include "lockstep/server/server_engine.h"

namespace lockstep {
namespace {

ServerOptions in_lanes(ServerOptions options, int stop_fd) {
  options.settings.mode = Mode::kLanes;
  options.stop_fd = stop_fd;
  return options;
}

}  // namespace

std::uint64_t serve_lanes(
    GradientServer& server, std::uint64_t most,
    const std::function<void(std::uint64_t step, const LaneStep::Piece& last)>& after) {
  server.wait_for_workers();
  std::uint64_t step = 0;
  bool last = false;
  while (!last && step < most) {
    server.send_shards(step);
    const LaneStep::Piece piece = server.reduce_lanes(step);
    last = piece.sum.tail[RoundControl::kLast] > 0;
    if (after) after(step, piece);
    ++step;
  }
  server.shutdown();
  return step;
}

ServerRun::ServerRun(Socket listener, const ServerOptions& options)
    : address_(listener.local_address()),
      server_(
          std::make_unique<GradientServer>(std::move(listener), in_lanes(options, stop_.fd()))) {
  start();
}

ServerRun::ServerRun(const ServerOptions& options) {
  LocalStar star = make_local_star(in_lanes(options, stop_.fd()));
  server_ = std::move(star.server);
  ends_ = std::move(star.ends);
  start();
}

ServerRun::~ServerRun() { finish(Deadline::after({})); }

void ServerRun::start() {
  const auto end = [this](std::optional<Error> error) {
    server_.reset();  // closes what it still has
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
    done_ = true;
    ended_.notify_all();
  };
  const auto serve = [this, end] {
    serve_lanes(*server_, UINT64_MAX);
    end(std::nullopt);
  };
  thread_.start("the gradient server's thread", serve, end);
}

std::optional<Error> ServerRun::finish(Deadline deadline) {
  bool stopped = false;
  {
    std::unique_lock lock(mutex_);
    stopped = !ended_.wait_until(lock, deadline.time(), [this] { return done_; });
  }
  if (stopped) stop_.set();
  thread_.join();
  if (stopped && error_ && error_->code() == ErrorCode::kAborted) return std::nullopt;
  return error_;
}

}  // namespace lockstep
