#include "lockstep/comm/collectives/host_exchange.h"

#include <algorithm>

#include "lockstep/base/index.h"
#include "lockstep/comm/kernels/kernels.h"
#include "lockstep/comm/stream_copy.h"

namespace lockstep {
namespace {

constexpr std::size_t kHostWindow = 2;  // segments of a partial in memory
// All segments in memory together should stay in a core's own cache.
constexpr std::size_t kHostSegmentBytes = 256 * 1024;
constexpr std::size_t kLeastHostSegment = 16 * 1024;
// Results are handed on to the other ranks of the host in blocks that are still in the cache.
constexpr std::size_t kSpreadBytes = 128 * 1024;
// Results of this size leave the cache before anybody reads them.
constexpr std::size_t kStreamedResult = 1024 * 1024;

const HostInputs kNoInputs;

class Exchanger final : public TransferObserver {
 public:
  Exchanger(const HostExchange& exchange, Transport& transport, Scratch& scratch);

  std::span<Transfer> transfers() { return transfers_; }
  void advanced(Transfer& transfer) override;
  // Whether sends wait for what the observer does.
  bool watches_sends() const override { return produces_ || releases_; }
  // What the end of all messages leaves to do.
  void finish() {
    while (spread_some()) {
    }
  }

 private:
  enum class Content { kPartials, kResult };
  // What is known of a transfer besides; of equal index.
  struct Message {
    Content content = Content::kPartials;
    std::size_t index = 0;
    Range range;  // elements of the vector
    std::size_t segment_bytes = 0;
    bool windowed = true;
    std::size_t produced = 0;     // partials that are sent: segments
    std::size_t first_piece = 0;  // partials that come: the pieces that they bring something to
    std::size_t end_piece = 0;
    std::size_t spread = 0;  // results that come: bytes that all ranks of the host have
  };
  // Elements of the own chunk that come from the same ranks. Different hosts cut the chunk at
  // different places.
  struct Piece {
    Range left;                     // what is not combined yet
    std::vector<std::size_t> from;  // per host, a message
  };
  // Results that are here from the start, for all ranks of the host.
  struct Ready {
    const std::byte* from = nullptr;
    std::size_t to = 0;  // offset in the vector
    std::size_t bytes = 0;
  };

  std::size_t segment_bytes_of(int host) const;
  bool reduces() const { return exchange_.inputs != nullptr; }
  std::byte* own_out() const {
    return exchange_.outs[index_of(exchange_.hosts->place_of[index_of(rank_)])];
  }
  void add_partials(int peer, Direction direction, Range range, int from_host);
  void add_results(int peer);
  void add_result(int peer, Direction direction, const std::byte* data, Range range);
  void add_ready(const std::byte* from, Range range);
  void assign_windows(Scratch& scratch);
  void cut_pieces();
  void produce(Message& message);
  void combine_ready();
  bool combine_block(Piece& piece);
  void release_results();
  void spread(Message& message);
  bool spread_some();
  void raise_limit(Message& message);
  void combine_inputs(const TreeReduction& how, std::span<void* const> outputs, std::size_t count);
  const std::byte* brought(int rank, std::size_t partial, std::size_t element) const {
    const int place = exchange_.hosts->place_of[index_of(rank)];
    return exchange_.partials[index_of(place)][partial] + element * element_;
  }
  // Bytes of a message up to the end of a segment.
  std::size_t end_of(const Message& message, std::size_t segment) const {
    const Layout& layout = transfers_[message.index].layout;
    return layout.rows.size() * std::min(layout.row_bytes, (segment + 1) * message.segment_bytes);
  }
  std::size_t segment_at(const Message& message, std::size_t element) const {
    return (element - message.range.begin) * element_ / message.segment_bytes;
  }

  const HostExchange& exchange_;
  const HostInputs& inputs_;
  const int rank_;
  const int host_;
  const std::size_t element_;
  bool produces_ = false;  // some partials are combined before they are sent
  bool releases_ = false;  // some results are combined before they are sent
  std::vector<Transfer> transfers_;
  std::vector<Message> messages_;
  std::vector<std::byte*> rows_;         // of partials
  std::vector<std::byte*> result_rows_;  // never grows: transfers point into it
  std::vector<Piece> pieces_;
  std::vector<Ready> ready_;
  std::vector<const void*> operands_;
  std::vector<void*> outputs_;
};

Exchanger::Exchanger(const HostExchange& exchange, Transport& transport, Scratch& scratch)
    : exchange_(exchange),
      inputs_(exchange.inputs != nullptr ? *exchange.inputs : kNoInputs),
      rank_(transport.rank()),
      host_(exchange.hosts->host_of[index_of(rank_)]),
      element_(size_of(exchange.type)) {
  const int n = transport.world_size();
  const auto for_peers = [&](const auto& visit) {
    for (int i = 1; i < n; ++i) {
      const int peer = (rank_ + i) % n;
      const int peer_host = exchange.hosts->host_of[index_of(peer)];
      if (peer_host != host_) visit(peer, peer_host);
    }
  };
  result_rows_.reserve(2 * index_of(n));
  if (reduces()) {
    for_peers([&](int peer, int peer_host) {
      add_partials(peer, Direction::kSend, exchange.shares->part(rank_, peer), host_);
      add_partials(peer, Direction::kRecv, exchange.shares->part(peer, rank_), peer_host);
    });
    assign_windows(scratch);
    cut_pieces();
  }
  if (exchange.gathers) {
    for_peers([&](int peer, int) { add_results(peer); });
    if (!reduces()) add_ready(exchange.own_chunk, exchange.shares->chunk(rank_));
  }
  for (Message& message : messages_) {
    if (message.content == Content::kResult) continue;
    if (transfers_[message.index].direction == Direction::kRecv) {
      raise_limit(message);
    } else if (message.windowed) {
      produces_ = true;
      produce(message);
    } else {
      transfers_[message.index].limit = transfers_[message.index].layout.bytes();
    }
  }
  combine_ready();  // pieces that need nothing of other hosts
}

// The same on both ends of a message: it depends on whose partials they are.
std::size_t Exchanger::segment_bytes_of(int host) const {
  if (exchange_.segment_bytes != 0) return exchange_.segment_bytes;
  const std::size_t rows =
      inputs_.nodes_of[index_of(host)] * index_of(exchange_.hosts->hosts() - 1);
  const std::size_t bytes = kHostSegmentBytes / std::max<std::size_t>(1, rows) / 4096 * 4096;
  return std::max(bytes, kLeastHostSegment);
}

// An empty message is not sent: both ends know.
void Exchanger::add_partials(int peer, Direction direction, Range range, int from_host) {
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

// What a carrier has sent of its host's partials it gets back as the result.
void Exchanger::add_results(int peer) {
  const Range chunk = exchange_.shares->chunk(rank_);
  const Range sent = exchange_.shares->part(peer, rank_);
  if (exchange_.hosts->host_of[index_of(peer)] != exchange_.from_host) {
    const std::byte* const own =
        reduces() ? own_out() + chunk.begin * element_ : exchange_.own_chunk;
    add_result(peer, Direction::kSend, own + (sent.begin - chunk.begin) * element_, sent);
  }
  const Range received = exchange_.shares->part(rank_, peer);
  if (host_ == exchange_.from_host) {
    add_ready(brought(exchange_.root, 0, received.begin), received);
  } else {
    add_result(peer, Direction::kRecv, own_out() + received.begin * element_, received);
  }
}

void Exchanger::add_result(int peer, Direction direction, const std::byte* data, Range range) {
  if (range.size() == 0) return;
  Message message;
  message.content = Content::kResult;
  message.index = transfers_.size();
  message.range = range;
  messages_.push_back(message);
  result_rows_.push_back(const_cast<std::byte*>(data));
  Transfer transfer;
  transfer.peer = peer;
  transfer.direction = direction;
  transfer.layout.rows = {&result_rows_.back(), 1};
  transfer.layout.row_bytes = range.size() * element_;
  if (reduces() && direction == Direction::kSend) {
    releases_ = true;
  } else {
    transfer.limit = transfer.layout.row_bytes;
  }
  transfers_.push_back(transfer);
}

void Exchanger::add_ready(const std::byte* from, Range range) {
  if (range.size() > 0) ready_.push_back({from, range.begin * element_, range.size() * element_});
}

void Exchanger::advanced(Transfer& transfer) {
  Message& message = messages_[index_of(&transfer - transfers_.data())];
  const bool sent = transfer.direction == Direction::kSend;
  if (message.content == Content::kResult) {
    if (!sent) spread(message);
  } else if (!sent) {
    combine_ready();
  } else if (message.windowed) {
    produce(message);
  }
  spread_some();
}

void Exchanger::assign_windows(Scratch& scratch) {
  const auto rows_of = [&](const Message& message) {
    const Transfer& transfer = transfers_[message.index];
    const int from = transfer.direction == Direction::kSend
                         ? host_
                         : exchange_.hosts->host_of[index_of(transfer.peer)];
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

void Exchanger::cut_pieces() {
  const Range own = exchange_.shares->chunk(rank_);
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
    const int host = exchange_.hosts->host_of[index_of(transfer.peer)];
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

void Exchanger::combine_inputs(const TreeReduction& how, std::span<void* const> outputs,
                               std::size_t count) {
  if (operands_.size() == 2 && outputs.size() == 1 && how.op != ReduceOp::kMean) {
    combine(how.op, how.type, outputs[0], operands_[0], operands_[1], count);
  } else {
    reduce_tree(how, operands_, outputs, count);
  }
}

// Combines what has room in the window. A segment has its place once what lay there is sent.
void Exchanger::produce(Message& message) {
  Transfer& transfer = transfers_[message.index];
  const std::size_t segments =
      (transfer.layout.row_bytes + message.segment_bytes - 1) / message.segment_bytes;
  const ReduceOp op = exchange_.op == ReduceOp::kMean ? ReduceOp::kSum : exchange_.op;
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
      combine_inputs({op, exchange_.type, node.program, 1}, {&out, 1}, bytes / element_);
    }
    ++message.produced;
    transfer.limit = end_of(message, segment);
  }
}

void Exchanger::combine_ready() {
  bool combined = false;
  for (Piece& piece : pieces_) {
    while (piece.left.size() > 0 && combine_block(piece)) {
      combined = true;
      for (const HostInputs::Source& source : inputs_.sources) {
        if (!source.own) raise_limit(messages_[piece.from[index_of(source.from)]]);
      }
    }
  }
  if (combined && releases_) release_results();
}

// Lets results go out up to the first element that is not combined.
void Exchanger::release_results() {
  for (const Message& message : messages_) {
    Transfer& transfer = transfers_[message.index];
    if (message.content != Content::kResult || transfer.direction != Direction::kSend) continue;
    std::size_t end = message.range.end;
    for (const Piece& piece : pieces_) {
      if (piece.left.size() == 0 || piece.left.end <= message.range.begin) continue;
      end = std::clamp(piece.left.begin, message.range.begin, message.range.end);
      break;
    }
    transfer.limit = (end - message.range.begin) * element_;
  }
}

void Exchanger::spread(Message& message) {
  const Transfer& transfer = transfers_[message.index];
  const std::size_t bytes = transfer.done - message.spread;
  if (bytes < kSpreadBytes && transfer.done < transfer.layout.bytes()) return;
  const std::byte* const own = own_out();
  const std::size_t at = message.range.begin * element_ + message.spread;
  const auto copy = transfer.layout.bytes() < kStreamedResult ? copy_bytes : stream_bytes;
  for (std::byte* out : exchange_.outs) {
    if (out != own) copy(out + at, own + at, bytes);
  }
  message.spread = transfer.done;
}

// A block of what is ready; false when there was none.
bool Exchanger::spread_some() {
  if (ready_.empty()) return false;
  Ready& ready = ready_.back();
  const std::size_t bytes = std::min(ready.bytes, kSpreadBytes);
  for (std::byte* out : exchange_.outs) copy_bytes(out + ready.to, ready.from, bytes);
  ready.from += bytes;
  ready.to += bytes;
  ready.bytes -= bytes;
  if (ready.bytes == 0) ready_.pop_back();
  return true;
}

// Combines up to the next end of a segment, if everybody's elements are there.
bool Exchanger::combine_block(Piece& piece) {
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
  for (std::byte* out : exchange_.outs) {
    outputs_.push_back(out + (begin - exchange_.first_out) * element_);
  }
  combine_inputs({exchange_.op, exchange_.type, inputs_.program, inputs_.leaves}, outputs_,
                 end - begin);
  piece.left.begin = end;
  return true;
}

// A received segment keeps its place until all pieces in it are combined.
void Exchanger::raise_limit(Message& message) {
  std::size_t needed = message.range.end;
  for (std::size_t i = message.first_piece; i < message.end_piece; ++i) {
    if (pieces_[i].left.size() == 0) continue;
    needed = pieces_[i].left.begin;
    break;
  }
  transfers_[message.index].limit = end_of(message, segment_at(message, needed) + kHostWindow - 1);
}

}  // namespace

void HostExchange::run(Transport& transport, Scratch& scratch, const MeshFrame& stamp,
                       Deadline deadline) const {
  Exchanger exchanger(*this, transport, scratch);
  if (!exchanger.transfers().empty()) {
    transport.run(exchanger.transfers(), stamp, &exchanger, deadline);
  }
  exchanger.finish();
}

}  // namespace lockstep
