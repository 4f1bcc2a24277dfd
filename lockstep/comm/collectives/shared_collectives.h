#pragma once

#include <span>
#include <vector>

#include "lockstep/base/index.h"
#include "lockstep/comm/call.h"
#include "lockstep/comm/collectives/board_sync.h"
#include "lockstep/comm/transport/shared_space.h"
#include "lockstep/comm/tree_inputs.h"

namespace lockstep {

// Collectives through shared memory. Every one of them is "reduce, then gather", or one half of it,
// over chunks of a vector, chunk r being the work of rank r:
//   small   everybody shows everything it brings in its entry and takes what it needs;
//   window  everybody's memory is visible: rank r combines chunk r of all and stores it everywhere;
//   staged  the same through stages, round by round, when some memory is not visible.
// No temporary beyond the boards. One thread at a time.
class SharedCollectives {
 public:
  SharedCollectives(Transport& transport, SharedSpace& space, bool oversubscribed);

  static bool supports(Collective collective);
  // Whether it can carry out this call: reductions over very many nodes do not fit the boards.
  static bool supports(const Call& call, int world_size);
  Outcome run(const Call& call, const MeshFrame& stamp, CollectiveStay& stay);

 private:
  // A collective as reduce and gather over chunks. Kept between calls to save allocations.
  struct Task {
    bool reduce = false;
    bool gather = false;
    int gather_to = -1;  // the one rank that gathers; -1: every rank
    DataType type = DataType::kU8;
    std::size_t element = 1;    // bytes
    std::size_t count = 0;      // elements of the whole vector
    std::vector<Range> chunks;  // unless it is small and whole on every rank
    // reduce: the vectors this rank brings, whole; otherwise its own chunk.
    std::vector<const std::byte*> partials;
    const TreeInputs* inputs = nullptr;
    ReduceOp op = ReduceOp::kSum;
    std::byte* out = nullptr;  // the whole vector when this rank gathers, else its own chunk
    bool check_finite = false;

    bool gathers(int rank) const { return gather && (gather_to < 0 || gather_to == rank); }
  };

  // The rounds in which a vector goes through the stages.
  struct Stages {
    std::size_t segment = 0;  // elements of a chunk in one round
    std::size_t rounds = 1;
    std::uint64_t first_turn = 0;  // as Board counts rounds

    std::uint64_t turn(std::size_t round) const { return first_turn + round; }
  };

  Outcome carry_out(const Call& call, const MeshFrame& stamp, CollectiveStay& stay);
  void describe_task(const Call& call);
  void cut_chunks(const Call& call);
  bool show_windows();
  void run_small();
  void run_window();
  void run_staged();
  void gather_staged(const Stages& stages);
  void reduce_staged(const Stages& stages);
  void stage_partials(const Stages& stages, std::size_t round);
  void reduce_stage(const Stages& stages, std::size_t round);
  void take_results(const Stages& stages, std::size_t round);
  std::byte* result_of(int rank, const Stages& stages, std::size_t round) const;
  void take(std::byte* to, const std::byte* from, std::size_t bytes) const;
  void combine_range(std::span<void* const> outputs, std::size_t begin, std::size_t count);
  void note_non_finite(const void* data, std::size_t begin, std::size_t count);
  Outcome outcome(bool in_parts) const;

  Range chunk(int rank) const { return task_.chunks[index_of(rank)]; }
  // Part `round` of a rank's chunk, cut into segments of `segment` elements.
  Range segment_of(int rank, std::size_t segment, std::size_t round) const;

  SharedSpace& space_;
  BoardSync sync_;
  Board& own_;
  const int rank_;
  const int world_size_;

  const TreeInputs ranks_;    // leaf = rank
  TreeInputs nodes_;          // of the last reduction over nodes
  std::uint64_t rounds_ = 0;  // as all ranks have counted them

  // Of the collective under way.
  Task task_;
  std::uint64_t first_non_finite_ = 0;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
};

}  // namespace lockstep
