#include "lockstep/comm/collectives/plan.h"

#include <algorithm>
#include <bit>
#include <iterator>

#include "lockstep/base/canonical_tree.h"
#include "lockstep/base/check.h"

namespace lockstep {
namespace {

// rank + offset around the ring, |offset| <= world_size.
int shifted(int rank, int offset, int world_size) {
  return (rank + offset + world_size) % world_size;
}

void append(std::vector<Round>& rounds, std::vector<Round> more) {
  rounds.insert(rounds.end(), std::make_move_iterator(more.begin()),
                std::make_move_iterator(more.end()));
}

// The way back: what rounds took to where it was reduced flows as a copy to where it came from,
// last round first.
std::vector<Round> mirrored(const std::vector<Round>& rounds) {
  std::vector<Round> back;
  for (auto round = rounds.rbegin(); round != rounds.rend(); ++round) {
    Round& mirror = back.emplace_back();
    for (const Recv& recv : round->recvs) mirror.sends.push_back({recv.peer, recv.range});
    for (const Send& send : round->sends) {
      mirror.recvs.push_back({send.peer, send.range, Merge::kCopy});
    }
  }
  return back;
}

// One round: every rank sends `theirs(peer)` to every peer and receives `mine` from all.
// In the k-th place all send k ranks ahead and receive from k ranks behind, so no rank is
// everybody's first.
template <typename ChunkOfPeer>
Round reduce_directly(int rank, int world_size, ChunkOfPeer theirs, Range mine) {
  Round round;
  for (int k = 1; k < world_size; ++k) {
    const int ahead = shifted(rank, k, world_size);
    round.sends.push_back({ahead, theirs(ahead)});
    round.recvs.push_back({shifted(rank, -k, world_size), mine, Merge::kTree});
  }
  return round;
}

// In round k a rank passes on what it reduced in round k - 1; chunk r ends at rank r.
std::vector<Round> ring_reduce(int rank, const std::vector<Range>& chunks) {
  const int n = static_cast<int>(chunks.size());
  const int ahead = shifted(rank, 1, n);
  const int behind = shifted(rank, -1, n);
  std::vector<Round> rounds(static_cast<std::size_t>(n - 1));
  for (int k = 0; k < n - 1; ++k) {
    rounds[k].sends = {{ahead, chunks[shifted(rank, -k - 1, n)]}};
    rounds[k].recvs = {{behind, chunks[shifted(behind, -k - 1, n)], Merge::kLeft}};
  }
  return rounds;
}

std::vector<Round> ring_gather(int rank, const std::vector<Range>& chunks) {
  const int n = static_cast<int>(chunks.size());
  const int ahead = shifted(rank, 1, n);
  const int behind = shifted(rank, -1, n);
  std::vector<Round> rounds(static_cast<std::size_t>(n - 1));
  for (int k = 0; k < n - 1; ++k) {
    rounds[k].sends = {{ahead, chunks[shifted(rank, -k, n)]}};
    rounds[k].recvs = {{behind, chunks[shifted(behind, -k, n)], Merge::kCopy}};
  }
  return rounds;
}

// The node of the canonical tree over ranks [begin, end), cut at `middle`.
struct Ranks {
  int begin;
  int end;
  int size() const { return end - begin; }
  int middle() const { return begin + static_cast<int>(tree_split(size())); }
};

// Up the canonical tree: the first rank of a node holds its value.
void append_tree_reduce(int rank, Ranks ranks, Range whole, std::vector<Round>& rounds) {
  if (ranks.size() == 1) return;
  const int middle = ranks.middle();
  append_tree_reduce(rank, rank < middle ? Ranks{ranks.begin, middle} : Ranks{middle, ranks.end},
                     whole, rounds);
  if (rank == ranks.begin) rounds.push_back({{}, {{middle, whole, Merge::kRight}}});
  if (rank == middle) rounds.push_back({{{ranks.begin, whole}}, {}});
}

Range half_of(Range range, bool upper) {
  const std::size_t middle = range.end - range.size() / 2;
  return upper ? Range{middle, range.end} : Range{range.begin, middle};
}

// What the index-th of `holders` (a power of two) ranks holds after they halved `whole` among
// them: the lowest bit of the index chooses first, so the j-th of 2^k holders has the union of
// what holders j, j + 2^k, j + 2 * 2^k ... have when there are more of them.
Range held_range(Range whole, int holders, int index) {
  for (int bit = 1; bit < holders; bit *= 2) whole = half_of(whole, (index & bit) != 0);
  return whole;
}

// Recursive halving along the canonical tree. Afterwards the value of a node is spread over its
// first ranks, as many as the largest power of two that is not above its size.
void append_halving(int rank, Ranks ranks, Range whole, std::vector<Round>& rounds) {
  if (ranks.size() == 1) return;
  const int middle = ranks.middle();
  const bool on_left = rank < middle;
  append_halving(rank, on_left ? Ranks{ranks.begin, middle} : Ranks{middle, ranks.end}, whole,
                 rounds);

  const int left_holders = middle - ranks.begin;
  const int right_holders = static_cast<int>(std::bit_floor(unsigned(ranks.end - middle)));
  const int index = on_left ? rank - ranks.begin : rank - middle;
  if (left_holders == right_holders) {
    // Both hold the same range; the lower rank keeps the lower half.
    const int partner = on_left ? middle + index : ranks.begin + index;
    const Range held = held_range(whole, left_holders, index);
    rounds.push_back(
        {{{partner, half_of(held, on_left)}},
         {{partner, half_of(held, !on_left), on_left ? Merge::kRight : Merge::kLeft}}});
  } else if (on_left) {
    rounds.push_back({{},
                      {{middle + index % right_holders, held_range(whole, left_holders, index),
                        Merge::kRight}}});
  } else if (index < right_holders) {
    Round& round = rounds.emplace_back();
    for (int left = index; left < left_holders; left += right_holders) {
      round.sends.push_back({ranks.begin + left, held_range(whole, left_holders, left)});
    }
  }
}

void check_rank(int rank, std::size_t world_size) {
  LOCKSTEP_CHECK(rank >= 0 && static_cast<std::size_t>(rank) < world_size);
}

}  // namespace

Plan plan_all_reduce(Algorithm algorithm, int rank, int world_size, std::size_t count) {
  check_rank(rank, static_cast<std::size_t>(world_size));
  if (world_size == 1) return {};
  const Range whole{0, count};
  if (algorithm == Algorithm::kPair) {
    const auto everything = [&](int) { return whole; };
    return {{reduce_directly(rank, world_size, everything, whole)}};
  }

  std::vector<Round> rounds;
  switch (algorithm) {
    case Algorithm::kRing: {
      const std::vector<Range> chunks = chunks_of({}, count, world_size);
      rounds = ring_reduce(rank, chunks);
      append(rounds, ring_gather(rank, chunks));
      return {rounds};
    }
    case Algorithm::kDirect: {
      const auto chunk = [&](int peer) { return chunk_of(count, world_size, peer); };
      rounds = {reduce_directly(rank, world_size, chunk, chunk(rank))};
      break;
    }
    case Algorithm::kHalvingDoubling: append_halving(rank, {0, world_size}, whole, rounds); break;
    default:
      LOCKSTEP_CHECK(algorithm == Algorithm::kTree);
      append_tree_reduce(rank, {0, world_size}, whole, rounds);
  }
  append(rounds, mirrored(rounds));
  return {rounds};
}

Plan plan_reduce_scatter(Algorithm algorithm, int rank, const std::vector<Range>& chunks) {
  check_rank(rank, chunks.size());
  if (chunks.size() == 1) return {};
  if (algorithm == Algorithm::kRing) return {ring_reduce(rank, chunks)};
  LOCKSTEP_CHECK(algorithm == Algorithm::kDirect);
  const auto chunk = [&](int peer) { return chunks[peer]; };
  return {{reduce_directly(rank, static_cast<int>(chunks.size()), chunk, chunks[rank])}};
}

Plan plan_all_gather(Algorithm algorithm, int rank, const std::vector<Range>& chunks) {
  if (chunks.size() > 1 && algorithm == Algorithm::kRing) return {ring_gather(rank, chunks)};
  return {mirrored(plan_reduce_scatter(algorithm, rank, chunks).rounds)};
}

// Relative rank v receives from v without its lowest bit, then sends to v + d for every power of
// two d below that bit, the largest subtree first.
Plan plan_broadcast(int rank, int world_size, std::size_t count, int root) {
  check_rank(rank, static_cast<std::size_t>(world_size));
  check_rank(root, static_cast<std::size_t>(world_size));
  const Range whole{0, count};
  const int relative = shifted(rank, -root, world_size);
  const auto rank_of = [&](int v) { return shifted(v, root, world_size); };
  int bit = relative & -relative;
  Plan plan;
  if (relative == 0) {
    bit = static_cast<int>(std::bit_ceil(unsigned(world_size)));
  } else {
    plan.rounds.push_back({{}, {{rank_of(relative - bit), whole, Merge::kCopy}}});
  }
  for (int d = bit / 2; d > 0; d /= 2) {
    if (relative + d < world_size) plan.rounds.push_back({{{rank_of(relative + d), whole}}, {}});
  }
  return plan;
}

Plan plan_reduce(int rank, int world_size, std::size_t count, int root) {
  check_rank(rank, static_cast<std::size_t>(world_size));
  check_rank(root, static_cast<std::size_t>(world_size));
  const Range whole{0, count};
  Plan plan;
  append_tree_reduce(rank, {0, world_size}, whole, plan.rounds);
  if (root != 0 && rank == 0) plan.rounds.push_back({{{root, whole}}, {}});
  if (root != 0 && rank == root) plan.rounds.push_back({{}, {{0, whole, Merge::kCopy}}});
  return plan;
}

Plan plan_gather(int rank, const std::vector<Range>& chunks, int root) {
  return {mirrored(plan_scatter(rank, chunks, root).rounds)};
}

Plan plan_scatter(int rank, const std::vector<Range>& chunks, int root) {
  check_rank(rank, chunks.size());
  check_rank(root, chunks.size());
  const int world_size = static_cast<int>(chunks.size());
  if (world_size == 1) return {};
  Round round;
  if (rank == root) {
    for (int k = 1; k < world_size; ++k) {
      const int peer = shifted(rank, k, world_size);
      round.sends.push_back({peer, chunks[peer]});
    }
  } else {
    round.recvs.push_back({root, {0, chunks[rank].size()}, Merge::kCopy});
  }
  return {{round}};
}

}  // namespace lockstep
