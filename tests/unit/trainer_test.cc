#include "lockstep/train/trainer.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "lockstep/base/error.h"
#include "lockstep/base/random.h"
#include "lockstep/comm/kernels/kernels.h"
#include "lockstep/model/cpu/adamw.h"
#include "lockstep/model/cpu/transformer.h"
#include "lockstep/model/weights_hash.h"
#include "lockstep/run/defaults.h"
#include "tests/support/trainers.h"

namespace lockstep::trainer_test {
namespace {

using ::testing::HasSubstr;

using ::lockstep::test::kContext;
using ::lockstep::test::SoloTrainer;
using ::lockstep::test::some_samples;

TrainerOptions small_options() {
  TrainerOptions options = test::small_training();
  options.global_batch = 12;
  options.micro_batch = 4;
  options.schedule.steps = 30;
  options.schedule.warmup = 3;
  return options;
}

std::string train(const TrainerOptions& options, int threads,
                  std::vector<double>* losses = nullptr) {
  SoloTrainer solo(options, some_samples(50), some_samples(5), threads);
  solo.trainer.run([] { return Requests{}; },
                   [&](const StepReport& report) {
                     if (losses != nullptr) losses->push_back(report.loss);
                   });
  EXPECT_EQ(solo.trainer.steps_done(), options.schedule.steps);
  return solo.trainer.verify();
}

TEST(Trainer, LearnsAndGivesTheSameBitsForAnyThreads) {
  std::vector<double> losses;
  const std::string alone = train(small_options(), 1, &losses);
  EXPECT_NEAR(losses.front(), std::log(64), 0.2);
  EXPECT_LT(losses.back(), 0.8 * losses.front());
  EXPECT_EQ(train(small_options(), 1), alone);
  EXPECT_EQ(train(small_options(), 2), alone);
  EXPECT_EQ(train(small_options(), 3), alone);
}

TEST(Trainer, TheSeedChangesTheResult) {
  TrainerOptions options = small_options();
  options.schedule.steps = 2;
  const std::string one = train(options, 1);
  options.seed = 12;
  EXPECT_NE(train(options, 1), one);
}

// A step once more, by hand: lanes one by one, added as the tree says, one factor, one AdamW.
TEST(Trainer, AStepIsOneSumOverLanes) {
  const TrainerOptions options = small_options();
  const Samples samples = some_samples(50);
  SoloTrainer solo(options, samples, samples, 1);
  Trainer& trainer = solo.trainer;
  ThreadPool& pool = solo.pool;
  const std::vector<float> start = solo.parameters();

  Transformer transformer(options.model, options.precision, pool, 4, kContext);
  std::vector<FloatBuffer> lanes;
  double loss = 0;
  for (std::uint32_t lane = 0; lane < 3; ++lane) {
    std::vector<std::uint64_t> ids(4);
    trainer.lanes().sample_ids(0, lane, ids);
    std::vector<std::int32_t> tokens(4 * kContext), targets(4 * kContext);
    for (std::size_t row = 0; row < 4; ++row) {
      samples.read(ids[row], std::span(tokens).subspan(row * kContext, kContext),
                   std::span(targets).subspan(row * kContext, kContext));
    }
    lanes.emplace_back(start.size());
    loss += transformer.gradient(start, {tokens, targets, 4, kContext}, lanes.back().span()).loss;
  }
  double squares = 0;
  for (std::size_t i = 0; i < start.size(); ++i) {
    float& sum = lanes[0].span()[i];
    sum = (sum + lanes[1].span()[i]) + lanes[2].span()[i];
    squares += static_cast<double>(sum) * sum;
  }
  const StepReport report = trainer.step();
  EXPECT_EQ(report.tokens, 12 * kContext);
  EXPECT_NEAR(report.loss, loss / (12 * kContext), 1e-12);
  EXPECT_NEAR(report.gradient_norm, std::sqrt(squares) / (12 * kContext), 1e-9);
  const double mean_norm = std::sqrt(squares) / (12 * kContext);
  const auto factor = static_cast<float>(std::min(1.0, options.clip / mean_norm) / (12 * kContext));
  std::vector<float> expected = start;
  AdamW adamw(transformer.layout(), options.adamw);
  adamw.step(expected, lanes[0].span(), factor, learning_rate(options.schedule, 0), 0, pool);
  EXPECT_EQ(std::memcmp(expected.data(), solo.parameters().data(), expected.size() * sizeof(float)),
            0);
}

TEST(Trainer, StopsAfterTheStepUnderWay) {
  SoloTrainer solo(small_options(), some_samples(50), some_samples(5), 1);
  int asked = 0;
  std::vector<int> stops;
  solo.trainer.run([&] { return Requests{.stop = ++asked == 4 ? 15 : 0, .save = asked == 2}; },
                   [&](const StepReport& report) {
                     stops.push_back(report.stop);
                     EXPECT_EQ(report.save, report.step == 2);
                   });
  EXPECT_EQ(stops, (std::vector<int>{0, 0, 0, 15}));
  EXPECT_EQ(solo.trainer.steps_done(), 4);
}

// What the job asks for it asks for as long as it lives.
TEST(Trainer, SavesOnceForEachRequestOfTheJob) {
  SoloTrainer solo(small_options(), some_samples(50), some_samples(5), 1);
  int polls = 0;
  std::vector<bool> saved;
  solo.trainer.run(
      [&] {
        const std::uint32_t newest = polls < 2 ? 0 : polls < 4 ? 9 : 5;
        return Requests{.stop = ++polls == 7 ? 15 : 0, .save_request = newest};
      },
      [&](const StepReport& report) { saved.push_back(report.save); });
  EXPECT_EQ(saved, (std::vector<bool>{false, false, true, false, true, false, false}));
}

TEST(Trainer, ValidatesWhenAsked) {
  TrainerOptions options = small_options();
  options.eval_every = 4;
  options.eval_samples = 7;
  options.schedule.steps = 10;
  SoloTrainer solo(options, some_samples(50), some_samples(10), 2);
  std::vector<std::int64_t> validated;
  solo.trainer.run([] { return Requests{}; },
                   [&](const StepReport& report) {
                     if (report.validation_loss) validated.push_back(report.step);
                   });
  EXPECT_EQ(validated, (std::vector<std::int64_t>{4, 8, 10}));
  EXPECT_EQ(solo.trainer.evaluate(), solo.trainer.evaluate());
}

TEST(Trainer, AccuracyIsTheShareOfTokensThanWhichNoneWasLikelier) {
  TrainerOptions options = small_options();
  options.eval_samples = 10;
  const Samples samples = some_samples(10);
  SoloTrainer solo(options, some_samples(50), samples, 1);
  solo.trainer.run([] { return Requests{}; }, [](const StepReport&) {});
  Transformer transformer(options.model, options.precision, solo.pool, 1, kContext);
  const auto vocab = static_cast<std::size_t>(options.model.vocab);
  std::vector<std::int32_t> tokens(kContext), targets(kContext);
  std::vector<float> logits(kContext * vocab);
  int correct = 0;
  for (std::uint64_t sample = 0; sample < 10; ++sample) {
    samples.read(sample, tokens, targets);
    transformer.logits(solo.parameters(), {tokens, targets, 1, kContext}, logits);
    for (std::size_t i = 0; i < kContext; ++i) {
      const auto row = std::span(logits).subspan(i * vocab, vocab);
      correct += row[static_cast<std::size_t>(targets[i])] == std::ranges::max(row) ? 1 : 0;
    }
  }
  EXPECT_GT(correct, 0);
  EXPECT_LT(correct, 10 * kContext);
  EXPECT_EQ(solo.trainer.evaluate()->accuracy, correct / (10.0 * kContext));
}

// The steps of a run that has had these validations.
std::vector<StepReport> reports_of(const TrainerOptions& options,
                                   const ValidationRecord& before = {}, std::int64_t stop_at = 0) {
  SoloTrainer solo(options, some_samples(50), some_samples(10), 1);
  solo.trainer.set_validation(before);
  std::vector<StepReport> reports;
  solo.trainer.run(
      [&] {
        return Requests{solo.trainer.steps_done() + 1 == stop_at ? 15 : 0, false};
      },
      [&](const StepReport& report) { reports.push_back(report); });
  return reports;
}

TEST(Trainer, RemembersTheBestValidationAndEndsEarly) {
  TrainerOptions options = small_options();
  options.eval_every = 2;
  options.schedule.steps = 40;
  options.schedule.peak = 0;  // no validation is better than the first
  EXPECT_EQ(reports_of(options).size(), 40u);
  options.early_stop = 3;
  const std::vector<StepReport> reports = reports_of(options);
  ASSERT_EQ(reports.size(), 8u);
  for (const StepReport& report : reports) {
    EXPECT_EQ(report.best, report.step == 2);
    EXPECT_EQ(report.ends_early, report.step == 8);
  }
  // The count goes on where the run does; a run that has ended has nothing left to do.
  const double loss = *reports[1].validation_loss;
  EXPECT_EQ(reports_of(options, {2, loss, 2}).size(), 2u);
  EXPECT_EQ(reports_of(options, {2, loss, 3}).size(), 0u);
  EXPECT_TRUE(reports_of(options, {2, loss * 2, 2})[1].best);
}

TEST(Trainer, AValidationBecauseOfAStopIsNotRecorded) {
  TrainerOptions options = small_options();
  options.eval_every = 4;
  const std::vector<StepReport> reports = reports_of(options, {}, 3);
  ASSERT_EQ(reports.size(), 3u);
  EXPECT_TRUE(reports[2].validation_loss);
  EXPECT_FALSE(reports[2].best);
}

// Runs one step that must halt; the weights stay as they are.
std::string halt_message(SoloTrainer& solo) {
  const std::vector<float> before = solo.parameters();
  try {
    solo.trainer.step();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNonFinite);
    EXPECT_EQ(std::memcmp(before.data(), solo.parameters().data(), before.size() * sizeof(float)),
              0);
    EXPECT_EQ(solo.trainer.steps_done(), 0);
    return error.what();
  }
  return "no error";
}

TEST(Trainer, NamesAWeightThatIsNotFinite) {
  SoloTrainer solo(small_options(), some_samples(50), some_samples(5), 1);
  const Range range = solo.trainer.layout().range(Component::kDown, 1);
  solo.replica->complete_parameters([&](std::span<float> parameters) {
    parameters[range.begin + 5] = std::numeric_limits<float>::quiet_NaN();
  });
  const std::string message = halt_message(solo);
  EXPECT_THAT(message,
              HasSubstr("step 1: weight model.layers.1.mlp.down_proj.weight, element 5, is nan"));
  EXPECT_THAT(message, HasSubstr("no weights were changed"));
}

// One embedding is so large that adding the first block's output overflows: the sample with its
// token, and only it, has no gradient.
TEST(Trainer, NamesTheLaneAndItsSamples) {
  std::vector<std::int32_t> tokens(50 * kContext + 1, 3);
  constexpr std::uint64_t kBadSample = 17;
  tokens[kBadSample * kContext + 4] = 9;
  const Samples samples({TokenShard::of("tokens", tokens, {})}, 64, kContext);
  TrainerOptions options = small_options();
  options.global_batch = 50;
  options.micro_batch = 2;
  options.model.tie_embeddings = false;
  SoloTrainer solo(options, samples, samples, 1);
  Trainer& trainer = solo.trainer;
  const Range embedding = trainer.layout().range(Component::kEmbedding);
  const Range output = trainer.layout().range(Component::kOutput, 0);
  solo.replica->complete_parameters([&](std::span<float> parameters) {
    for (std::size_t i = 0; i < 32; ++i) parameters[embedding.begin + 9 * 32 + i] = 3.4e38f;
    for (std::size_t i = output.begin; i < output.end; ++i) parameters[i] *= 1e38f;
  });

  std::vector<std::uint64_t> ids(2);
  std::uint32_t lane = 0;
  for (;; ++lane) {
    trainer.lanes().sample_ids(0, lane, ids);
    if (ids[0] == kBadSample || ids[1] == kBadSample) break;
  }
  const std::string message = halt_message(solo);
  EXPECT_THAT(message,
              HasSubstr(fmt::format("lane {} (samples {}, {}) on rank 0 (", lane, ids[0], ids[1])));
  EXPECT_EQ(trainer.halt_report()->samples, ids);
  EXPECT_THAT(message, ::testing::ContainsRegex("weight, element [0-9]+, is -?(nan|inf)"));
}

TEST(Trainer, WrongUsage) {
  TrainerOptions options = small_options();
  options.micro_batch = 5;
  EXPECT_THROW(SoloTrainer(options, some_samples(50), some_samples(5), 1), Error);
}

TEST(Defaults, FitTheData) {
  ModelConfig previous = fitting_model(1);
  for (std::uint64_t tokens = 1; tokens < std::uint64_t{1} << 40; tokens *= 3) {
    ModelConfig model = fitting_model(tokens);
    model.vocab = 256;
    EXPECT_NO_THROW(validate(model)) << tokens;
    EXPECT_GE(model.hidden, previous.hidden);
    previous = model;
  }
  EXPECT_EQ(fitting_model(600).context, 16);
  EXPECT_EQ(validation_samples(2), 1u);
  EXPECT_EQ(validation_samples(1), 0u);
  EXPECT_EQ(validation_samples(1000), 50u);
  EXPECT_EQ(fitting_steps(1, 1000, std::uint64_t{1} << 40), 200);
  EXPECT_EQ(fitting_steps(1'000'000, 1000, std::uint64_t{1} << 40), 10'000);
  EXPECT_EQ(fitting_steps(1'000'000, 1000, 1500), 60);  // forty passes
  EXPECT_EQ(fitting_steps(1'000'000, 1000, 1), 1);
  EXPECT_EQ(fitting_micro_batch(kGlobalBatch), 2u);  // eight lanes
  EXPECT_EQ(fitting_micro_batch(64), 8u);
  EXPECT_EQ(fitting_micro_batch(12), 1u);  // twelve lanes: six would not do for eight workers
  EXPECT_EQ(fitting_micro_batch(20), 2u);  // ten
  EXPECT_EQ(fitting_micro_batch(13), 1u);
  EXPECT_EQ(fitting_micro_batch(6), 1u);
  EXPECT_EQ(fitting_micro_batch(1), 1u);
  EXPECT_DOUBLE_EQ(fitting_learning_rate(64, true), fitting_learning_rate(64, false) / 10);
}

}  // namespace
}  // namespace lockstep::trainer_test
