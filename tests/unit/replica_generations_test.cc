#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <memory>
#include <utility>

#include "lockstep/base/canonical_tree.h"
#include "lockstep/base/index.h"
#include "lockstep/data/lanes.h"
#include "lockstep/model/init.h"
#include "lockstep/train/reducer.h"
#include "tests/support/pretended_gpu.h"
#include "tests/support/ranks.h"
#include "tests/support/trainers.h"

// Replicas that outlive their communicators: what they give up, what they keep, and that a run over
// several groups of ranks has the bits of one rank alone.

namespace lockstep::replica_generations_test {
namespace {

enum class Kind : std::uint8_t { kCpu, kGpuThroughHost, kGpuToGpu };

// Counts the buffers that were not given back.
class CountingEngine final : public Engine {
 public:
  CountingEngine(std::unique_ptr<Transport> transport, std::atomic<int>& buffers)
      : engine_(std::move(transport)), buffers_(buffers) {}

  int rank() const override { return engine_.rank(); }
  int world_size() const override { return engine_.world_size(); }
  std::string name_of(int rank) const override { return engine_.name_of(rank); }
  Supervisor& supervisor() override { return engine_.supervisor(); }
  Algorithm choose(const Call& call) const override { return engine_.choose(call); }
  Outcome run(const Call& call, const MeshFrame& stamp, Deadline deadline) override {
    return engine_.run(call, stamp, deadline);
  }
  std::unique_ptr<Engine> split(const std::vector<int>& members, std::uint32_t group) override {
    return engine_.split(members, group);
  }
  Buffer allocate(std::size_t bytes) override {
    ++buffers_;
    auto memory = std::make_shared<Buffer>(Buffer::heap(bytes));
    std::byte* const data = memory->data();
    return Buffer(data, bytes, [memory, this](std::byte*) { --buffers_; });
  }

 private:
  PlanEngine engine_;
  std::atomic<int>& buffers_;
};

TrainerOptions options_of(Kind kind, bool shard, bool buddy = true) {
  TrainerOptions options = test::eleven_lanes();
  options.reducer.shard = shard;
  options.reducer.buddy = buddy;
  options.reducer.on_device = kind == Kind::kGpuToGpu;
  return options;
}

// A worker's replica, which outlives generations.
struct Survivor {
  Survivor(const TrainerOptions& training, Kind kind)
      : options(training), samples(test::some_samples(60)) {
    const ReplicaOptions made_for = replica_options(options, 0, 1);
    replica = kind == Kind::kCpu ? make_cpu_replica(made_for, pool)
                                 : make_gpu_replica(made_for, test::pretended_parts());
  }

  // Joins a generation, with owners that no rule would choose.
  void attach(Communicator& communicator) {
    const int rank = communicator.rank();
    const int world_size = communicator.world_size();
    ReplicaOptions now = replica_options(options, rank, world_size);
    owners = test::odd_owners(kLanes, world_size, index_of(world_size) + 1);
    now.owners = owners;
    now.partials = owned_nodes(owners, rank);
    replica->attach(now, communicator);
    std::vector<std::span<float>> partials;
    for (std::size_t i = 0; i < now.partials.size(); ++i) partials.push_back(replica->partial(i));
    reducer = std::make_unique<GradientReducer>(communicator, owners, std::move(partials),
                                                options.reducer,
                                                [this](Range range) { replica->reduced(range); });
  }
  void detach() {
    reducer.reset();
    replica->detach();
  }

  // A step up to the norm, which is then known, and the tokens of all ranks.
  double add_up(Communicator& communicator, std::int64_t step) {
    const LanePlan plan{samples.size(), options.seed, options.global_batch, options.micro_batch};
    reducer->begin(step + 1);
    std::vector<std::uint64_t> ids(options.micro_batch);
    std::vector<std::int32_t> tokens(options.micro_batch * test::kContext);
    std::vector<std::int32_t> targets(tokens.size());
    const std::vector<LaneWork> lanes = replica->schedule().lanes;
    for (std::size_t i = 0; i < lanes.size(); ++i) {
      plan.sample_ids(static_cast<std::uint64_t>(step), lanes[i].lane, ids);
      for (std::size_t row = 0; row < ids.size(); ++row) {
        samples.read(ids[row], std::span(tokens).subspan(row * test::kContext, test::kContext),
                     std::span(targets).subspan(row * test::kContext, test::kContext));
      }
      RangeReady ready;
      if (i + 1 == lanes.size()) ready = [this](Range range) { reducer->ready(range); };
      replica->gradient({tokens, targets, static_cast<int>(ids.size()), test::kContext}, i, ready);
    }
    EXPECT_EQ(replica->finish_lanes().size(), lanes.size());
    const Range own = reducer->finish(std::vector<std::vector<double>>(lanes.size(), {1.0})).range;
    std::vector<double> sums(norm_blocks(replica->layout().size()));
    const std::size_t first = own.begin / kNormBlock;
    const std::span<double> mine = std::span(sums).subspan(first, norm_blocks(own.end) - first);
    replica->block_squares(own, mine);
    if (options.reducer.shard) {
      std::vector<std::size_t> counts =
          shard_sizes(replica->layout().size(), communicator.world_size());
      for (std::size_t& count : counts) count = norm_blocks(count);
      communicator.all_gather(std::span<const double>(mine), std::span(sums), counts);
    }
    return std::sqrt(tree_sum(sums));
  }
  void update(std::int64_t step, double norm) const {
    replica->update({.tokens = static_cast<std::int64_t>(options.global_batch) * test::kContext,
                     .clip = options.clip,
                     .learning_rate = 1e-2,
                     .step = step,
                     .norm = norm});
    EXPECT_TRUE(replica->finish_update().done);
  }
  void share(Communicator& communicator) const {
    if (!options.reducer.shard || replica->complete_on_device()) return;
    const Range own = reducer->shard();
    replica->complete_parameters([&](std::span<float> parameters) {
      communicator.all_gather(std::span<const float>(parameters.subspan(own.begin, own.size())),
                              parameters,
                              shard_sizes(parameters.size(), communicator.world_size()));
    });
  }

  static constexpr std::size_t kLanes = 11;
  const TrainerOptions options;
  const Samples samples;
  ThreadPool pool{1};
  std::unique_ptr<Replica> replica;
  LeafOwners owners;
  std::unique_ptr<GradientReducer> reducer;
};

struct State {
  std::vector<float> parameters, first, second;
  bool operator==(const State&) const = default;
};

State first_state(const ParameterLayout& layout) {
  ThreadPool pool(1);
  State state;
  state.parameters.resize(layout.size());
  initialise(layout, 11, pool, state.parameters);
  state.first.resize(layout.size());
  state.second.resize(layout.size());
  return state;
}

void put(const State& state, Replica& replica) {
  const Range range = replica.shard();
  replica.set_parameters(state.parameters);
  replica.set_moments(std::span(state.first).subspan(range.begin, range.size()),
                      std::span(state.second).subspan(range.begin, range.size()));
}

// Moments only where the replica holds them.
void get(const Replica& replica, State& state) {
  const Range range = replica.shard();
  replica.get_parameters(state.parameters);
  replica.get_moments(std::span(state.first).subspan(range.begin, range.size()),
                      std::span(state.second).subspan(range.begin, range.size()));
}

std::vector<std::unique_ptr<Communicator>> make_group(int ranks, std::atomic<int>& buffers) {
  std::vector<std::unique_ptr<Communicator>> group;
  for (auto& transport : make_local_group(ranks)) {
    group.push_back(std::make_unique<Communicator>(
        std::make_unique<CountingEngine>(std::move(transport), buffers), std::chrono::seconds(20)));
  }
  return group;
}

// Two steps in each generation of so many ranks. Survivors keep their replicas; newcomers come at
// the end. Moments go by way of `state` where their ranges change.
State run(Kind kind, const TrainerOptions& options, const std::vector<int>& generations) {
  std::vector<std::unique_ptr<Survivor>> workers;
  State state = first_state(ParameterLayout(options.model));
  std::int64_t step = 0;
  for (const int ranks : generations) {
    std::atomic<int> buffers = 0;
    auto group = make_group(ranks, buffers);
    workers.resize(std::min(workers.size(), index_of(ranks)));
    while (workers.size() < index_of(ranks)) {
      workers.push_back(std::make_unique<Survivor>(options, kind));
      put(state, *workers.back()->replica);
    }
    const auto errors = test::run_ranks(ranks, [&](int rank) {
      Communicator& communicator = *group[index_of(rank)];
      Survivor& worker = *workers[index_of(rank)];
      EXPECT_FALSE(worker.replica->attached());
      const Range before = worker.replica->shard();
      worker.attach(communicator);
      EXPECT_TRUE(worker.replica->attached());
      if (worker.replica->shard() != before) put(state, *worker.replica);
      State kept = state;
      get(*worker.replica, kept);
      // Parameters, and moments of the same range, are as they were.
      EXPECT_TRUE(kept == state) << "rank " << rank << " of " << ranks;
      for (std::int64_t i = 0; i < 2; ++i) {
        const double norm = worker.add_up(communicator, step + i);
        worker.update(step + i, norm);
        worker.share(communicator);
      }
      communicator.barrier();
      const std::size_t attached_bytes = worker.replica->state_bytes();
      worker.detach();
      worker.detach();
      EXPECT_FALSE(worker.replica->attached());
      if (kind == Kind::kCpu) EXPECT_LT(worker.replica->state_bytes(), attached_bytes);
    });
    for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
    EXPECT_EQ(buffers, 0) << "memory of a communicator that is about to go";
    group.clear();
    step += 2;
    for (const auto& worker : workers) get(*worker->replica, state);
  }
  return state;
}

const char* name_of(Kind kind) {
  return kind == Kind::kCpu ? "CPU" : kind == Kind::kGpuToGpu ? "GPU to GPU" : "GPU through host";
}

TEST(ReplicaGenerations, HaveTheBitsOfOneWorkerAlone) {
  // Sizes that stay, grow and fall, odd ones among them; ranks whose range stays, and others.
  const std::vector<int> generations = {3, 1, 2, 5, 4, 4};
  const State expected = run(Kind::kCpu, options_of(Kind::kCpu, false), {1, 1, 1, 1, 1, 1});
  for (const Kind kind : {Kind::kCpu, Kind::kGpuThroughHost, Kind::kGpuToGpu}) {
    for (const bool shard : {false, true}) {
      for (const bool buddy : {true, false}) {
        if (!shard && !buddy) continue;
        SCOPED_TRACE(testing::Message()
                     << name_of(kind) << ", sharded " << shard << ", buddies " << buddy);
        const State state = run(kind, options_of(kind, shard, buddy), generations);
        EXPECT_TRUE(state == expected);
      }
    }
  }
}

// The norm is known, the update is not made, and the communicator goes: the step can still be done,
// for the whole range that a rank holds.
TEST(ReplicaGenerations, AStepThatIsDecidedIsUpdatedWithoutTheCommunicator) {
  constexpr int kRanks = 5;
  for (const Kind kind : {Kind::kCpu, Kind::kGpuThroughHost, Kind::kGpuToGpu}) {
    SCOPED_TRACE(name_of(kind));
    const TrainerOptions options = options_of(kind, true);
    State expected = first_state(ParameterLayout(options.model));
    {
      Survivor alone(options_of(Kind::kCpu, false), Kind::kCpu);
      std::atomic<int> buffers = 0;
      const auto group = make_group(1, buffers);
      alone.attach(*group[0]);
      put(expected, *alone.replica);
      alone.update(0, alone.add_up(*group[0], 0));
      get(*alone.replica, expected);
      alone.detach();
    }
    std::atomic<int> buffers = 0;
    auto group = make_group(kRanks, buffers);
    const auto errors = test::run_ranks(kRanks, [&](int rank) {
      auto& communicator = group[index_of(rank)];
      Survivor worker(options, kind);
      worker.attach(*communicator);
      State state = first_state(worker.replica->layout());
      put(state, *worker.replica);
      const double norm = worker.add_up(*communicator, 0);
      communicator->barrier();
      worker.detach();
      communicator.reset();
      worker.update(0, norm);
      const Range held = worker.replica->shard();
      EXPECT_EQ(held, group_range(state.parameters.size(), rank, kRanks));
      get(*worker.replica, state);
      for (std::size_t i = held.begin; i < held.end; ++i) {
        ASSERT_EQ(state.parameters[i], expected.parameters[i]) << "rank " << rank << ", " << i;
        ASSERT_EQ(state.first[i], expected.first[i]);
        ASSERT_EQ(state.second[i], expected.second[i]);
      }
    });
    for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
    EXPECT_EQ(buffers, 0);
  }
}

// In the middle of a step, when another rank ends the job: lanes begun, buckets under way.
TEST(ReplicaGenerations, AreDetachedInTheMiddleOfAStep) {
  for (const Kind kind : {Kind::kCpu, Kind::kGpuThroughHost, Kind::kGpuToGpu}) {
    for (const bool shard : {false, true}) {
      SCOPED_TRACE(testing::Message() << name_of(kind) << ", sharded " << shard);
      const TrainerOptions options = options_of(kind, shard);
      std::atomic<int> buffers = 0;
      auto broken = make_group(2, buffers);
      auto alone = make_group(1, buffers);
      State state = first_state(ParameterLayout(options.model));
      const State before = state;
      const auto errors = test::run_ranks(2, [&](int rank) {
        Survivor worker(options, kind);
        worker.attach(*broken[index_of(rank)]);
        if (rank == 1) {
          broken[1]->abort("enough");
          worker.detach();
          return;
        }
        put(state, *worker.replica);
        EXPECT_THROW(worker.add_up(*broken[0], 0), Error);
        worker.detach();
        broken[0].reset();
        get(*worker.replica, state);
        EXPECT_TRUE(state == before);
        worker.attach(*alone[0]);
        put(before, *worker.replica);
        worker.update(0, worker.add_up(*alone[0], 0));
        get(*worker.replica, state);
        worker.detach();
      });
      for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
      EXPECT_EQ(buffers, 0);
      Survivor other(options_of(Kind::kCpu, false), Kind::kCpu);
      State expected = before;
      other.attach(*alone[0]);
      put(before, *other.replica);
      other.update(0, other.add_up(*alone[0], 0));
      get(*other.replica, expected);
      other.detach();
      EXPECT_TRUE(state == expected);
    }
  }
}

}  // namespace
}  // namespace lockstep::replica_generations_test
