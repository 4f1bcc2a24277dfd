#include "lockstep/comm/collectives/host_reduction.h"

#include <algorithm>

#include "lockstep/base/index.h"
#include "lockstep/comm/kernels/kernels.h"

namespace lockstep {
namespace {

constexpr std::size_t kHostWindow = 2;  // segments of a partial in memory
// All segments in memory together should stay in a core's own cache.
constexpr std::size_t kHostSegmentBytes = 256 * 1024;
constexpr std::size_t kLeastHostSegment = 16 * 1024;

class HostCombiner final : public TransferObserver {
 public:
  HostCombiner(const HostReduction& reduction, Transport& transport, Scratch& scratch);

  std::span<Transfer> transfers() { return transfers_; }
  void advanced(Transfer& transfer) override {
    Message& message = messages_[index_of(&transfer - transfers_.data())];
    if (transfer.direction == Direction::kSend) {
      if (message.windowed) produce(message);
    } else {
      combine_ready();
    }
  }
  bool watches_sends() const override { return produces_; }
  void combine_ready();

 private:
  // What is known of a transfer besides; of equal index.
  struct Message {
    std::size_t index = 0;
    Range range;  // elements of the vector
    std::size_t segment_bytes = 0;
    bool windowed = true;
    std::size_t produced = 0;     // sends: segments
    std::size_t first_piece = 0;  // receives: the pieces that it brings something to
    std::size_t end_piece = 0;
  };
  // Elements of the own chunk that come from the same ranks. Different hosts cut the chunk at
  // different places.
  struct Piece {
    Range left;                     // what is not combined yet
    std::vector<std::size_t> from;  // per host, a message
  };

  std::size_t segment_bytes_of(int host) const;
  void add_message(int peer, Direction direction, Range range, int from_host);
  void assign_windows(Scratch& scratch);
  void cut_pieces();
  void produce(Message& message);
  bool combine_block(Piece& piece);
  void raise_limit(Message& message);
  void combine_inputs(const TreeReduction& how, std::span<void* const> outputs, std::size_t count);
  const std::byte* brought(int rank, std::size_t partial, std::size_t element) const {
    const int place = reduction_.hosts->place_of[index_of(rank)];
    return reduction_.partials[index_of(place)][partial] + element * element_;
  }
  // Bytes of a message up to the end of a segment.
  std::size_t end_of(const Message& message, std::size_t segment) const {
    const Layout& layout = transfers_[message.index].layout;
    return layout.rows.size() * std::min(layout.row_bytes, (segment + 1) * message.segment_bytes);
  }
  std::size_t segment_at(const Message& message, std::size_t element) const {
    return (element - message.range.begin) * element_ / message.segment_bytes;
  }

  const HostReduction& reduction_;
  const HostInputs& inputs_;
  const int rank_;
  const int host_;
  const std::size_t element_;
  bool produces_ = false;  // some sends are combined first
  std::vector<Transfer> transfers_;
  std::vector<Message> messages_;
  std::vector<std::byte*> rows_;
  std::vector<Piece> pieces_;
  std::vector<const void*> operands_;
  std::vector<void*> outputs_;
};

HostCombiner::HostCombiner(const HostReduction& reduction, Transport& transport, Scratch& scratch)
    : reduction_(reduction),
      inputs_(*reduction.inputs),
      rank_(transport.rank()),
      host_(reduction.hosts->host_of[index_of(rank_)]),
      element_(size_of(reduction.type)) {
  const int n = transport.world_size();
  for (int i = 1; i < n; ++i) {
    const int peer = (rank_ + i) % n;
    const int peer_host = reduction.hosts->host_of[index_of(peer)];
    if (peer_host == host_) continue;
    add_message(peer, Direction::kSend, reduction.shares->part(rank_, peer), host_);
    add_message(peer, Direction::kRecv, reduction.shares->part(peer, rank_), peer_host);
  }
  assign_windows(scratch);
  cut_pieces();
  for (Message& message : messages_) {
    if (transfers_[message.index].direction == Direction::kRecv) {
      raise_limit(message);
    } else if (message.windowed) {
      produces_ = true;
      produce(message);
    } else {
      transfers_[message.index].limit = transfers_[message.index].layout.bytes();
    }
  }
}

// The same on both ends of a message: it depends on whose partials they are.
std::size_t HostCombiner::segment_bytes_of(int host) const {
  if (reduction_.segment_bytes != 0) return reduction_.segment_bytes;
  const std::size_t rows =
      inputs_.nodes_of[index_of(host)] * index_of(reduction_.hosts->hosts() - 1);
  const std::size_t bytes = kHostSegmentBytes / std::max<std::size_t>(1, rows) / 4096 * 4096;
  return std::max(bytes, kLeastHostSegment);
}

// An empty message is not sent: both ends know.
void HostCombiner::add_message(int peer, Direction direction, Range range, int from_host) {
  if (range.size() == 0 || inputs_.nodes_of[index_of(from_host)] == 0) return;
  Message message;
  message.index = transfers_.size();
  message.range = range;
  message.segment_bytes = segment_bytes_of(from_host);
  message.windowed = direction == Direction::kRecv || !inputs_.sends_as_brought();
  messages_.push_back(message);
  Transfer transfer;
  transfer.peer = peer;
  transfer.direction = direction;
  transfer.layout.row_bytes = range.size() * element_;
  transfer.layout.segment_bytes = message.segment_bytes;
  transfer.layout.window_segments = message.windowed ? kHostWindow : 0;
  transfers_.push_back(transfer);
}

void HostCombiner::assign_windows(Scratch& scratch) {
  const auto rows_of = [&](const Message& message) {
    const Transfer& transfer = transfers_[message.index];
    const int from = transfer.direction == Direction::kSend
                         ? host_
                         : reduction_.hosts->host_of[index_of(transfer.peer)];
    return inputs_.nodes_of[index_of(from)];
  };
  // The window of a small message is no larger than the message.
  const auto window_bytes = [&](const Message& message) {
    return std::min(kHostWindow * message.segment_bytes,
                    (message.range.size() * element_ + 63) / 64 * 64);
  };
  std::size_t rows = 0;
  std::size_t bytes = 0;
  for (const Message& message : messages_) {
    rows += rows_of(message);
    if (message.windowed) bytes += rows_of(message) * window_bytes(message);
  }
  std::byte* memory = scratch.get(bytes);
  rows_.reserve(rows);
  for (const Message& message : messages_) {
    const std::size_t begin = rows_.size();
    for (std::size_t row = 0; row < rows_of(message); ++row) {
      if (message.windowed) {
        rows_.push_back(memory);
        memory += window_bytes(message);
      } else {
        const TreeInputs::Source& source = inputs_.own[row].sources[0];
        rows_.push_back(
            const_cast<std::byte*>(brought(source.rank, source.partial, message.range.begin)));
      }
    }
    transfers_[message.index].layout.rows = std::span(rows_).subspan(begin, rows_of(message));
  }
}

void HostCombiner::cut_pieces() {
  const Range own = reduction_.shares->chunk(rank_);
  std::vector<std::size_t> cuts{own.begin, own.end};
  for (const Message& message : messages_) {
    if (transfers_[message.index].direction == Direction::kSend) continue;
    cuts.push_back(message.range.begin);
    cuts.push_back(message.range.end);
  }
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
    pieces_.push_back({{cuts[i], cuts[i + 1]}, std::vector<std::size_t>(inputs_.nodes_of.size())});
  }
  for (Message& message : messages_) {
    const Transfer& transfer = transfers_[message.index];
    if (transfer.direction == Direction::kSend) continue;
    const int host = reduction_.hosts->host_of[index_of(transfer.peer)];
    const auto piece_at = [&](std::size_t element) {
      return index_of(std::lower_bound(cuts.begin(), cuts.end(), element) - cuts.begin());
    };
    message.first_piece = piece_at(message.range.begin);
    message.end_piece = piece_at(message.range.end);
    for (std::size_t i = message.first_piece; i < message.end_piece; ++i) {
      pieces_[i].from[index_of(host)] = message.index;
    }
  }
}

void HostCombiner::combine_inputs(const TreeReduction& how, std::span<void* const> outputs,
                                  std::size_t count) {
  if (operands_.size() == 2 && outputs.size() == 1 && how.op != ReduceOp::kMean) {
    combine(how.op, how.type, outputs[0], operands_[0], operands_[1], count);
  } else {
    reduce_tree(how, operands_, outputs, count);
  }
}

// Combines what has room in the window. A segment has its place once what lay there is sent.
void HostCombiner::produce(Message& message) {
  Transfer& transfer = transfers_[message.index];
  const std::size_t segments =
      (transfer.layout.row_bytes + message.segment_bytes - 1) / message.segment_bytes;
  const ReduceOp op = reduction_.op == ReduceOp::kMean ? ReduceOp::kSum : reduction_.op;
  while (message.produced < segments) {
    const std::size_t segment = message.produced;
    if (segment >= kHostWindow && transfer.done < end_of(message, segment - kHostWindow)) return;
    const std::size_t begin = segment * message.segment_bytes;
    const std::size_t bytes = std::min(message.segment_bytes, transfer.layout.row_bytes - begin);
    const std::size_t first = message.range.begin + begin / element_;
    for (std::size_t row = 0; row < inputs_.own.size(); ++row) {
      const HostInputs::Node& node = inputs_.own[row];
      operands_.clear();
      for (const TreeInputs::Source& source : node.sources) {
        operands_.push_back(brought(source.rank, source.partial, first));
      }
      void* const out = transfer.layout.rows[row] + (segment % kHostWindow) * message.segment_bytes;
      combine_inputs({op, reduction_.type, node.program, 1}, {&out, 1}, bytes / element_);
    }
    ++message.produced;
    transfer.limit = end_of(message, segment);
  }
}

void HostCombiner::combine_ready() {
  for (Piece& piece : pieces_) {
    while (piece.left.size() > 0 && combine_block(piece)) {
      for (const HostInputs::Source& source : inputs_.sources) {
        if (!source.own) raise_limit(messages_[piece.from[index_of(source.from)]]);
      }
    }
  }
}

// Combines up to the next end of a segment, if everybody's elements are there.
bool HostCombiner::combine_block(Piece& piece) {
  const std::size_t begin = piece.left.begin;
  std::size_t end = std::min(piece.left.end, begin + segment_bytes_of(host_) / element_);
  for (const HostInputs::Source& source : inputs_.sources) {
    if (source.own) continue;
    const Message& message = messages_[piece.from[index_of(source.from)]];
    const std::size_t segment = segment_at(message, begin);
    if (transfers_[message.index].done < end_of(message, segment)) return false;
    end = std::min(end, message.range.begin + (segment + 1) * message.segment_bytes / element_);
  }
  operands_.clear();
  for (const HostInputs::Source& source : inputs_.sources) {
    if (source.own) {
      operands_.push_back(brought(source.from, source.partial, begin));
      continue;
    }
    const Message& message = messages_[piece.from[index_of(source.from)]];
    const std::size_t segment = segment_at(message, begin);
    const std::size_t within =
        (begin - message.range.begin) * element_ - segment * message.segment_bytes;
    operands_.push_back(transfers_[message.index].layout.rows[source.partial] +
                        (segment % kHostWindow) * message.segment_bytes + within);
  }
  outputs_.clear();
  for (std::byte* out : reduction_.outs) {
    outputs_.push_back(out + (begin - reduction_.first_out) * element_);
  }
  combine_inputs({reduction_.op, reduction_.type, inputs_.program, inputs_.leaves}, outputs_,
                 end - begin);
  piece.left.begin = end;
  return true;
}

// A received segment keeps its place until all pieces in it are combined.
void HostCombiner::raise_limit(Message& message) {
  std::size_t needed = message.range.end;
  for (std::size_t i = message.first_piece; i < message.end_piece; ++i) {
    if (pieces_[i].left.size() == 0) continue;
    needed = pieces_[i].left.begin;
    break;
  }
  transfers_[message.index].limit = end_of(message, segment_at(message, needed) + kHostWindow - 1);
}

}  // namespace

void HostReduction::run(Transport& transport, Scratch& scratch, const MeshFrame& stamp,
                        Deadline deadline) const {
  HostCombiner combiner(*this, transport, scratch);
  if (!combiner.transfers().empty()) {
    transport.run(combiner.transfers(), stamp, &combiner, deadline);
  }
  combiner.combine_ready();  // when no other host has anything to send to this rank
}

}  // namespace lockstep
