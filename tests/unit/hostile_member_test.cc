// Members that err: what another rank tells never ends a process. It is an Error that names the
// rank, on all ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/index.h"
#include "lockstep/base/whole_number.h"
#include "lockstep/comm/collectives/plan_engine.h"
#include "lockstep/comm/transport/local_group.h"
#include "lockstep/train/agreement.h"
#include "lockstep/train/levelling.h"
#include "lockstep/train/resume.h"
#include "tests/support/forwarding_transport.h"
#include "tests/support/groups.h"
#include "tests/support/lying_engine.h"
#include "tests/support/trainers.h"

namespace lockstep::hostile_member_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using namespace test;

constexpr std::chrono::seconds kTimeout{20};
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Rank 0 does what is right, rank 1 what is not. The error of rank 0.
Error honest_error(const std::function<void(Communicator&)>& honest,
                   const std::function<void(Communicator&)>& hostile) {
  Group group({.medium = GroupMedium::kLocal, .world_size = 2, .faults = {}});
  const auto errors = group.errors([&](Communicator& communicator) {
    (communicator.rank() == 0 ? honest : hostile)(communicator);
  });
  EXPECT_TRUE(errors[0]) << "rank 0 took it";
  return errors[0].value_or(Error(ErrorCode::kInvalidArgument, "none"));
}

void expect_named(const Error& error, const std::string& what) {
  EXPECT_EQ(error.code(), ErrorCode::kUnexpectedMessage) << error.what();
  EXPECT_EQ(error.rank(), 1) << error.what();
  EXPECT_THAT(error.what(), HasSubstr("rank 1"));
  EXPECT_THAT(error.what(), HasSubstr(what));
}

TEST(WholeNumber, IsNothingWhereACastWouldBeUndefined) {
  EXPECT_EQ(whole_number<int>(-3.0), -3);
  EXPECT_EQ(whole_number<std::int64_t>(-std::ldexp(1.0, 63)),
            std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(whole_number<std::uint8_t>(255.0), 255);
  EXPECT_EQ(whole_number<bool>(1.0), true);
  for (const double bad : {kNan, kInfinity, -kInfinity, 0.5, std::ldexp(1.0, 63), 1e300}) {
    EXPECT_FALSE(whole_number<std::int64_t>(bad)) << bad;
  }
  EXPECT_FALSE(whole_number<std::uint8_t>(256.0));
  EXPECT_FALSE(whole_number<std::uint32_t>(-1.0));
  EXPECT_FALSE(whole_number<bool>(2.0));
}

TEST(HostileMember, TellsTextsOfNoLength) {
  for (const std::int64_t size : {std::int64_t{-1}, std::int64_t{1} << 40}) {
    const Error error =
        honest_error([](Communicator& communicator) { gather_texts(communicator, "a text"); },
                     [&](Communicator& communicator) {
                       std::vector<std::int64_t> sizes(2);
                       communicator.all_gather(std::span(&size, 1), std::span(sizes));
                       communicator.barrier();
                     });
    expect_named(error, "a text of " + std::to_string(size) + " bytes");
  }
}

TEST(HostileMember, TellsSettingsThatAreNone) {
  for (const char* text : {"", "7", "[1]", "[[\"a\",\"b\"]]", "[[\"a\",1,true]]", "{\"a\":[]}"}) {
    const Error error = honest_error(
        [](Communicator& communicator) {
          const std::vector<Setting> own = {{"seed", "1"}};
          compare_settings(communicator, own);
        },
        [&](Communicator& communicator) {
          gather_texts(communicator, text);
          communicator.barrier();
        });
    expect_named(error, "its settings");
  }
}

TEST(HostileMember, TellsCheckpointsThatAreNone) {
  for (const char* text : {"", "[\"a\"]", "{\"a\":1}", "[[1]]", "[1.5]", "[1e300]", "[-1]"}) {
    const Error error =
        honest_error([](Communicator& communicator) { find_newest_checkpoint(communicator, ""); },
                     [&](Communicator& communicator) {
                       gather_texts(communicator, text);
                       communicator.barrier();
                     });
    expect_named(error, "its checkpoints");
  }
}

// Rank 0 levels with a rank that does as it likes.
Error levelling_error(const std::function<void(Communicator&)>& hostile) {
  return honest_error(
      [](Communicator& communicator) {
        TrainerOptions options = small_training();
        options.global_batch = 4;
        options.micro_batch = 1;
        ThreadPool pool(1);
        const auto replica = make_cpu_replica(replica_options(options, 0, 1), pool);
        Trainer trainer(options, some_samples(60), some_samples(9), *replica);
        trainer.standing().has_state = true;
        trainer.standing().step = 2;
        try {
          level(trainer, communicator);
        } catch (...) {
          if (trainer.attached()) trainer.detach();
          throw;
        }
      },
      hostile);
}

std::string standing(const std::string& step, const std::string& held, const std::string& moments) {
  return "{\"state\":true,\"step\":" + step +
         ",\"summed\":false,\"decided\":false,\"updated\":false,\"held\":" + held +
         ",\"done\":2,\"closed\":true,\"moments\":" + moments + "}";
}

TEST(HostileMember, StandsWhereNobodyCan) {
  std::string many_moments = "[[0,1,2]";  // each is compared with each
  for (int i = 0; i < 100'000; ++i) many_moments += ",[0,1,2]";
  many_moments += "]";
  const std::vector<std::string> texts = {
      "",
      "[]",
      "{\"state\":true}",
      standing("-1", "[0,0]", "[]"),
      standing("9223372036854775807", "[0,0]", "[]"),
      standing("1e300", "[0,0]", "[]"),
      standing("1.5", "[0,0]", "[]"),
      standing("2", "[-1,0]", "[]"),
      standing("2", "[0,1e300]", "[]"),
      standing("2", "[0,0]", "[[0,0,1.5]]"),
      standing("2", "[0,0]", "[[0,0,-1]]"),
      standing("2", "[0,0]", "[7]"),
      standing("2", "[5,2]", "[]"),
      standing("2", "[0,99999999]", "[]"),
      standing("2", "[0]", "[]"),
      standing("2", "[0,0]", "[[0,99999999,2]]"),
      standing("2", "[0,0]", "[[0]]"),
      standing("2", "[0,0]", many_moments),
  };
  for (const std::string& text : texts) {
    expect_named(levelling_error([&](Communicator& communicator) {
                   gather_texts(communicator, text);
                   communicator.barrier();
                 }),
                 "where it stands");
  }
}

// It is furthest, so the others take the last report from it.
TEST(HostileMember, TellsAReportThatIsNone) {
  const auto telling = [](std::int64_t size, const std::vector<double>& numbers) {
    return [=](Communicator& communicator) {
      gather_texts(communicator, standing("3", "[0,0]", "[]"));
      std::int64_t told = size;
      communicator.broadcast(std::span(&told, 1), 1);
      std::vector<double> copy = numbers;
      if (!copy.empty()) communicator.broadcast(std::span(copy), 1);
      communicator.barrier();
    };
  };
  for (const std::int64_t size : {std::int64_t{-1}, std::int64_t{1} << 60}) {
    expect_named(levelling_error(telling(size, {})), "a report of");
  }
  expect_named(levelling_error(telling(1, {1})), "the report of the last step");
  for (const double bad : {kNan, kInfinity, -1e300, 0.5, 1e15}) {
    const std::vector<double> numbers(40, bad);
    expect_named(levelling_error(telling(40, numbers)), "the report of the last step");
  }
}

// The numbers of a report of step 3 in their order, of two ranks, with all else as little as can
// be.
struct ToldReport {
  double step = 3;
  double tokens = 1;
  double phases = 2;
  std::vector<double> straggler = {0};
  std::vector<double> lanes = {2, 2, 2};
  std::vector<double> next_lanes = {0};
  double stop = 0;
  double save_request = 0;
  std::vector<double> leaving = {0};
  std::vector<double> more = {};

  std::vector<double> numbers() const {
    std::vector<double> all = {1, step, 0, 0, 0, 0, tokens, 0, 0, 0, 0, 0, 0, phases};
    all.resize(all.size() + static_cast<std::size_t>(phases) * kPhases);
    const auto add = [&](const std::vector<double>& next) {
      all.insert(all.end(), next.begin(), next.end());
    };
    add(straggler);
    add(lanes);
    add(next_lanes);
    add({stop, 0, save_request, 0});
    add(leaving);
    add({1, 1, 0, 0, 0, 0});
    add(more);
    return all;
  }
};

// Each number is one that could be, but they do not belong together: who believed the second list
// of lanes would read past the end of the first.
TEST(HostileMember, TellsAReportOfRanksThatAreNone) {
  const std::vector<ToldReport> reports = {
      {.step = 4},
      {.tokens = -1},
      {.phases = 3},
      {.straggler = {1, 2, 0.5}},
      {.straggler = {1, -1, 0.5}},
      {.lanes = {1, 4}},
      {.next_lanes = {3, 1, 1, 2}},
      {.stop = 65},
      {.stop = -1},
      {.save_request = -1},
      {.leaving = {1, 2}},
      {.more = {0}},
  };
  const auto tell = [](const ToldReport& report) {
    return [report](Communicator& communicator) {
      gather_texts(communicator, standing("3", "[0,0]", "[]"));
      std::vector<double> numbers = report.numbers();
      auto size = static_cast<std::int64_t>(numbers.size());
      communicator.broadcast(std::span(&size, 1), 1);
      communicator.broadcast(std::span(numbers), 1);
      communicator.barrier();
    };
  };
  for (const ToldReport& report : reports) {
    expect_named(levelling_error(tell(report)), "the report of the last step");
  }
  // One that is right is taken.
  EXPECT_THAT(levelling_error(tell({})).what(), Not(HasSubstr("makes no sense")));
}

// The places of trainer.cc: four numbers of the lanes, then those of every rank.
constexpr std::size_t kTokensPlace = 1;
constexpr std::size_t kStopPlaceOfRank1 = 4 + (5 + kPhases);
constexpr std::size_t kSaveRequestPlaceOfRank1 = kStopPlaceOfRank1 + 2;
constexpr std::size_t kLeavePlaceOfRank1 = kStopPlaceOfRank1 + 4;
constexpr std::size_t kPhasePlaceOfRank1 = kStopPlaceOfRank1 + 5;

std::vector<std::optional<Error>> train_with_lie(std::size_t place, double lie) {
  auto group = make_local_group(2);
  std::vector<std::optional<Error>> errors(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      TrainerOptions options = small_training();
      options.global_batch = 4;
      options.micro_batch = 1;
      options.schedule.steps = 2;
      std::unique_ptr<Engine> engine =
          std::make_unique<PlanEngine>(std::move(group[index_of(rank)]));
      if (rank == 1) {
        engine = std::make_unique<LyingEngine>(
            std::move(engine), [&](const Call& call, std::span<std::byte> brought) {
              if (call.out.type() != DataType::kF64 || call.partials.empty()) return;
              std::memcpy(&brought[place * sizeof lie], &lie, sizeof lie);
            });
      }
      Communicator communicator(std::move(engine), kTimeout);
      ThreadPool pool(1);
      const auto replica = make_cpu_replica(replica_options(options, rank, 2), communicator, pool);
      initialise(*replica, options.seed, pool);
      try {
        Trainer trainer(options, some_samples(60), some_samples(9), *replica, communicator);
        trainer.start();
        trainer.run([] { return Requests(); }, [](const StepReport&) {});
      } catch (const Error& error) {
        errors[index_of(rank)] = error;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// Bad memory, or whoever passes it on: a rank does not take it for what it has told.
TEST(HostileMember, IsNotBelievedByItself) {
  auto group = make_local_group(2);
  const auto talk = [&](std::unique_ptr<Engine> engine) -> std::optional<Error> {
    Communicator communicator(std::move(engine), kTimeout);
    try {
      gather_texts(communicator, "a text");
      communicator.barrier();
    } catch (const Error& error) {
      return error;
    }
    return std::nullopt;
  };
  std::optional<Error> error;
  std::thread liar([&] {
    const auto lie = [](const Call& call, std::span<std::byte> brought) {
      if (call.in.type() == DataType::kU8 && !brought.empty()) brought[0] = std::byte{'b'};
    };
    error =
        talk(std::make_unique<LyingEngine>(std::make_unique<PlanEngine>(std::move(group[1])), lie));
  });
  talk(std::make_unique<PlanEngine>(std::move(group[0])));
  liar.join();
  ASSERT_TRUE(error);
  expect_named(*error, "its own text, which came back changed");
}

TEST(HostileMember, RequestsWhatNobodyCanWant) {
  const std::vector<std::pair<std::size_t, double>> lies = {
      {kStopPlaceOfRank1, kNan},      {kStopPlaceOfRank1, 1e300},
      {kStopPlaceOfRank1, 1000},      {kStopPlaceOfRank1, -1},
      {kLeavePlaceOfRank1, 0.5},      {kLeavePlaceOfRank1, -1e18},
      {kPhasePlaceOfRank1, kNan},     {kPhasePlaceOfRank1, kInfinity},
      {kSaveRequestPlaceOfRank1, -1}, {kSaveRequestPlaceOfRank1, 0.5}};
  for (const auto& [place, lie] : lies) {
    for (const auto& error : train_with_lie(place, lie)) {
      ASSERT_TRUE(error) << place << " " << lie;
      expect_named(*error, "its requests of step 1");
    }
  }
}

TEST(HostileMember, CountsTokensThatAreNone) {
  for (const double lie : {kNan, -1e300, 1e300, -1e9}) {
    for (const auto& error : train_with_lie(kTokensPlace, lie)) {
      ASSERT_TRUE(error) << lie;
      EXPECT_EQ(error->code(), ErrorCode::kUnexpectedMessage) << error->what();
      EXPECT_THAT(error->what(), HasSubstr("tokens, as the ranks add them up"));
    }
  }
}

// Shows the others memory that is not there.
class LyingSpace final : public SharedSpace {
 public:
  explicit LyingSpace(SharedSpace& inner) : inner_(inner) {}
  void connect(Deadline deadline) override { inner_.connect(deadline); }
  Board& board(int rank) override { return inner_.board(rank); }
  std::optional<std::uint64_t> publish(const std::byte*, std::size_t) const override {
    return std::uint64_t{1} << 60;
  }
  std::byte* locate(int rank, std::uint64_t published, std::size_t bytes) const override {
    return inner_.locate(rank, published, bytes);
  }
  Buffer allocate(std::size_t bytes) override { return inner_.allocate(bytes); }

 private:
  SharedSpace& inner_;
};

class LyingTransport final : public test::ForwardingTransport {
 public:
  explicit LyingTransport(std::unique_ptr<Transport> inner)
      : ForwardingTransport(std::move(inner)), space_(*inner_->shared_space()) {}
  SharedSpace* shared_space() override { return &space_; }

 private:
  LyingSpace space_;
};

TEST(HostileMember, ShowsMemoryThatIsNotThere) {
  auto transports = make_transports({.medium = GroupMedium::kShm, .world_size = 2, .faults = {}});
  transports[1] = std::make_unique<LyingTransport>(std::move(transports[1]));
  std::vector<std::optional<Error>> errors(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      Communicator communicator(std::make_unique<PlanEngine>(std::move(transports[index_of(rank)])),
                                kTimeout);
      const Buffer data = communicator.allocate(std::size_t{1} << 20);
      try {
        communicator.all_reduce(BufferView(data.data(), data.bytes() / 4, DataType::kF32),
                                ReduceOp::kSum);
      } catch (const Error& error) {
        errors[index_of(rank)] = error;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(errors[0]);
  expect_named(*errors[0], "showed memory that is not there");
}

}  // namespace
}  // namespace lockstep::hostile_member_test
