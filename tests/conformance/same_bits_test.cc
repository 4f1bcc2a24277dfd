// Arbitrary values, every canonical algorithm, every medium: the same bits.

#include <gtest/gtest.h>

#include <map>

#include "lockstep/base/hash/blake3.h"
#include "lockstep/base/random.h"
#include "lockstep/comm/collectives/algorithm_table.h"
#include "tests/support/places.h"

namespace lockstep::test::same_bits_test {
namespace {

class SameBits : public testing::TestWithParam<int> {};

TEST_P(SameBits, OnEveryMediumByEveryAlgorithm) {
  const int n = GetParam();
  constexpr std::size_t kCount = 30'011;
  std::map<std::string, std::string> hashes;  // of rank 0, by how it came about
  for (const GroupMedium medium :
       {GroupMedium::kLocal, GroupMedium::kLocalMessages, GroupMedium::kTcp, GroupMedium::kTcpV6,
        GroupMedium::kTcpSealed, GroupMedium::kTcpRails, GroupMedium::kShm, GroupMedium::kAuto}) {
    const bool shared_memory = medium == GroupMedium::kLocal || medium == GroupMedium::kShm ||
                               medium == GroupMedium::kAuto;
    for (const Algorithm algorithm :
         {Algorithm::kAuto, Algorithm::kPair, Algorithm::kHalvingDoubling, Algorithm::kDirect,
          Algorithm::kTree, Algorithm::kShared}) {
      const Sharing sharing = shared_memory ? Sharing::kAll : Sharing::kNone;
      if (!offers(Collective::kAllReduce, algorithm, sharing)) continue;
      std::vector<std::string> of_rank(static_cast<std::size_t>(n));
      kept_group(medium, n).run([&](Communicator& comm) {
        const auto rank = static_cast<std::uint64_t>(comm.rank());
        std::vector<float> data(kCount);
        for (std::size_t i = 0; i < kCount; ++i) {
          data[i] = random_f32(7, rank, i) * (i % 3 == 0 ? -1000.0F : 0.001F);
        }
        CallOptions options;
        options.algorithm = algorithm;
        comm.all_reduce(std::span(data), ReduceOp::kSum, options);
        of_rank[rank] = to_hex(blake3(std::as_bytes(std::span(data))));
      });
      for (const std::string& hash : of_rank) EXPECT_EQ(hash, of_rank[0]);
      hashes[std::string(to_string(medium)) + " " + std::string(to_string(algorithm))] = of_rank[0];
    }
  }
  EXPECT_GE(hashes.size(), 30U);
  for (const auto& [how, hash] : hashes) EXPECT_EQ(hash, hashes.begin()->second) << how;
}

// More partial sums than the boards of shared memory take.
TEST(ManyNodes, ReduceOnEveryMedium) {
  constexpr std::uint32_t kLanes = 5000;
  LeafOwners owners;
  for (std::uint32_t lane = 0; lane < kLanes; ++lane) owners.push_back(static_cast<int>(lane % 2));
  for (const GroupMedium medium :
       {GroupMedium::kLocal, GroupMedium::kTcp, GroupMedium::kTcpRails, GroupMedium::kShm}) {
    kept_group(medium, 2).run([&](Communicator& comm) {
      const std::vector<std::int64_t> lane(3, 1 + comm.rank());
      const std::vector<ConstBufferView> partials(owned_nodes(owners, comm.rank()).size(),
                                                  std::span(lane));
      std::vector<std::int64_t> sum(3);
      comm.reduce_nodes(partials, owners, std::span(sum));
      EXPECT_EQ(sum, std::vector<std::int64_t>(3, kLanes / 2 * 3)) << to_string(medium);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(AllMedia, SameBits, testing::Values(2, 3, 5, 8),
                         [](const auto& n) { return std::to_string(n.param) + "_ranks"; });

}  // namespace
}  // namespace lockstep::test::same_bits_test
