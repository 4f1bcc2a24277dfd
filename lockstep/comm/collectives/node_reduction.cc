#include "lockstep/comm/collectives/node_reduction.h"

#include <algorithm>
#include <limits>

#include "lockstep/base/check.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/kernels/kernels.h"

namespace lockstep {
namespace {

constexpr std::size_t kPartialWindow = 2;  // segments of a partial in memory

// Combines a segment as soon as it has come from everybody.
class Combiner final : public TransferObserver {
 public:
  Combiner(const NodeReduction& reduction, Transport& transport, Scratch& scratch);

  std::span<Transfer> transfers() { return transfers_; }
  std::size_t first_non_finite() const { return first_non_finite_; }

  void advanced(Transfer&) override { combine_ready(); }
  // Whether sends and what is combined wait for each other.
  bool watches_sends() const override { return sends_first_ || reduction_.one_thread; }

 private:
  void combine_ready() {
    while (combined_ < segments_ && ready(combined_)) combine(combined_++);
  }
  void add_results();
  bool ready(std::size_t segment) const;
  void combine(std::size_t segment);
  // Bytes of a message with so many partials up to the end of a segment.
  std::size_t message_end(std::size_t partials, std::size_t bytes, std::size_t segment) const {
    return partials * std::min(bytes, (segment + 1) * reduction_.segment_bytes);
  }

  const NodeReduction& reduction_;
  const int rank_;
  const std::size_t element_;
  const Range own_;
  const std::size_t own_bytes_;
  std::size_t segments_ = 0;
  std::size_t combined_ = 0;
  // Where the result overwrites what others still need, it has to wait until that is sent.
  bool sends_first_ = false;
  std::size_t first_non_finite_ = std::numeric_limits<std::size_t>::max();

  std::vector<std::byte*> send_partials_;
  std::vector<std::byte*> recv_partials_;
  std::vector<std::size_t> recv_begin_;  // of each rank's partials in recv_partials_
  std::vector<std::byte*> result_rows_;  // never grows: transfers point into it
  std::vector<Transfer> transfers_;      // the partials', then the results'
  std::size_t partial_transfers_ = 0;
  std::vector<const void*> inputs_;
};

Combiner::Combiner(const NodeReduction& reduction, Transport& transport, Scratch& scratch)
    : reduction_(reduction),
      rank_(transport.rank()),
      element_(size_of(reduction.type)),
      own_(reduction.chunks[index_of(rank_)]),
      own_bytes_(own_.size() * element_) {
  const int n = transport.world_size();
  const std::size_t segment_bytes = reduction.segment_bytes;
  segments_ = (own_bytes_ + segment_bytes - 1) / segment_bytes;

  std::size_t recv_partials = 0;
  for (int r = 0; r < n; ++r) {
    recv_begin_.push_back(recv_partials);
    if (r != rank_) recv_partials += reduction.inputs->partials_of[index_of(r)];
  }
  // The window of a small message is no larger than the message.
  const std::size_t window_bytes =
      std::min(kPartialWindow * segment_bytes, (own_bytes_ + 63) / 64 * 64);
  std::byte* memory = scratch.get(recv_partials * window_bytes);
  for (std::size_t i = 0; i < recv_partials; ++i)
    recv_partials_.push_back(memory + i * window_bytes);

  // One partial travels in its own order, so it can be sent in one piece.
  const std::size_t send_segment = reduction.partials.size() == 1 ? 0 : segment_bytes;
  send_partials_.reserve(reduction.partials.size() * static_cast<std::size_t>(n));
  for (int i = 1; i < n; ++i) {
    const int peer = (rank_ + i) % n;
    const Range theirs = reduction.chunks[index_of(peer)];
    const std::size_t begin = send_partials_.size();
    for (const std::byte* partial : reduction.partials) {
      send_partials_.push_back(const_cast<std::byte*>(partial) + theirs.begin * element_);
      const std::byte* sent = send_partials_.back();
      sends_first_ |=
          reduction.out < sent + theirs.size() * element_ && sent < reduction.out + own_bytes_;
    }
    Transfer send;
    send.peer = peer;
    send.direction = Direction::kSend;
    send.layout = {std::span(send_partials_).subspan(begin), theirs.size() * element_, send_segment,
                   0};
    send.limit = send.layout.bytes();
    transfers_.push_back(send);

    Transfer recv;
    recv.peer = peer;
    recv.direction = Direction::kRecv;
    const std::size_t partials = reduction.inputs->partials_of[index_of(peer)];
    recv.layout = {std::span(recv_partials_).subspan(recv_begin_[index_of(peer)], partials),
                   own_bytes_, segment_bytes, kPartialWindow};
    recv.limit = message_end(partials, own_bytes_, kPartialWindow - 1);
    transfers_.push_back(recv);
  }
  partial_transfers_ = transfers_.size();
  LOCKSTEP_CHECK(reduction.gathered == nullptr || reduction.one_thread);
  if (reduction.gathered != nullptr) add_results();
  combine_ready();  // when nobody has anything to send to this rank
}

// A peer's result overwrites what it must have had of this rank's partial before it could combine
// it. No result waits for anything but partials, which wait for nothing behind them.
void Combiner::add_results() {
  const auto add = [&](int peer, Direction direction, std::byte* data, Range range) {
    result_rows_.push_back(data);
    Transfer result;
    result.peer = peer;
    result.direction = direction;
    result.layout.rows = {&result_rows_.back(), 1};
    result.layout.row_bytes = range.size() * element_;
    if (direction == Direction::kRecv) result.limit = result.layout.row_bytes;
    transfers_.push_back(result);
  };
  result_rows_.reserve(partial_transfers_);
  for (std::size_t i = 0; i < partial_transfers_; i += 2) {
    const int peer = transfers_[i].peer;
    const Range theirs = reduction_.chunks[index_of(peer)];
    add(peer, Direction::kSend, reduction_.out, own_);
    add(peer, Direction::kRecv, reduction_.gathered + theirs.begin * element_, theirs);
  }
}

bool Combiner::ready(std::size_t segment) const {
  const std::span partials = std::span(transfers_).first(partial_transfers_);
  return std::all_of(partials.begin(), partials.end(), [&](const Transfer& t) {
    if (t.direction == Direction::kSend && !sends_first_) return true;
    return t.done >= message_end(t.layout.rows.size(), t.layout.row_bytes, segment);
  });
}

void Combiner::combine(std::size_t segment) {
  const std::size_t begin = segment * reduction_.segment_bytes;
  const std::size_t bytes = std::min(reduction_.segment_bytes, own_bytes_ - begin);
  const std::size_t place = (segment % kPartialWindow) * reduction_.segment_bytes;
  inputs_.clear();
  for (const TreeInputs::Source& source : reduction_.inputs->sources) {
    inputs_.push_back(source.rank == rank_
                          ? reduction_.partials[source.partial] + own_.begin * element_ + begin
                          : recv_partials_[recv_begin_[index_of(source.rank)] + source.partial] +
                                place);
  }
  void* const out = reduction_.out + begin;
  const std::size_t count = bytes / element_;
  reduce_tree(
      {reduction_.op, reduction_.type, reduction_.inputs->program, reduction_.inputs->leaves},
      inputs_, {&out, 1}, count);
  if (reduction_.check_finite) {
    const std::size_t found = find_non_finite(reduction_.type, out, count);
    if (found < count) first_non_finite_ = std::min(first_non_finite_, begin / element_ + found);
  }
  for (std::size_t i = 0; i < transfers_.size(); ++i) {
    Transfer& t = transfers_[i];
    if (i >= partial_transfers_) {
      if (t.direction == Direction::kSend) t.limit = begin + bytes;
    } else if (t.direction == Direction::kRecv) {
      t.limit = message_end(t.layout.rows.size(), own_bytes_, segment + kPartialWindow);
    }
  }
}

}  // namespace

std::optional<std::size_t> NodeReduction::run(Transport& transport, Scratch& scratch,
                                              const MeshFrame& stamp, Deadline deadline) const {
  Combiner combiner(*this, transport, scratch);
  transport.run(combiner.transfers(), stamp, &combiner, deadline);
  if (combiner.first_non_finite() == std::numeric_limits<std::size_t>::max()) return {};
  return combiner.first_non_finite();
}

}  // namespace lockstep
