// Which rounds of a gradient server make up a collective.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "lockstep/base/index.h"
#include "lockstep/comm/kernels/kernels.h"
#include "lockstep/server/server_engine.h"

namespace lockstep {
namespace {

// A round's tail has at most so many numbers, those of its control among them.
constexpr std::size_t kMostNumbers = 2048 - RoundControl::kNumbers;
// Rows are combined in strips of so many bytes: one piece on the wire.
constexpr std::size_t kStripBytes = 2 * kLanePiece;

bool adds(ReduceOp op) { return op == ReduceOp::kSum || op == ReduceOp::kMean; }

bool everybody_owns_a_lane(const LeafOwners& owners, int world_size) {
  std::vector<bool> owns(static_cast<std::size_t>(world_size));
  for (const int owner : owners) owns[index_of(owner)] = true;
  return std::ranges::find(owns, false) == owns.end();
}

}  // namespace

void ServerEngine::reduce_nodes(const Running& running) {
  const Call& call = running.call;
  const bool scatters = call.collective == Collective::kReduceScatterNodes;
  const Range piece = scatters ? chunks_of(call.counts, call.total, world_size())[index_of(rank_)]
                               : Range{0, call.total};
  const bool fast =
      adds(call.op) && (running.type() == DataType::kF32 || running.type() == DataType::kF64);
  if (!fast) {
    agree(running);
    std::vector<const std::byte*> rows;
    for (const ConstBufferView& partial : call.partials) rows.push_back(partial.data());
    return reduce_rows(running, TreeInputs::nodes(call.owners, world_size()), rows, piece,
                       call.out.data());
  }
  // A rank that brings nothing to the sum can bring no stamp with it either.
  if (!everybody_owns_a_lane(call.owners, world_size())) agree(running);
  std::byte* const sum = scatters ? scratch_.get(call.total * running.element()) : call.out.data();
  if (running.type() == DataType::kF32) {
    sum_nodes_f32(running, {reinterpret_cast<float*>(sum), call.total});
  } else {
    sum_nodes_f64(running, {reinterpret_cast<double*>(sum), call.total});
  }
  if (scatters)
    copy_bytes(call.out.data(), sum + piece.begin * running.element(), call.out.bytes());
  if (call.op == ReduceOp::kMean) {
    finish_mean(running.type(), call.out.data(), call.out.count(),
                static_cast<int>(call.owners.size()));
  }
}

void ServerEngine::sum_nodes_f32(const Running& running, std::span<float> sum) {
  const Call& call = running.call;
  const std::vector<Range> nodes = owned_nodes(call.owners, rank_);
  std::vector<Part> parts;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const auto* data = reinterpret_cast<const float*>(call.partials[i].data());
    parts.push_back({nodes[i], {data, call.total}, {}});
  }
  check_agreement(running, round(running.control, static_cast<std::uint32_t>(call.owners.size()),
                                 parts, 0, sum));
}

void ServerEngine::sum_nodes_f64(const Running& running, std::span<double> sum) {
  const Call& call = running.call;
  const std::vector<Range> nodes = owned_nodes(call.owners, rank_);
  std::size_t begin = 0;
  do {  // no numbers at all are a round, too
    const std::size_t count = std::min(kMostNumbers, sum.size() - begin);
    std::vector<Part> parts;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      const ConstBufferView some = call.partials[i].slice({begin, begin + count});
      Part part{nodes[i], {}, std::vector<double>(count)};
      if (count > 0) std::memcpy(part.numbers.data(), some.data(), some.bytes());
      parts.push_back(std::move(part));
    }
    const std::vector<double> sums =
        round(running.control, static_cast<std::uint32_t>(call.owners.size()), parts, count, {});
    check_agreement(running, sums);
    std::copy_n(sums.begin() + RoundControl::kNumbers, count,
                sum.begin() + static_cast<std::ptrdiff_t>(begin));
    begin += count;
  } while (begin < sum.size());
}

void ServerEngine::reduce_rows(const Running& running, const TreeInputs& inputs,
                               std::span<const std::byte* const> rows, Range piece,
                               std::byte* out) {
  const std::size_t element = running.element();
  const std::size_t strip = kStripBytes / element;
  const std::size_t total = running.call.total;
  for (std::size_t begin = 0; begin < total; begin += strip) {
    const std::size_t count = std::min(strip, total - begin);
    std::byte* place = scratch_.get(inputs.sources.size() * count * element);
    void* const result = place;  // where the first row was
    std::vector<const void*> strips;
    for (const TreeInputs::Source& source : inputs.sources) {
      if (source.rank == rank_) {
        std::memcpy(place, rows[source.row] + begin * element, count * element);
      }
      spread(running.control, source.rank, place, count * element);
      strips.push_back(place);
      place += count * element;
    }
    reduce_tree({running.call.op, running.type(), inputs.program, inputs.leaves}, strips,
                {&result, 1}, count);
    const std::size_t first = std::max(begin, piece.begin);
    const std::size_t last = std::min(begin + count, piece.end);
    if (out == nullptr || first >= last) continue;
    std::memcpy(out + (first - piece.begin) * element,
                static_cast<std::byte*>(result) + (first - begin) * element,
                (last - first) * element);
  }
}

void ServerEngine::reduce_ranks(const Running& running) {
  const Call& call = running.call;
  agree(running);
  const std::byte* const row = call.in.data();
  const bool scatters = call.collective == Collective::kReduceScatter;
  const bool wanted = call.collective != Collective::kReduce || rank_ == call.root;
  const Range piece = scatters ? chunks_of(call.counts, call.total, world_size())[index_of(rank_)]
                               : Range{0, call.total};
  reduce_rows(running, TreeInputs::ranks(world_size()), {&row, 1}, piece,
              wanted ? call.out.data() : nullptr);
}

void ServerEngine::gather(const Running& running) {
  const Call& call = running.call;
  agree(running);
  const bool wanted = call.collective == Collective::kAllGather || rank_ == call.root;
  const std::vector<Range> pieces = chunks_of(call.counts, call.total, world_size());
  for (int from = 0; from < world_size(); ++from) {
    const Range piece = pieces[index_of(from)];
    const std::size_t bytes = piece.size() * running.element();
    std::byte* place = wanted ? call.out.slice(piece).data() : nullptr;
    if (from == rank_) {
      if (!wanted) place = scratch_.get(bytes);
      copy_bytes(place, call.in.data(), bytes);
    }
    spread(running.control, from, place, bytes);
  }
}

void ServerEngine::scatter(const Running& running) {
  const Call& call = running.call;
  agree(running);
  const std::vector<Range> pieces = chunks_of(call.counts, call.total, world_size());
  for (int to = 0; to < world_size(); ++to) {
    const Range piece = pieces[index_of(to)];
    const std::size_t bytes = piece.size() * running.element();
    std::byte* place = to == rank_ ? call.out.data() : nullptr;
    if (rank_ == call.root) {
      if (to != rank_) place = scratch_.get(bytes);
      copy_bytes(place, call.in.slice(piece).data(), bytes);
    }
    spread(running.control, call.root, place, bytes);
  }
}

void ServerEngine::all_to_all(const Running& running) {
  const Call& call = running.call;
  agree(running);
  const auto n = static_cast<std::size_t>(world_size());
  // What every rank sends to each, then what it expects of each.
  std::vector<std::vector<std::uint64_t>> counts;
  for (int from = 0; from < world_size(); ++from) {
    std::vector<std::uint64_t> theirs(call.counts.begin(), call.counts.end());
    theirs.insert(theirs.end(), call.recv_counts.begin(), call.recv_counts.end());
    spread(running.control, from, reinterpret_cast<std::byte*>(theirs.data()),
           theirs.size() * sizeof theirs[0]);
    counts.push_back(std::move(theirs));
  }
  for (std::size_t from = 0; from < n; ++from) {
    for (std::size_t to = 0; to < n; ++to) {
      if (counts[from][to] == counts[to][n + from]) continue;
      throw Error(ErrorCode::kSizeMismatch,
                  fmt::format("{} sends {} elements, {} expects {}", names_[from], counts[from][to],
                              names_[to], counts[to][n + from]));
    }
  }
  const std::vector<Range> sent = chunks_of(call.counts, call.in.count(), world_size());
  const std::vector<Range> received = chunks_of(call.recv_counts, call.out.count(), world_size());
  for (std::size_t from = 0; from < n; ++from) {
    for (std::size_t to = 0; to < n; ++to) {
      const bool mine = static_cast<int>(from) == rank_;
      const auto bytes = static_cast<std::size_t>(counts[from][to]) * running.element();
      std::byte* place = nullptr;
      if (static_cast<int>(to) == rank_) {
        place = call.out.slice(received[from]).data();
      } else if (mine) {
        place = scratch_.get(bytes);
      }
      if (mine) copy_bytes(place, call.in.slice(sent[to]).data(), bytes);
      if (from != to) spread(running.control, static_cast<int>(from), place, bytes);
    }
  }
}

}  // namespace lockstep
