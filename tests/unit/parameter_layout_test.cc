#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/hash/blake3.h"
#include "lockstep/model/layout.h"
#include "lockstep/model/weights_hash.h"

namespace lockstep::parameter_layout_test {
namespace {

constexpr ModelConfig kConfig = {.vocab = 10,
                                 .hidden = 32,
                                 .layers = 2,
                                 .heads = 4,
                                 .kv_heads = 2,
                                 .intermediate = 24,
                                 .context = 8};

ModelConfig tied() {
  ModelConfig config = kConfig;
  config.tie_embeddings = true;
  return config;
}

std::vector<std::string> names(std::vector<TensorSpec> tensors, bool in_memory) {
  if (in_memory) {
    std::sort(tensors.begin(), tensors.end(),
              [](const auto& a, const auto& b) { return a.range.begin < b.range.begin; });
  }
  std::vector<std::string> all;
  for (const TensorSpec& tensor : tensors) {
    all.push_back(std::string(to_string(tensor.component)) +
                  (tensor.block < 0 ? "" : std::to_string(tensor.block)));
  }
  return all;
}

std::vector<TensorSpec> tensors(const ParameterLayout& layout) {
  return {layout.tensors().begin(), layout.tensors().end()};
}

TEST(ParameterLayout, FilesHaveTheOrderOfHuggingFace) {
  EXPECT_THAT(names(tensors(ParameterLayout(kConfig)), false),
              testing::ElementsAre("embedding",                                              //
                                   "w_q0", "w_k0", "w_v0", "w_o0", "gate0", "up0", "down0",  //
                                   "input_norm0", "post_attn_norm0",                         //
                                   "w_q1", "w_k1", "w_v1", "w_o1", "gate1", "up1", "down1",  //
                                   "input_norm1", "post_attn_norm1",                         //
                                   "final_norm", "lm_head"));
  EXPECT_EQ(ParameterLayout(kConfig).tensors()[10].name, "model.layers.1.self_attn.q_proj.weight");
}

TEST(ParameterLayout, MemoryHasTheOrderOfTheBackwardPass) {
  EXPECT_THAT(names(tensors(ParameterLayout(kConfig)), true),
              testing::ElementsAre("lm_head", "final_norm",                        //
                                   "down1", "gate1", "up1", "post_attn_norm1",     //
                                   "w_o1", "w_q1", "w_k1", "w_v1", "input_norm1",  //
                                   "down0", "gate0", "up0", "post_attn_norm0",     //
                                   "w_o0", "w_q0", "w_k0", "w_v0", "input_norm0",  //
                                   "embedding"));
}

TEST(ParameterLayout, FillsTheBufferWithoutGapsAndAligned) {
  for (const ModelConfig& config : {kConfig, tied()}) {
    const ParameterLayout layout(config);
    std::vector<TensorSpec> all = tensors(layout);
    std::sort(all.begin(), all.end(),
              [](const auto& a, const auto& b) { return a.range.begin < b.range.begin; });
    std::size_t end = 0;
    for (const TensorSpec& tensor : all) {
      EXPECT_EQ(tensor.range.begin, end) << tensor.name;
      EXPECT_EQ(tensor.range.begin % 16, 0u) << tensor.name;
      EXPECT_EQ(tensor.range.size(), static_cast<std::size_t>(tensor.rows * tensor.cols));
      EXPECT_EQ(tensor.range, layout.range(tensor.component, tensor.block));
      EXPECT_EQ(tensor.decay, tensor.cols != 1) << tensor.name;
      end = tensor.range.end;
    }
    EXPECT_EQ(end, layout.size());
  }
  EXPECT_EQ(ParameterLayout(kConfig).size(), ParameterLayout(tied()).size() + 10 * 32);
}

TEST(ParameterLayout, TiedEmbeddingsAreOneTensor) {
  const ParameterLayout layout(tied());
  EXPECT_EQ(layout.range(Component::kLmHead).size(), 0u);
  EXPECT_EQ(layout.range(Component::kFinalNorm).begin, 0u);
  EXPECT_EQ(layout.tensors().back().name, "model.norm.weight");
  EXPECT_EQ(layout.tensors().front().name, "model.embed_tokens.weight");
}

TEST(ParameterLayout, RefusesAWrongConfiguration) {
  ModelConfig config = kConfig;
  config.kv_heads = 3;
  EXPECT_THROW(ParameterLayout{config}, Error);
}

TEST(WeightsHash, IsTheHashOfTheHashesInFileOrder) {
  const ParameterLayout layout(kConfig);
  std::vector<float> parameters(layout.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i] = static_cast<float>(i);
  std::vector<std::byte> hashes;
  for (const TensorSpec& tensor : layout.tensors()) {
    const std::span<const float> values(parameters.data() + tensor.range.begin,
                                        tensor.range.size());
    const Blake3Hash hash = blake3(std::as_bytes(values));
    hashes.insert(hashes.end(), hash.begin(), hash.end());
  }
  const std::string hash = weights_hash(layout, parameters);
  EXPECT_EQ(hash, "blake3:" + to_hex(blake3(hashes)));
  EXPECT_EQ(hash.size(), 7u + 64u);
  parameters[layout.range(Component::kEmbedding).begin] += 1.0f;
  EXPECT_NE(hash, weights_hash(layout, parameters));
}

}  // namespace
}  // namespace lockstep::parameter_layout_test
