#include "lockstep/base/thread.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>

#include <new>
#include <optional>
#include <stdexcept>

namespace lockstep::thread_test {
namespace {

using ::testing::HasSubstr;

std::optional<Error> failure_of(const std::function<void()>& body) {
  std::optional<Error> failure;
  {
    Thread thread;
    thread.start("the test's thread", body, [&](const Error& error) { failure = error; });
  }
  return failure;
}

TEST(Thread, WhateverItsBodyThrowsIsHeardWithItsText) {
  EXPECT_FALSE(failure_of([] {}));
  const auto error = failure_of([] { throw Error(ErrorCode::kTimeout, "too late", 3); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kTimeout);
  EXPECT_EQ(error->rank(), 3);
  const auto memory = failure_of([] { throw std::bad_alloc(); });
  ASSERT_TRUE(memory);
  EXPECT_THAT(memory->what(), HasSubstr("the test's thread failed: std::bad_alloc"));
  const auto number = failure_of([] { throw 7; });
  ASSERT_TRUE(number);
  EXPECT_THAT(number->what(), HasSubstr("the test's thread failed"));
}

TEST(Thread, SignalsAreLeftToTheThreadsOfTheProgram) {
  sigset_t before;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &before);
  bool blocked = false;
  failure_of([&] {
    sigset_t mask;
    ::pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    blocked = ::sigismember(&mask, SIGTERM) == 1 && ::sigismember(&mask, SIGINT) == 1;
  });
  EXPECT_TRUE(blocked);
  sigset_t after;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &after);
  EXPECT_EQ(::sigismember(&after, SIGTERM), ::sigismember(&before, SIGTERM));
}

}  // namespace
}  // namespace lockstep::thread_test
