#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "lockstep/run/memory.h"

namespace lockstep::run_memory_test {
namespace {

using ::testing::HasSubstr;

constexpr std::size_t kGib = std::size_t{1} << 30;
constexpr std::array kOne = {0};
constexpr std::array kTwo = {0, 1};

TrainerOptions options_of(std::uint64_t micro_batch) {
  TrainerOptions options;
  options.model = *named_model("124m");
  options.global_batch = 16;
  options.micro_batch = micro_batch;
  return options;
}

TrainerOptions thrifty_of(std::uint64_t micro_batch) {
  TrainerOptions options = options_of(micro_batch);
  options.recompute = true;
  return options;
}

TEST(RunMemory, CountsWhatAWorkerHolds) {
  const TrainerOptions options = options_of(1);
  const std::size_t weights = ParameterLayout(options.model).size() * 4;
  const std::size_t plain = cpu_bytes_needed(options, 0, 1, false);
  EXPECT_GT(plain, 4 * weights);  // weights, two moments, at least one accumulator
  EXPECT_EQ(cpu_bytes_needed(options, 0, 1, true) - plain, 3 * weights);
  EXPECT_GT(cpu_bytes_needed(options_of(8), 0, 1, false), plain);
  TrainerOptions sharded = options;
  sharded.reducer.shard = true;
  const auto saved = [&](int world_size) {
    return static_cast<double>(cpu_bytes_needed(options, 1, world_size, false) -
                               cpu_bytes_needed(sharded, 1, world_size, false));
  };
  // Of two moments a pair of buddies holds two shards.
  EXPECT_EQ(saved(2), 0);
  EXPECT_NEAR(saved(4), static_cast<double>(weights), 1e5);
  sharded.reducer.buddy = false;
  EXPECT_NEAR(saved(2), static_cast<double>(weights), 1e5);
  EXPECT_NEAR(saved(4), 1.5 * static_cast<double>(weights), 1e5);
}

TEST(RunMemory, SaysWhatWouldFit) {
  const TrainerOptions options = options_of(16);
  EXPECT_FALSE(memory_refusal(options, kOne, 1, true, 400 * kGib));
  const std::size_t recomputed = cpu_bytes_needed(thrifty_of(16), 0, 1, true);
  EXPECT_LT(recomputed, cpu_bytes_needed(options, 0, 1, true));
  EXPECT_THAT(*memory_refusal(options, kOne, 1, true, recomputed),
              HasSubstr("; --recompute would fit"));
  TrainerOptions longer = thrifty_of(4);
  longer.model.context = 16384;
  const std::size_t fits = cpu_bytes_needed(longer, 0, 1, true);
  longer.micro_batch = 16;
  const std::string line = *memory_refusal(longer, kOne, 1, true, fits);
  EXPECT_THAT(line, HasSubstr("out of memory: 1 worker needs"));
  EXPECT_THAT(line, HasSubstr("; --micro-batch 4 would fit"));
  TrainerOptions single = thrifty_of(1);
  EXPECT_THAT(*memory_refusal(single, kOne, 1, true, cpu_bytes_needed(single, 0, 1, false)),
              HasSubstr("--save-every 0"));
  TrainerOptions sharded = single;
  sharded.reducer.shard = true;
  const auto two_of = [&](int world_size) {
    return cpu_bytes_needed(sharded, 0, world_size, true) +
           cpu_bytes_needed(sharded, 1, world_size, false);
  };
  EXPECT_THAT(*memory_refusal(single, kTwo, 4, true, two_of(4)),
              HasSubstr("--shard-optimizer would"));
  sharded.reducer.buddy = false;
  EXPECT_THAT(*memory_refusal(single, kTwo, 2, true, two_of(2)),
              HasSubstr("--shard-optimizer with --no-buddy would"));
  EXPECT_THAT(*memory_refusal(single, kTwo, 2, true, kGib / 2), HasSubstr("smaller model"));
}

TEST(RunMemory, OfAModelThatIsRead) {
  const ModelConfig model = *named_model("124m");
  const std::size_t weights = ParameterLayout(model).size() * 4;
  EXPECT_FALSE(model_memory_refusal(model, 0, weights + kGib / 8));
  EXPECT_THAT(*model_memory_refusal(model, 0, weights),
              HasSubstr("out of memory: the model needs 0."));
  EXPECT_TRUE(model_memory_refusal(model, 1 << 20, weights + kGib));  // keys and values
}

TEST(RunMemory, OnAGpuTooActivationsCount) {
  const std::size_t plain = gpu_bytes_needed(options_of(8), 0, 1);
  EXPECT_GT(plain, 4 * ParameterLayout(options_of(8).model).size() * 4);
  EXPECT_LT(gpu_bytes_needed(thrifty_of(8), 0, 1), plain);
}

TEST(RunMemory, ReadsWhatTheSystemSays) {
  const char* text = "MemTotal:       8000 kB\nMemFree:  1 kB\nMemAvailable:    5000 kB\n";
  EXPECT_EQ(parse_meminfo(text, "MemAvailable"), 5000u * 1024);
  EXPECT_EQ(parse_meminfo(text, "Swap"), std::nullopt);
  ASSERT_TRUE(available_memory());
  EXPECT_GT(*available_memory(), std::size_t{1} << 20);
}

}  // namespace
}  // namespace lockstep::run_memory_test
