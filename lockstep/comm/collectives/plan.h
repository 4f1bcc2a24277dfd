#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/base/range.h"
#include "lockstep/comm/call.h"

namespace lockstep {

// A plan says which range of a buffer goes to whom in which round of a collective. It is plain data
// computed by pure functions of (rank, world size, counts). PlanEngine (plan_engine.cc) carries it
// out: RoundRunner and NodeReduction move the bytes.

// What happens to a received range.
enum class Merge : std::uint8_t {
  kCopy,   // buffer[range] = received
  kLeft,   // buffer[range] = received op buffer[range]
  kRight,  // buffer[range] = buffer[range] op received
  kTree,   // all kTree ranges of a round are the same range, one from every other rank:
           // buffer[range] = canonical tree over ranks of received and own
};

struct Send {
  int peer = 0;
  Range range;
};

struct Recv {
  int peer = 0;
  Range range;
  Merge merge = Merge::kCopy;
};

// Sends and receives of a round run at once; a send carries what the buffer held when the round
// began. Both ends list a transfer even when its range is empty. At most one send to and one
// receive from a peer in a round. Peers are listed in the order in which to start with them, so
// that no rank is everybody's first.
struct Round {
  std::vector<Send> sends;
  std::vector<Recv> recvs;
};

struct Plan {
  std::vector<Round> rounds;
};

// After the plan ran on all ranks, every rank holds the reduction of all buffers.
// kRing is order-free; all others combine in the canonical tree over ranks (canonical_tree.h).
// kAuto, kShared, kTwoLevel and kNative have no plan: asking for one is a bug.
Plan plan_all_reduce(Algorithm algorithm, int rank, int world_size, std::size_t count);

// `chunks[r]` of the buffer belongs to rank r; afterwards it holds the reduction there, and the
// rest of the buffer is unspecified. kRing and kDirect.
Plan plan_reduce_scatter(Algorithm algorithm, int rank, const std::vector<Range>& chunks);

// Rank r brings `chunks[r]`; afterwards every rank has all of them. kRing and kDirect.
Plan plan_all_gather(Algorithm algorithm, int rank, const std::vector<Range>& chunks);

// Binomial trees over ranks relative to the root for broadcast; reduce runs in the canonical tree,
// then rank 0 hands the result to `root`; the buffers of the other ranks are unspecified after it.
Plan plan_broadcast(int rank, int world_size, std::size_t count, int root);
Plan plan_reduce(int rank, int world_size, std::size_t count, int root);

// Direct: `chunks[r]` of the root's buffer goes to or comes from rank r. The buffer of any other
// rank is its chunk alone, so its range there is {0, chunks[rank].size()}.
Plan plan_gather(int rank, const std::vector<Range>& chunks, int root);
Plan plan_scatter(int rank, const std::vector<Range>& chunks, int root);

}  // namespace lockstep
