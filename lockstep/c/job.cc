#include <fmt/format.h>

#include <chrono>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "lockstep/c.h"
#include "lockstep/c/guard.h"
#include "lockstep/c/handles.h"
#include "lockstep/lockstep.h"

namespace lockstep::c {
namespace {

TransportKind transport_of(int transport) {
  switch (transport) {
    case LOCKSTEP_AUTO: return TransportKind::kAuto;
    case LOCKSTEP_TCP: return TransportKind::kTcp;
    case LOCKSTEP_SHM: return TransportKind::kShm;
    case LOCKSTEP_SERVER: return TransportKind::kServer;
    default: refuse(fmt::format("lockstep_join: {} is no transport", transport));
  }
}

JoinOptions join_options_of(const lockstep_join_options& given) {
  JoinOptions options;
  options.transport = transport_of(given.transport);
  options.coordinator = or_empty(given.coordinator);
  if (given.name != nullptr) options.name = given.name;
  options.token = or_empty(given.token);
  options.plain_wire = given.plain_wire != 0;
  options.interface = or_empty(given.interface_name);
  if (given.timeout_ms < 0 || given.patience_ms < 0 || given.call_timeout_ms < 0 ||
      given.min_workers < 0) {
    refuse("lockstep_join: a negative time or number");
  }
  if (given.timeout_ms > 0) options.timeout = std::chrono::milliseconds(given.timeout_ms);
  options.survive = given.survive != 0;
  if (given.min_workers > 0) options.min_workers = given.min_workers;
  options.patience = std::chrono::milliseconds(given.patience_ms);
  options.call_timeout = std::chrono::milliseconds(given.call_timeout_ms);
  if (given.no_environment == 0) {
    options = JoinOptions::from_environment(options);
    if (given.attempt != nullptr && options.attempt.empty()) options.attempt = given.attempt;
    return options;
  }
  options.attempt = or_empty(given.attempt);
  options.master_host = or_empty(given.master_host);
  options.master_port = given.master_port;
  if (given.has_listener != 0) options.listener = given.listener;
  if (given.world_size > 0) {
    options.rank = given.rank;
    options.world_size = given.world_size;
  }
  return options;
}

}  // namespace
}  // namespace lockstep::c

using lockstep::c::guarded;
using lockstep::c::known_part;
using lockstep::c::or_empty;
using lockstep::c::refuse;
using lockstep::c::require;
using lockstep::c::write_known_part;

int lockstep_join(const lockstep_join_options* options, lockstep_job** job) {
  return guarded([&] {
    require(job, "lockstep_join: job");
    *job = nullptr;
    const auto known = known_part(options, "lockstep_join: options");
    *job = new lockstep_job(lockstep::join(lockstep::c::join_options_of(known)));
    return LOCKSTEP_OK;
  });
}

void lockstep_job_destroy(lockstep_job* job) { delete job; }

int lockstep_job_rank(const lockstep_job* job) {
  return job->job.newcomer() ? -1 : job->job.rank();
}

int lockstep_job_world_size(const lockstep_job* job) {
  return job->job.newcomer() ? -1 : job->job.world_size();
}

lockstep_communicator* lockstep_job_communicator(lockstep_job* job) {
  return job->job.newcomer() ? nullptr : &job->world;
}

int lockstep_job_leave(lockstep_job* job) {
  return guarded([&] {
    require(job, "lockstep_job_leave: job");
    if (job->job.newcomer()) return LOCKSTEP_OK;  // it was never in
    job->job.leave();
    return LOCKSTEP_OK;
  });
}

int lockstep_job_abort(lockstep_job* job, const char* reason) {
  return guarded([&] {
    require(job, "lockstep_job_abort: job");
    job->job.abort(or_empty(reason));
    return LOCKSTEP_OK;
  });
}

int lockstep_job_give_up(lockstep_job* job, const char* reason) {
  return guarded([&] {
    require(job, "lockstep_job_give_up: job");
    job->job.give_up(or_empty(reason));
    return LOCKSTEP_OK;
  });
}

int lockstep_job_write_flight(lockstep_job* job, const char* folder, const char* why) {
  return guarded([&] {
    require(job, "lockstep_job_write_flight: job");
    require(folder, "lockstep_job_write_flight: folder");
    job->job.write_flight(folder, or_empty(why));
    return LOCKSTEP_OK;
  });
}

int lockstep_job_survives(const lockstep_job* job, const lockstep_error* error) {
  int survives = 0;
  guarded([&] {
    require(job, "lockstep_job_survives: job");
    const auto known = known_part(error, "lockstep_job_survives: error");
    const auto code = lockstep::c::error_code_of(known.code);
    // The text begins with the code's name, which Error puts there itself.
    std::string text = or_empty(known.text);
    const std::string prefix = fmt::format("{}: ", lockstep::to_string(code));
    if (text.starts_with(prefix)) text.erase(0, prefix.size());
    survives = job->job.survives(lockstep::Error(code, text, known.rank)) ? 1 : 0;
    return LOCKSTEP_OK;
  });
  return survives;
}

int lockstep_job_regroup(lockstep_job* job, int64_t step, int how) {
  return guarded([&] {
    require(job, "lockstep_job_regroup: job");
    if (how < LOCKSTEP_AFTER_LOSS || how > LOCKSTEP_TOO_FEW) {
      refuse(fmt::format("lockstep_job_regroup: {} is no way to regroup", how));
    }
    constexpr lockstep::Regroup kHow[] = {lockstep::Regroup::kAfterLoss,
                                          lockstep::Regroup::kInOrder, lockstep::Regroup::kTooFew};
    job->job.regroup(step, kHow[how]);
    return LOCKSTEP_OK;
  });
}

uint32_t lockstep_job_generation(const lockstep_job* job) { return job->job.generation(); }
int lockstep_job_newcomers(const lockstep_job* job) { return job->job.newcomers(); }
int lockstep_job_newcomer(const lockstep_job* job) { return job->job.newcomer() ? 1 : 0; }
int lockstep_job_too_few(const lockstep_job* job) { return job->job.too_few() ? 1 : 0; }
int lockstep_job_stood_still(const lockstep_job* job) { return job->job.stood_still() ? 1 : 0; }

size_t lockstep_job_departed_count(const lockstep_job* job) { return job->job.departed().size(); }

int lockstep_job_departed(const lockstep_job* job, size_t index, lockstep_departure* departure) {
  return guarded([&] {
    require(job, "lockstep_job_departed: job");
    if (index >= job->job.departed().size()) {
      refuse(fmt::format("lockstep_job_departed: {} have gone, not {}", job->job.departed().size(),
                         index + 1));
    }
    const lockstep::Job::Departure& gone = job->job.departed()[index];
    write_known_part(
        departure, {0, gone.rank, static_cast<int>(gone.kind), gone.name.c_str(), gone.why.c_str()},
        "lockstep_job_departed: departure");
    return LOCKSTEP_OK;
  });
}

int lockstep_job_describe(lockstep_job* job, const void* bytes, size_t count, int most_workers) {
  return guarded([&] {
    require(job, "lockstep_job_describe: job");
    if (count > 0) require(bytes, "lockstep_job_describe: bytes");
    std::vector<std::byte> description(count);
    if (count > 0) std::memcpy(description.data(), bytes, count);
    job->job.describe(std::move(description), most_workers);
    return LOCKSTEP_OK;
  });
}

int lockstep_job_description(const lockstep_job* job, const void** bytes, size_t* count) {
  return guarded([&] {
    require(job, "lockstep_job_description: job");
    require(bytes, "lockstep_job_description: bytes");
    require(count, "lockstep_job_description: count");
    *bytes = job->job.description().data();
    *count = job->job.description().size();
    return LOCKSTEP_OK;
  });
}

int lockstep_job_wishes(const lockstep_job* job, lockstep_wishes* wishes) {
  return guarded([&] {
    require(job, "lockstep_job_wishes: job");
    const lockstep::JobWishes now = job->job.wishes();
    write_known_part(wishes, {0, now.stop, now.save, now.regroup ? 1 : 0},
                     "lockstep_job_wishes: wishes");
    return LOCKSTEP_OK;
  });
}
