#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/run/options.h"
#include "lockstep/run/plan.h"

namespace lockstep::train_options_test {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

TEST(TrainOptions, BetweenCheckpointsAreStepsOrTime) {
  EXPECT_EQ(parse_save_every("500"), (SaveEvery{500, 0s}));
  EXPECT_EQ(parse_save_every("1e3"), (SaveEvery{1000, 0s}));
  EXPECT_EQ(parse_save_every("0"), SaveEvery{});
  EXPECT_EQ(parse_save_every("90s"), (SaveEvery{0, 90s}));
  EXPECT_EQ(parse_save_every("10m"), kDefaultSaveEvery);
  EXPECT_EQ(parse_save_every("2h"), (SaveEvery{0, 2h}));
  for (const char* text : {"", "m", "-1", "0m", "10 m", "10d", "1.5", "1e3m", "9999999999h"}) {
    EXPECT_FALSE(parse_save_every(text)) << text;
  }
  for (const char* text : {"500", "0", "90s", "10m", "2h"}) {
    EXPECT_EQ(to_string(*parse_save_every(text)), text);
  }
}

TEST(TrainOptions, Bf16SaysWhatItNeeds) {
  EXPECT_EQ(precision_refusal(Precision::kBf16, true, false), std::nullopt);
  EXPECT_EQ(precision_refusal(Precision::kBf16, false, true), std::nullopt);
  EXPECT_EQ(precision_refusal(Precision::kBf16, false, false),
            "--precision bf16 needs a GPU (--device cuda) or a processor with AMX, which this one "
            "does not have; fp32 works everywhere");
}

std::string refusal(const TrainOptions& options) {
  try {
    check_options(options);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "";
}

TEST(TrainOptions, OfWorkersThatComeAndGo) {
  TrainOptions good;
  good.workers = 3;
  EXPECT_EQ(refusal(good), "");
  good.min_workers = 3;
  EXPECT_EQ(refusal(good), "");
  good.listen = "127.0.0.1:7000";
  good.min_workers = 5;  // others may come
  good.expect = 4;
  EXPECT_EQ(refusal(good), "");

  const auto refused = [](auto change) {
    TrainOptions options;
    options.workers = 3;
    change(options);
    return refusal(options);
  };
  using O = TrainOptions&;
  EXPECT_THAT(refused([](O o) { o.min_workers = 4; }), HasSubstr("there are only 3 workers"));
  EXPECT_THAT(refused([](O o) { o.listen = "somewhere"; }), HasSubstr("--listen somewhere"));
  EXPECT_THAT(refused([](O o) { o.join = "here"; }), HasSubstr("--join here: not HOST:PORT"));
  EXPECT_THAT(refused([](O o) { o.join = o.listen = "a:1"; }), HasSubstr("give one of them"));
  EXPECT_THAT(refused([](O o) { o.expect = 3; }), HasSubstr("--listen HOST:PORT"));
  EXPECT_THAT(refused([](O o) {
                o.listen = "a:1";
                o.expect = 2;
              }),
              HasSubstr("--expect 2 is fewer than --workers 3"));
  for (const TransportKind kind :
       {TransportKind::kLocal, TransportKind::kMpi, TransportKind::kServer}) {
    EXPECT_THAT(refused([&](O o) {
                  o.listen = "a:1";
                  o.job.transport = kind;
                }),
                HasSubstr("--listen is for --transport tcp, shm or auto"));
  }
  EXPECT_THAT(refused([](O o) {
                o.fail_fast = true;
                o.listen = "a:1";
              }),
              HasSubstr("--fail-fast"));
  EXPECT_THAT(refused([](O o) {
                o.fail_fast = true;
                o.min_workers = 2;
              }),
              HasSubstr("--fail-fast"));
  EXPECT_THAT(refused([](O o) { o.reducer.buddy = false; }), HasSubstr("--shard-optimizer"));
}

TEST(TrainOptions, TheBestModelOfAnEarlyStopIsKept) {
  TrainOptions options;
  options.early_stop = 2;
  EXPECT_EQ(refusal(options), "");
  options.out = "somewhere";
  options.save_every = SaveEvery{5, 0s};
  EXPECT_EQ(refusal(options), "");
  options.save_every = SaveEvery{};
  EXPECT_THAT(refusal(options), HasSubstr("it does not go with --save-every 0"));
}

}  // namespace
}  // namespace lockstep::train_options_test
