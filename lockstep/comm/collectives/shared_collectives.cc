#include "lockstep/comm/collectives/shared_collectives.h"

#include <algorithm>
#include <limits>

#include "lockstep/base/check.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/kernels/kernels.h"

namespace lockstep {
namespace {

constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();
constexpr std::size_t kSlotData = sizeof(Board::Slot::data);
// Above this, reading everything that everybody brings costs more than a second round.
constexpr std::size_t kSmallTotal = 64 * 1024;
// A stage is cut into a share for every rank and row, of at least a cache line; and a slot has room
// for the addresses of the rows, of 2 ranks at least.
constexpr std::size_t kMostShares = std::min(Board::kStageBytes / 64, 2 * (kSlotData / 8 - 1));

// What a slot holds when the data is too large for it: where to find the result vector, then the
// rows (SharedSpace::publish), kNone for memory that others cannot see.
std::uint64_t* note_in(Board::Slot& slot) { return reinterpret_cast<std::uint64_t*>(slot.data); }

}  // namespace

SharedCollectives::SharedCollectives(Transport& transport, SharedSpace& space, bool oversubscribed)
    : space_(space),
      sync_(transport, space, oversubscribed),
      own_(space.board(transport.rank())),
      rank_(transport.rank()),
      world_size_(transport.world_size()),
      ranks_(TreeInputs::ranks(world_size_)) {}

bool SharedCollectives::supports(Collective collective) {
  return collective != Collective::kScatter && collective != Collective::kAllToAll;
}

bool SharedCollectives::supports(const Call& call, int world_size) {
  if (!supports(call.collective)) return false;
  const auto fits = [&](std::size_t most_rows) {
    return most_rows * static_cast<std::size_t>(world_size) <= kMostShares;
  };
  if (call.owners.empty()) return fits(1);
  // No rank has more rows than there are lanes; to count them takes long.
  return fits(call.owners.size()) || fits(TreeInputs::nodes(call.owners, world_size).most_rows);
}

Outcome SharedCollectives::run(const Call& call, const MeshFrame& stamp, Deadline deadline) {
  sync_.begin(stamp, deadline);
  describe_job(call);
  first_non_finite_ = kNone;
  std::size_t brought = job_.inputs->most_rows * job_.count * job_.element;
  if (!job_.reduce) {
    cut_pieces(call);
    brought = 0;
    for (const Range& p : job_.pieces) brought = std::max(brought, p.size() * job_.element);
  }
  const bool small =
      brought <= kSlotData && brought * static_cast<std::size_t>(world_size_) <= kSmallTotal;
  // A small reduction that is wanted whole needs no pieces.
  if (job_.reduce && !(small && job_.gather)) cut_pieces(call);
  if (small) {
    run_small();
  } else if (show_windows()) {
    run_window();
  } else {
    run_staged();
  }
  return outcome(!small);
}

void SharedCollectives::describe_job(const Call& call) {
  Job& job = job_;
  job.reduce = job.gather = true;
  job.gather_to = -1;
  job.type = call.out.type();
  job.element = size_of(job.type);
  job.count = call.total;
  job.op = call.op;
  job.out = call.out.data();
  job.check_finite = call.options.check_finite;
  job.rows.assign(1, call.in.data());
  switch (call.collective) {
    case Collective::kAllReduce:
    case Collective::kReduceNodes: break;
    case Collective::kBarrier: job.reduce = job.gather = false; break;
    case Collective::kReduceScatter:
    case Collective::kReduceScatterNodes: job.gather = false; break;
    case Collective::kAllGather:
    case Collective::kBroadcast: job.reduce = false; break;
    case Collective::kReduce: job.gather_to = call.root; break;
    case Collective::kGather:
      job.reduce = false;
      job.gather_to = call.root;
      break;
    default: LOCKSTEP_CHECK(false);  // supports() refuses it
  }

  job.inputs = &ranks_;
  if (call.owners.empty()) return;
  nodes_ = TreeInputs::nodes(call.owners, world_size_);
  job.inputs = &nodes_;
  job.rows.clear();
  for (const ConstBufferView& partial : call.partials) job.rows.push_back(partial.data());
}

void SharedCollectives::cut_pieces(const Call& call) {
  if (call.collective != Collective::kBroadcast) {
    job_.pieces = chunks_of(call.counts, job_.count, world_size_);
    return;
  }
  job_.pieces.assign(static_cast<std::size_t>(world_size_), {});
  job_.pieces[index_of(call.root)].end = job_.count;
}

// Combines `count` elements of `inputs_`, which are elements `begin` and on of the result.
void SharedCollectives::combine_piece(std::span<void* const> outputs, std::size_t begin,
                                      std::size_t count) {
  if (count == 0) return;
  if (inputs_.size() == 2 && outputs.size() == 1 && job_.op != ReduceOp::kMean) {
    combine(job_.op, job_.type, outputs[0], inputs_[0], inputs_[1], count);
  } else {
    reduce_tree({job_.op, job_.type, job_.inputs->program, job_.inputs->leaves}, inputs_, outputs,
                count);
  }
  if (job_.check_finite) note_non_finite(outputs[0], begin, count);
}

void SharedCollectives::note_non_finite(const void* data, std::size_t begin, std::size_t count) {
  const std::size_t found = find_non_finite(job_.type, data, count);
  if (found < count) first_non_finite_ = std::min<std::uint64_t>(first_non_finite_, begin + found);
}

void SharedCollectives::run_small() {
  const Job& job = job_;
  const std::size_t vector_bytes = job.count * job.element;
  const std::size_t row_bytes = job.reduce ? vector_bytes : piece(rank_).size() * job.element;
  std::byte* at = sync_.slot(rank_).data;
  for (const std::byte* row : job.rows) {
    copy_bytes(at, row, row_bytes);
    at += row_bytes;
  }
  sync_.exchange_slots();

  if (job.reduce && (!job.gather || job.gathers(rank_))) {
    const Range wanted = job.gather ? Range{0, job.count} : piece(rank_);
    inputs_.clear();
    for (const TreeInputs::Source& source : job.inputs->sources) {
      const std::byte* row = source.rank == rank_
                                 ? job.rows[source.row]
                                 : sync_.slot(source.rank).data + source.row * vector_bytes;
      inputs_.push_back(row + wanted.begin * job.element);
    }
    void* const out = job.out;
    combine_piece({&out, 1}, 0, wanted.size());
  } else if (job.gathers(rank_)) {
    for (int r = 0; r < world_size_; ++r) {
      copy_bytes(job.out + piece(r).begin * job.element, sync_.slot(r).data,
                 piece(r).size() * job.element);
    }
    if (job.check_finite) note_non_finite(job.out, 0, job.count);
  }
}

// Tells everybody where this rank's memory is; true if all of it can be seen by all who need it.
bool SharedCollectives::show_windows() {
  const Job& job = job_;
  const std::size_t vector_bytes = job.count * job.element;
  const std::size_t row_bytes = job.reduce ? vector_bytes : piece(rank_).size() * job.element;
  LOCKSTEP_CHECK((job.inputs->most_rows + 1) * sizeof(std::uint64_t) <= kSlotData);
  std::uint64_t* note = note_in(sync_.slot(rank_));
  // Others store a reduction's result; what is only gathered is fetched by its receiver.
  const bool shows_out = job.reduce && job.gathers(rank_);
  note[0] = shows_out ? space_.publish(job.out, vector_bytes).value_or(kNone) : 0;
  for (std::size_t i = 0; i < job.rows.size(); ++i) {
    note[i + 1] = row_bytes == 0 ? 0 : space_.publish(job.rows[i], row_bytes).value_or(kNone);
  }
  sync_.exchange_slots();
  for (int r = 0; r < world_size_; ++r) {
    const std::uint64_t* theirs = note_in(sync_.slot(r));
    const std::size_t words = job.inputs->rows_of[index_of(r)] + 1;
    if (std::find(theirs, theirs + words, kNone) != theirs + words) return false;
  }
  return true;
}

void SharedCollectives::run_window() {
  const Job& job = job_;
  const auto shown = [&](int rank, std::size_t word) {
    return space_.locate(rank, note_in(sync_.slot(rank))[word]);
  };
  const Range own = piece(rank_);
  const std::size_t offset = own.begin * job.element;
  if (job.reduce) {
    inputs_.clear();
    for (const TreeInputs::Source& source : job.inputs->sources) {
      inputs_.push_back(shown(source.rank, source.row + 1) + offset);
    }
    outputs_.clear();
    if (!job.gather) outputs_.push_back(job.out);
    for (int i = 0; i < world_size_; ++i) {
      const int r = (rank_ + i) % world_size_;
      if (job.gathers(r)) outputs_.push_back(shown(r, 0) + offset);
    }
    combine_piece(outputs_, job.gather ? own.begin : 0, own.size());
  } else if (job.gathers(rank_)) {
    for (int i = 0; i < world_size_; ++i) {
      const int r = (rank_ + i) % world_size_;
      if (piece(r).size() == 0) continue;
      copy_bytes(job.out + piece(r).begin * job.element, r == rank_ ? job.rows[0] : shown(r, 1),
                 piece(r).size() * job.element);
    }
    if (job.check_finite) note_non_finite(job.out, 0, job.count);
  }
  own_.first_non_finite[sync_.parity()] = first_non_finite_;
  ++rounds_;
  sync_.signal(&Board::staged, rounds_);
  sync_.signal(&Board::finished, rounds_);
  sync_.await(&Board::finished, rounds_);
}

Range SharedCollectives::segment_of(int rank, std::size_t segment, std::size_t round) const {
  const Range whole = piece(rank);
  const std::size_t begin = whole.begin + round * segment;
  return common_part({begin, begin + segment}, whole);
}

// Lays out what the others need of this rank's rows: for every rank, for every row, one segment.
void SharedCollectives::stage_rows(std::size_t parity, std::size_t segment, std::size_t round) {
  const Job& job = job_;
  for (int r = 0; r < world_size_; ++r) {
    if (r == rank_) continue;
    const Range part = segment_of(r, segment, round);
    for (std::size_t row = 0; row < job.rows.size(); ++row) {
      const std::size_t place = static_cast<std::size_t>(r) * job.inputs->most_rows + row;
      copy_bytes(own_.stage_in[parity] + place * segment * job.element,
                 job.rows[row] + part.begin * job.element, part.size() * job.element);
    }
  }
}

// Round k moves segment k of every piece. The two halves of a stage are used in turn: before one is
// filled again, signals of the round between prove that everybody has read it.
void SharedCollectives::run_staged() {
  const Job& job = job_;
  const std::size_t shares =
      job.reduce ? static_cast<std::size_t>(world_size_) * job.inputs->most_rows : 1;
  const std::size_t segment = Board::kStageBytes / shares / 64 * 64 / job.element;
  LOCKSTEP_CHECK(segment > 0);
  std::size_t rounds = 1;
  for (const Range& p : job.pieces) rounds = std::max(rounds, (p.size() + segment - 1) / segment);

  for (std::size_t round = 0; round < rounds; ++round) {
    const std::uint64_t turn = ++rounds_;
    const std::size_t parity = turn & 1;
    const Range own = segment_of(rank_, segment, round);
    const std::size_t within = own.begin - piece(rank_).begin;
    if (turn > 2) sync_.await(&Board::finished, turn - 2);
    if (job.reduce) {
      stage_rows(parity, segment, round);
      sync_.signal(&Board::staged, turn);
      sync_.await(&Board::staged, turn);
      inputs_.clear();
      for (const TreeInputs::Source& source : job.inputs->sources) {
        const std::size_t place =
            static_cast<std::size_t>(rank_) * job.inputs->most_rows + source.row;
        inputs_.push_back(source.rank == rank_ ? job.rows[source.row] + own.begin * job.element
                                               : sync_.board(source.rank).stage_in[parity] +
                                                     place * segment * job.element);
      }
      outputs_.clear();
      if (!job.gather) outputs_.push_back(job.out + within * job.element);
      if (job.gathers(rank_)) outputs_.push_back(job.out + own.begin * job.element);
      if (job.gather) outputs_.push_back(own_.stage_out[parity]);
      combine_piece(outputs_, job.gather ? own.begin : within, own.size());
    } else {
      sync_.signal(&Board::staged, turn);
      sync_.await(&Board::staged, turn - 1);
      const std::byte* from = job.rows[0] + within * job.element;
      copy_bytes(own_.stage_out[parity], from, own.size() * job.element);
      if (job.gathers(rank_)) {
        copy_bytes(job.out + own.begin * job.element, from, own.size() * job.element);
      }
    }
    own_.first_non_finite[sync_.parity()] = first_non_finite_;
    sync_.signal(&Board::finished, turn);

    if (!job.gathers(rank_)) continue;
    sync_.await(&Board::finished, turn);
    for (int i = 1; i < world_size_; ++i) {
      const int r = (rank_ + i) % world_size_;
      const Range part = segment_of(r, segment, round);
      copy_bytes(job.out + part.begin * job.element, sync_.board(r).stage_out[parity],
                 part.size() * job.element);
    }
  }
  if (!job.reduce && job.check_finite && job.gathers(rank_)) {
    note_non_finite(job.out, 0, job.count);
  }
}

// Where every rank has looked at its own part only, the one that holds the whole asks them all.
Outcome SharedCollectives::outcome(bool in_parts) const {
  std::uint64_t first = first_non_finite_;
  if (job_.check_finite && in_parts && job_.reduce && job_.gather) {
    if (!job_.gathers(rank_)) return {};
    for (int r = 0; r < world_size_; ++r) {
      first = std::min(first, sync_.board(r).first_non_finite[sync_.parity()]);
    }
  }
  if (first == kNone) return {};
  return {static_cast<std::size_t>(first)};
}

}  // namespace lockstep
