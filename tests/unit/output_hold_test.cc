#include "lockstep/run/output_hold.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>

#include "lockstep/base/error.h"
#include "tests/support/temporary_folder.h"

namespace lockstep::output_hold_test {
namespace {

using namespace std::chrono_literals;

constexpr auto kTerm = 60s;  // nobody waits for it

TEST(OutputHold, TheNextRank0WaitsUntilTheOneBeforeLetsGo) {
  const TemporaryFolder folder;
  OutputHold before(folder.path(), "job", kTerm);
  OutputHold after(folder.path(), "job", kTerm);
  before.take();
  after.take_over(2);
  EXPECT_TRUE(before.held());
  EXPECT_FALSE(after.held());
  auto written = std::async(std::launch::async, [&] { after.guard().require("a file"); });
  before.let_go();
  EXPECT_EQ(written.wait_for(20s), std::future_status::ready);
  EXPECT_NO_THROW(written.get());
  EXPECT_TRUE(after.held());
  EXPECT_FALSE(before.held());
  EXPECT_THROW(before.guard().require("a file"), Error);
}

TEST(OutputHold, WhoHasLetGoMayTakeItOverAgain) {
  const TemporaryFolder folder;
  OutputHold hold(folder.path(), "job", kTerm);
  hold.take();
  hold.let_go();
  hold.take_over(3);
  EXPECT_TRUE(hold.held());
}

TEST(OutputHold, AWriteThatWaitsEndsWhenItIsLetGo) {
  const TemporaryFolder folder;
  OutputHold before(folder.path(), "job", kTerm);
  OutputHold after(folder.path(), "job", kTerm);
  before.take();
  after.take_over(2);
  auto written = std::async(std::launch::async, [&] { after.guard().require("a file"); });
  after.let_go();
  EXPECT_EQ(written.wait_for(20s), std::future_status::ready);
  EXPECT_THROW(written.get(), Error);
  EXPECT_TRUE(before.held());
}

}  // namespace
}  // namespace lockstep::output_hold_test
