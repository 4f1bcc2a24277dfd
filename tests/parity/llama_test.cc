// Against Hugging Face's LlamaForCausalLM, see make_llama_reference.py.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/base/thread_pool.h"
#include "lockstep/model/cpu/matmul.h"
#include "lockstep/model/cpu/transformer.h"
#include "lockstep/model/layout.h"

namespace lockstep::llama_test {
namespace {

struct Reference {
  struct Tensor {
    std::string name;
    std::int64_t rows = 0, cols = 0;
    std::vector<float> gradient;
  };
  ModelConfig config;
  int rows = 0, context = 0;
  std::int64_t tokens = 0;
  double loss = 0.0;
  std::vector<Tensor> tensors;
  std::vector<float> logits;
};

std::vector<float> read_floats(std::istream& file, std::size_t count) {
  std::vector<float> values(count);
  file.read(reinterpret_cast<char*>(values.data()),
            static_cast<std::streamsize>(count * sizeof(float)));
  EXPECT_TRUE(file.good()) << "the reference ends too soon";
  return values;
}

Reference read_reference(const std::string& name) {
  const std::string path = std::string(LOCKSTEP_TESTS_DIR) + "/parity/" + name;
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.is_open()) << path;
  Reference reference;
  for (std::string line; std::getline(file, line) && !line.empty();) {
    std::istringstream words(line);
    std::string what;
    words >> what;
    if (what == "config") {
      ModelConfig& c = reference.config;
      words >> c.vocab >> c.hidden >> c.layers >> c.heads >> c.kv_heads >> c.intermediate >>
          c.context >> c.rope_theta >> c.norm_eps >> c.tie_embeddings;
    } else if (what == "batch") {
      words >> reference.rows >> reference.context >> reference.tokens;
    } else if (what == "loss") {
      words >> reference.loss;
    } else if (what == "tensor") {
      Reference::Tensor& tensor = reference.tensors.emplace_back();
      words >> tensor.name >> tensor.rows >> tensor.cols;
    } else {
      ADD_FAILURE() << "unknown line: " << line;
    }
    EXPECT_FALSE(words.fail()) << line;
  }
  reference.logits = read_floats(
      file, static_cast<std::size_t>(reference.rows * reference.context * reference.config.vocab));
  for (auto& tensor : reference.tensors) {
    tensor.gradient = read_floats(file, static_cast<std::size_t>(tensor.rows * tensor.cols));
  }
  EXPECT_EQ(file.peek(), EOF);
  return reference;
}

std::uint32_t mix(std::uint32_t stream, std::size_t index) {
  std::uint32_t x = static_cast<std::uint32_t>(index) + stream * 0x9e3779b9u;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 16)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

struct Problem {
  std::vector<float> parameters;
  std::vector<std::int32_t> tokens, targets;
};

Problem make_problem(const Reference& reference, const ParameterLayout& layout) {
  Problem problem;
  problem.parameters.resize(layout.size());
  std::uint32_t stream = 0;
  for (const TensorSpec& tensor : layout.tensors()) {
    for (std::size_t i = 0; i < tensor.range.size(); ++i) {
      const float value = static_cast<float>(mix(stream, i) >> 8) * 0x1p-25f - 0.25f;
      problem.parameters[tensor.range.begin + i] = tensor.cols == 1 ? value + 1.0f : value;
    }
    ++stream;
  }
  const auto vocab = static_cast<std::uint32_t>(reference.config.vocab);
  for (std::size_t i = 0; i < static_cast<std::size_t>(reference.rows * reference.context); ++i) {
    problem.tokens.push_back(static_cast<std::int32_t>(mix(1000, i) % vocab));
    problem.targets.push_back(
        mix(1002, i) % 5 == 0 ? -100 : static_cast<std::int32_t>(mix(1001, i) % vocab));
  }
  return problem;
}

// The root mean square of the difference, relative to that of the reference.
double distance(std::span<const float> ours, std::span<const float> theirs) {
  EXPECT_EQ(ours.size(), theirs.size());
  double difference = 0.0, size = 0.0;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    difference += std::pow(static_cast<double>(ours[i]) - static_cast<double>(theirs[i]), 2);
    size += std::pow(static_cast<double>(theirs[i]), 2);
  }
  return std::sqrt(difference / size);
}

class LlamaParity : public testing::TestWithParam<const char*> {
 protected:
  void compare(Precision precision, double tolerance);
};

void LlamaParity::compare(Precision precision, double tolerance) {
  const Reference reference = read_reference(GetParam());
  const ParameterLayout layout(reference.config);

  ASSERT_EQ(layout.tensors().size(), reference.tensors.size());
  for (std::size_t i = 0; i < reference.tensors.size(); ++i) {
    EXPECT_EQ(layout.tensors()[i].name, reference.tensors[i].name);
    EXPECT_EQ(layout.tensors()[i].rows, reference.tensors[i].rows);
    EXPECT_EQ(layout.tensors()[i].cols, reference.tensors[i].cols);
  }

  const Problem problem = make_problem(reference, layout);
  const Batch batch = {problem.tokens, problem.targets, reference.rows, reference.context};
  ThreadPool pool(2);
  Transformer model(reference.config, precision, pool, reference.rows, reference.context);

  std::vector<float> logits(reference.logits.size());
  model.logits(problem.parameters, batch, logits);
  EXPECT_LT(distance(logits, reference.logits), tolerance);

  std::vector<float> gradient(layout.size());
  const LossSum sum = model.gradient(problem.parameters, batch, gradient);
  EXPECT_EQ(sum.tokens, reference.tokens);
  EXPECT_NEAR(sum.loss, reference.loss, reference.loss * tolerance);
  for (std::size_t i = 0; i < reference.tensors.size(); ++i) {
    const Range range = layout.tensors()[i].range;
    EXPECT_LT(
        distance({gradient.data() + range.begin, range.size()}, reference.tensors[i].gradient),
        tolerance)
        << reference.tensors[i].name;
  }
}

TEST_P(LlamaParity, Fp32) { compare(Precision::kF32, 3e-6); }

TEST_P(LlamaParity, Bf16) {
  if (!supports(Precision::kBf16)) {
    EXPECT_THROW(compare(Precision::kBf16, 0.0), std::exception);  // it says so
    return;
  }
  compare(Precision::kBf16, 3e-2);
}

INSTANTIATE_TEST_SUITE_P(References, LlamaParity,
                         testing::Values("llama_grouped.ref", "llama_tied.ref", "llama_long.ref"),
                         [](const auto& test) {
                           const std::string name = test.param;
                           return name.substr(6, name.find('.') - 6);
                         });

}  // namespace
}  // namespace lockstep::llama_test
