#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/base/canonical_tree.h"
#include "lockstep/base/index.h"
#include "lockstep/base/random.h"
#include "lockstep/comm/collectives/plan_engine.h"
#include "lockstep/comm/transport/local_group.h"
#include "lockstep/model/init.h"
#include "lockstep/train/reducer.h"
#include "lockstep/train/replica.h"
#include "tests/support/ranks.h"

// Replicas of any kind in one group of ranks after another, without a Trainer.

namespace lockstep::test {

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
  Outcome run(const Call& call, const MeshFrame& stamp, CollectiveStay& stay) override {
    return engine_.run(call, stamp, stay);
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

inline std::vector<std::unique_ptr<Communicator>> make_counting_group(int ranks,
                                                                      std::atomic<int>& buffers) {
  std::vector<std::unique_ptr<Communicator>> group;
  for (auto& transport : make_local_group(ranks)) {
    group.push_back(std::make_unique<Communicator>(
        std::make_unique<CountingEngine>(std::move(transport), buffers), std::chrono::seconds(20)));
  }
  return group;
}

struct Generations {
  std::function<std::unique_ptr<Replica>(const ReplicaOptions&, ThreadPool&)> make;  // detached
  ReducerOptions reducer;

  static constexpr std::size_t kLanes = 11;
  static constexpr int kRows = 2;
  static ModelConfig model() {
    return {.vocab = 64,
            .hidden = 32,
            .layers = 2,
            .heads = 4,
            .kv_heads = 2,
            .intermediate = 48,
            .context = 16};
  }
};

// All of a run's state.
struct WholeState {
  std::vector<float> parameters, first, second;
  bool operator==(const WholeState&) const = default;
};

inline WholeState first_state() {
  const ParameterLayout layout(Generations::model());
  ThreadPool pool(1);
  WholeState state;
  state.parameters.resize(layout.size());
  initialise(layout, 11, pool, state.parameters);
  state.first.resize(layout.size());
  state.second.resize(layout.size());
  return state;
}

inline void put(const WholeState& state, Replica& replica) {
  const Range range = replica.shard();
  replica.set_parameters(state.parameters);
  replica.set_moments(std::span(state.first).subspan(range.begin, range.size()),
                      std::span(state.second).subspan(range.begin, range.size()));
}

// Moments only where the replica holds them.
inline void get(const Replica& replica, WholeState& state) {
  const Range range = replica.shard();
  replica.get_parameters(state.parameters);
  replica.get_moments(std::span(state.first).subspan(range.begin, range.size()),
                      std::span(state.second).subspan(range.begin, range.size()));
}

// A worker's replica, which outlives communicators.
class Survivor {
 public:
  explicit Survivor(const Generations& how) : how_(how) {
    replica_ = how.make(options(0, 1), pool_);
  }

  Replica& replica() { return *replica_; }

  void attach(Communicator& communicator) {
    const ReplicaOptions now = options(communicator.rank(), communicator.world_size());
    replica_->attach(now, communicator);
    std::vector<std::span<float>> partials;
    for (std::size_t i = 0; i < now.partials.size(); ++i) partials.push_back(replica_->partial(i));
    reducer_ = std::make_unique<GradientReducer>(communicator, now.owners, std::move(partials),
                                                 how_.reducer,
                                                 [this](Range range) { replica_->reduced(range); });
  }
  void detach() {
    reducer_.reset();
    replica_->detach();
  }

  // A step up to its norm.
  double add_up(Communicator& communicator, std::int64_t step) {
    reducer_->begin(step + 1);
    const std::vector<LaneWork> lanes = replica_->schedule().lanes;
    for (std::size_t i = 0; i < lanes.size(); ++i) {
      fill_batch(step, lanes[i].lane);
      RangeReady ready;
      if (i + 1 == lanes.size()) ready = [this](Range range) { reducer_->ready(range); };
      replica_->gradient({tokens_, targets_, Generations::kRows, Generations::model().context}, i,
                         ready);
    }
    // A GPU that waits for a rank that is gone would only be late.
    if (how_.reducer.on_device) communicator.barrier();
    EXPECT_EQ(replica_->finish_lanes().size(), lanes.size());
    const Range own = reducer_->finish(std::vector<std::vector<double>>(lanes.size(), {1.0})).range;
    std::vector<double> sums(norm_blocks(replica_->layout().size()));
    const std::size_t first = own.begin / kNormBlock;
    const std::span<double> mine = std::span(sums).subspan(first, norm_blocks(own.end) - first);
    replica_->block_squares(own, mine);
    if (how_.reducer.shard) {
      std::vector<std::size_t> counts =
          shard_sizes(replica_->layout().size(), communicator.world_size());
      for (std::size_t& count : counts) count = norm_blocks(count);
      communicator.all_gather(std::span<const double>(mine), std::span(sums), counts);
    }
    return std::sqrt(tree_sum(sums));
  }
  void update(std::int64_t step, double norm) {
    replica_->update(
        {.tokens = 352, .clip = 0.05, .learning_rate = 1e-2, .step = step, .norm = norm});
    EXPECT_TRUE(replica_->finish_update().done);
  }
  void share(Communicator& communicator) {
    if (!how_.reducer.shard || replica_->complete_on_device()) return;
    const Range own = reducer_->shard();
    replica_->complete_parameters([&](std::span<float> parameters) {
      communicator.all_gather(std::span<const float>(parameters.subspan(own.begin, own.size())),
                              parameters,
                              shard_sizes(parameters.size(), communicator.world_size()));
    });
  }

 private:
  // Owners as no rule would choose them, others for every number of ranks.
  ReplicaOptions options(int rank, int world_size) const {
    ReplicaOptions options;
    options.model = Generations::model();
    options.rows = Generations::kRows;
    options.context = options.model.context;
    for (std::size_t lane = 0; lane < Generations::kLanes; ++lane) {
      options.owners.push_back(static_cast<int>((lane * lane + lane / 2) % index_of(world_size)));
    }
    for (int each = 0; each < world_size; ++each) {  // everybody has one
      options.owners[2 * index_of(each)] = each;
    }
    options.partials = owned_nodes(options.owners, rank);
    options.shard =
        held_range(how_.reducer, ParameterLayout(options.model).size(), rank, world_size);
    options.exchange = how_.reducer.on_device              ? Exchange::kDevice
                       : travels(how_.reducer, world_size) ? Exchange::kHost
                                                           : Exchange::kNone;
    options.sharded = how_.reducer.shard;
    options.buddy = how_.reducer.buddy;
    return options;
  }
  void fill_batch(std::int64_t step, std::uint32_t lane) {
    const auto size = static_cast<std::size_t>(Generations::kRows * Generations::model().context);
    tokens_.resize(size);
    targets_.resize(size);
    for (std::size_t i = 0; i < size; ++i) {
      const std::uint64_t random = random_u64(static_cast<std::uint64_t>(step), lane, i);
      tokens_[i] = static_cast<std::int32_t>(random % 48);
      targets_[i] = (tokens_[i] * 3 + 1) % 48;
    }
  }

  const Generations how_;
  ThreadPool pool_{1};
  std::unique_ptr<Replica> replica_;
  std::unique_ptr<GradientReducer> reducer_;
  std::vector<std::int32_t> tokens_, targets_;
};

// Two steps in each generation of so many ranks. Survivors keep their replicas; newcomers come at
// the end. Moments go by way of the state where their ranges change.
inline WholeState run_generations(const Generations& how, const std::vector<int>& generations) {
  std::vector<std::unique_ptr<Survivor>> workers;
  WholeState state = first_state();
  std::int64_t step = 0;
  for (const int ranks : generations) {
    std::atomic<int> buffers = 0;
    auto group = make_counting_group(ranks, buffers);
    workers.resize(std::min(workers.size(), index_of(ranks)));
    while (workers.size() < index_of(ranks)) {
      workers.push_back(std::make_unique<Survivor>(how));
      put(state, workers.back()->replica());
    }
    const auto errors = run_ranks(ranks, [&](int rank) {
      Communicator& communicator = *group[index_of(rank)];
      Survivor& worker = *workers[index_of(rank)];
      EXPECT_FALSE(worker.replica().attached());
      const Range before = worker.replica().shard();
      worker.attach(communicator);
      EXPECT_TRUE(worker.replica().attached());
      if (worker.replica().shard() != before) put(state, worker.replica());
      WholeState kept = state;
      get(worker.replica(), kept);
      EXPECT_TRUE(kept == state) << "rank " << rank << " of " << ranks
                                 << " has lost parameters, or moments of a range that stayed";
      for (std::int64_t i = 0; i < 2; ++i) {
        worker.update(step + i, worker.add_up(communicator, step + i));
        worker.share(communicator);
      }
      communicator.barrier();
      worker.detach();
      worker.detach();
      EXPECT_FALSE(worker.replica().attached());
    });
    for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
    EXPECT_EQ(buffers, 0) << "memory of a communicator that is about to go";
    group.clear();
    step += 2;
    for (const auto& worker : workers) get(worker->replica(), state);
  }
  return state;
}

// Whether a step whose norm is known can still be made, for all that a rank holds, when the
// communicator is gone.
inline void expect_update_without_communicator(const Generations& how, int ranks) {
  Generations whole = how;
  whole.reducer = {};
  WholeState expected = first_state();
  std::atomic<int> buffers = 0;
  {
    Survivor alone(whole);
    const auto group = make_counting_group(1, buffers);
    alone.attach(*group[0]);
    put(expected, alone.replica());
    alone.update(0, alone.add_up(*group[0], 0));
    get(alone.replica(), expected);
    alone.detach();
  }
  auto group = make_counting_group(ranks, buffers);
  const auto errors = run_ranks(ranks, [&](int rank) {
    auto& communicator = group[index_of(rank)];
    Survivor worker(how);
    worker.attach(*communicator);
    WholeState state = first_state();
    put(state, worker.replica());
    const double norm = worker.add_up(*communicator, 0);
    communicator->barrier();
    worker.detach();
    communicator.reset();
    worker.update(0, norm);
    const Range held = worker.replica().shard();
    EXPECT_EQ(held, held_range(how.reducer, state.parameters.size(), rank, ranks));
    get(worker.replica(), state);
    for (std::size_t i = held.begin; i < held.end; ++i) {
      ASSERT_EQ(state.parameters[i], expected.parameters[i]) << "rank " << rank << ", " << i;
      ASSERT_EQ(state.first[i], expected.first[i]);
      ASSERT_EQ(state.second[i], expected.second[i]);
    }
  });
  for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
  EXPECT_EQ(buffers, 0);
}

// In the middle of a step another rank ends the job: lanes are begun, buckets under way. The
// replica then makes the step alone.
inline void expect_detached_in_a_step(const Generations& how) {
  std::atomic<int> buffers = 0;
  auto broken = make_counting_group(2, buffers);
  const auto alone = make_counting_group(1, buffers);
  const WholeState before = first_state();
  WholeState state = before;
  const auto errors = run_ranks(2, [&](int rank) {
    Survivor worker(how);
    worker.attach(*broken[index_of(rank)]);
    if (rank == 1) {
      broken[1]->abort("enough");
      return worker.detach();
    }
    put(before, worker.replica());
    EXPECT_THROW(worker.add_up(*broken[0], 0), Error);
    worker.detach();
    broken[0].reset();
    get(worker.replica(), state);
    EXPECT_TRUE(state == before);
    worker.attach(*alone[0]);
    put(before, worker.replica());
    worker.update(0, worker.add_up(*alone[0], 0));
    get(worker.replica(), state);
    worker.detach();
  });
  for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
  EXPECT_EQ(buffers, 0);

  Survivor other(how);
  WholeState expected = before;
  other.attach(*alone[0]);
  put(before, other.replica());
  other.update(0, other.add_up(*alone[0], 0));
  get(other.replica(), expected);
  other.detach();
  EXPECT_TRUE(state == expected);
}

}  // namespace lockstep::test
