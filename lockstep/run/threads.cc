#include "lockstep/run/threads.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/index.h"
#include "lockstep/base/thread.h"
#include "lockstep/net/job/blame.h"

namespace lockstep {

int run_threads(int world_size, std::chrono::nanoseconds timeout, bool survive,
                const std::function<int(Job&)>& work) {
  std::vector<Job> jobs = join_threads(world_size, timeout);
  std::vector<int> codes(jobs.size());
  std::vector<char> ended(jobs.size());  // by itself, without an error
  std::mutex mutex;
  Blame blame;                 // guarded by mutex
  std::exception_ptr failure;  // guarded by mutex: the culprit's
  const auto failed = [&](int rank, Evidence evidence) {
    const std::lock_guard lock(mutex);
    if (blame.add(rank, evidence)) failure = std::current_exception();
  };
  {
    std::vector<Thread> threads(jobs.size());
    for (int rank = 0; rank < world_size; ++rank) {
      const auto run = [&, rank] {
        try {
          // Ends with this rank's work, not with the last one's.
          Job job = std::move(jobs[index_of(rank)]);
          codes[index_of(rank)] = work(job);
          ended[index_of(rank)] = 1;
        } catch (const Error& error) {
          failed(rank, evidence_of(error, rank));
        } catch (...) {
          failed(rank, Evidence::kOwn);
        }
      };
      threads[index_of(rank)].start("a rank's thread", run, [](const Error&) {});
    }
  }
  const bool some_ended_well = std::ranges::find(ended, 1) != ended.end();
  if (failure && !(survive && some_ended_well)) std::rethrow_exception(failure);
  return *std::ranges::max_element(codes);
}

}  // namespace lockstep
