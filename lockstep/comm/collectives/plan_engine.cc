#include "lockstep/comm/collectives/plan_engine.h"

#include <fmt/format.h>

#include <algorithm>

#include "lockstep/base/check.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/collective_stay.h"
#include "lockstep/comm/kernels/kernels.h"
#include "lockstep/comm/kernels/outcome.h"

namespace lockstep {
namespace {

// Elements: the shares of a chunk begin at multiples of so many.
constexpr std::size_t kRailAlignment = 1024;

// What of a chunk one of several rails moves.
Range share_of(Range chunk, int rail, int rails) {
  const auto cut = [&](int i) {
    if (i == rails) return chunk.end;
    const std::size_t at = chunk.size() * index_of(i) / index_of(rails);
    return chunk.begin + at / kRailAlignment * kRailAlignment;
  };
  return {cut(rail), cut(rail + 1)};
}

}  // namespace

struct PlanEngine::Running {
  const Call& call;
  const MeshFrame& stamp;
  Deadline deadline;

  Algorithm algorithm() const { return static_cast<Algorithm>(stamp.algorithm); }
  DataType type() const { return call.out.type(); }
};

PlanEngine::PlanEngine(std::unique_ptr<Transport> transport, PlanOptions options,
                       std::uint32_t group)
    : transport_(std::move(transport)),
      options_(options),
      ranks_(TreeInputs::ranks(transport_->world_size())),
      rails_(*transport_, scratch_, options_.rails > 0 ? options_.rails : transport_->rails(),
             group) {
  if (SharedSpace* space = transport_->shared_space()) {
    shared_ =
        std::make_unique<SharedCollectives>(*transport_, *space, transport_->oversubscribed());
    return;
  }
  HostMap hosts(transport_->hosts());
  if (hosts.has_two_levels()) {
    two_level_ = std::make_unique<TwoLevelCollectives>(*transport_, std::move(hosts), group,
                                                       options_.segment_bytes);
  }
}

std::size_t PlanEngine::segment_bytes() const {
  if (options_.segment_bytes != 0) return options_.segment_bytes;
  // What is received from all peers at once should stay in a core's own cache.
  const auto peers = static_cast<std::size_t>(std::max(1, world_size() - 1));
  return std::clamp<std::size_t>(256 * 1024 / peers / 4096 * 4096, 16 * 1024, 256 * 1024);
}

Algorithm PlanEngine::choose(const Call& call) const {
  return choose_algorithm(call, world_size(), sharing(), transport_->crowded());
}

Sharing PlanEngine::sharing() const {
  if (shared_ != nullptr) return Sharing::kAll;
  return two_level_ != nullptr ? Sharing::kHosts : Sharing::kNone;
}

void PlanEngine::note_waits_in(WaitNote& waits) {
  transport_->note_waits_in(waits);
  if (two_level_ != nullptr) two_level_->note_waits_in(waits);
}

Buffer PlanEngine::allocate(std::size_t bytes) {
  SharedSpace* space = transport_->shared_space();
  if (space != nullptr) return space->allocate(bytes);
  return two_level_ != nullptr ? two_level_->allocate(bytes) : Buffer::heap(bytes);
}

std::unique_ptr<Engine> PlanEngine::split(const std::vector<int>& members, std::uint32_t group) {
  return std::make_unique<PlanEngine>(transport_->split(members, group), options_, group);
}

Outcome PlanEngine::run(const Call& call, const MeshFrame& stamp, CollectiveStay& stay) {
  if (world_size() == 1) return run_alone(call);
  const auto algorithm = static_cast<Algorithm>(stamp.algorithm);
  if (algorithm == Algorithm::kShared) return shared_->run(call, stamp, stay);
  if (algorithm == Algorithm::kTwoLevel) return two_level_->run(call, stamp, stay);
  const Running running{call, stamp, stay.enter()};
  switch (call.collective) {
    case Collective::kAllReduce: return all_reduce(running);
    case Collective::kReduceScatter: return reduce_scatter(running);
    case Collective::kReduce: return reduce(running);
    case Collective::kReduceNodes:
    case Collective::kReduceScatterNodes: return reduce_nodes(running);
    case Collective::kAllGather: all_gather(running); break;
    case Collective::kBroadcast: broadcast(running); break;
    case Collective::kGather:
    case Collective::kScatter: scatter_or_gather(running); break;
    case Collective::kAllToAll: all_to_all(running); break;
    case Collective::kBarrier: barrier(running); break;
    case Collective::kPointToPoint:
      run_plan(running, plan_broadcast(rank(), world_size(), call.total, call.root), call.out);
      break;
  }
  return outcome_of(call, rank());
}

void PlanEngine::run_plan(const Running& running, const Plan& plan, BufferView data) {
  RoundRunner(*transport_, scratch_, segment_bytes())
      .run(plan, data, running.call.op, running.stamp, running.deadline);
}

std::optional<std::size_t> PlanEngine::reduce_own_chunk(const Running& running,
                                                        const TreeInputs& inputs,
                                                        std::span<const std::byte* const> partials,
                                                        std::span<const Range> chunks,
                                                        std::byte* out, std::byte* gathered) {
  const int rails = rails_for(running.call);
  const std::size_t own_begin = chunks[index_of(rank())].begin;
  // Of some elements of every chunk; where in the whole own chunk one is not finite.
  const auto reduce_ranges = [&](Transport& transport, Scratch& scratch,
                                 std::span<const Range> ranges,
                                 std::byte* results) -> std::optional<std::size_t> {
    const std::size_t first = ranges[index_of(rank())].begin - own_begin;
    NodeReduction reduction;
    reduction.type = running.type();
    reduction.op = running.call.op;
    reduction.inputs = &inputs;
    reduction.partials = partials;
    reduction.chunks = ranges;
    reduction.out = out + first * size_of(running.type());
    reduction.gathered = results;
    reduction.one_thread = rails > 1;
    reduction.segment_bytes = segment_bytes();
    reduction.check_finite = running.call.options.check_finite;
    const auto found = reduction.run(transport, scratch, running.stamp, running.deadline);
    if (!found) return {};
    return first + *found;
  };
  if (rails == 1) {
    // With one thread for everything, results behind the partials were slower than a second round.
    const auto found = reduce_ranges(*transport_, scratch_, chunks, nullptr);
    if (gathered != nullptr) {
      gather_chunks(running, chunks, BufferView(gathered, running.call.total, running.type()));
    }
    return found;
  }
  std::vector<std::optional<std::size_t>> not_finite(index_of(rails));
  rails_.run(rails, [&](Transport& transport, Scratch& scratch, int rail) {
    std::vector<Range> ranges;
    for (const Range chunk : chunks) ranges.push_back(share_of(chunk, rail, rails));
    not_finite[index_of(rail)] = reduce_ranges(transport, scratch, ranges, gathered);
  });
  for (const std::optional<std::size_t>& found : not_finite) {
    if (found) return found;
  }
  return {};
}

// The same on all ranks. Where some of them share memory, connections are not all there is.
int PlanEngine::rails_for(const Call& call) const {
  if (options_.rails > 0) return options_.rails;
  if (sharing() != Sharing::kNone) return 1;
  return lockstep::rails_for(call.total * size_of(call.out.type()), world_size(), rails_.count());
}

void PlanEngine::gather_chunks(const Running& running, std::span<const Range> chunks,
                               BufferView data) {
  const Algorithm algorithm =
      running.algorithm() == Algorithm::kRing ? Algorithm::kRing : Algorithm::kDirect;
  run_plan(running, plan_all_gather(algorithm, rank(), {chunks.begin(), chunks.end()}), data);
}

Outcome PlanEngine::all_reduce(const Running& running) {
  const BufferView data = running.call.out;
  const std::byte* partial = data.data();
  switch (running.algorithm()) {
    case Algorithm::kPair: {
      const std::vector<Range> chunks(static_cast<std::size_t>(world_size()), {0, data.count()});
      return {reduce_own_chunk(running, ranks_, {&partial, 1}, chunks, data.data())};
    }
    case Algorithm::kDirect: {
      const std::vector<Range> chunks = chunks_of({}, data.count(), world_size());
      const Range own = chunks[index_of(rank())];
      reduce_own_chunk(running, ranks_, {&partial, 1}, chunks, data.slice(own).data(), data.data());
      return outcome_of(running.call, rank());
    }
    default:
      run_plan(running, plan_all_reduce(running.algorithm(), rank(), world_size(), data.count()),
               data);
      if (running.call.op == ReduceOp::kMean) {
        finish_mean(data.type(), data.data(), data.count(), world_size());
      }
      return outcome_of(running.call, rank());
  }
}

Outcome PlanEngine::reduce_scatter(const Running& running) {
  const Call& call = running.call;
  const std::vector<Range> chunks = chunks_of(call.counts, call.total, world_size());
  const Range own = chunks[index_of(rank())];
  if (running.algorithm() == Algorithm::kDirect) {
    const std::byte* partial = call.in.data();
    return {reduce_own_chunk(running, ranks_, {&partial, 1}, chunks, call.out.data())};
  }
  const BufferView work(temporary_.get(call.in.bytes()), call.in.count(), call.in.type());
  copy_bytes(work.data(), call.in.data(), call.in.bytes());
  run_plan(running, plan_reduce_scatter(running.algorithm(), rank(), chunks), work);
  copy_bytes(call.out.data(), work.slice(own).data(), call.out.bytes());
  if (call.op == ReduceOp::kMean) {
    finish_mean(call.out.type(), call.out.data(), call.out.count(), world_size());
  }
  return outcome_of(call, rank());
}

Outcome PlanEngine::reduce(const Running& running) {
  const Call& call = running.call;
  const bool at_root = rank() == call.root;
  const BufferView work(temporary_.get(call.in.bytes()), call.in.count(), call.in.type());
  if (running.algorithm() == Algorithm::kDirect) {
    const std::vector<Range> chunks = chunks_of({}, call.total, world_size());
    const Range own = chunks[index_of(rank())];
    const std::byte* partial = call.in.data();
    std::byte* own_out = at_root ? call.out.slice(own).data() : work.data();
    reduce_own_chunk(running, ranks_, {&partial, 1}, chunks, own_out);
    const BufferView parts = at_root ? call.out : work.slice({0, own.size()});
    run_plan(running, plan_gather(rank(), chunks, call.root), parts);
    return outcome_of(call, rank());
  }
  copy_bytes(work.data(), call.in.data(), call.in.bytes());
  run_plan(running, plan_reduce(rank(), world_size(), call.total, call.root), work);
  if (!at_root) return {};
  copy_bytes(call.out.data(), work.data(), call.out.bytes());
  if (call.op == ReduceOp::kMean) {
    finish_mean(call.out.type(), call.out.data(), call.out.count(), world_size());
  }
  return outcome_of(call, rank());
}

Outcome PlanEngine::reduce_nodes(const Running& running) {
  const Call& call = running.call;
  const TreeInputs inputs = TreeInputs::nodes(call.owners, world_size());
  const std::vector<Range> chunks = chunks_of(call.counts, call.total, world_size());
  const Range own = chunks[index_of(rank())];
  std::vector<const std::byte*> partials;
  for (const ConstBufferView& partial : call.partials) partials.push_back(partial.data());
  if (call.collective == Collective::kReduceScatterNodes) {
    return {reduce_own_chunk(running, inputs, partials, chunks, call.out.data())};
  }
  reduce_own_chunk(running, inputs, partials, chunks, call.out.slice(own).data(), call.out.data());
  return outcome_of(call, rank());
}

void PlanEngine::all_gather(const Running& running) {
  const Call& call = running.call;
  const std::vector<Range> chunks = chunks_of(call.counts, call.total, world_size());
  const Range own = chunks[index_of(rank())];
  copy_bytes(call.out.slice(own).data(), call.in.data(), call.in.bytes());
  gather_chunks(running, chunks, call.out);
}

void PlanEngine::broadcast(const Running& running) {
  const Call& call = running.call;
  if (running.algorithm() == Algorithm::kTree) {
    run_plan(running, plan_broadcast(rank(), world_size(), call.total, call.root), call.out);
    return;
  }
  // A chunk to every rank, then everybody's chunks to everybody.
  const std::vector<Range> chunks = chunks_of({}, call.total, world_size());
  const Range own = chunks[index_of(rank())];
  const BufferView view = rank() == call.root ? call.out : call.out.slice(own);
  run_plan(running, plan_scatter(rank(), chunks, call.root), view);
  gather_chunks(running, chunks, call.out);
}

void PlanEngine::scatter_or_gather(const Running& running) {
  const Call& call = running.call;
  const std::vector<Range> chunks = chunks_of(call.counts, call.total, world_size());
  const Range own = chunks[index_of(rank())];
  const std::size_t offset = own.begin * size_of(call.out.type());
  const bool gathers = call.collective == Collective::kGather;
  if (rank() == call.root) {
    if (gathers) {
      copy_bytes(call.out.data() + offset, call.in.data(), call.in.bytes());
    } else {
      copy_bytes(call.out.data(), call.in.data() + offset, call.out.bytes());
    }
  }
  const Plan plan =
      gathers ? plan_gather(rank(), chunks, call.root) : plan_scatter(rank(), chunks, call.root);
  const RoundRunner runner(*transport_, scratch_, segment_bytes());
  for (const Round& round : plan.rounds) {
    runner.run(round, call.in.data(), call.out.data(), call.out.type(), call.op, running.stamp,
               running.deadline);
  }
}

void PlanEngine::all_to_all(const Running& running) {
  const Call& call = running.call;
  const int n = world_size();
  const std::vector<Range> sent = chunks_of(call.counts, call.in.count(), n);
  const std::vector<Range> received = chunks_of(call.recv_counts, call.out.count(), n);
  const std::size_t me = index_of(rank());
  copy_bytes(call.out.slice(received[me]).data(), call.in.slice(sent[me]).data(),
             sent[me].size() * size_of(call.in.type()));
  Round round;
  for (int i = 1; i < n; ++i) {
    const int to = (rank() + i) % n;
    const int from = (rank() + n - i) % n;
    round.sends.push_back({to, sent[index_of(to)]});
    round.recvs.push_back({from, received[index_of(from)], Merge::kCopy});
  }
  RoundRunner(*transport_, scratch_, segment_bytes())
      .run(round, call.in.data(), call.out.data(), call.out.type(), call.op, running.stamp,
           running.deadline);
}

// Dissemination, as Transport::barrier.
void PlanEngine::barrier(const Running& running) {
  const int n = world_size();
  Plan plan;
  for (int distance = 1; distance < n; distance *= 2) {
    plan.rounds.push_back({{{(rank() + distance) % n, {}}}, {{(rank() + n - distance) % n, {}}}});
  }
  run_plan(running, plan, running.call.out);
}

}  // namespace lockstep
