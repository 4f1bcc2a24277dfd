#include "lockstep/server/server_run.h"

#include <utility>

namespace lockstep {
namespace {

ServerOptions for_ranks(ServerOptions options, int stop_fd) {
  options.settings.mode = Mode::kLanes;
  options.settings.total_samples = 0;
  options.stop_fd = stop_fd;
  return options;
}

}  // namespace

ServerRun::ServerRun(Socket listener, const ServerOptions& options)
    : address_(listener.local_address()),
      server_(
          std::make_unique<GradientServer>(std::move(listener), for_ranks(options, stop_.fd()))) {
  start();
}

ServerRun::ServerRun(const ServerOptions& options) {
  LocalStar star = make_local_star(for_ranks(options, stop_.fd()));
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
    server_->serve_ranks();
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
