// One GiB on every rank. Not for the sanitizers; the presets leave it out.

#include <gtest/gtest.h>

#include "tests/support/places.h"
#include "tests/support/printing.h"

namespace lockstep::test::gigabyte_test {
namespace {

using namespace std::chrono_literals;

// Small integers: sums are exact.
float value_at(std::size_t i, int rank) {
  return static_cast<float>((i * 2654435761U >> 7) % 1000 + static_cast<std::size_t>(rank));
}

class Gigabyte : public testing::TestWithParam<Place> {};

TEST_P(Gigabyte, AllReduce) {
  GroupOptions options;
  options.medium = GetParam().medium;
  options.world_size = GetParam().world_size;
  options.segment_bytes = 0;
  Group group(options);
  group.run([&](Communicator& comm) {
    const Buffer buffer = comm.allocate(std::size_t{1} << 30);
    const std::span<float> data = buffer.as<float>();
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = value_at(i, comm.rank());
    comm.all_reduce(data, ReduceOp::kSum);
    for (std::size_t i = 0; i < data.size(); ++i) {
      float expected = 0;
      for (int r = 0; r < comm.world_size(); ++r) expected += value_at(i, r);
      if (data[i] != expected) {
        throw std::runtime_error("element " + std::to_string(i) + " is " + std::to_string(data[i]));
      }
    }
  });
}

constexpr int kSizes[] = {2, 3};
INSTANTIATE_TEST_SUITE_P(All, Gigabyte,
                         testing::ValuesIn(places({GroupMedium::kTcp, GroupMedium::kShm}, kSizes)),
                         place_name);

}  // namespace
}  // namespace lockstep::test::gigabyte_test
