#include "lockstep/comm/collectives/host_map.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "lockstep/base/index.h"
#include "lockstep/comm/call.h"
#include "tests/support/printing.h"

namespace lockstep::host_map_test {
namespace {

using testing::ElementsAre;

// Per rank, the first rank on its host.
using Hosts = std::vector<int>;
const std::vector<Hosts> kShapes = {
    {0, 0, 2, 2},              // 2 x 2
    {0, 0, 2, 2, 4, 4},        // 3 x 2
    {0, 0, 0, 0, 4, 4, 4, 4},  // 2 x 4
    {0, 0, 0, 3},              // 3 + 1
    {0, 0, 2, 2, 2, 5},        // 2 + 3 + 1
    {0, 1, 0, 1},              // in turn
    {0, 1, 1, 0, 4, 1, 0},     // anyhow
    {0, 1, 2},                 // one rank a host
};

TEST(HostMap, NumbersHostsByTheirFirstRanks) {
  const HostMap hosts(Hosts{0, 1, 1, 0, 4, 1, 0});
  EXPECT_THAT(hosts.host_of, ElementsAre(0, 1, 1, 0, 2, 1, 0));
  EXPECT_THAT(hosts.place_of, ElementsAre(0, 0, 1, 1, 0, 2, 2));
  EXPECT_THAT(hosts.members,
              ElementsAre(ElementsAre(0, 3, 6), ElementsAre(1, 2, 5), ElementsAre(4)));
}

TEST(HostMap, HasTwoLevelsWhereSeveralRanksShareOneOfSeveralHosts) {
  EXPECT_TRUE(HostMap(Hosts{0, 0, 2}).has_two_levels());
  EXPECT_FALSE(HostMap(Hosts{0, 0, 0}).has_two_levels());
  EXPECT_FALSE(HostMap(Hosts{0, 1, 2}).has_two_levels());
  EXPECT_FALSE(HostMap(Hosts{0}).has_two_levels());
}

std::vector<Range> uneven_chunks(std::size_t ranks, std::size_t& count) {
  std::vector<Range> chunks;
  std::mt19937 random(static_cast<unsigned>(ranks));
  count = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    const std::size_t size = random() % 3 == 0 ? 0 : random() % 50;
    chunks.push_back({count, count + size});
    count += size;
  }
  return chunks;
}

// How often the ranks of each host handle each element.
void expect_every_element_once(const HostMap& hosts, const HostShares& shares, std::size_t count) {
  for (const std::vector<int>& members : hosts.members) {
    std::vector<int> times(count);
    for (const int member : members) {
      for (const Range& part : shares.parts(member)) {
        for (std::size_t i = part.begin; i < part.end; ++i) ++times.at(i);
      }
    }
    EXPECT_THAT(times, testing::Each(1));
  }
}

TEST(HostShares, TheRanksOfAHostHandleEveryElementOnce) {
  for (const Hosts& shape : kShapes) {
    const HostMap hosts(shape);
    for (const std::size_t count : {0, 1, 2, 5, 7, 24, 1000}) {
      SCOPED_TRACE(
          fmt::format("{} ranks, {} hosts, {} elements", shape.size(), hosts.hosts(), count));
      expect_every_element_once(hosts, HostShares(hosts, chunks_by_host(hosts, count)), count);
      expect_every_element_once(hosts, HostShares(hosts, chunks_of({}, count, hosts.world_size())),
                                count);
    }
    std::size_t count = 0;
    const std::vector<Range> chunks = uneven_chunks(shape.size(), count);
    expect_every_element_once(hosts, HostShares(hosts, chunks), count);
  }
}

TEST(HostShares, ARankHandlesItsOwnChunkAndNoneOfItsNeighbours) {
  const HostMap hosts(Hosts{0, 0, 2, 2, 2, 5});
  const HostShares shares(hosts, chunks_by_host(hosts, 1000));
  for (int rank = 0; rank < hosts.world_size(); ++rank) {
    for (int other = 0; other < hosts.world_size(); ++other) {
      if (other == rank) {
        EXPECT_EQ(shares.part(rank, rank), shares.chunk(rank));
      } else if (hosts.host_of[index_of(rank)] == hosts.host_of[index_of(other)]) {
        EXPECT_EQ(shares.part(rank, other).size(), 0U);
      }
    }
  }
}

TEST(HostShares, HostsOfEqualSizeTalkRankToRank) {
  const HostMap hosts(Hosts{0, 0, 2, 2, 4, 4});
  const HostShares shares(hosts, chunks_by_host(hosts, 999));
  for (int rank = 0; rank < 6; ++rank) {
    for (int other = 0; other < 6; ++other) {
      const Range part = shares.part(rank, other);
      if (rank % 2 == other % 2) {
        EXPECT_EQ(part, shares.chunk(other));
      } else {
        EXPECT_EQ(part.size(), 0U);
      }
    }
  }
}

// Every byte crosses once: a host sends (H-1)/H of the vector in each round.
TEST(HostShares, HostsSendEquallyMuch) {
  for (const Hosts& shape : kShapes) {
    const HostMap hosts(shape);
    const std::size_t count = 1200 * index_of(hosts.hosts());
    const HostShares shares(hosts, chunks_by_host(hosts, count));
    for (const std::vector<int>& members : hosts.members) {
      std::size_t sent = 0;
      for (const int member : members) {
        for (const Range& part : shares.parts(member)) sent += part.size();
        sent -= shares.chunk(member).size();
      }
      EXPECT_EQ(sent, count - 1200);
    }
  }
}

// The canonical tree written out.
std::string tree(Range node) {
  if (node.size() == 1) return std::to_string(node.begin);
  const std::size_t middle = node.begin + tree_split(node.size());
  return fmt::format("({}+{})", tree({node.begin, middle}), tree({middle, node.end}));
}

std::string combined(std::span<const CombineStep> program, std::vector<std::string> inputs) {
  std::vector<std::string> stack;
  auto next = inputs.begin();
  for (const CombineStep& step : program) {
    if (step.push) {
      stack.push_back(*next++);
      continue;
    }
    const std::string right = stack.back();
    stack.pop_back();
    stack.back() = fmt::format("({}+{})", stack.back(), right);
  }
  EXPECT_EQ(stack.size(), 1U);
  EXPECT_EQ(next, inputs.end());
  return stack.empty() ? "" : stack.back();
}

void expect_canonical(const HostMap& hosts, const LeafOwners& owners) {
  const auto brought = [&](int rank, std::size_t partial) {
    return tree(owned_nodes(owners, rank).at(partial));
  };
  std::vector<HostInputs> of;
  std::vector<std::vector<std::string>> sent(hosts.members.size());  // per host
  for (int host = 0; host < hosts.hosts(); ++host) {
    of.push_back(HostInputs::of(owners, hosts, host));
    for (const HostInputs::Node& node : of.back().own) {
      std::vector<std::string> inputs;
      for (const TreeInputs::Source& source : node.sources) {
        EXPECT_EQ(hosts.host_of[index_of(source.rank)], host);
        inputs.push_back(brought(source.rank, source.partial));
      }
      sent[index_of(host)].push_back(combined(node.program, inputs));
    }
  }
  for (int host = 0; host < hosts.hosts(); ++host) {
    const HostInputs& inputs = of[index_of(host)];
    EXPECT_EQ(inputs.leaves, static_cast<int>(owners.size()));
    std::vector<std::string> values;
    for (const HostInputs::Source& source : inputs.sources) {
      values.push_back(source.own ? brought(source.from, source.partial)
                                  : sent[index_of(source.from)].at(source.partial));
    }
    EXPECT_EQ(combined(inputs.program, values), tree({0, owners.size()}));
    for (std::size_t other = 0; other < sent.size(); ++other) {
      EXPECT_EQ(inputs.nodes_of[other], sent[other].size());
    }
    for (int rank = 0; rank < hosts.world_size(); ++rank) {
      EXPECT_EQ(inputs.partials_of[index_of(rank)], owned_nodes(owners, rank).size());
    }
  }
}

TEST(HostInputs, CombineInTheCanonicalOrder) {
  std::mt19937 random(1);
  for (const Hosts& shape : kShapes) {
    const HostMap hosts(shape);
    for (const std::size_t lanes : {shape.size(), 2 * shape.size() + 1, std::size_t{29}}) {
      expect_canonical(hosts, even_owners(lanes, hosts.world_size()));
      LeafOwners scattered(lanes);
      for (int& owner : scattered) owner = static_cast<int>(random() % shape.size());
      expect_canonical(hosts, scattered);
    }
    expect_canonical(hosts, {hosts.world_size() - 1});  // a broadcast
  }
}

TEST(HostInputs, AHostWhoseLanesAreANodeSendsOnePartial) {
  const HostMap hosts(Hosts{0, 0, 2, 2});
  EXPECT_THAT(HostInputs::of(even_owners(4, 4), hosts, 0).nodes_of, ElementsAre(1, 1));
  EXPECT_THAT(HostInputs::of(even_owners(16, 4), hosts, 1).nodes_of, ElementsAre(1, 1));
  EXPECT_FALSE(HostInputs::of(even_owners(4, 4), hosts, 0).sends_as_brought());
  // In turn, no two ranks of a host are next to each other in the tree.
  EXPECT_THAT(HostInputs::of(even_owners(4, 4), HostMap(Hosts{0, 1, 0, 1}), 0).nodes_of,
              ElementsAre(2, 2));
  EXPECT_TRUE(HostInputs::of(even_owners(4, 4), HostMap(Hosts{0, 1, 0, 1}), 0).sends_as_brought());
}

}  // namespace
}  // namespace lockstep::host_map_test
