#include "tests/support/collective_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "lockstep/base/hash/blake3.h"
#include "lockstep/comm/call.h"
#include "tests/support/guarded_memory.h"
#include "tests/support/kernel_reference.h"

namespace lockstep::test {
namespace {

struct Memory : GuardedMemory {
  Memory(Communicator& comm, const Case& c, std::size_t count)
      : GuardedMemory(comm, c.type, count, c.allocated) {}
};

[[noreturn]] void wrong(const Case& c, const std::string& what) {
  throw std::runtime_error(fmt::format("{}: {}", to_string(c), what));
}

// Adds up to `count`; every third share or so is empty.
std::vector<std::size_t> uneven_counts(std::size_t count, int n, std::size_t salt) {
  std::vector<std::size_t> weights;
  for (std::size_t r = 0; r < static_cast<std::size_t>(n); ++r) {
    weights.push_back((r * 7 + salt * 5 + 3) % 3 == 0 ? 0 : (r * 13 + salt * 11) % 9 + 1);
  }
  const std::size_t all = std::accumulate(weights.begin(), weights.end(), std::size_t{0});
  std::vector<std::size_t> counts;
  std::size_t left = count;
  for (const std::size_t weight : weights) {
    counts.push_back(all == 0 ? 0 : count * weight / all);
    left -= counts.back();
  }
  counts.back() += left;
  return counts;
}

LeafOwners owners_of(const Case& c) {
  LeafOwners owners = even_owners(c.lanes, c.world_size);
  if (!c.scattered_lanes) return owners;
  // Every third rank owns nothing if that leaves any.
  for (std::size_t lane = 0; lane < owners.size(); ++lane) {
    const std::size_t random = lane * lane * 31 + lane / 3 * 17 + c.lanes;
    int owner = static_cast<int>(random % static_cast<std::size_t>(c.world_size));
    if (owner % 3 == 1) owner = (owner + 1) % c.world_size;
    owners[lane] = owner;
  }
  return owners;
}

bool order_free(Algorithm algorithm) {
  return algorithm == Algorithm::kRing || algorithm == Algorithm::kNative;
}

// Which element is the first that is not finite, if any.
std::optional<std::size_t> first_non_finite(DataType type, std::span<const std::byte> bytes) {
  std::optional<std::size_t> first;
  reference::with_type(type, [&](auto load, auto) {
    if constexpr (std::is_floating_point_v<decltype(load(bytes.data()))>) {
      for (std::size_t i = 0; i < bytes.size() && !first; i += size_of(type)) {
        if (!std::isfinite(load(bytes.data() + i))) first = i / size_of(type);
      }
    }
  });
  return first;
}

// memcmp: much of the time of all cases would go into comparing byte by byte.
bool same_bytes(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

// One rank's part of a case.
class Part {
 public:
  Part(Communicator& comm, const Case& c, const CaseData& data)
      : comm_(comm),
        case_(c),
        data_(data),
        me_(static_cast<std::size_t>(comm.rank())),
        n_(static_cast<std::size_t>(c.world_size)),
        element_(size_of(c.type)) {
    if (comm.world_size() != c.world_size) wrong(c, "the group has another size");
  }

  void run();

 private:
  std::span<const std::byte> elements(std::size_t leaf, std::size_t begin,
                                      std::size_t count) const {
    return std::span(data_.leaves[leaf]).subspan(begin * element_, count * element_);
  }
  std::span<const std::byte> result(std::size_t begin, std::size_t count) const {
    return std::span(data_.result).subspan(begin * element_, count * element_);
  }
  bool at_root() const { return comm_.rank() == case_.root; }
  // Even shares where the collective allows leaving the counts away.
  std::vector<std::size_t> shares() const;
  std::size_t begin_of(const std::vector<std::size_t>& counts, std::size_t rank) const {
    return std::accumulate(counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(rank),
                           std::size_t{0});
  }
  ConstBufferView in_view(Memory& memory) const {
    return {memory.data(), memory.bytes().size() / element_, case_.type};
  }
  BufferView out_view(Memory& memory) const {
    return {memory.data(), memory.bytes().size() / element_, case_.type};
  }

  void all_reduce();
  void reduce_scatter();
  void reduce();
  void all_gather();
  void gather();
  void scatter();
  void broadcast();
  void all_to_all();
  void nodes();

  // Runs the call; then `out` must be `expected` (anything if it is unspecified).
  void execute(Call call, Memory& out, std::span<const std::byte> expected, bool has_result);
  void check_bits(std::span<const std::byte> got, std::span<const std::byte> expected) const;
  void check_identical(std::span<const std::byte> got) const;
  void check_input(Memory& in, std::span<const std::byte> before) const {
    if (!in.guards_untouched()) wrong(case_, "wrote beside the input");
    if (!same_bytes(in.bytes(), before)) wrong(case_, "changed its input");
  }

  Communicator& comm_;
  const Case& case_;
  const CaseData& data_;
  const std::size_t me_;
  const std::size_t n_;
  const std::size_t element_;
};

std::vector<std::size_t> Part::shares() const {
  if (case_.uneven) return uneven_counts(case_.count, case_.world_size, case_.count % 5);
  if (case_.collective == Collective::kReduceScatter ||
      case_.collective == Collective::kReduceScatterNodes) {
    std::vector<std::size_t> counts;
    for (std::size_t r = 0; r < n_; ++r) {
      counts.push_back(case_.count / n_ + (r < case_.count % n_ ? 1 : 0));
    }
    return counts;
  }
  return std::vector<std::size_t>(n_, equal_share(case_.count, case_.world_size));
}

void Part::execute(Call call, Memory& out, std::span<const std::byte> expected, bool has_result) {
  call.options.algorithm = case_.algorithm;
  call.options.check_finite = true;
  call.options.step = 1;
  if (case_.time) call.options.deadline = Deadline::after(*case_.time);
  Outcome outcome;
  if (case_.asynchronous) {
    outcome = comm_.start(std::move(call)).wait(Deadline::after(std::chrono::seconds(60)));
  } else {
    outcome = comm_.run(std::move(call));
  }
  if (!out.guards_untouched()) wrong(case_, "wrote beside the output");
  if (!has_result) return;
  if (order_free(case_.algorithm) && reduces(case_.collective) && order_matters(case_) &&
      !case_.small_values) {
    if (case_.collective == Collective::kAllReduce) check_identical(out.bytes());
    return;
  }
  check_bits(out.bytes(), expected);
  const std::optional<std::size_t> first = first_non_finite(case_.type, expected);
  if (outcome.first_non_finite != first) {
    wrong(case_,
          fmt::format("says that element {} is the first that is not finite, not {}",
                      outcome.first_non_finite ? static_cast<long>(*outcome.first_non_finite) : -1L,
                      first ? static_cast<long>(*first) : -1L));
  }
}

void Part::check_bits(std::span<const std::byte> got, std::span<const std::byte> expected) const {
  if (got.size() != expected.size()) wrong(case_, "the test expects another size");
  if (same_bytes(got, expected)) return;
  const auto [a, b] = std::ranges::mismatch(got, expected);
  const std::size_t at = static_cast<std::size_t>(a - got.begin()) / element_;
  wrong(case_, fmt::format("element {} of {} is {}, not {} (little-endian)", at,
                           got.size() / element_, to_hex(got.subspan(at * element_, element_)),
                           to_hex(expected.subspan(at * element_, element_))));
}

void Part::check_identical(std::span<const std::byte> got) const {
  const Blake3Hash mine = blake3(got);
  Blake3Hash first = mine;
  comm_.broadcast({first.data(), first.size(), DataType::kU8}, 0);
  if (first != mine) wrong(case_, "differs from rank 0");
}

void Part::all_reduce() {
  Memory data(comm_, case_, case_.count);
  data.fill(data_.leaves[me_]);
  execute(calls::all_reduce(out_view(data), case_.op), data, data_.result, true);
}

void Part::reduce_scatter() {
  const std::vector<std::size_t> counts = shares();
  Memory in(comm_, case_, case_.count);
  Memory out(comm_, case_, counts[me_]);
  in.fill(data_.leaves[me_]);
  execute(calls::reduce_scatter(in_view(in), out_view(out), case_.op,
                                case_.uneven ? counts : std::vector<std::size_t>{}),
          out, result(begin_of(counts, me_), counts[me_]), true);
  check_input(in, data_.leaves[me_]);
}

void Part::reduce() {
  Memory in(comm_, case_, case_.count);
  in.fill(data_.leaves[me_]);
  if (case_.in_place) {
    // What is left in the input of the other ranks is as it was.
    execute(calls::reduce(in_view(in), out_view(in), case_.op, case_.root), in, data_.result,
            at_root());
    if (!at_root()) check_input(in, data_.leaves[me_]);
    return;
  }
  Memory out(comm_, case_, case_.count);
  execute(calls::reduce(in_view(in), out_view(out), case_.op, case_.root), out, data_.result,
          at_root());
  if (!at_root() && !Memory::untouched(out.bytes())) wrong(case_, "wrote the output of no root");
  check_input(in, data_.leaves[me_]);
}

void Part::all_gather() {
  const std::vector<std::size_t> counts = shares();
  const std::size_t total = begin_of(counts, n_);
  const std::size_t begin = begin_of(counts, me_);
  const std::span<const std::byte> mine = elements(0, begin, counts[me_]);
  const std::vector<std::size_t> given = case_.uneven ? counts : std::vector<std::size_t>{};
  Memory out(comm_, case_, total);
  if (case_.in_place) {
    const BufferView all = out_view(out);
    const BufferView own = all.slice({begin, begin + counts[me_]});
    if (!mine.empty()) std::memcpy(own.data(), mine.data(), mine.size());
    execute(calls::all_gather(own, all, given), out, elements(0, 0, total), true);
    return;
  }
  Memory in(comm_, case_, counts[me_]);
  in.fill(mine);
  execute(calls::all_gather(in_view(in), out_view(out), given), out, elements(0, 0, total), true);
  check_input(in, mine);
}

void Part::gather() {
  const std::vector<std::size_t> counts = shares();
  const std::size_t total = begin_of(counts, n_);
  const std::span<const std::byte> mine = elements(0, begin_of(counts, me_), counts[me_]);
  Memory in(comm_, case_, counts[me_]);
  Memory out(comm_, case_, at_root() ? total : 3);
  in.fill(mine);
  execute(calls::gather(in_view(in), out_view(out), case_.root,
                        case_.uneven ? counts : std::vector<std::size_t>{}),
          out, elements(0, 0, total), at_root());
  if (!at_root() && !Memory::untouched(out.bytes())) wrong(case_, "wrote the output of no root");
  check_input(in, mine);
}

void Part::scatter() {
  const std::vector<std::size_t> counts = shares();
  const std::size_t total = begin_of(counts, n_);
  Memory in(comm_, case_, at_root() ? total : 0);
  Memory out(comm_, case_, counts[me_]);
  if (at_root()) in.fill(elements(0, 0, total));
  execute(calls::scatter(in_view(in), out_view(out), case_.root,
                         case_.uneven ? counts : std::vector<std::size_t>{}),
          out, elements(0, begin_of(counts, me_), counts[me_]), true);
  if (at_root()) check_input(in, elements(0, 0, total));
}

void Part::broadcast() {
  Memory data(comm_, case_, case_.count);
  if (at_root()) data.fill(elements(0, 0, case_.count));
  execute(calls::broadcast(out_view(data), case_.root), data, elements(0, 0, case_.count), true);
}

void Part::all_to_all() {
  const auto sent_by = [&](std::size_t rank) {
    return case_.uneven ? uneven_counts(case_.count, case_.world_size, rank) : shares();
  };
  const std::vector<std::size_t> sent = sent_by(me_);
  std::vector<std::size_t> received;
  std::vector<std::byte> expected;
  for (std::size_t r = 0; r < n_; ++r) {
    const std::vector<std::size_t> theirs = sent_by(r);
    received.push_back(theirs[me_]);
    const std::span<const std::byte> part = elements(r, begin_of(theirs, me_), theirs[me_]);
    expected.insert(expected.end(), part.begin(), part.end());
  }
  const std::span<const std::byte> mine = elements(me_, 0, begin_of(sent, n_));
  Memory in(comm_, case_, begin_of(sent, n_));
  Memory out(comm_, case_, begin_of(received, n_));
  in.fill(mine);
  const std::vector<std::size_t> none;
  execute(calls::all_to_all(in_view(in), out_view(out), case_.uneven ? sent : none,
                            case_.uneven ? received : none),
          out, expected, true);
  check_input(in, mine);
}

void Part::nodes() {
  const LeafOwners owners = owners_of(case_);
  std::vector<std::unique_ptr<Memory>> partials;
  std::vector<std::vector<std::byte>> sums;
  std::vector<ConstBufferView> views;
  for (const Range& node : owned_nodes(owners, comm_.rank())) {
    sums.push_back(
        reduce_leaves(case_, std::span(data_.leaves).subspan(node.begin, node.end - node.begin)));
    partials.push_back(std::make_unique<Memory>(comm_, case_, case_.count));
    partials.back()->fill(sums.back());
    views.push_back(in_view(*partials.back()));
  }
  std::size_t first_kept = 0;
  if (case_.collective == Collective::kReduceScatterNodes) {
    const std::vector<std::size_t> counts = shares();
    Memory out(comm_, case_, counts[me_]);
    execute(calls::reduce_scatter_nodes(views, owners, out_view(out), counts, case_.op), out,
            result(begin_of(counts, me_), counts[me_]), true);
  } else if (case_.in_place && !partials.empty()) {
    execute(calls::reduce_nodes(views, owners, out_view(*partials[0]), case_.op), *partials[0],
            data_.result, true);
    first_kept = 1;
  } else {
    Memory out(comm_, case_, case_.count);
    execute(calls::reduce_nodes(views, owners, out_view(out), case_.op), out, data_.result, true);
  }
  for (std::size_t i = first_kept; i < partials.size(); ++i) check_input(*partials[i], sums[i]);
}

void Part::run() {
  switch (case_.collective) {
    case Collective::kAllReduce: return all_reduce();
    case Collective::kReduceScatter: return reduce_scatter();
    case Collective::kReduce: return reduce();
    case Collective::kAllGather: return all_gather();
    case Collective::kGather: return gather();
    case Collective::kScatter: return scatter();
    case Collective::kBroadcast: return broadcast();
    case Collective::kAllToAll: return all_to_all();
    case Collective::kReduceNodes:
    case Collective::kReduceScatterNodes: return nodes();
    case Collective::kBarrier: comm_.barrier(); return;
    case Collective::kPointToPoint: break;
  }
  wrong(case_, "no collective");
}

}  // namespace

std::string to_string(const Case& c) {
  std::string text(to_string(c.collective));
  if (reduces(c.collective)) text += fmt::format(" {}", to_string(c.op));
  text += fmt::format(" {} x {} ({}), {} ranks", to_string(c.type), c.count, to_string(c.algorithm),
                      c.world_size);
  if (c.root != 0) text += fmt::format(", root {}", c.root);
  if (c.lanes > 0) text += fmt::format(", {} lanes", c.lanes);
  if (c.scattered_lanes) text += ", scattered";
  if (c.uneven) text += ", uneven";
  if (c.in_place) text += ", in place";
  if (c.small_values) text += ", small values";
  if (c.allocated) text += ", allocated";
  if (c.asynchronous) text += ", asynchronous";
  return text;
}

bool over_nodes(Collective collective) {
  return collective == Collective::kReduceNodes || collective == Collective::kReduceScatterNodes;
}

bool reduces(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kReduceScatter ||
         collective == Collective::kReduce || over_nodes(collective);
}

bool order_matters(const Case& c) {
  const bool integer =
      c.type == DataType::kI32 || c.type == DataType::kI64 || c.type == DataType::kU8;
  return !integer && c.op != ReduceOp::kMin && c.op != ReduceOp::kMax;
}

void run_case(Communicator& comm, const Case& c, const CaseData& data) {
  Part(comm, c, data).run();
}

}  // namespace lockstep::test
