#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/collectives/plan_engine.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/transport/local_group.h"
#include "lockstep/lockstep.h"
#include "lockstep/run/job_state.h"
#include "lockstep/run/thread_meeting.h"

namespace lockstep {
namespace {

// A thread of a job that survives those that throw.
struct ThreadState : Job::State {
  ThreadState(std::shared_ptr<ThreadMeeting> where, int number, std::unique_ptr<Transport> first,
              std::chrono::nanoseconds limit)
      : meeting(std::move(where)), thread(number), timeout(limit) {
    generation = 1;
    enter(std::move(first));
  }
  ~ThreadState() override {
    communicator.reset();
    meeting->leave(thread, rank, why_gone);
  }

  bool survives(const Error& error) const override {
    if (supervisor == nullptr) return false;
    const auto cause = supervisor->latch().error();
    const bool loss = error.code() == ErrorCode::kPeerLost || error.code() == ErrorCode::kTimeout;
    return loss && error.rank() >= 0 && error.rank() != rank && cause &&
           std::string_view(cause->what()) == error.what();
  }
  void regroup(std::int64_t, Regroup how) override {
    if (how != Regroup::kAfterLoss) communicator->barrier();
    communicator.reset();
    supervisor = nullptr;
    ThreadMeeting::Place next = meeting->regroup(thread, Deadline::after(10 * timeout));
    generation = next.generation;
    departed.clear();
    for (const ThreadMeeting::Departed& gone : next.departed) {
      auto kind = gone.why.empty() ? Job::Departure::Kind::kLeft : Job::Departure::Kind::kFailed;
      if (gone.stuck) kind = Job::Departure::Kind::kExpelled;
      departed.push_back({gone.rank, kind, fmt::format("rank {} (thread)", gone.rank), gone.why});
    }
    enter(std::move(next.transport));
  }
  void give_up(const std::string& reason) override {
    why_gone = reason;
    if (supervisor != nullptr) supervisor->give_up(reason);
  }
  void abort(const std::string& reason) override {
    if (communicator) communicator->abort(reason);
  }

 private:
  void enter(std::unique_ptr<Transport> transport) {
    supervisor = &transport->supervisor();
    rank = transport->rank();
    flight->set_place(rank, transport->world_size(), generation,
                      static_cast<std::uint32_t>(::getpid()));
    communicator = std::make_unique<Communicator>(
        std::make_unique<PlanEngine>(std::move(transport)), timeout, 0, flight);
  }

  const std::shared_ptr<ThreadMeeting> meeting;
  const int thread;
  const std::chrono::nanoseconds timeout;
  Supervisor* supervisor = nullptr;  // of the communicator, while there is one
  std::string why_gone;
  int rank = 0;
};

}  // namespace

std::vector<Job> join_threads(int world_size, std::chrono::nanoseconds timeout) {
  auto transports = make_local_group(world_size);
  const auto meeting = std::make_shared<ThreadMeeting>(world_size);
  std::vector<Job> jobs;
  for (int thread = 0; thread < world_size; ++thread) {
    jobs.emplace_back(std::make_unique<ThreadState>(
        meeting, thread, std::move(transports[index_of(thread)]), timeout));
  }
  return jobs;
}

}  // namespace lockstep
