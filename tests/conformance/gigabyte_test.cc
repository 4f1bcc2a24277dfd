// One GiB on every rank. Not for the sanitizers; the presets leave it out.

#include <gtest/gtest.h>

#include <cstdint>

#include "tests/support/places.h"
#include "tests/support/printing.h"

namespace lockstep::test::gigabyte_test {
namespace {

using namespace std::chrono_literals;

// Small integers: sums are exact. Rank r has pattern + r.
std::uint32_t pattern(std::size_t i) {
  return (static_cast<std::uint32_t>(i) * 2654435761U >> 7) & 1023;
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
    const auto rank = static_cast<std::uint32_t>(comm.rank());
    const auto ranks = static_cast<std::uint32_t>(comm.world_size());
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(pattern(i) + rank);
    comm.all_reduce(data, ReduceOp::kSum);
    for (std::size_t i = 0; i < data.size(); ++i) {
      if (data[i] != static_cast<float>(ranks * pattern(i) + ranks * (ranks - 1) / 2)) {
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
