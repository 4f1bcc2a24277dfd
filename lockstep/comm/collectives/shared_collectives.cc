#include "lockstep/comm/collectives/shared_collectives.h"

#include <algorithm>
#include <limits>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/kernels/kernels.h"
#include "lockstep/comm/stream_copy.h"

namespace lockstep {
namespace {

constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();
constexpr std::size_t kEntryData = sizeof(Board::Entry::data);
// Above this, reading everything that everybody brings costs more than a second round.
constexpr std::size_t kSmallTotal = 64 * 1024;
// A stage is cut into a share for every rank and partial, of at least a cache line; and an entry
// has room for the addresses of the partials, of 2 ranks at least.
constexpr std::size_t kMostShares = std::min(Board::kStageBytes / 64, 2 * (kEntryData / 8 - 1));

// What is left to do with so few bytes of all ranks takes about as long as a look at the clock.
constexpr std::size_t kBrief = 128;
// From so many bytes of results on all ranks together, they are written past the cache: most caches
// do not keep them until they are used, and to fetch what is overwritten would take half as long
// again. Smaller ones are slower that way.
constexpr std::size_t kLeavesCache = 128 * 1024 * 1024;
// How many results of a rank may wait for the others. Each has the size of one share of a stage,
// and a reduction has two shares at least: so four fit into stage_out.
constexpr std::size_t kResults = 4;

// What an entry holds when the data is too large for it: where to find the result vector, then the
// partials (SharedSpace::publish), kNone for memory that others cannot see.
std::uint64_t* note_in(Board::Entry& entry) { return reinterpret_cast<std::uint64_t*>(entry.data); }

}  // namespace

SharedCollectives::SharedCollectives(Transport& transport, SharedSpace& space, bool oversubscribed)
    : space_(space),
      sync_(transport, space, oversubscribed),
      own_(space.board(transport.rank())),
      rank_(transport.rank()),
      world_size_(transport.world_size()),
      ranks_(TreeInputs::ranks(world_size_)) {}

bool SharedCollectives::supports(Collective collective) {
  return collective != Collective::kScatter && collective != Collective::kAllToAll &&
         collective != Collective::kPointToPoint;
}

bool SharedCollectives::supports(const Call& call, int world_size) {
  if (!supports(call.collective)) return false;
  const auto fits = [&](std::size_t most_partials) {
    return most_partials * static_cast<std::size_t>(world_size) <= kMostShares;
  };
  if (call.owners.empty()) return fits(1);
  // No rank has more partials than there are lanes; to count them takes long.
  return fits(call.owners.size()) || fits(TreeInputs::nodes(call.owners, world_size).most_partials);
}

// A rank that throws may free its memory at once.
Outcome SharedCollectives::run(const Call& call, const MeshFrame& stamp, CollectiveStay& stay) {
  sync_.enter();
  try {
    const Outcome outcome = carry_out(call, stamp, stay);
    sync_.leave();
    return outcome;
  } catch (const Error&) {
    sync_.leave();
    if (space_.shares_heap()) sync_.await_leaving();
    throw;
  }
}

Outcome SharedCollectives::carry_out(const Call& call, const MeshFrame& stamp,
                                     CollectiveStay& stay) {
  sync_.begin(stamp, stay);
  describe_task(call);
  first_non_finite_ = kNone;
  std::size_t brought = task_.inputs->most_partials * task_.count * task_.element;
  if (!task_.reduce) {
    cut_chunks(call);
    brought = 0;
    for (const Range& p : task_.chunks) brought = std::max(brought, p.size() * task_.element);
  }
  const bool small =
      brought <= kEntryData && brought * static_cast<std::size_t>(world_size_) <= kSmallTotal;
  // A small reduction that is wanted whole needs no chunks.
  if (task_.reduce && !(small && task_.gather)) cut_chunks(call);
  if (small) {
    run_small();
    return outcome(false);
  }
  stay.enter();  // takes no time beside what follows
  if (show_windows()) {
    run_window();
  } else {
    run_staged();
  }
  return outcome(true);
}

void SharedCollectives::describe_task(const Call& call) {
  Task& task = task_;
  task.reduce = task.gather = true;
  task.gather_to = -1;
  task.type = call.out.type();
  task.element = size_of(task.type);
  task.count = call.total;
  task.op = call.op;
  task.out = call.out.data();
  task.check_finite = call.options.check_finite;
  task.partials.assign(1, call.in.data());
  switch (call.collective) {
    case Collective::kAllReduce:
    case Collective::kReduceNodes: break;
    case Collective::kBarrier: task.reduce = task.gather = false; break;
    case Collective::kReduceScatter:
    case Collective::kReduceScatterNodes: task.gather = false; break;
    case Collective::kAllGather:
    case Collective::kBroadcast: task.reduce = false; break;
    case Collective::kReduce: task.gather_to = call.root; break;
    case Collective::kGather:
      task.reduce = false;
      task.gather_to = call.root;
      break;
    default: LOCKSTEP_CHECK(false);  // supports() refuses it
  }

  task.inputs = &ranks_;
  if (call.owners.empty()) return;
  nodes_ = TreeInputs::nodes(call.owners, world_size_);
  task.inputs = &nodes_;
  task.partials.clear();
  for (const ConstBufferView& partial : call.partials) task.partials.push_back(partial.data());
}

void SharedCollectives::cut_chunks(const Call& call) {
  if (call.collective != Collective::kBroadcast) {
    task_.chunks = chunks_of(call.counts, task_.count, world_size_);
    return;
  }
  task_.chunks.assign(static_cast<std::size_t>(world_size_), {});
  task_.chunks[index_of(call.root)].end = task_.count;
}

// Combines `count` elements of `inputs_`, which are elements `begin` and on of the result.
void SharedCollectives::combine_range(std::span<void* const> outputs, std::size_t begin,
                                      std::size_t count) {
  if (count == 0) return;
  if (inputs_.size() == 2 && outputs.size() == 1 && task_.op != ReduceOp::kMean) {
    combine(task_.op, task_.type, outputs[0], inputs_[0], inputs_[1], count);
  } else {
    reduce_tree({task_.op, task_.type, task_.inputs->program, task_.inputs->leaves}, inputs_,
                outputs, count);
  }
  if (task_.check_finite) note_non_finite(outputs[0], begin, count);
}

void SharedCollectives::note_non_finite(const void* data, std::size_t begin, std::size_t count) {
  const std::size_t found = find_non_finite(task_.type, data, count);
  if (found < count) first_non_finite_ = std::min<std::uint64_t>(first_non_finite_, begin + found);
}

void SharedCollectives::run_small() {
  const Task& task = task_;
  const std::size_t vector_bytes = task.count * task.element;
  const std::size_t partial_bytes = task.reduce ? vector_bytes : chunk(rank_).size() * task.element;
  std::byte* at = sync_.entry(rank_).data;
  for (const std::byte* partial : task.partials) {
    copy_bytes(at, partial, partial_bytes);
    at += partial_bytes;
  }
  sync_.gather_entries(task.inputs->leaves * vector_bytes <= kBrief);

  if (task.reduce && (!task.gather || task.gathers(rank_))) {
    const Range wanted = task.gather ? Range{0, task.count} : chunk(rank_);
    inputs_.clear();
    for (const TreeInputs::Source& source : task.inputs->sources) {
      const std::byte* partial =
          source.rank == rank_ ? task.partials[source.partial]
                               : sync_.entry(source.rank).data + source.partial * vector_bytes;
      inputs_.push_back(partial + wanted.begin * task.element);
    }
    void* const out = task.out;
    combine_range({&out, 1}, 0, wanted.size());
  } else if (task.gathers(rank_)) {
    for (int r = 0; r < world_size_; ++r) {
      copy_bytes(task.out + chunk(r).begin * task.element, sync_.entry(r).data,
                 chunk(r).size() * task.element);
    }
    if (task.check_finite) note_non_finite(task.out, 0, task.count);
  }
}

// Tells everybody where this rank's memory is; true if all of it can be seen by all who need it.
bool SharedCollectives::show_windows() {
  const Task& task = task_;
  const std::size_t vector_bytes = task.count * task.element;
  const std::size_t partial_bytes = task.reduce ? vector_bytes : chunk(rank_).size() * task.element;
  LOCKSTEP_CHECK((task.inputs->most_partials + 1) * sizeof(std::uint64_t) <= kEntryData);
  std::uint64_t* note = note_in(sync_.entry(rank_));
  // Others store a reduction's result; what is only gathered is fetched by its receiver.
  const bool shows_out = task.reduce && task.gathers(rank_);
  note[0] = shows_out ? space_.publish(task.out, vector_bytes).value_or(kNone) : 0;
  for (std::size_t i = 0; i < task.partials.size(); ++i) {
    note[i + 1] =
        partial_bytes == 0 ? 0 : space_.publish(task.partials[i], partial_bytes).value_or(kNone);
  }
  sync_.gather_entries();
  for (int r = 0; r < world_size_; ++r) {
    const std::uint64_t* theirs = note_in(sync_.entry(r));
    const std::size_t words = task.inputs->partials_of[index_of(r)] + 1;
    if (std::find(theirs, theirs + words, kNone) != theirs + words) return false;
  }
  return true;
}

void SharedCollectives::run_window() {
  const Task& task = task_;
  const std::size_t vector_bytes = task.count * task.element;
  // The numbers are the other rank's: they need not be right.
  const auto shown = [&](int rank, std::size_t word, std::size_t bytes) {
    std::byte* const data = space_.locate(rank, note_in(sync_.entry(rank))[word], bytes);
    if (data == nullptr) [[unlikely]] {
      sync_.fail(rank, "showed memory that is not there");
    }
    return data;
  };
  const Range own = chunk(rank_);
  const std::size_t offset = own.begin * task.element;
  if (task.reduce) {
    inputs_.clear();
    for (const TreeInputs::Source& source : task.inputs->sources) {
      inputs_.push_back(shown(source.rank, source.partial + 1, vector_bytes) + offset);
    }
    outputs_.clear();
    if (!task.gather) outputs_.push_back(task.out);
    for (int i = 0; i < world_size_; ++i) {
      const int r = (rank_ + i) % world_size_;
      if (task.gathers(r)) outputs_.push_back(shown(r, 0, vector_bytes) + offset);
    }
    combine_range(outputs_, task.gather ? own.begin : 0, own.size());
  } else if (task.gathers(rank_)) {
    for (int i = 0; i < world_size_; ++i) {
      const int r = (rank_ + i) % world_size_;
      if (chunk(r).size() == 0) continue;
      const std::size_t bytes = chunk(r).size() * task.element;
      copy_bytes(task.out + chunk(r).begin * task.element,
                 r == rank_ ? task.partials[0] : shown(r, 1, bytes), bytes);
    }
    if (task.check_finite) note_non_finite(task.out, 0, task.count);
  }
  own_.first_non_finite[sync_.parity()] = first_non_finite_;
  ++rounds_;
  sync_.signal(&Board::staged, rounds_);
  sync_.signal(&Board::finished, rounds_);
  sync_.await(&Board::finished, rounds_);
}

Range SharedCollectives::segment_of(int rank, std::size_t segment, std::size_t round) const {
  const Range whole = chunk(rank);
  const std::size_t begin = whole.begin + round * segment;
  return common_part({begin, begin + segment}, whole);
}

// Copies what others have shown to where the caller wants it.
void SharedCollectives::take(std::byte* to, const std::byte* from, std::size_t bytes) const {
  const int takers = task_.gather_to < 0 ? world_size_ : 1;
  if (task_.count * task_.element * index_of(takers) >= kLeavesCache) {
    stream_bytes(to, from, bytes);
  } else {
    copy_bytes(to, from, bytes);
  }
}

void SharedCollectives::run_staged() {
  const Task& task = task_;
  const std::size_t shares =
      task.reduce ? static_cast<std::size_t>(world_size_) * task.inputs->most_partials : 1;
  Stages stages;
  stages.segment = Board::kStageBytes / shares / 64 * 64 / task.element;
  LOCKSTEP_CHECK(stages.segment > 0 && (!task.reduce || kResults * stages.segment * task.element <=
                                                            sizeof(Board::stage_out)));
  for (const Range& p : task.chunks) {
    stages.rounds = std::max(stages.rounds, (p.size() + stages.segment - 1) / stages.segment);
  }
  stages.first_turn = rounds_ + 1;
  rounds_ += stages.rounds;
  if (task.reduce) {
    reduce_staged(stages);
  } else {
    gather_staged(stages);
  }
}

// Round k moves segment k of every chunk. What a rank waits for, the others have done well before
// they wait themselves: they have staged round k before they reduced round k - 1, and reduced round
// k before they took what round k - 1 brought. So nobody stands still for the jitter of others.
//
// Partials have two stages, in turn: one is filled again when all have finished the round before
// the last. Results have kResults: who has staged round k, has taken what round k - 3 brought.
void SharedCollectives::reduce_staged(const Stages& stages) {
  stage_partials(stages, 0);
  for (std::size_t round = 0; round < stages.rounds; ++round) {
    if (round + 1 < stages.rounds) stage_partials(stages, round + 1);
    sync_.await(&Board::staged, stages.turn(round));
    reduce_stage(stages, round);
    own_.first_non_finite[sync_.parity()] = first_non_finite_;
    sync_.signal(&Board::finished, stages.turn(round));
    if (round > 0) take_results(stages, round - 1);
  }
  take_results(stages, stages.rounds - 1);
}

// Lays out what the others need of this rank's partials: for every rank, for every partial, one
// segment.
void SharedCollectives::stage_partials(const Stages& stages, std::size_t round) {
  const Task& task = task_;
  if (round >= 2) sync_.await(&Board::finished, stages.turn(round - 2));
  for (int i = 1; i < world_size_; ++i) {
    const int r = (rank_ + i) % world_size_;
    const Range some = segment_of(r, stages.segment, round);
    for (std::size_t partial = 0; partial < task.partials.size(); ++partial) {
      const std::size_t place = index_of(r) * task.inputs->most_partials + partial;
      copy_bytes(own_.stage_in[round % 2] + place * stages.segment * task.element,
                 task.partials[partial] + some.begin * task.element, some.size() * task.element);
    }
  }
  sync_.signal(&Board::staged, stages.turn(round));
}

std::byte* SharedCollectives::result_of(int rank, const Stages& stages, std::size_t round) const {
  return sync_.board(rank).stage_out + round % kResults * stages.segment * task_.element;
}

void SharedCollectives::reduce_stage(const Stages& stages, std::size_t round) {
  const Task& task = task_;
  const Range own = segment_of(rank_, stages.segment, round);
  const std::size_t within = own.begin - chunk(rank_).begin;
  inputs_.clear();
  for (const TreeInputs::Source& source : task.inputs->sources) {
    const std::size_t place = index_of(rank_) * task.inputs->most_partials + source.partial;
    inputs_.push_back(source.rank == rank_
                          ? task.partials[source.partial] + own.begin * task.element
                          : sync_.board(source.rank).stage_in[round % 2] +
                                place * stages.segment * task.element);
  }
  void* const out =
      task.gather ? result_of(rank_, stages, round) : task.out + within * task.element;
  combine_range({&out, 1}, task.gather ? own.begin : within, own.size());
}

void SharedCollectives::take_results(const Stages& stages, std::size_t round) {
  const Task& task = task_;
  if (!task.gathers(rank_)) return;
  sync_.await(&Board::finished, stages.turn(round));
  for (int i = 0; i < world_size_; ++i) {
    const int r = (rank_ + i) % world_size_;
    const Range some = segment_of(r, stages.segment, round);
    take(task.out + some.begin * task.element, result_of(r, stages, round),
         some.size() * task.element);
  }
}

// Round k moves segment k of every chunk, through two stages in turn: before one is filled again,
// signals of the round between prove that everybody has read it.
void SharedCollectives::gather_staged(const Stages& stages) {
  const Task& task = task_;
  for (std::size_t round = 0; round < stages.rounds; ++round) {
    const Range own = segment_of(rank_, stages.segment, round);
    const std::size_t within = own.begin - chunk(rank_).begin;
    const std::size_t stage = round % 2 * Board::kStageBytes;
    sync_.signal(&Board::staged, stages.turn(round));
    if (round >= 1) sync_.await(&Board::staged, stages.turn(round - 1));
    const std::byte* from = task.partials[0] + within * task.element;
    copy_bytes(own_.stage_out + stage, from, own.size() * task.element);
    if (task.gathers(rank_)) {
      copy_bytes(task.out + own.begin * task.element, from, own.size() * task.element);
    }
    sync_.signal(&Board::finished, stages.turn(round));

    if (!task.gathers(rank_)) continue;
    sync_.await(&Board::finished, stages.turn(round));
    for (int i = 1; i < world_size_; ++i) {
      const int r = (rank_ + i) % world_size_;
      const Range some = segment_of(r, stages.segment, round);
      take(task.out + some.begin * task.element, sync_.board(r).stage_out + stage,
           some.size() * task.element);
    }
  }
  if (task.check_finite && task.gathers(rank_)) note_non_finite(task.out, 0, task.count);
}

// Where every rank has looked at its own part only, the one that holds the whole asks them all.
Outcome SharedCollectives::outcome(bool in_parts) const {
  std::uint64_t first = first_non_finite_;
  if (task_.check_finite && in_parts && task_.reduce && task_.gather) {
    if (!task_.gathers(rank_)) return {};
    for (int r = 0; r < world_size_; ++r) {
      const std::uint64_t theirs = sync_.board(r).first_non_finite[sync_.parity()];
      if (theirs != kNone && theirs >= task_.count) {
        sync_.fail(r, "names an element that is not there");
      }
      first = std::min(first, theirs);
    }
  }
  if (first == kNone) return {};
  return {static_cast<std::size_t>(first)};
}

}  // namespace lockstep
