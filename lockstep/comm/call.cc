#include "lockstep/comm/call.h"

#include <fmt/format.h>

namespace lockstep {
namespace {

// FNV-1a over 64-bit words: tells uneven counts or owners apart in a stamp.
class WordHash {
 public:
  void add(std::uint64_t word) { value_ = (value_ ^ word) * 0x100000001b3ULL; }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325ULL;
};

std::uint64_t shape_of(const Call& call) {
  switch (call.collective) {
    case Collective::kBroadcast:
    case Collective::kReduce:
    case Collective::kGather:
    case Collective::kScatter: {
      if (call.counts.empty()) return static_cast<std::uint64_t>(call.root);
      break;
    }
    default: break;
  }
  // All-to-all counts differ from rank to rank by design.
  if (call.collective == Collective::kAllToAll) return 0;
  if (call.counts.empty() && call.owners.empty()) return 0;
  WordHash hash;
  hash.add(static_cast<std::uint64_t>(call.root));
  for (const std::size_t count : call.counts) hash.add(count);
  for (const int owner : call.owners) hash.add(static_cast<std::uint64_t>(owner));
  return hash.value();
}

// The number of elements as every rank must see it.
std::uint64_t count_of(const Call& call) {
  switch (call.collective) {
    case Collective::kReduceScatter:
    case Collective::kReduce: return call.in.count();
    case Collective::kGather:
    case Collective::kScatter:
    case Collective::kAllToAll: return 0;  // differ from rank to rank; the messages' sizes tell
    default: return call.out.count();
  }
}

}  // namespace

std::string_view to_string(Collective collective) {
  switch (collective) {
    case Collective::kPointToPoint: return "message";
    case Collective::kBarrier: return "barrier";
    case Collective::kAllReduce: return "all_reduce";
    case Collective::kReduceScatter: return "reduce_scatter";
    case Collective::kAllGather: return "all_gather";
    case Collective::kBroadcast: return "broadcast";
    case Collective::kReduce: return "reduce";
    case Collective::kGather: return "gather";
    case Collective::kScatter: return "scatter";
    case Collective::kAllToAll: return "all_to_all";
    case Collective::kReduceNodes: return "reduce_nodes";
    case Collective::kReduceScatterNodes: return "reduce_scatter_nodes";
  }
  return "unknown collective";
}

MeshFrame stamp_of(const Call& call) {
  MeshFrame stamp;
  stamp.kind = static_cast<std::uint8_t>(call.collective);
  stamp.type = static_cast<std::uint8_t>(call.out.type());
  stamp.op = static_cast<std::uint8_t>(call.op);
  stamp.algorithm = static_cast<std::uint8_t>(call.options.algorithm);
  stamp.count = count_of(call);
  stamp.shape = shape_of(call);
  stamp.step = call.options.step;
  stamp.bucket = call.options.bucket;
  return stamp;
}

std::string describe(const MeshFrame& stamp) {
  const auto collective = static_cast<Collective>(stamp.kind);
  std::string text(to_string(collective));
  switch (collective) {
    case Collective::kPointToPoint:
    case Collective::kBarrier: break;
    case Collective::kAllReduce:
    case Collective::kReduceScatter:
    case Collective::kReduce:
    case Collective::kReduceNodes:
    case Collective::kReduceScatterNodes:
      text += fmt::format(" {}", to_string(static_cast<ReduceOp>(stamp.op)));
      [[fallthrough]];
    default:
      text += fmt::format(" {}", to_string(static_cast<DataType>(stamp.type)));
      if (stamp.count > 0) text += fmt::format(" x {}", stamp.count);
      if (stamp.shape > 0xffffffffULL) {
        text += fmt::format(", shape {:016x}", stamp.shape);
      } else if (stamp.shape > 0) {
        text += fmt::format(", root {}", stamp.shape);
      }
      text += fmt::format(" ({})", to_string(static_cast<Algorithm>(stamp.algorithm)));
  }
  if (stamp.step > 0 || stamp.bucket > 0) {
    text += fmt::format(", step {}, bucket {}", stamp.step, stamp.bucket);
  }
  return text;
}

std::vector<Piece> pieces_of(const std::vector<std::size_t>& counts, std::size_t total,
                             int world_size) {
  std::vector<Piece> pieces;
  std::size_t begin = 0;
  for (int r = 0; r < world_size; ++r) {
    if (counts.empty()) {
      pieces.push_back(chunk_of(total, world_size, r));
    } else {
      pieces.push_back({begin, counts[static_cast<std::size_t>(r)]});
      begin += pieces.back().count;
    }
  }
  return pieces;
}

}  // namespace lockstep
