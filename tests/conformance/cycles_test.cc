// Groups come and go and leave nothing behind.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "tests/support/build_kind.h"
#include "tests/support/places.h"

namespace lockstep::test::cycles_test {
namespace {

using namespace std::chrono_literals;

std::size_t entries_of(const char* folder) {
  std::size_t number = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    (void)entry;
    ++number;
  }
  return number;
}

struct Possessions {
  std::size_t descriptors = entries_of("/proc/self/fd");
  std::size_t threads = entries_of("/proc/self/task");
  std::size_t segments = 0;  // mapped memfds
  std::size_t mappings = 0;

  Possessions() {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      ++mappings;
      if (line.find("memfd:") != std::string::npos) ++segments;
    }
  }
};

// A thread that was joined may still be listed for a moment, and nothing tells when it no longer
// is.
Possessions settled() {
  Possessions now;
  for (int i = 0; i < 250; ++i) {
    const Possessions before = now;
    std::this_thread::sleep_for(20ms);
    now = Possessions();
    if (now.threads == before.threads) break;
  }
  return now;
}

class Cycles : public testing::TestWithParam<Place> {
 protected:
  static void cycle(int i) {
    GroupOptions options;
    options.medium = GetParam().medium;
    options.world_size = GetParam().world_size;
    Group group(options);
    const auto errors = group.errors([&](Communicator& comm) {
      std::vector<float> data(2000, 1.0F);
      const auto part = i % 3 == 0 ? comm.split(comm.rank() % 2, 0) : nullptr;
      if (part != nullptr) part->barrier();
      comm.all_reduce(std::span(data), ReduceOp::kSum);
      if (comm.rank() == i % comm.world_size()) comm.abort("next");
      comm.barrier();
      comm.barrier();
    });
    for (const auto& error : errors) {
      ASSERT_TRUE(error);
      ASSERT_EQ(error->code(), ErrorCode::kAborted) << error->what();
    }
  }
};

TEST_P(Cycles, LeaveNothingBehind) {
  const int cycles = kSanitizers.empty() ? 1000 : 60;
  for (int i = 0; i < 20; ++i) ASSERT_NO_FATAL_FAILURE(cycle(i));
  const Possessions before = settled();
  for (int i = 0; i < cycles; ++i) ASSERT_NO_FATAL_FAILURE(cycle(i));
  const Possessions after = settled();
  EXPECT_EQ(after.descriptors, before.descriptors);
  EXPECT_EQ(after.threads, before.threads);
  EXPECT_EQ(after.segments, before.segments);
  // The allocator maps and unmaps as it likes, but not once per cycle. That of a sanitizer keeps
  // what is freed, and looks for leaks itself.
  if (kSanitizers.empty()) {
    EXPECT_LT(after.mappings, before.mappings + static_cast<std::size_t>(cycles) / 3);
  }
}

constexpr int kSizes[] = {3};
INSTANTIATE_TEST_SUITE_P(
    All, Cycles,
    testing::ValuesIn(places({GroupMedium::kLocal, GroupMedium::kTcp, GroupMedium::kShm}, kSizes)),
    place_name);

}  // namespace
}  // namespace lockstep::test::cycles_test
