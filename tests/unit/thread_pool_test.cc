#include "lockstep/base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <set>
#include <stdexcept>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep::thread_pool_test {
namespace {

TEST(ThreadPool, RunsEveryIndexOnce) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (std::size_t count : {0, 1, 2, 3, 100, 1000}) {
      std::vector<int> runs(count);
      pool.run(count, [&](std::size_t index) { ++runs[index]; });
      EXPECT_EQ(runs, std::vector<int>(count, 1));
    }
  }
}

TEST(ThreadPool, ManySmallJobsKeepTheirTasksApart) {
  ThreadPool pool(4);
  for (std::size_t job = 0; job < 20000; ++job) {
    const std::size_t count = 1 + job % 7;
    std::size_t sums[7] = {};
    pool.run(count, [&](std::size_t index) { sums[index] += job + index; });
    for (std::size_t index = 0; index < count; ++index) ASSERT_EQ(sums[index], job + index);
  }
}

TEST(ThreadPool, AllThreadsTakePart) {
  ThreadPool pool(3);
  std::latch all(3);
  std::vector<int> workers(3);
  pool.run(3, [&](std::size_t index, int worker) {
    workers[index] = worker;
    all.arrive_and_wait();  // holds this thread until each has a task
  });
  EXPECT_EQ(std::set<int>(workers.begin(), workers.end()), (std::set<int>{0, 1, 2}));
}

TEST(ThreadPool, AnExceptionReachesTheCallerAndThePoolGoesOn) {
  for (int threads : {1, 3}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 100; ++round) {
      EXPECT_THROW(pool.run(50,
                            [](std::size_t index) {
                              if (index % 5 == 3) throw std::runtime_error("a body failed");
                            }),
                   std::runtime_error);
      std::atomic<int> runs = 0;
      pool.run(50, [&](std::size_t) { ++runs; });
      EXPECT_EQ(runs, 50);
    }
  }
}

TEST(ThreadPool, RefusesToBeEmpty) {
  EXPECT_THROW(ThreadPool(0), Error);
  EXPECT_THROW(ThreadPool(-1), Error);
}

}  // namespace
}  // namespace lockstep::thread_pool_test
