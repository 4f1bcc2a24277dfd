#include "lockstep/comm/collectives/host_map.h"

#include <algorithm>

#include "lockstep/base/check.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/call.h"

namespace lockstep {

HostMap::HostMap(std::span<const int> first_ranks) {
  for (std::size_t rank = 0; rank < first_ranks.size(); ++rank) {
    const std::size_t first = index_of(first_ranks[rank]);
    LOCKSTEP_CHECK(first <= rank);
    if (first == rank) members.emplace_back();
    host_of.push_back(first == rank ? hosts() - 1 : host_of[first]);
    std::vector<int>& neighbours = members[index_of(host_of.back())];
    LOCKSTEP_CHECK(first == rank || neighbours.front() == first_ranks[rank]);
    place_of.push_back(static_cast<int>(neighbours.size()));
    neighbours.push_back(static_cast<int>(rank));
  }
}

bool HostMap::has_two_levels() const { return hosts() > 1 && hosts() < world_size(); }

std::vector<Range> chunks_by_host(const HostMap& hosts, std::size_t count) {
  std::vector<Range> chunks(hosts.host_of.size());
  for (int host = 0; host < hosts.hosts(); ++host) {
    const Range share = chunk_of(count, hosts.hosts(), host);
    const std::vector<int>& members = hosts.members[index_of(host)];
    const int ranks = static_cast<int>(members.size());
    for (int place = 0; place < ranks; ++place) {
      const Range within = chunk_of(share.size(), ranks, place);
      chunks[index_of(members[index_of(place)])] = {share.begin + within.begin,
                                                    share.begin + within.end};
    }
  }
  return chunks;
}

HostShares::HostShares(const HostMap& hosts, std::vector<Range> chunks)
    : hosts_(hosts),
      chunks_(std::move(chunks)),
      begin_(chunks_.size()),
      totals_(hosts.members.size(), 0) {
  for (std::size_t rank = 0; rank < chunks_.size(); ++rank) {
    std::size_t& total = totals_[index_of(hosts_.host_of[rank])];
    begin_[rank] = total;
    total += chunks_[rank].size();
  }
}

Range HostShares::part(int carrier, int rank) const {
  const Range whole = chunk(rank);
  const int host = hosts_.host_of[index_of(rank)];
  const int own_host = hosts_.host_of[index_of(carrier)];
  if (host == own_host) return rank == carrier ? whole : Range{whole.begin, whole.begin};
  const int carriers = static_cast<int>(hosts_.members[index_of(own_host)].size());
  const std::size_t begin = begin_[index_of(rank)];
  const Range common =
      common_part(chunk_of(totals_[index_of(host)], carriers, hosts_.place_of[index_of(carrier)]),
                  {begin, begin + whole.size()});
  return {whole.begin + common.begin - begin, whole.begin + common.end - begin};
}

std::vector<Range> HostShares::parts(int carrier) const {
  std::vector<Range> parts;
  for (int rank = 0; rank < hosts_.world_size(); ++rank) {
    const Range some = part(carrier, rank);
    if (some.size() > 0) parts.push_back(some);
  }
  return parts;
}

bool HostInputs::sends_as_brought() const {
  return std::all_of(own.begin(), own.end(),
                     [](const Node& node) { return node.sources.size() == 1; });
}

HostInputs HostInputs::of(const LeafOwners& owners, const HostMap& hosts, int host) {
  HostInputs inputs;
  inputs.nodes_of.assign(hosts.members.size(), 0);
  inputs.partials_of.assign(hosts.host_of.size(), 0);
  inputs.leaves = static_cast<int>(owners.size());
  LeafOwners host_owners;
  for (const int owner : owners) host_owners.push_back(hosts.host_of[index_of(owner)]);

  // A maximal node of a host is made of maximal nodes of its ranks.
  const std::vector<Range> rank_nodes = maximal_nodes(owners);
  std::vector<Range> nodes;  // of `program`
  auto next = rank_nodes.begin();
  for (const Range& host_node : maximal_nodes(host_owners)) {
    const int from = host_owners[host_node.begin];
    const std::size_t number = inputs.nodes_of[index_of(from)]++;
    Node node;
    std::vector<Range> within;
    for (; next != rank_nodes.end() && next->begin < host_node.end; ++next) {
      const int rank = owners[next->begin];
      node.sources.push_back({rank, inputs.partials_of[index_of(rank)]++});
      within.push_back({next->begin - host_node.begin, next->end - host_node.begin});
      if (from != host) continue;
      nodes.push_back(*next);
      inputs.sources.push_back({true, rank, node.sources.back().partial});
    }
    if (from != host) {
      nodes.push_back(host_node);
      inputs.sources.push_back({false, from, number});
      continue;
    }
    node.program = combine_program(within, host_node.size());
    inputs.own.push_back(std::move(node));
  }
  inputs.program = combine_program(nodes, owners.size());
  return inputs;
}

}  // namespace lockstep
