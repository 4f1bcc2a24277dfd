#include "lockstep/comm/call_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

[[noreturn]] void refuse(const Call& call, ErrorCode code, const std::string& why) {
  throw Error(code, fmt::format("{}: {}", to_string(call.collective), why));
}

void check_size(const Call& call, const char* what, std::size_t got, std::size_t expected) {
  if (got == expected) return;
  refuse(call, ErrorCode::kSizeMismatch,
         fmt::format("{} has {} elements, {} are needed", what, got, expected));
}

std::size_t sum(const std::vector<std::size_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

void check_counts(const Call& call, const std::vector<std::size_t>& counts, int world_size) {
  if (!counts.empty() && counts.size() != static_cast<std::size_t>(world_size)) {
    refuse(call, ErrorCode::kInvalidArgument,
           fmt::format("{} counts for {} ranks", counts.size(), world_size));
  }
}

void check_owners(const Call& call, int rank, int world_size) {
  if (call.owners.size() < static_cast<std::size_t>(world_size)) {
    refuse(call, ErrorCode::kInvalidArgument,
           fmt::format("{} lanes for {} ranks", call.owners.size(), world_size));
  }
  for (const int owner : call.owners) {
    if (owner < 0 || owner >= world_size) {
      refuse(call, ErrorCode::kInvalidRank, fmt::format("a lane belongs to rank {}", owner));
    }
  }
  const std::size_t nodes = owned_nodes(call.owners, rank).size();
  if (call.partials.size() != nodes) {
    refuse(
        call, ErrorCode::kInvalidArgument,
        fmt::format("{} partials, but rank {} owns {} nodes", call.partials.size(), rank, nodes));
  }
  for (const ConstBufferView& partial : call.partials) {
    check_size(call, "a partial", partial.count(), call.total);
    if (partial.type() != call.out.type()) {
      refuse(call, ErrorCode::kInvalidArgument, "a partial is of another type than the result");
    }
  }
}

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

void complete_call(Call& call, int rank, int world_size) {
  const auto n = static_cast<std::size_t>(world_size);
  const auto me = static_cast<std::size_t>(rank);
  if (call.root < 0 || call.root >= world_size) {
    refuse(call, ErrorCode::kInvalidRank,
           fmt::format("root {} is not in [0, {})", call.root, world_size));
  }
  if (call.in.type() != call.out.type()) {
    refuse(call, ErrorCode::kInvalidArgument,
           fmt::format("input is {}, output is {}", to_string(call.in.type()),
                       to_string(call.out.type())));
  }
  check_counts(call, call.counts, world_size);
  const bool at_root = rank == call.root;
  switch (call.collective) {
    case Collective::kBarrier: break;
    case Collective::kPointToPoint:
    case Collective::kAllReduce:
    case Collective::kBroadcast: call.total = call.out.count(); break;
    case Collective::kReduceScatter:
      call.total = call.in.count();
      if (!call.counts.empty()) check_size(call, "the input", call.total, sum(call.counts));
      check_size(
          call, "the output", call.out.count(),
          call.counts.empty() ? chunk_of(call.total, world_size, rank).size() : call.counts[me]);
      break;
    case Collective::kAllGather:
    case Collective::kGather:
      if (call.counts.empty()) call.counts.assign(n, call.in.count());
      call.total = sum(call.counts);
      check_size(call, "the input", call.in.count(), call.counts[me]);
      if (call.collective == Collective::kAllGather || at_root) {
        check_size(call, "the output", call.out.count(), call.total);
      }
      break;
    case Collective::kReduce:
      call.total = call.in.count();
      if (at_root) check_size(call, "the output", call.out.count(), call.total);
      break;
    case Collective::kScatter:
      if (call.counts.empty()) call.counts.assign(n, call.out.count());
      call.total = sum(call.counts);
      check_size(call, "the output", call.out.count(), call.counts[me]);
      if (at_root) check_size(call, "the input", call.in.count(), call.total);
      break;
    case Collective::kAllToAll:
      check_counts(call, call.recv_counts, world_size);
      if (call.counts.empty()) call.counts.assign(n, call.in.count() / n);
      if (call.recv_counts.empty()) call.recv_counts.assign(n, call.out.count() / n);
      call.total = call.in.count();
      check_size(call, "the input", call.in.count(), sum(call.counts));
      check_size(call, "the output", call.out.count(), sum(call.recv_counts));
      check_size(call, "the own part of the output", call.recv_counts[me], call.counts[me]);
      break;
    case Collective::kReduceNodes:
      call.total = call.out.count();
      check_owners(call, rank, world_size);
      break;
    case Collective::kReduceScatterNodes:
      check_size(call, "the list of counts", call.counts.size(), n);
      call.total = sum(call.counts);
      check_size(call, "the output", call.out.count(), call.counts[me]);
      check_owners(call, rank, world_size);
      break;
  }
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
    case Collective::kBarrier: break;
    case Collective::kPointToPoint:
      if (stamp.count > 0) {
        text += fmt::format(" {} x {}", to_string(static_cast<DataType>(stamp.type)), stamp.count);
      }
      return stamp.step > 0 ? text + fmt::format(", tag {}", stamp.step) : text;
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

Error frame_mismatch(const MeshFrame& got, const std::string& sender, int rank,
                     const MeshFrame& expected, const std::string& receiver) {
  MeshFrame same_size = got;
  same_size.payload = expected.payload;
  if (same_size == expected) {
    return Error(ErrorCode::kSizeMismatch,
                 fmt::format("{} sent {} bytes where {} expected {}, in {}", sender, got.payload,
                             receiver, expected.payload, describe(expected)),
                 rank);
  }
  return Error(
      ErrorCode::kCollectiveMismatch,
      fmt::format("{} is in collective {}: {}; {} is in collective {}: {}", sender, got.sequence,
                  describe(got), receiver, expected.sequence, describe(expected)),
      rank);
}

}  // namespace lockstep
