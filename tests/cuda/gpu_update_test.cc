#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "gpu_cases.h"
#include "lockstep/base/canonical_tree.h"
#include "lockstep/base/error.h"
#include "lockstep/model/cpu/adamw.h"
#include "lockstep/model/gpu_model.h"

namespace lockstep {
namespace {

TEST(GpuUpdate, UpdatesAsTheCpuToTheBit) {
  LOCKSTEP_NEEDS_GPU();
  const ModelConfig config = small_model();
  const TestBatch data(config, 2, 1);
  const ParameterLayout layout(config);
  const Range shard{4096, layout.size()};
  GpuModelOptions options = gpu_options(config, Precision::kBf16, 2);
  options.shard = shard;
  const auto model = make_gpu_model(options);
  std::vector<float> parameters = test_parameters(config);
  model->set_parameters(parameters);
  ThreadPool pool(1);
  AdamW adamw(layout, {}, shard);
  std::vector<double> ours(norm_blocks(layout.size()));
  std::vector<double> theirs(ours.size());
  for (std::int64_t step = 0; step < 6; ++step) {  // the later ones are graphs
    const Gradient gradient = on_gpu(*model, data.batch());
    model->block_squares({0, layout.size()}, ours);
    block_squares(gradient.values, pool, theirs);
    for (std::size_t i = 0; i < ours.size(); ++i)
      EXPECT_NEAR(ours[i], theirs[i], 1e-12 * theirs[i]);
    const double norm = std::sqrt(tree_sum(ours));
    // Both ways to the norm, with clipping and without.
    UpdateRequest request{.tokens = gradient.sum.tokens,
                          .clip = step % 3 == 0   ? 1e-3
                                  : step % 3 == 1 ? 1e6
                                                  : 0.0,
                          .learning_rate = 1e-3,
                          .step = step};
    if (step % 2 == 1) request.norm = norm;
    model->update(request);
    const UpdateResult updated = model->finish_update();
    EXPECT_TRUE(updated.done);
    EXPECT_EQ(updated.norm, norm);
    adamw.step(parameters, std::span(gradient.values).subspan(shard.begin, shard.size()),
               gradient_factor(norm, request.tokens, request.clip), 1e-3, step, pool);
  }
  std::vector<float> updated(parameters.size());
  model->get_parameters(updated);
  EXPECT_EQ(updated, parameters);
  std::vector<float> first(shard.size());
  std::vector<float> second(shard.size());
  model->get_moments(first, second);
  EXPECT_TRUE(std::ranges::equal(first, adamw.first_moment()));
  EXPECT_TRUE(std::ranges::equal(second, adamw.second_moment()));
  model->set_moments(second, first);
  model->get_moments(first, second);
  EXPECT_TRUE(std::ranges::equal(second, adamw.first_moment()));
}

// The update looks for itself, so that it can be enqueued before anybody knows.
TEST(GpuUpdate, WhatIsNotFiniteShowsAndChangesNothing) {
  LOCKSTEP_NEEDS_GPU();
  const ModelConfig config = small_model();
  const TestBatch data(config, 2, 1);
  for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
    const auto model = make_gpu_model(gpu_options(config, precision, 2));
    const std::vector<float> good = test_parameters(config);
    std::vector<float> bad = good;
    bad[model->layout().range(Component::kDown, 1).begin] = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> now(good.size());
    UpdateRequest request{.tokens = 100, .clip = 1, .learning_rate = 1e-3, .step = 0};
    for (int repeat = 0; repeat < 4; ++repeat) {
      model->set_parameters(bad);
      model->gradient(data.batch(), 0, {});
      model->update(request);
      EXPECT_FALSE(std::isfinite(model->finish_lanes().front().sum.loss));
      const UpdateResult refused = model->finish_update();
      EXPECT_FALSE(std::isfinite(refused.norm));
      EXPECT_FALSE(refused.done);
      model->get_parameters(now);
      EXPECT_EQ(std::memcmp(now.data(), bad.data(), now.size() * sizeof(float)), 0);

      // A bad loss is enough, whatever the norm.
      model->gradient(data.batch(), 0, {});
      request.norm = 1.0;
      model->update(request);
      EXPECT_FALSE(model->finish_update().done);
      model->finish_lanes();
      request.norm.reset();

      model->set_parameters(good);
      model->gradient(data.batch(), 0, {});
      model->update(request);
      EXPECT_TRUE(std::isfinite(model->finish_lanes().front().sum.loss));
      EXPECT_TRUE(model->finish_update().done);
      model->get_parameters(now);
      EXPECT_NE(now, good);

      request.tokens = 0;  // every lane left out
      model->skip(0, {});
      model->update(request);
      EXPECT_FALSE(model->finish_update().done);
      model->finish_lanes();
      request.tokens = 100;
    }
  }
}

TEST(GpuUpdate, WaitsCanBeGivenUp) {
  LOCKSTEP_NEEDS_GPU();
  ModelConfig config = small_model();
  config.context = 1024;
  GpuModelOptions options = gpu_options(config, Precision::kF32, 64);
  int looks = 0;
  options.while_waiting = [&] {
    if (++looks == 3) throw Error(ErrorCode::kAborted, "enough");
  };
  const auto model = make_gpu_model(options);
  const TestBatch data(config, 64, 1);
  EXPECT_THROW(
      {
        for (int i = 0; i < 1000; ++i) {  // some of it takes longer than three looks
          for (int lane = 0; lane < 10; ++lane) model->gradient(data.batch(), 0, {});
          model->finish_lanes();
        }
      },
      Error);
  EXPECT_EQ(looks, 3);
}

TEST(GpuUpdateDeathTest, AWaitEndsByItsDeadline) {
  LOCKSTEP_NEEDS_GPU();
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  ModelConfig config = small_model();
  config.context = 1024;
  // A wait is given the patience of one lane for each that is enqueued: 50 x 1 ms.
  constexpr int kLanes = 50;
  EXPECT_EXIT(
      {
        const GpuModelOptions options = gpu_options(config, Precision::kF32, 64);
        auto model = make_gpu_model(options);
        model->set_patience(std::chrono::milliseconds(1));
        const TestBatch data(config, 64, 1);
        try {
          for (int lane = 0; lane < kLanes; ++lane) model->gradient(data.batch(), 0, {});
          model->finish_lanes();
        } catch (const Error& error) {
          model.reset();
          std::fprintf(stderr, "%s\n", error.what());
          std::_Exit(error.code() == ErrorCode::kTimeout ? 3 : 4);
        }
        std::_Exit(0);
      },
      ::testing::ExitedWithCode(3), "computing: the GPU has not finished within 0.05 s");
}

}  // namespace
}  // namespace lockstep
