#include "lockstep/server/server_run.h"

#include <utility>

namespace lockstep {

ServerRun::ServerRun(Socket listener, HostOptions job, std::size_t window)
    : address_(listener.local_address()) {
  job.patience = 10 * job.timeout;
  job.fixed_centre = true;
  control_ = host_job(job, {std::move(listener), {Purpose::kRendezvous, Purpose::kServer}});
  shared_control_ = control_;
  server_ = std::make_unique<RankServer>(
      *control_,
      RankServerOptions{.timeout = job.timeout, .window = window, .stop_fd = stop_.fd()});
  const auto end = [this](std::optional<Error> error) {
    server_.reset();  // closes what they still have
    control_.reset();
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
    done_ = true;
    ended_.notify_all();
  };
  const auto serve = [this, end] {
    server_->serve();
    end(std::nullopt);
  };
  thread_.start("the gradient server's thread", serve, end);
}

ServerRun::~ServerRun() { finish(Deadline::after({})); }

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
