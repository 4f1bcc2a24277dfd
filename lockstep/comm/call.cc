#include "lockstep/comm/call.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "lockstep/base/index.h"

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

// MeshFrame::shape is the root, 16 bits, then a hash of what is uneven.
constexpr int kHashBits = 48;
constexpr std::uint64_t kHashMask = (std::uint64_t{1} << kHashBits) - 1;

bool has_root(Collective collective) {
  return collective == Collective::kBroadcast || collective == Collective::kReduce ||
         collective == Collective::kGather || collective == Collective::kScatter;
}

bool all_equal(const std::vector<std::size_t>& counts) {
  return std::adjacent_find(counts.begin(), counts.end(), std::not_equal_to<>()) == counts.end();
}

std::uint64_t shape_of(const Call& call) {
  const std::uint64_t root =
      has_root(call.collective) ? static_cast<std::uint64_t>(call.root) << kHashBits : 0;
  // All-to-all counts differ from rank to rank by design.
  if (call.collective == Collective::kAllToAll) return 0;
  if (all_equal(call.counts) && call.owners.empty()) return root;
  WordHash hash;
  for (const std::size_t count : call.counts) hash.add(count);
  for (const int owner : call.owners) hash.add(static_cast<std::uint64_t>(owner));
  return root | (hash.value() & kHashMask);
}

// The number of elements as every rank must see it; of all-to-all, the messages' sizes tell.
std::uint64_t count_of(const Call& call) {
  return call.collective == Collective::kAllToAll ? 0 : call.total;
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
      if (has_root(collective)) text += fmt::format(", root {}", stamp.shape >> kHashBits);
      if ((stamp.shape & kHashMask) != 0) {
        text += fmt::format(", shape {:012x}", stamp.shape & kHashMask);
      }
      text += fmt::format(" ({})", to_string(static_cast<Algorithm>(stamp.algorithm)));
  }
  if (stamp.step > 0 || stamp.bucket > 0) {
    text += fmt::format(", step {}, bucket {}", stamp.step, stamp.bucket);
  }
  return text;
}

std::vector<Range> chunks_of(const std::vector<std::size_t>& counts, std::size_t total,
                             int world_size) {
  std::vector<Range> chunks;
  std::size_t begin = 0;
  for (int r = 0; r < world_size; ++r) {
    if (counts.empty()) {
      chunks.push_back(chunk_of(total, world_size, r));
    } else {
      chunks.push_back({begin, begin + counts[index_of(r)]});
      begin = chunks.back().end;
    }
  }
  return chunks;
}

}  // namespace lockstep
