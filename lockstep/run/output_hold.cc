#include "lockstep/run/output_hold.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/files/storage.h"
#include "lockstep/net/job/handshake.h"

namespace lockstep {
namespace {

// A takeover needs a whole term in which the lease stands still, and a little more.
constexpr int kPatience = 3;
constexpr std::chrono::seconds kShortestTerm{1};

}  // namespace

OutputHold::OutputHold(std::string folder, std::string job, std::chrono::nanoseconds term)
    : folder_(std::move(folder)),
      job_(std::move(job)),
      member_(to_string(random_member_id())),
      term_(std::max<std::chrono::nanoseconds>(term, kShortestTerm)) {}

Lease::Options OutputHold::options(std::uint32_t generation) const {
  return {.folder = folder_,
          .job = job_,
          .generation = std::to_string(generation),
          .member = member_,
          .term = term_};
}

void OutputHold::take() {
  if (folder_.empty()) return;
  const std::lock_guard lock(mutex_);
  if (!lease_) lease_ = std::make_shared<Lease>(options(1));
  lease_->take(Deadline::after(kPatience * term_));
}

void OutputHold::take_over(std::uint32_t generation) {
  if (folder_.empty()) return;
  const std::lock_guard lock(mutex_);
  if (lease_ && lease_->held()) return lease_->set_generation(std::to_string(generation));
  if (lease_) lease_->give_back();  // one that was lost does not come back
  try {
    make_folder(folder_);
  } catch (const Error& error) {  // shows again when something is written
    log(LogLevel::kWarning, "{}", error.message());
  }
  lease_ = std::make_shared<Lease>(options(generation));
}

void OutputHold::let_go() {
  const std::lock_guard lock(mutex_);
  if (lease_) lease_->give_back();  // who waits for it has a share
  lease_.reset();
}

bool OutputHold::held() {
  const std::lock_guard lock(mutex_);
  return lease_ && lease_->held();
}

void OutputHold::require(const std::string& path) {
  std::shared_ptr<Lease> lease;
  {
    const std::lock_guard lock(mutex_);
    lease = lease_;
  }
  if (!lease) {
    throw Error(ErrorCode::kIo,
                fmt::format("writing {} is not done: this process is not rank 0 of the run", path));
  }
  if (lease->held()) return;
  // Who had it and finds another's file there does not wait: others have gone on.
  lease->wait(Deadline::after(kPatience * term_));
  lease->require("writing " + path);
}

WriteGuard OutputHold::guard() {
  return {[this](const std::string& path) { require(path); }, member_};
}

}  // namespace lockstep
