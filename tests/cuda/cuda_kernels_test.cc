#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "gpu_cases.h"
#include "lockstep/base/canonical_tree.h"
#include "lockstep/base/cuda/runtime.h"
#include "lockstep/base/thread_pool.h"
#include "lockstep/model/batch.h"
#include "lockstep/model/cpu/adamw.h"
#include "lockstep/model/cpu/layers.h"
#include "lockstep/model/cuda/kernels.h"

namespace lockstep {
namespace {

std::vector<float> noise(std::size_t count, std::uint64_t stream, float scale = 1.0F) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = scale * (2.0F * static_cast<float>(random_u64(1, stream, i) >> 40) * 0x1p-24F - 1);
  }
  return values;
}

template <typename T>
DeviceArray<T> device(const std::vector<float>& values) {
  std::vector<T> typed(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if constexpr (sizeof(T) == 4) {
      typed[i] = values[i];
    } else {
      typed[i] = __float2bfloat16_rn(values[i]);
    }
  }
  DeviceArray<T> array(values.size(), "a test");
  check_cuda(cudaMemcpy(array.data(), typed.data(), typed.size() * sizeof(T), cudaMemcpyDefault),
             "copying");
  return array;
}

// All ones: not a number.
template <typename T>
DeviceArray<T> poisoned(std::size_t count) {
  DeviceArray<T> array(count, "a test");
  check_cuda(cudaMemset(array.data(), 0xff, count * sizeof(T)), "poisoning");
  return array;
}

template <typename T>
std::vector<float> host(const DeviceArray<T>& array) {
  std::vector<T> typed(array.size());
  check_cuda(cudaMemcpy(typed.data(), array.data(), typed.size() * sizeof(T), cudaMemcpyDefault),
             "copying");
  std::vector<float> values(typed.size());
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(typed[i]);
  return values;
}

// What both sides start from in bf16.
template <typename T>
std::vector<float> representable(const std::vector<float>& values) {
  return host(device<T>(values));
}

template <typename T>
class CudaKernels : public ::testing::Test {
 protected:
  static constexpr double kNear = sizeof(T) == 4 ? 1e-5 : 5e-3;
  ThreadPool pool_{1};
};
using Types = ::testing::Types<float, __nv_bfloat16>;
TYPED_TEST_SUITE(CudaKernels, Types);

ModelConfig config_of(int hidden, int context, int heads, int kv_heads) {
  return {.vocab = 40,
          .hidden = hidden,
          .layers = 1,
          .heads = heads,
          .kv_heads = kv_heads,
          .intermediate = 72,
          .context = context};
}

TYPED_TEST(CudaKernels, Norm) {
  LOCKSTEP_NEEDS_GPU();
  using T = TypeParam;
  constexpr std::size_t kRows = 5000;
  for (const std::size_t width : {16, 80, 768, 1024, 2048}) {
    Layers layers(config_of(static_cast<int>(width), 8, 1, 1), Precision::kF32, this->pool_, kRows,
                  8);
    const auto x = representable<T>(noise(kRows * width, 1));
    const auto dout = representable<T>(noise(kRows * width, 2));
    const auto before = representable<T>(noise(kRows * width, 3));
    const auto weight = noise(width, 4, 2.0F);
    std::vector<float> out(x.size()), rstd(kRows), dx = before, dweight(width);
    layers.norm(
        {kRows, width, x.data(), nullptr, weight.data(), 1e-5F, nullptr, out.data(), rstd.data()});
    layers.norm_backward({kRows, width, x.data(), rstd.data(), weight.data(), dout.data(),
                          dx.data(), dweight.data()});
    const auto gx = device<T>(x), gdout = device<T>(dout), gdx = device<T>(before);
    const auto gweight = device<float>(weight);
    const auto gout = poisoned<T>(x.size());
    const auto grstd = poisoned<float>(kRows);
    const auto gdweight = poisoned<float>(width);
    const auto scratch = poisoned<float>(cuda::norm_scratch(width));
    cuda::norm_forward(kRows, width, gx.data(), gweight.data(), 1e-5F, gout.data(), grstd.data(),
                       nullptr);
    cuda::norm_backward<T>({kRows, width, gx.data(), grstd.data(), gweight.data(), gdout.data(),
                            gdx.data(), gdx.data(), gdweight.data(), scratch.data()},
                           nullptr);
    EXPECT_LT(distance(host(gout), out), this->kNear) << width;
    EXPECT_LT(distance(host(gdx), dx), this->kNear) << width;
    EXPECT_LT(distance(host(gdweight), dweight), 1e-4) << width;
  }
}

TYPED_TEST(CudaKernels, Swiglu) {
  LOCKSTEP_NEEDS_GPU();
  using T = TypeParam;
  constexpr std::size_t kRows = 77;
  constexpr std::size_t kWidth = 72;
  Layers layers(config_of(16, 8, 1, 1), Precision::kF32, this->pool_, kRows, 8);
  const auto gate_up = representable<T>(noise(kRows * 2 * kWidth, 1, 6.0F));
  const auto dact = representable<T>(noise(kRows * kWidth, 2));
  std::vector<float> act(dact.size()), again(dact.size()), dgate_up = gate_up;
  layers.swiglu({kRows, kWidth, gate_up.data(), act.data()});
  layers.swiglu_backward({kRows, kWidth, dgate_up.data(), dact.data(), again.data()});
  const auto ggate_up = device<T>(gate_up), gdact = device<T>(dact);
  const auto gact = poisoned<T>(act.size()), gagain = poisoned<T>(act.size());
  cuda::swiglu_forward(kRows, kWidth, ggate_up.data(), gact.data(), nullptr);
  cuda::swiglu_backward(kRows, kWidth, ggate_up.data(), gdact.data(), gagain.data(), nullptr);
  EXPECT_LT(distance(host(gact), act), this->kNear);
  EXPECT_EQ(host(gact), host(gagain));
  EXPECT_LT(distance(host(ggate_up), dgate_up), this->kNear);
}

TYPED_TEST(CudaKernels, CrossEntropy) {
  LOCKSTEP_NEEDS_GPU();
  using T = TypeParam;
  constexpr std::size_t kRows = 9;
  for (const std::size_t vocab : {2, 301, 4099, 50304}) {
    const std::size_t stride = (vocab + 7) / 8 * 8;
    Layers layers(config_of(16, 8, 1, 1), Precision::kF32, this->pool_, kRows, 8);
    const auto padded = representable<T>(noise(kRows * stride, 1, 9.0F));
    std::vector<float> logits;
    for (std::size_t row = 0; row < kRows; ++row) {
      logits.insert(logits.end(), padded.begin() + static_cast<std::ptrdiff_t>(row * stride),
                    padded.begin() + static_cast<std::ptrdiff_t>(row * stride + vocab));
    }
    std::vector<std::int32_t> targets(kRows);
    for (std::size_t i = 0; i < kRows; ++i) {
      targets[i] = i == 4 ? -1 : static_cast<std::int32_t>(i * 7919 % vocab);
    }
    std::vector<double> losses(kRows);
    // Half of the targets are the likeliest tokens.
    for (std::size_t i = 0; i < kRows; i += 2) {
      const auto begin = logits.begin() + static_cast<std::ptrdiff_t>(i * vocab);
      const auto end = begin + static_cast<std::ptrdiff_t>(vocab);
      if (i != 4) targets[i] = static_cast<std::int32_t>(std::max_element(begin, end) - begin);
    }
    std::vector<std::uint8_t> correct(kRows);
    layers.cross_entropy(
        {kRows, vocab, logits.data(), targets.data(), true, losses.data(), correct.data()});
    const auto glogits = device<T>(padded);
    const auto glosses = poisoned<float>(kRows);
    DeviceArray<std::int32_t> gtargets(kRows, "a test");
    check_cuda(cudaMemcpy(gtargets.data(), targets.data(), kRows * 4, cudaMemcpyDefault),
               "copying");
    DeviceArray<cuda::LossTotal> gtotal(1, "a test");
    const auto gcorrect = poisoned<std::uint8_t>(kRows);
    cuda::cross_entropy(kRows, vocab, stride, glogits.data(), gtargets.data(), true, glosses.data(),
                        gcorrect.data(), nullptr);
    cuda::sum_losses(kRows, glosses.data(), gcorrect.data(), gtargets.data(), gtotal.data(),
                     nullptr);
    cuda::LossTotal total{};
    check_cuda(cudaMemcpy(&total, gtotal.data(), sizeof(total), cudaMemcpyDefault), "copying");
    double sum = 0;
    for (const double loss : losses) sum += loss;
    EXPECT_NEAR(total.loss, sum, 1e-5 * sum) << vocab;
    EXPECT_EQ(total.tokens, 8);
    EXPECT_EQ(total.correct, std::accumulate(correct.begin(), correct.end(), std::int64_t{0}));
    const std::vector<float> got = host(glogits);
    std::vector<float> gradient;
    for (std::size_t row = 0; row < kRows; ++row) {
      gradient.insert(gradient.end(), got.begin() + static_cast<std::ptrdiff_t>(row * stride),
                      got.begin() + static_cast<std::ptrdiff_t>(row * stride + vocab));
    }
    EXPECT_LT(distance(gradient, logits), this->kNear) << vocab;
  }
}

TYPED_TEST(CudaKernels, Attention) {
  LOCKSTEP_NEEDS_GPU();
  using T = TypeParam;
  for (const CudaAttentionShape shape :
       {CudaAttentionShape{2, 70, 4, 2, 16}, CudaAttentionShape{1, 129, 3, 3, 64},
        CudaAttentionShape{2, 33, 8, 1, 8}}) {
    const std::size_t tokens = shape.rows * shape.context;
    Layers layers(config_of(static_cast<int>(shape.hidden()), static_cast<int>(shape.context),
                            static_cast<int>(shape.heads), static_cast<int>(shape.kv_heads)),
                  Precision::kF32, this->pool_, tokens, shape.context);
    const auto qkv = representable<T>(noise(tokens * shape.qkv_width(), 1, 2.0F));
    const auto dout = representable<T>(noise(tokens * shape.hidden(), 2));
    std::vector<float> out(dout.size()), lse(tokens * shape.heads), dqkv(qkv.size());
    layers.attention(shape.rows, shape.context, qkv.data(), out.data(), lse.data());
    layers.attention_backward(shape.rows, shape.context, qkv.data(), out.data(), lse.data(),
                              dout.data(), dqkv.data());
    // The CPU's rotates on its own.
    const std::size_t half = shape.head_dim / 2;
    std::vector<float> cosines, sines;
    for (std::size_t position = 0; position < shape.context; ++position) {
      for (std::size_t i = 0; i < half; ++i) {
        const auto frequency = static_cast<float>(
            std::pow(10000.0, -static_cast<double>(2 * i) / static_cast<double>(shape.head_dim)));
        const double angle = static_cast<float>(position) * frequency;
        cosines.push_back(static_cast<float>(std::cos(angle)));
        sines.push_back(static_cast<float>(std::sin(angle)));
      }
    }
    const auto gcos = device<float>(cosines), gsin = device<float>(sines);
    cuda::Rotation rotation{tokens,
                            shape.context,
                            shape.heads + shape.kv_heads,
                            shape.head_dim,
                            shape.qkv_width(),
                            gcos.data(),
                            gsin.data(),
                            false};
    const auto gqkv = device<T>(qkv), gdout = device<T>(dout);
    cuda::rotate(rotation, gqkv.data(), nullptr);
    rotation.inverse = true;
    const auto check = [&](const char* what, auto&& forward, auto&& backward) {
      const auto gout = poisoned<T>(out.size());
      const auto glse = poisoned<float>(lse.size());
      const auto gdqkv = poisoned<T>(dqkv.size());
      forward(gout.data(), glse.data());
      backward(gout.data(), glse.data(), gdqkv.data());
      cuda::rotate(rotation, gdqkv.data(), nullptr);
      EXPECT_LT(distance(host(gout), out), 2 * this->kNear) << what;
      EXPECT_LT(distance(host(glse), lse), this->kNear) << what;
      EXPECT_LT(distance(host(gdqkv), dqkv), 3 * this->kNear) << what;
    };
    const auto delta = poisoned<float>(lse.size());
    check(
        "simple",
        [&](T* o, float* l) { cuda::attention_forward(shape, gqkv.data(), o, l, nullptr); },
        [&](T* o, float* l, T* d) {
          cuda::attention_backward(shape, gqkv.data(), o, l, gdout.data(), delta.data(), d,
                                   nullptr);
        });
    if constexpr (sizeof(T) == 2) {
      for (const std::size_t scratch : {kGpuScratch, std::size_t{1}}) {  // in one call, and by rows
        CudnnAttention cudnn(shape, scratch);
        const DeviceMemory workspace(cudnn.workspace_bytes(), "a test");
        check(
            "cuDNN",
            [&](T* o, float* l) { cudnn.forward(gqkv.data(), o, l, workspace.data(), nullptr); },
            [&](T* o, float* l, T* d) {
              cudnn.backward(gqkv.data(), o, l, gdout.data(), d, workspace.data(), nullptr);
            });
      }
    }
  }
}

TYPED_TEST(CudaKernels, Embedding) {
  LOCKSTEP_NEEDS_GPU();
  using T = TypeParam;
  constexpr std::size_t kVocab = 40;
  constexpr std::size_t kTokens = 3000;
  constexpr std::size_t kWidth = 80;
  std::vector<std::int32_t> ids(kTokens);
  for (std::size_t i = 0; i < kTokens; ++i) {  // half of them the same one, and some never
    ids[i] = i % 2 == 0 ? 7 : static_cast<std::int32_t>(random_u64(1, 9, i) % 30);
  }
  Layers layers(config_of(kWidth, 8, 1, 1), Precision::kF32, this->pool_, kTokens, 8);
  const auto table = representable<T>(noise(kVocab * kWidth, 1));
  const auto dx = representable<T>(noise(kTokens * kWidth, 2));
  std::vector<float> x(dx.size()), dtable(table.size());
  layers.embed(ids, table.data(), x.data());
  layers.embed_backward(ids, dx.data(), false, dtable.data());
  std::vector<std::uint32_t> begin(kVocab + 1), places(kTokens);
  index_tokens(ids, begin, places);
  const auto words = [](const auto& values) {
    DeviceArray<std::uint32_t> array(values.size(), "a test");
    check_cuda(cudaMemcpy(array.data(), values.data(), values.size() * 4, cudaMemcpyDefault),
               "copying");
    return array;
  };
  const auto gids = words(ids), gbegin = words(begin), gplaces = words(places);
  const auto gtable = device<T>(table), gdx = device<T>(dx);
  const auto gx = poisoned<T>(x.size());
  const auto gdtable = poisoned<float>(dtable.size());
  cuda::embed(kTokens, kWidth, reinterpret_cast<const std::int32_t*>(gids.data()), gtable.data(),
              gx.data(), nullptr);
  EXPECT_EQ(host(gx), x);
  cuda::embed_backward(kVocab, kWidth, gbegin.data(), gplaces.data(), gdx.data(), false,
                       gdtable.data(), nullptr);
  EXPECT_EQ(host(gdtable), dtable);  // the same order
  cuda::embed_backward(kVocab, kWidth, gbegin.data(), gplaces.data(), gdx.data(), true,
                       gdtable.data(), nullptr);
  for (float& value : dtable) value *= 2;
  EXPECT_LT(distance(host(gdtable), dtable), 1e-6);
}

TEST(CudaKernelsOfUpdates, TreeSumIsTheHosts) {
  LOCKSTEP_NEEDS_GPU();
  for (const std::size_t count : {1U, 2U, 3U, 7U, 1023U, 1024U, 1025U, 5000U, 105469U, 1100001U}) {
    std::vector<double> values(count);
    for (std::size_t i = 0; i < count; ++i) {  // of very different sizes
      values[i] = std::ldexp(static_cast<double>(random_u64(1, 2, i) >> 11),
                             static_cast<int>(random_u64(1, 3, i) % 100) - 50);
    }
    const DeviceArray<double> device_values(count, "a test");
    const DeviceArray<double> scratch(cuda::tree_scratch(count), "a test");
    check_cuda(
        cudaMemcpy(device_values.data(), values.data(), count * sizeof(double), cudaMemcpyDefault),
        "copying");
    const double* sum = cuda::tree_sum(count, device_values.data(), scratch.data(), nullptr);
    double result = 0;
    check_cuda(cudaMemcpy(&result, sum, sizeof(result), cudaMemcpyDefault), "copying");
    EXPECT_EQ(result, tree_sum(values)) << count;
  }
}

TEST(CudaKernelsOfUpdates, FactorIsTheHosts) {
  LOCKSTEP_NEEDS_GPU();
  const DeviceArray<cuda::UpdateState> state(1, "a test");
  const DeviceArray<std::uint32_t> bad(1, "a test");
  check_cuda(cudaMemset(bad.data(), 0, sizeof(std::uint32_t)), "clearing");
  for (std::uint64_t i = 0; i < 200; ++i) {
    cuda::UpdateState given{};
    given.tokens = static_cast<double>(1 + random_u64(2, 1, i) % 1000000);
    given.clip = i % 3 == 0 ? 0.0 : std::ldexp(1.0 + static_cast<double>(i), -7);
    given.norm = i % 5 == 0 ? 0.0 : static_cast<double>(random_u64(2, 2, i) >> 30) * 1e-5;
    check_cuda(cudaMemcpy(state.data(), &given, sizeof(given), cudaMemcpyDefault), "copying");
    cuda::decide_update(nullptr, bad.data(), state.data(), nullptr);
    cuda::UpdateState decided{};
    check_cuda(cudaMemcpy(&decided, state.data(), sizeof(decided), cudaMemcpyDefault), "copying");
    EXPECT_EQ(decided.factor,
              gradient_factor(given.norm, static_cast<std::int64_t>(given.tokens), given.clip));
    EXPECT_EQ(decided.apply, 1U);
  }
}

}  // namespace
}  // namespace lockstep
