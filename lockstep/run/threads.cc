#include "lockstep/run/threads.h"

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/launch/launch.h"

namespace lockstep {

int run_threads(int world_size, std::chrono::nanoseconds timeout,
                const std::function<int(Job&)>& work) {
  std::vector<Job> jobs = join_threads(world_size, timeout);
  std::vector<int> codes(jobs.size());
  std::vector<std::exception_ptr> causes(jobs.size());
  std::vector<std::exception_ptr> echoes(jobs.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < jobs.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Job job = std::move(jobs[rank]);  // ends with this rank's work, not with the last one's
        codes[rank] = work(job);
      } catch (const Error& error) {
        auto& kind = is_echo(error, static_cast<int>(rank)) ? echoes : causes;
        kind[rank] = std::current_exception();
      } catch (...) {
        causes[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& errors : {causes, echoes}) {
    for (const std::exception_ptr& error : errors) {
      if (error) std::rethrow_exception(error);
    }
  }
  return *std::ranges::max_element(codes);
}

}  // namespace lockstep
