#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "lockstep/base/range.h"

namespace lockstep {

// A plan says which piece of a buffer goes to whom in which round of a collective. It is plain data
// computed by pure functions of (rank, world size, counts); RoundRunner and
// NodeExchange move the bytes.

enum class Algorithm : std::uint8_t {
  kAuto,             // the table in choose_algorithm()
  kPair,             // every rank exchanges whole vectors with every other; one round
  kRing,             // scatter-reduce, all-gather around the ring; order-free
  kHalvingDoubling,  // recursive halving by doubling distances, then doubling
  kDirect,           // every rank reduces one chunk of everybody's, then all-gather
  kTree,             // binomial reduce to a root, binomial broadcast
  kShared,           // direct, through memory that all ranks map
  kNative,           // the engine's own (MPI); order-free
};

std::string_view to_string(Algorithm algorithm);

// What happens to a received piece.
enum class Merge : std::uint8_t {
  kCopy,   // buffer[piece] = received
  kLeft,   // buffer[piece] = received op buffer[piece]
  kRight,  // buffer[piece] = buffer[piece] op received
  kTree,   // all kTree pieces of a round are the same range, one from every other rank:
           // buffer[piece] = canonical tree over ranks of received and own
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
// began. Both ends list a transfer even when its piece is empty. At most one send to and one
// receive from a peer in a round. Peers are listed in the order in which to start with them, so
// that no rank is everybody's first.
struct Round {
  std::vector<Send> sends;
  std::vector<Recv> recvs;
};

struct Plan {
  std::vector<Round> rounds;
};

// Cuts `count` elements into `parts` chunks; the first `count % parts` have one more element.
Range chunk_of(std::size_t count, int parts, int index);

// After the plan ran on all ranks, every rank holds the reduction of all buffers.
// kRing is order-free; all others combine in the canonical tree over ranks (canonical_tree.h).
// kAuto, kShared and kNative have no plan: asking for one is a bug.
Plan plan_all_reduce(Algorithm algorithm, int rank, int world_size, std::size_t count);

// `pieces[r]` of the buffer belongs to rank r; afterwards it holds the reduction there, and the
// rest of the buffer is unspecified. kRing and kDirect.
Plan plan_reduce_scatter(Algorithm algorithm, int rank, const std::vector<Range>& pieces);

// Rank r brings `pieces[r]`; afterwards every rank has all of them. kRing and kDirect.
Plan plan_all_gather(Algorithm algorithm, int rank, const std::vector<Range>& pieces);

// Binomial trees over ranks relative to the root for broadcast; reduce runs in the canonical tree,
// then rank 0 hands the result to `root`; the buffers of the other ranks are unspecified after it.
Plan plan_broadcast(int rank, int world_size, std::size_t count, int root);
Plan plan_reduce(int rank, int world_size, std::size_t count, int root);

// Direct: the root exchanges `pieces[r]` of its buffer with rank r. A non-root rank's buffer is
// that piece alone, so its range is {0, pieces[rank].size()}.
Plan plan_gather(int rank, const std::vector<Range>& pieces, int root);
Plan plan_scatter(int rank, const std::vector<Range>& pieces, int root);

}  // namespace lockstep
