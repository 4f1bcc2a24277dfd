#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <set>

#include "lockstep/base/index.h"
#include "lockstep/base/random.h"
#include "tests/support/faulty_storage.h"
#include "tests/support/ranks.h"
#include "tests/support/trainers.h"

namespace lockstep::data_parallel_test {
namespace {

using ::lockstep::test::eleven_lanes;
using ::lockstep::test::odd_owners;
using ::lockstep::test::run_ranks;
using ::lockstep::test::some_samples;
using ::lockstep::test::TestWorker;
using ::testing::HasSubstr;

struct Result {
  std::string hash;
  std::vector<double> losses;
  std::vector<double> validation;
  bool operator==(const Result&) const = default;
};

// `before` and `after` every step, on every rank.
Result train_ranks(int workers, int threads, const std::function<TrainerOptions(int)>& options_of,
                   const std::function<void(Trainer&)>& before = {},
                   const std::function<void(int, const StepReport&)>& after = {}) {
  auto group = make_local_group(workers);
  std::vector<Result> results(static_cast<std::size_t>(workers));
  const auto errors = run_ranks(workers, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    TestWorker worker(options_of(rank), some_samples(60), some_samples(9), threads,
                      std::move(group[index]));
    worker.trainer.start();
    Result& result = results[index];
    worker.trainer.run(
        [&] {
          if (before) before(worker.trainer);
          return Requests{};
        },
        [&](const StepReport& report) {
          result.losses.push_back(report.loss);
          if (report.validation_loss) {
            result.validation.push_back(*report.validation_loss);
          }
          EXPECT_EQ(report.phases.size(), static_cast<std::size_t>(workers));
          if (after) after(rank, report);
        });
    result.hash = worker.trainer.verify();
    worker.communicator.barrier();
  });
  for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
  for (const Result& result : results) EXPECT_EQ(result, results[0]);
  return results[0];
}

Result train(const TrainerOptions& options, int workers, int threads = 1) {
  return train_ranks(workers, threads, [&](int) { return options; });
}

TEST(DataParallel, AMixGivesTheSameBitsForAnyWorkers) {
  TrainerOptions options = eleven_lanes();
  options.mix = {.training = {{50, 8000}, {10, 2000}}, .validation = {{8, 8000}, {1, 2000}}};
  const Result alone = train(options, 1);
  EXPECT_NE(alone.hash, train(eleven_lanes(), 1).hash);
  EXPECT_EQ(alone.validation.size(), 2u);
  for (const int workers : {2, 3, 11}) EXPECT_EQ(train(options, workers), alone) << workers;
}

// The heart of it: loss curve, validation and weights are equal, not close.
TEST(DataParallel, SameBitsForAnyWorkersThreadsOverlapAndSharding) {
  const Result alone = train(eleven_lanes(), 1);
  EXPECT_EQ(alone.losses.size(), 6u);
  EXPECT_EQ(alone.validation.size(), 2u);
  for (const int workers : {2, 3, 4, 5, 8, 11}) {
    for (const bool overlap : {true, false}) {
      for (const bool shard : {true, false}) {
        TrainerOptions options = eleven_lanes();
        options.reducer.overlap = overlap;
        options.reducer.shard = shard;
        EXPECT_EQ(train(options, workers, 1 + workers % 2), alone)
            << workers << " workers, overlap " << overlap << ", sharded " << shard;
      }
    }
  }
  TrainerOptions options = eleven_lanes();
  options.reducer.bucket_bytes = 1 << 30;  // the whole gradient in one
  EXPECT_EQ(train(options, 3), alone);
}

// Lanes may change hands before every step: no bit changes.
TEST(DataParallel, SameBitsWhoeverOwnsTheLanes) {
  const Result alone = train(eleven_lanes(), 1);
  for (const int workers : {2, 3, 4}) {
    for (const bool shard : {false, true}) {
      TrainerOptions options = eleven_lanes();
      options.reducer.shard = shard;
      std::set<LeafOwners> dealt;
      const auto deal = [&](Trainer& trainer) {
        const auto step = static_cast<std::uint64_t>(trainer.steps_done());
        const LeafOwners owners = odd_owners(11, workers, 100 * index_of(workers) + step);
        trainer.set_owners(owners);
        EXPECT_EQ(trainer.owners(), owners);
        if (trainer.communicator().rank() == 0) dealt.insert(owners);
      };
      EXPECT_EQ(train_ranks(
                    workers, 1, [&](int) { return options; }, deal),
                alone)
          << workers << " workers, sharded " << shard;
      EXPECT_GT(dealt.size(), 4u);
    }
  }
}

// Adds to the time of this rank's lanes, as the tail will tell it, before a step: ranks seem to
// take a second for a lane, `slow` takes four.
void pretend_times(Trainer& trainer, int slow) {
  const int rank = trainer.communicator().rank();
  const auto lanes = static_cast<double>(std::ranges::count(trainer.owners(), rank));
  trainer.phases()[Phase::kData] += lanes * (rank == slow ? 4 : 1);
}

// Rank 1 is slow until step 16: the others get lanes of it, and it gets them back.
TEST(DataParallel, LanesFollowSpeed) {
  TrainerOptions options = eleven_lanes();
  options.global_batch = 24;  // twelve lanes
  options.schedule.steps = 36;
  options.eval_every = 0;
  const Result alone = train(options, 1);
  for (const bool balance : {true, false}) {
    options.balance = balance;
    std::vector<std::vector<std::uint32_t>> lanes, next;
    const Result result = train_ranks(
        3, 1, [&](int) { return options; },
        [](Trainer& trainer) { pretend_times(trainer, trainer.steps_done() < 16 ? 1 : -1); },
        [&](int rank, const StepReport& report) {
          if (rank != 0) return;
          lanes.push_back(report.lanes);
          next.push_back(report.next_lanes.empty() ? report.lanes : report.next_lanes);
        });
    EXPECT_EQ(result, alone);
    ASSERT_EQ(lanes.size(), 36u);
    const std::vector<std::uint32_t> even = {4, 4, 4};
    EXPECT_EQ(lanes[9], even);  // two steps to warm up, eight to measure
    EXPECT_EQ(lanes[10][1], balance ? 1u : 4u);
    EXPECT_EQ(lanes[35], even);
    for (std::size_t i = 1; i < lanes.size(); ++i) EXPECT_EQ(lanes[i], next[i - 1]);
  }
}

// Where the bits depend on who owns which lanes, lanes stay where they are.
TEST(DataParallel, LanesStayWhereTheyAreWithOrderFreeReductions) {
  TrainerOptions options = eleven_lanes();
  options.schedule.steps = 12;
  for (const bool rounded : {true, false}) {
    options.reducer.wire = rounded ? DataType::kBf16 : DataType::kF32;
    options.reducer.reduction = rounded ? Reduction::kTree : Reduction::kRing;
    train_ranks(
        2, 1, [&](int) { return options; }, [](Trainer& trainer) { pretend_times(trainer, 0); },
        [](int, const StepReport& report) {
          EXPECT_EQ(report.lanes, (std::vector<std::uint32_t>{5, 6}));
          EXPECT_TRUE(report.next_lanes.empty());
        });
  }
}

// A shard of the moments is 1/n of them, and all shards are the whole.
TEST(DataParallel, ShardsCoverTheMoments) {
  for (const std::size_t size : {1ul, 4095ul, 4096ul, 4097ul, 100'000ul}) {
    for (const int ranks : {1, 2, 3, 7}) {
      std::size_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const Range shard = shard_range(size, rank, ranks);
        EXPECT_EQ(shard.begin, next);
        EXPECT_LE(shard.size(), (size / 4096 / static_cast<std::size_t>(ranks) + 1) * 4096);
        next = shard.end;
      }
      EXPECT_EQ(next, size);
    }
  }
}

// Order-free ways keep the replicas identical (which train() verifies) and still learn.
TEST(DataParallel, OrderFreeReductions) {
  const Result alone = train(eleven_lanes(), 1);
  for (const bool shard : {false, true}) {
    TrainerOptions ring = eleven_lanes();
    ring.reducer.reduction = Reduction::kRing;
    ring.reducer.shard = shard;
    TrainerOptions rounded = eleven_lanes();
    rounded.reducer.wire = DataType::kBf16;
    rounded.reducer.shard = shard;
    for (const TrainerOptions& options : {ring, rounded}) {
      const Result result = train(options, 3);
      EXPECT_NE(result.hash, alone.hash);
      EXPECT_NEAR(result.losses.back(), alone.losses.back(), 2e-3 * alone.losses.back());
    }
  }
}

// What bf16 drops in one step comes in the next: over many steps nothing is lost.
TEST(DataParallel, ErrorFeedbackLosesNothing) {
  constexpr std::size_t kSize = 5000;
  constexpr int kSteps = 64;
  auto group = make_local_group(2);
  const auto errors = run_ranks(2, [&](int rank) {
    Communicator communicator(
        std::make_unique<PlanEngine>(std::move(group[static_cast<std::size_t>(rank)])),
        std::chrono::seconds(20));
    std::vector<float> gradient(kSize);
    ReducerOptions options;
    options.wire = DataType::kBf16;
    GradientReducer reducer(communicator, even_owners(2, 2), {gradient}, options);
    std::vector<double> sums(kSize), exact(kSize);
    const std::vector<std::vector<double>> tail{{1.0}};
    for (int step = 0; step < kSteps; ++step) {
      for (std::size_t i = 0; i < kSize; ++i) {
        const auto key = static_cast<std::uint64_t>(step);
        gradient[i] = random_f32(key, static_cast<std::uint64_t>(rank), i);
        exact[i] += random_f32(key, 0, i) + random_f32(key, 1, i);
      }
      reducer.begin(step);
      const ReducedStep reduced = reducer.finish(tail);
      EXPECT_EQ(reduced.tail, (std::vector<double>{2.0}));
      for (std::size_t i = 0; i < kSize; ++i) sums[i] += reduced.gradient[i];
    }
    double worst = 0;
    for (std::size_t i = 0; i < kSize; ++i) worst = std::max(worst, std::abs(sums[i] - exact[i]));
    // The rounding of results (sums of two in [0, 2)) adds up; that of inputs does not.
    EXPECT_LT(worst, 0.1);
    communicator.barrier();
  });
  for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
}

// All ranks throw the same error; returns it. `prepare` may spoil a worker before the start.
Error fails_alike(int workers, const std::function<TrainerOptions(int)>& options_of,
                  const std::function<void(TestWorker&, int)>& between) {
  auto group = make_local_group(workers);
  const auto errors = run_ranks(workers, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    TestWorker worker(options_of(rank), some_samples(60), some_samples(9), 1,
                      std::move(group[index]));
    try {
      worker.trainer.start();
      between(worker, rank);
      worker.trainer.run([] { return Requests{}; }, [](const StepReport&) {});
      worker.trainer.verify();
    } catch (const Error& error) {
      worker.communicator.abort(std::string(error.message()));
      throw;
    }
  });
  for (const auto& error : errors) {
    EXPECT_TRUE(error.has_value());
    if (error && errors[0]) {
      EXPECT_STREQ(error->what(), errors[0]->what());
    }
  }
  return errors[0] ? *errors[0] : Error(ErrorCode::kInvalidArgument, "no error");
}

TEST(DataParallel, AFlippedBitIsFoundAndNamed) {
  const Error error = fails_alike(
      3, [](int) { return eleven_lanes(); },
      [](TestWorker& worker, int rank) {
        if (rank != 1) return;
        worker.replica->complete_parameters([&](std::span<float> parameters) {
          const Range gate = worker.trainer.layout().range(Component::kGate, 1);
          parameters[gate.begin + 3] = std::nextafter(parameters[gate.begin + 3], 1.0f);
        });
      });
  EXPECT_EQ(error.code(), ErrorCode::kReplicaMismatch);
  EXPECT_EQ(error.rank(), 1);
  EXPECT_THAT(error.what(), HasSubstr("after step 2: rank 1"));
  EXPECT_THAT(error.what(), HasSubstr("the first tensor that differs is model.layers.1."));
}

// Of terabytes that are read before the first step.
TEST(DataParallel, HowMuchOfTheDataIsReadIsTold) {
  const auto told_of = [](std::chrono::seconds between_notes) {
    test::FaultyStorage storage;
    make_folder("/data", storage);
    for (const char* path : {"/data/a.bin", "/data/b.bin"}) {
      storage.set_contents(path, std::string(30'000'000, 'x'));
    }
    const std::array<TokenShard, 2> shards = {TokenShard::open("/data/a.bin", storage),
                                              TokenShard::open("/data/b.bin", storage)};
    testing::internal::CaptureStderr();
    hash_payloads(shards, between_notes);
    std::string told = testing::internal::GetCapturedStderr();
    testing::internal::CaptureStderr();
    hash_payloads(shards, std::chrono::seconds(0));  // known now
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
    return told;
  };
  const std::string told = told_of(std::chrono::seconds(0));
  EXPECT_THAT(told, testing::StartsWith("hashing the data (once only): 0.0 of 0.1 GB read\n"));
  EXPECT_THAT(told, testing::EndsWith("\nhashing the data (once only): 0.1 of 0.1 GB read\n"));
  EXPECT_EQ(told_of(std::chrono::hours(1)), "");
}

// Of a file that all ranks see, one reads the tokens; of files of its own every rank does.
TEST(DataParallel, OneRankOfAHostReadsTheTokens) {
  constexpr int kRanks = 3;
  constexpr std::uint64_t kBytes = 100'000;
  test::FaultyStorage storage;
  make_folder("/data", storage);
  storage.set_contents("/data/t.bin", std::string(kBytes, 'x'));
  storage.fault = [](test::FaultyStorage::Call call, const std::string&) {
    return call == test::FaultyStorage::Call::kCreate ? EROFS : 0;  // nothing is kept beside it
  };
  std::vector<Blake3Hash> found(kRanks);
  const auto find = [&](const std::function<TokenShard(int)>& shard_of) {
    auto group = make_local_group(kRanks);
    const auto errors = run_ranks(kRanks, [&](int rank) {
      Communicator communicator(std::make_unique<PlanEngine>(std::move(group[index_of(rank)])),
                                std::chrono::seconds(20));
      const TokenShard shard = shard_of(rank);
      find_payload_hashes(communicator, std::span(&shard, 1));
      found[index_of(rank)] = shard.payload().get();
    });
    for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
  };
  const auto read_by = [&](auto&& body) {
    const std::uint64_t before = storage.bytes_read();
    body();
    return storage.bytes_read() - before;
  };
  const std::string same(kBytes, 'x');
  const Blake3Hash hash = blake3(std::as_bytes(std::span(same)));
  const auto read =
      read_by([&] { find([&](int) { return TokenShard::open("/data/t.bin", storage); }); });
  EXPECT_GT(read, kBytes);
  EXPECT_LT(read, 2 * kBytes);
  EXPECT_THAT(found, testing::Each(hash));
  storage.set_contents("/data/other.bin", same.substr(1) + "y");
  find([&](int rank) {
    return TokenShard::open(rank == 1 ? "/data/other.bin" : "/data/t.bin", storage);
  });
  EXPECT_EQ(found[0], hash);
  EXPECT_NE(found[1], hash);
  EXPECT_EQ(found[2], hash);
}

// Every rank has a file of its own, and in that of one of them a single token is another.
TEST(DataParallel, OneTokenThatDiffersIsNamed) {
  const auto samples_with = [](std::int32_t token, std::uint64_t count) {
    std::vector<std::int32_t> tokens(count * 8 + 1, 1);
    tokens[tokens.size() / 2] = token;
    return Samples({TokenShard::of("t", tokens, {})}, 64, 8);
  };
  for (const bool training : {true, false}) {
    auto group = make_local_group(3);
    TrainerOptions options = eleven_lanes();
    options.model.context = 8;
    const auto errors = run_ranks(3, [&](int rank) {
      const std::int32_t token = rank == 2 ? 3 : 2;
      TestWorker worker(options, samples_with(training ? token : 2, 60),
                        samples_with(training ? 2 : token, 9), 1, std::move(group[index_of(rank)]));
      worker.trainer.start();
    });
    for (const auto& error : errors) {
      ASSERT_TRUE(error);
      EXPECT_EQ(error->code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error->what(),
                  HasSubstr(training ? "rank 2 has training data" : "rank 2 has validation data"));
    }
  }
}

TEST(DataParallel, DifferentSettingsAreNamed) {
  const auto with = [](auto change) {
    return [change](int rank) {
      TrainerOptions options = eleven_lanes();
      if (rank == 2) change(options);
      return options;
    };
  };
  const auto nothing = [](TestWorker&, int) {};
  EXPECT_THAT(fails_alike(3, with([](TrainerOptions& o) { o.clip = 2; }), nothing).what(),
              HasSubstr("rank 2 has clip 2, rank 0 has 0.05"));
  EXPECT_THAT(
      fails_alike(3, with([](TrainerOptions& o) { o.reducer.bucket_bytes = 1 << 20; }), nothing)
          .what(),
      HasSubstr("rank 2 has bucket bytes 1048576, rank 0 has 16384"));
}

// Their bits may differ, which is told and no reason to refuse them.
TEST(DataParallel, OtherGpusAreToldOf) {
  for (const int which : {0, 1, 2, 3}) {
    auto group = make_local_group(2);
    ::testing::internal::CaptureStderr();
    const auto errors = run_ranks(2, [&](int rank) {
      TrainerOptions options = eleven_lanes();
      GpuVersions& gpu = options.gpu;
      gpu = {"GPU A", "12040", "120405", "90100"};
      if (rank == 1)
        *std::array{&gpu.name, &gpu.cuda, &gpu.cublas_lt, &gpu.cudnn}[index_of(which)] = "B";
      TestWorker worker(options, some_samples(60), some_samples(9), 1,
                        std::move(group[index_of(rank)]));
      worker.trainer.start();
      worker.communicator.barrier();
    });
    const std::string said = ::testing::internal::GetCapturedStderr();
    for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
    EXPECT_THAT(said,
                ::testing::ContainsRegex("warning: rank 1 has GPU, CUDA, cuBLASLt and cuDNN .*"
                                         "B.*, rank 0 has GPU A 12040 120405 90100: "));
  }
}

// Past the comparison at the start, the collectives themselves notice.
TEST(DataParallel, AnotherBucketSizeNeverMixes) {
  auto group = make_local_group(2);
  const auto errors = run_ranks(2, [&](int rank) {
    Communicator communicator(
        std::make_unique<PlanEngine>(std::move(group[static_cast<std::size_t>(rank)])),
        std::chrono::seconds(20));
    std::vector<float> gradient(100'000, 1.0f);
    ReducerOptions options;
    options.bucket_bytes = rank == 0 ? 64 << 10 : 128 << 10;
    GradientReducer reducer(communicator, even_owners(2, 2), {gradient}, options);
    reducer.begin(1);
    const std::vector<std::vector<double>> tail{{1.0}};
    reducer.finish(tail);
  });
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kCollectiveMismatch);
    EXPECT_THAT(error->what(), HasSubstr("x 16384"));
    EXPECT_THAT(error->what(), HasSubstr("x 32768"));
  }
}

TEST(DataParallel, ASkippedLaneHasNoPart) {
  TrainerOptions options = eleven_lanes();
  const Result all = train(options, 2);
  options.skip_lanes = {{2, 5}};
  const Result without = train(options, 2);
  EXPECT_NE(without.hash, all.hash);
  EXPECT_EQ(without.losses[0], all.losses[0]);
  EXPECT_NE(without.losses[1], all.losses[1]);
  EXPECT_EQ(train(options, 1), without);
  EXPECT_EQ(train(options, 5), without);
}

TEST(DataParallel, MoreWorkersThanLanesIsWrongUsage) {
  EXPECT_THAT(test::error_of([] { replica_options(eleven_lanes(), 0, 12); }).what(),
              HasSubstr("12 workers, but a step has only 11 lanes"));
}

TEST(Straggler, IsTheOneThatIsMuchSlowerThanTheMedian) {
  EXPECT_FALSE(find_straggler(std::vector<double>{1}, 0.25));
  EXPECT_FALSE(find_straggler(std::vector<double>{1, 1.15, 0.9}, 0.25));
  const auto found = find_straggler(std::vector<double>{1, 1, 3, 1}, 0.25);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->rank, 2);
  EXPECT_DOUBLE_EQ(found->slower, 2);
}

TEST(Halt, ReportsSurviveTheFile) {
  HaltReport report;
  report.step = 7;
  report.what = "gradient";
  report.lane = 3;
  report.samples = {5, 1ull << 60};
  report.rank = 1;
  report.host = "here";
  report.tensor = "model.norm.weight";
  report.element = 12;
  report.value = "nan";
  EXPECT_EQ(parse_halt_report(to_json(report)), report);
  EXPECT_FALSE(parse_halt_report("{}"));
  EXPECT_FALSE(parse_halt_report("[1"));
  EXPECT_FALSE(parse_halt_report(R"({"step":"x"})"));
  const std::string good = to_json(report);
  for (const auto& [number, bad] :
       std::vector<std::pair<std::string, std::string>>{{"\"step\":7", "\"step\":1e300"},
                                                        {"\"lane\":3", "\"lane\":4294967296"},
                                                        {"\"lane\":3", "\"lane\":-1"},
                                                        {"[5,", "[0.5,"},
                                                        {"\"rank\":1", "\"rank\":1e300"},
                                                        {"\"element\":12", "\"element\":1.5"}}) {
    std::string text = good;
    text.replace(text.find(number), number.size(), bad);
    EXPECT_FALSE(parse_halt_report(text)) << text;
  }
  EXPECT_EQ(parse_skipped_lane("7:3"), (SkippedLane{7, 3}));
  for (const char* text : {"", "7", "7:", ":3", "0:1", "7:-1", "7:3x"}) {
    EXPECT_FALSE(parse_skipped_lane(text)) << text;
  }
}

}  // namespace
}  // namespace lockstep::data_parallel_test
