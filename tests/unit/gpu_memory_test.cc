#include "lockstep/model/gpu_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::gpu_memory_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::size_t kGib = std::size_t{1} << 30;

GpuModelOptions options_of(const char* name, int rows) {
  GpuModelOptions options;
  options.model = *named_model(name);
  options.rows = rows;
  options.context = options.model.context;
  options.shard = {0, ParameterLayout(options.model).size()};
  return options;
}

// What the models were seen to take.
TEST(GpuMemory, IsAboutWhatIsTaken) {
  EXPECT_NEAR(static_cast<double>(gpu_bytes_needed(options_of("124m", 64))) / kGib, 23.2 + 0.9, 1);
  EXPECT_NEAR(static_cast<double>(gpu_bytes_needed(options_of("350m", 32))) / kGib, 36.8 + 0.9, 1);
}

TEST(GpuMemory, SaysWhatWouldFit) {
  const GpuModelOptions options = options_of("124m", 64);
  EXPECT_FALSE(gpu_memory_refusal(options, 40 * kGib));
  const std::string line = gpu_memory_refusal(options, 16 * kGib).value();
  EXPECT_THAT(line, HasSubstr("16.0 GiB are free"));
  EXPECT_THAT(line, HasSubstr("64 x 1024"));
  EXPECT_THAT(line, Not(HasSubstr("\n")));
  // What it proposes fits, and one row more does not.
  for (const bool recompute : {false, true}) {
    GpuModelOptions proposed = options;
    proposed.recompute = recompute;
    for (proposed.rows = 1; gpu_bytes_needed(proposed) <= 16 * kGib; ++proposed.rows) {
    }
    const int most = proposed.rows - 1;
    if (most < options.rows) {
      EXPECT_THAT(line, HasSubstr("--micro-batch " + std::to_string(most) + " would fit"));
    }
  }
}

TEST(GpuMemory, AttentionTakesRowsThatFit) {
  EXPECT_EQ(attention_rows(64, 12, 1024), 64U);
  EXPECT_EQ(attention_rows(64, 12, 2048), 16U);
  EXPECT_EQ(attention_rows(6, 1, 8, 5 * 128), 3U);
  EXPECT_EQ(attention_rows(7, 1, 8, 5 * 128), 1U);
  EXPECT_EQ(attention_rows(8, 64, 1 << 17), 1U);  // the least there is
  // Long contexts take no more than short ones, as long as a row fits.
  GpuModelOptions longer = options_of("124m", 8);
  longer.model.context = longer.context = 8192;
  EXPECT_LT(gpu_bytes_needed(longer), gpu_bytes_needed(options_of("124m", 64)) + kGib / 2);
}

TEST(GpuMemory, SaysWhenNothingFits) {
  const std::string line = gpu_memory_refusal(options_of("350m", 32), 4 * kGib).value();
  EXPECT_THAT(line, HasSubstr("only a smaller model"));
}

}  // namespace
}  // namespace lockstep::gpu_memory_test
