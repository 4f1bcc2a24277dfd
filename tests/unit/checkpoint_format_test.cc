#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/hash/blake3.h"
#include "lockstep/model/weights_hash.h"
#include "lockstep/train/checkpoint/folders.h"
#include "lockstep/train/checkpoint/manifest.h"
#include "lockstep/train/checkpoint/run_state.h"
#include "lockstep/train/run_checkpoints.h"

namespace lockstep::checkpoint_format_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(CheckpointFormat, Names) {
  EXPECT_EQ(checkpoint_path("/tmp/checkpoints", 500), "/tmp/checkpoints/checkpoint-500");
  EXPECT_EQ(parse_checkpoint_name("checkpoint-500"), 500);
  EXPECT_EQ(parse_checkpoint_name("checkpoint-0"), 0);
  for (const char* name :
       {"checkpoint-", "checkpoint-07", "checkpoint--1", "checkpoint-5x", "checkpoint-5.tmp",
        "checkpoint-5.damaged", "checkpoint", "xcheckpoint-5", "checkpoint-99999999999999999999",
        "checkpoint-+5", "checkpoint- 5"}) {
    EXPECT_EQ(parse_checkpoint_name(name), std::nullopt) << name;
  }
  EXPECT_TRUE(is_temporary_name("checkpoint-5.tmp"));
  EXPECT_TRUE(is_temporary_name("checkpoint-5.0123abcd.tmp"));
  EXPECT_FALSE(is_temporary_name("checkpoint-5"));
  EXPECT_FALSE(is_temporary_name("checkpoint-x.tmp"));
  EXPECT_FALSE(is_temporary_name("metrics.jsonl.tmp"));
  EXPECT_TRUE(is_plain_name("model.safetensors"));
  for (const char* name : {"", ".", "..", "../x", "a/b", "/etc/passwd", ".hidden"}) {
    EXPECT_FALSE(is_plain_name(name)) << name;
  }
}

TEST(CheckpointFormat, WhenToSave) {
  EXPECT_FALSE(should_save_checkpoint(0, 25, 100));
  EXPECT_TRUE(should_save_checkpoint(25, 25, 100));
  EXPECT_FALSE(should_save_checkpoint(26, 25, 100));
  EXPECT_TRUE(should_save_checkpoint(100, 25, 100));
  EXPECT_TRUE(should_save_checkpoint(100, 1000, 100));  // the last step
  EXPECT_FALSE(should_save_checkpoint(25, 0, 100));
  EXPECT_FALSE(should_save_checkpoint(100, 0, 100));
}

TEST(CheckpointFormat, WhatToDelete) {
  const std::vector<std::int64_t> steps = {40, 30, 20, 10};
  EXPECT_THAT(checkpoints_to_delete(steps, 40, 0, {}), IsEmpty());
  EXPECT_THAT(checkpoints_to_delete(steps, 40, 1, {}), ElementsAre(30, 20, 10));
  EXPECT_THAT(checkpoints_to_delete(steps, 40, 3, {}), ElementsAre(10));
  EXPECT_THAT(checkpoints_to_delete(steps, 40, 9, {}), IsEmpty());
  // 30 and 40 are later than what was just saved: not this run's.
  EXPECT_THAT(checkpoints_to_delete(steps, 25, 2, {}), ElementsAre(10));
  // One that could not be read does not take the place of one that could.
  const std::vector<std::int64_t> bad = {30};
  EXPECT_THAT(checkpoints_to_delete(steps, 40, 2, bad), ElementsAre(10));
}

Manifest some_manifest() {
  return {.step = 7,
          .weights = "blake3:" + std::string(64, 'a'),
          .files = {{.name = "config.json", .bytes = 12, .hash = std::string(64, '1')},
                    {.name = "model.safetensors",
                     .bytes = 1 << 20,
                     .hash = std::string(64, '2'),
                     .tensors = {{"a.weight", std::string(64, '3')},
                                 {"b.weight", std::string(64, '4')}}}}};
}

std::string manifest_problem(const std::string& text) {
  const auto parsed = parse_manifest(text);
  const auto* problem = std::get_if<FormatProblem>(&parsed);
  return problem == nullptr ? "none" : problem->what;
}

std::string with(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(CheckpointFormat, AManifestComesBackAndEveryEditIsNoticed) {
  const std::string text = to_json(some_manifest());
  ASSERT_EQ(manifest_problem(text), "none");
  EXPECT_EQ(std::get<Manifest>(parse_manifest(text)), some_manifest());
  EXPECT_THAT(manifest_problem(with(text, "\"step\": 7", "\"step\": 8")), HasSubstr("changed"));
  EXPECT_THAT(manifest_problem(with(text, "1111", "1112")), HasSubstr("changed"));
  EXPECT_THAT(manifest_problem(with(text, "a.weight", "c.weight")), HasSubstr("changed"));
  EXPECT_THAT(manifest_problem(with(text, "\"bytes\": 12", "\"bytes\": -12")),
              HasSubstr("'bytes' is not a whole number"));
  EXPECT_THAT(manifest_problem(with(text, "config.json", "../config.json")),
              HasSubstr("names no file"));
  EXPECT_THAT(manifest_problem(with(text, "config.json", "model.safetensors")), HasSubstr("twice"));
  EXPECT_THAT(manifest_problem(with(text, "\"version\": 1", "\"version\": 2")),
              HasSubstr("another version"));
  EXPECT_THAT(manifest_problem(with(text, "3333", "333X")), HasSubstr("'blake3' is not a hash"));
  EXPECT_THAT(manifest_problem(with(text, "\"files\"", "\"fields\"")),
              HasSubstr("'files' is missing"));
  EXPECT_EQ(manifest_problem("[]"), "not a JSON object");
  EXPECT_EQ(manifest_problem(text.substr(0, text.size() / 2)), "not a JSON object");
  EXPECT_EQ(manifest_problem("{}"), "not a checkpoint's manifest");
}

TEST(CheckpointFormat, WeightsHashFromThoseOfTheTensors) {
  ModelConfig config{.vocab = 16,
                     .hidden = 16,
                     .layers = 1,
                     .heads = 1,
                     .kv_heads = 1,
                     .intermediate = 16,
                     .context = 4};
  const ParameterLayout layout(config);
  std::vector<float> values(layout.size());
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  std::vector<ManifestTensor> tensors;
  for (const TensorSpec& tensor : layout.tensors()) {
    tensors.push_back({tensor.name, to_hex(blake3(std::as_bytes(std::span(values).subspan(
                                        tensor.range.begin, tensor.range.size()))))});
  }
  EXPECT_EQ(combine_tensor_hashes(tensors), weights_hash(layout, values));
}

RunState some_run() {
  RunState state;
  state.step = 41;
  state.settings.model = {.vocab = 300,
                          .hidden = 32,
                          .layers = 2,
                          .heads = 4,
                          .kv_heads = 2,
                          .intermediate = 48,
                          .context = 16,
                          .norm_eps = 1e-6f,
                          .tie_embeddings = true};
  state.settings.precision = Precision::kBf16;
  state.settings.global_batch = 12;
  state.settings.micro_batch = 4;
  state.settings.adamw.weight_decay = 0.3;
  state.settings.schedule = {Decay::kLinear, 0.1 / 3, 1e-300, 5, 1000};
  state.settings.clip = 0.7;
  state.settings.seed = UINT64_MAX;
  state.data = {12345, std::string(64, 'e'), std::string(64, 'd'), {{12000, 7000}, {345, 3000}}};
  state.validation = {30, 0.1 / 7, 2};
  state.skipped_lanes = {{3, 1}, {17, 0}};
  state.versions = {"0.1.0", "2.36", "x"};
  return state;
}

TEST(CheckpointFormat, ARunStateComesBackToTheLastBit) {
  const RunState state = some_run();
  const std::string text = to_json(state);
  const auto parsed = parse_run_state(text);
  ASSERT_TRUE(std::holds_alternative<RunState>(parsed)) << std::get<FormatProblem>(parsed).what;
  const auto& back = std::get<RunState>(parsed);
  EXPECT_EQ(to_json(back), text);
  EXPECT_EQ(back.step, 41);
  EXPECT_EQ(back.settings.model, state.settings.model);
  EXPECT_EQ(back.settings.seed, UINT64_MAX);
  EXPECT_EQ(back.settings.schedule.peak, 0.1 / 3);
  EXPECT_EQ(back.settings.precision, Precision::kBf16);
  EXPECT_EQ(back.skipped_lanes, state.skipped_lanes);
  EXPECT_EQ(back.data, state.data);
  EXPECT_EQ(back.validation, state.validation);
  EXPECT_EQ(back.versions, state.versions);
  EXPECT_THAT(compare(state, back).forbidden, IsEmpty());
  EXPECT_THAT(compare(state, back).noted, IsEmpty());
}

TEST(CheckpointFormat, BrokenRunStatesAreTold) {
  const auto problem = [](const std::string& text) {
    const auto parsed = parse_run_state(text);
    const auto* found = std::get_if<FormatProblem>(&parsed);
    return found == nullptr ? "none" : found->what;
  };
  const std::string text = to_json(some_run());
  EXPECT_EQ(problem(text), "none");
  EXPECT_EQ(problem("3"), "not a JSON object");
  EXPECT_EQ(problem("{}"), "not a trainer's state");
  EXPECT_THAT(problem(with(text, "\"step\": 41", "\"step\": 42")),
              HasSubstr("data: 'position' is not"));
  EXPECT_THAT(problem(with(text, "\"step\": 41", "\"step\": -1")), HasSubstr("'step'"));
  EXPECT_EQ(problem(with(text, "\"steps\": 1000", "\"steps\": 40")),
            "'step' is after the schedule's end");
  EXPECT_THAT(problem(with(text, "\"hidden\"", "\"width\"")),
              HasSubstr("model: 'hidden' is missing"));
  EXPECT_THAT(problem(with(text, "\"linear\"", "\"stairs\"")),
              HasSubstr("schedule: 'stairs' is no schedule"));
  EXPECT_THAT(problem(with(text, "\"bf16\"", "\"bf17\"")), HasSubstr("'bf17' is no precision"));
  EXPECT_THAT(problem(with(text, "\"adamw\"", "\"sgd\"")), HasSubstr("optimizer: not adamw"));
  EXPECT_THAT(problem(with(text, "7000", "\"most\"")),
              HasSubstr("data: a part of the mix is not [samples, share]"));
  EXPECT_THAT(problem(with(text, "\"clip\": 0.7", "\"clip\": \"0.7\"")), HasSubstr("'clip'"));
}

TEST(CheckpointFormat, AnotherRunIsToldFromAChange) {
  const RunState saved = some_run();
  RunState now = saved;
  now.settings.seed = 5;
  now.settings.micro_batch = 6;
  now.settings.model.hidden = 64;
  now.data.samples = 1;
  EXPECT_THAT(
      compare(saved, now).forbidden,
      ElementsAre("hidden is 64, and was 32", HasSubstr("seed is 5"), "micro-batch is 6, and was 4",
                  "the number of samples is 1, and was 12345"));
  now = saved;
  now.data.fingerprint = std::string(64, 'f');
  EXPECT_THAT(compare(saved, now).forbidden, ElementsAre("the data are not the same"));
  now = saved;
  now.data.validation = std::string(64, 'f');
  EXPECT_THAT(compare(saved, now).forbidden, ElementsAre("the validation data are not the same"));
  now = saved;
  now.data.mix[0].share = 5000;
  now.data.mix[1].share = 5000;
  EXPECT_THAT(compare(saved, now).forbidden,
              ElementsAre("the mix is 50 % of 12000 samples and 50 % of 345 samples, and was 70 % "
                          "of 12000 samples and 30 % of 345 samples"));
  now = saved;
  now.settings.schedule.steps = 2000;
  now.settings.schedule.steps = 40;  // fewer than are done
  EXPECT_THAT(compare(saved, now).forbidden, ElementsAre("steps is 40, but 41 are done"));
  now.settings.schedule.steps = 2000;
  now.versions.c_library = "2.39";
  EXPECT_THAT(compare(saved, now).forbidden, IsEmpty());
  EXPECT_THAT(compare(saved, now).noted,
              ElementsAre("steps is 2000, and was 1000", "the C library is 2.39, and was 2.36"));
}

TEST(CheckpointFormat, WhatAGpuComputesWithIsRecordedAndCompared) {
  RunState saved = some_run();
  EXPECT_THAT(to_json(saved), ::testing::Not(HasSubstr("cuda")));  // of a run on processors
  saved.versions.gpu = {"GPU A", "12040", "120405", "90100"};
  const auto parsed = parse_run_state(to_json(saved));
  ASSERT_TRUE(std::holds_alternative<RunState>(parsed)) << std::get<FormatProblem>(parsed).what;
  RunState now = std::get<RunState>(parsed);
  EXPECT_EQ(now.versions, saved.versions);
  EXPECT_THAT(compare(saved, now).noted, IsEmpty());
  now.versions.gpu = {"GPU B", "12050", "120500", "90200"};
  EXPECT_THAT(compare(saved, now).forbidden, IsEmpty());
  EXPECT_THAT(compare(saved, now).noted,
              ElementsAre("the GPU is GPU B, and was GPU A", "CUDA is 12050, and was 12040",
                          "cuBLASLt is 120500, and was 120405", "cuDNN is 90200, and was 90100"));
  now.versions.gpu = {};
  EXPECT_THAT(compare(saved, now).noted, ::testing::Contains("the GPU is none, and was GPU A"));
}

// Version 1 looked at some of the data only: that they are the same cannot be said.
TEST(CheckpointFormat, AnEarlierStateIsReadWithAWarning) {
  const RunState now = some_run();
  const auto parsed = parse_run_state(with(to_json(now), "\"version\": 2", "\"version\": 1"));
  ASSERT_TRUE(std::holds_alternative<RunState>(parsed)) << std::get<FormatProblem>(parsed).what;
  const auto& saved = std::get<RunState>(parsed);
  EXPECT_THAT(compare(saved, now).forbidden, IsEmpty());
  EXPECT_THAT(compare(saved, now).noted, ElementsAre(HasSubstr("is not known")));
  const auto later = parse_run_state(with(to_json(now), "\"version\": 2", "\"version\": 3"));
  EXPECT_TRUE(std::holds_alternative<FormatProblem>(later));
}

}  // namespace
}  // namespace lockstep::checkpoint_format_test
