#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "lockstep/base/range.h"
#include "lockstep/comm/tree_inputs.h"

namespace lockstep {

// Which ranks of a group are on which host, and what that means for a collective in two levels:
// who handles which elements, and which partials a host sends. Plain data from pure functions.

struct HostMap {
  HostMap() = default;
  // As Transport::hosts() tells it.
  explicit HostMap(std::span<const int> first_ranks);

  std::vector<int> host_of;   // per rank; hosts are numbered in the order of their ranks
  std::vector<int> place_of;  // per rank, among the ranks of its host
  std::vector<std::vector<int>> members;  // per host, in rank order

  int hosts() const { return static_cast<int>(members.size()); }
  int world_size() const { return static_cast<int>(host_of.size()); }
  // Whether two levels are less work than one: several hosts, one of them with several ranks.
  bool has_two_levels() const;
};

// The chunk of every rank when a vector is cut evenly among hosts, and a host's share among its
// ranks.
std::vector<Range> chunks_by_host(const HostMap& hosts, std::size_t count);

// Chunk r of a vector is the work of rank r. What a host sends and receives of the chunks of
// another host is cut evenly among its own ranks, its *carriers*, whatever the other host's cut is.
// So a carrier touches elements that no other rank of its host touches, and needs no word with
// them. `hosts` must outlive it.
class HostShares {
 public:
  HostShares(const HostMap& hosts, std::vector<Range> chunks);

  Range chunk(int rank) const { return chunks_[static_cast<std::size_t>(rank)]; }
  // The elements of the chunk of `rank` that `carrier` handles for its host. All of its own chunk,
  // nothing of the other chunks of its own host.
  Range part(int carrier, int rank) const;
  // All that `carrier` handles, of every rank's chunk.
  std::vector<Range> parts(int carrier) const;

 private:
  const HostMap& hosts_;
  std::vector<Range> chunks_;
  std::vector<std::size_t> begin_;   // of a rank's chunk among those of its host, side by side
  std::vector<std::size_t> totals_;  // per host, elements of all its chunks
};

// The canonical tree as one host sees it. Every host sends the partials of the maximal nodes whose
// leaves all belong to its ranks.
struct HostInputs {
  // What ranks of this host bring to a node that the host sends.
  struct Node {
    std::vector<TreeInputs::Source> sources;
    std::vector<CombineStep> program;
  };
  std::vector<Node> own;              // of this host, in leaf order
  std::vector<std::size_t> nodes_of;  // how many each host sends
  // The inputs of `program`, which combines the whole tree: partials of ranks of this host, and
  // nodes that other hosts have sent.
  struct Source {
    bool own = false;
    int from = 0;  // a rank if it is our own, else a host
    std::size_t partial = 0;
  };
  std::vector<Source> sources;
  std::vector<CombineStep> program;
  int leaves = 1;
  std::vector<std::size_t> partials_of;  // how many each rank brings

  // Whether this host sends partials as its ranks bring them: there is nothing to combine.
  bool sends_as_brought() const;

  static HostInputs of(const LeafOwners& owners, const HostMap& hosts, int host);
};

}  // namespace lockstep
