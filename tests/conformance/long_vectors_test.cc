// Long vectors, one collective after another. Between threads they are reduced in place; Shm takes
// heap memory, which other ranks do not see, through the stages in many rounds; over TCP every rail
// has a share.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/index.h"
#include "tests/support/places.h"
#include "tests/support/printing.h"

namespace lockstep::test::long_vectors_test {
namespace {

// In chunks of different sizes. What all of eight ranks want leaves the stages past the cache.
std::size_t count_for(const Place& place) {
  if (place.medium == GroupMedium::kTcpRails) return 300'007;
  return place.world_size < 8 ? 1'300'007 : 4'300'007;
}
constexpr int kTurns = 3;

// Small integers: sums are exact.
float value_of(std::size_t i, int rank, int turn) {
  const auto mixed = static_cast<std::uint32_t>(i + 977 * static_cast<std::size_t>(turn));
  return static_cast<float>((mixed * 2654435761U >> 7) & 1023) + static_cast<float>(rank);
}

float sum_of(std::size_t i, int ranks, int turn) {
  return static_cast<float>(ranks) * value_of(i, 0, turn) +
         static_cast<float>(ranks * (ranks - 1) / 2);
}

std::vector<float> vector_of(int rank, int turn, std::size_t count) {
  std::vector<float> vector(count);
  for (std::size_t i = 0; i < count; ++i) vector[i] = value_of(i, rank, turn);
  return vector;
}

template <typename Expected>
void expect_elements(const std::string& what, std::span<const float> found, std::size_t begin,
                     const Expected& expected) {
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (found[i] == expected(begin + i)) continue;
    throw std::runtime_error(what + ": element " + std::to_string(begin + i) + " is " +
                             std::to_string(found[i]) + ", not " +
                             std::to_string(expected(begin + i)));
  }
}

class LongVectors : public testing::TestWithParam<Place> {};

TEST_P(LongVectors, AreRightTurnAfterTurn) {
  GroupOptions options;
  options.medium = GetParam().medium;
  options.world_size = GetParam().world_size;
  options.segment_bytes = 0;
  Group group(options);
  group.run([&](Communicator& comm) {
    const int ranks = comm.world_size();
    const std::size_t count = count_for(GetParam());
    const std::size_t own = chunk_of(count, ranks, comm.rank()).size();
    const std::size_t own_begin = chunk_of(count, ranks, comm.rank()).begin;
    for (int turn = 0; turn < kTurns; ++turn) {
      const int root = turn % ranks;
      const auto sum = [&](std::size_t i) { return sum_of(i, ranks, turn); };
      const auto roots = [&](std::size_t i) { return value_of(i, root, turn); };

      std::vector<float> data = vector_of(comm.rank(), turn, count);
      comm.all_reduce(std::span(data), ReduceOp::kSum);
      expect_elements("all_reduce", data, 0, sum);

      // Lane l brings what rank l would. Lanes that lie apart make a partial each.
      LeafOwners owners;
      for (int lane = 0; lane < 2 * ranks + 1; ++lane) owners.push_back(lane / 2 % ranks);
      std::vector<std::vector<float>> partials;
      for (const Range node : owned_nodes(owners, comm.rank())) {
        std::vector<float>& partial = partials.emplace_back(count);
        for (std::size_t lane = node.begin; lane < node.end; ++lane) {
          const std::vector<float> more = vector_of(static_cast<int>(lane), turn, count);
          for (std::size_t i = 0; i < count; ++i) partial[i] += more[i];
        }
      }
      std::vector<ConstBufferView> views;
      for (const std::vector<float>& partial : partials) views.emplace_back(std::span(partial));
      comm.reduce_nodes(views, owners, BufferView(std::span(data)));
      const int lanes = static_cast<int>(owners.size());
      expect_elements("reduce_nodes", data, 0,
                      [&](std::size_t i) { return sum_of(i, lanes, turn); });

      const std::vector<float> in = vector_of(comm.rank(), turn, count);
      std::vector<float> out(count);
      comm.reduce(std::span(in), std::span(out), ReduceOp::kSum, root);
      if (comm.rank() == root) expect_elements("reduce", out, 0, sum);

      std::vector<float> chunk(own);
      comm.reduce_scatter(std::span(in), std::span(chunk), ReduceOp::kSum);
      expect_elements("reduce_scatter", chunk, own_begin, sum);

      std::vector<std::size_t> counts;
      for (int r = 0; r < ranks; ++r) counts.push_back(chunk_of(count, ranks, r).size());
      comm.all_gather(std::span(std::as_const(chunk)), std::span(out), counts);
      expect_elements("all_gather", out, 0, sum);

      data = vector_of(comm.rank(), turn, count);
      comm.broadcast(std::span(data), root);
      expect_elements("broadcast", data, 0, roots);
    }
  });
}

constexpr int kSizes[] = {2, 3, 8};
INSTANTIATE_TEST_SUITE_P(All, LongVectors,
                         testing::ValuesIn(places({GroupMedium::kLocal, GroupMedium::kTcpRails,
                                                   GroupMedium::kShm},
                                                  kSizes)),
                         place_name);

}  // namespace
}  // namespace lockstep::test::long_vectors_test
