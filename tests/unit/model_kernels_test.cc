#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "lockstep/model/cpu/kernels.h"
#include "tests/support/finite_difference.h"

namespace lockstep::model_kernels_test {

void PrintTo(const ModelKernels* kernels, std::ostream* out) { *out << kernels->name; }

namespace {

using test::expect_gradient;
using test::noise;
using test::widened;
using Doubles = std::vector<double>;

class ModelKernelsTest : public testing::TestWithParam<const ModelKernels*> {
 protected:
  const ModelKernels& kernels_ = *GetParam();
};

INSTANTIATE_TEST_SUITE_P(Levels, ModelKernelsTest, testing::ValuesIn(supported_model_kernels()),
                         [](const auto& test) {
                           std::string name = test.param->name;
                           for (char& c : name) c = c == '-' ? '_' : c;
                           return name;
                         });

double dot(const Doubles& a, const std::vector<float>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

void expect_close(const std::vector<float>& ours, const Doubles& reference, double tolerance) {
  ASSERT_EQ(ours.size(), reference.size());
  for (std::size_t i = 0; i < ours.size(); ++i) {
    ASSERT_NEAR(ours[i], reference[i], tolerance * (1.0 + std::abs(reference[i]))) << i;
  }
}

TEST_P(ModelKernelsTest, SquaresAreTheSameBitsAtEveryLevel) {
  for (const std::size_t count : {0u, 1u, 15u, 16u, 17u, 100u, 4095u, 4096u}) {
    const std::vector<float> values = noise(count, 1, 1e20f);
    double sums[16] = {};
    for (std::size_t i = 0; i < count; ++i) {
      sums[i % 16] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
    }
    for (std::size_t half = 8; half > 0; half /= 2) {
      for (std::size_t i = 0; i < half; ++i) sums[i] += sums[i + half];
    }
    EXPECT_EQ(kernels_.squares(values.data(), count), sums[0]) << count;
  }
}

TEST_P(ModelKernelsTest, AdamWIsTheSameBitsAtEveryLevel) {
  const AdamWScalars s = {0.37f, 0.9f, 0.1f, 0.95f, 0.05f, 3e-3f, 1.7f, 1e-8f, 0.9997f};
  for (const std::size_t count : {1u, 15u, 16u, 33u, 100u}) {
    const auto sum = noise(count, 1);
    auto p = noise(count, 2), m = noise(count, 3), v = noise(count, 4);
    for (float& value : v) value = std::abs(value);
    auto expected_p = p, expected_m = m, expected_v = v;
    for (std::size_t i = 0; i < count; ++i) {
      const float g = sum[i] * s.factor;
      expected_m[i] = s.beta1 * m[i] + s.rest1 * g;
      expected_v[i] = s.beta2 * v[i] + s.rest2 * (g * g);
      const float root = std::sqrt(expected_v[i]) * s.root_scale + s.eps;
      expected_p[i] = p[i] * s.keep - s.rate * expected_m[i] / root;
    }
    kernels_.adamw(s, count, sum.data(), p.data(), m.data(), v.data());
    EXPECT_EQ(p, expected_p);
    EXPECT_EQ(m, expected_m);
    EXPECT_EQ(v, expected_v);
  }
}

constexpr float kEps = 1e-2f;  // large enough to matter

Doubles norm(const Doubles& x, const Doubles& weight) {
  Doubles out(x.size());
  const std::size_t width = weight.size();
  for (std::size_t row = 0; row < x.size(); row += width) {
    double sum = 0.0;
    for (std::size_t i = 0; i < width; ++i) sum += x[row + i] * x[row + i];
    const double rstd = 1.0 / std::sqrt(sum / static_cast<double>(width) + kEps);
    for (std::size_t i = 0; i < width; ++i) out[row + i] = x[row + i] * rstd * weight[i];
  }
  return out;
}

TEST_P(ModelKernelsTest, NormForwardAndBackward) {
  for (const std::size_t width : {1u, 5u, 16u, 32u, 47u}) {
    constexpr std::size_t kRows = 3;
    const auto x = noise(kRows * width, 1), y = noise(kRows * width, 2), weight = noise(width, 3);
    std::vector<float> sum(x.size()), out(x.size()), rstd(kRows);
    kernels_.norm_forward({kRows, width, x.data(), y.data(), weight.data(), kEps, sum.data(),
                           out.data(), rstd.data()});
    for (std::size_t i = 0; i < x.size(); ++i) EXPECT_EQ(sum[i], x[i] + y[i]);
    expect_close(out, norm(widened(sum), widened(weight)), 1e-6);
    std::vector<float> again(x.size());
    kernels_.norm_forward({kRows, width, sum.data(), nullptr, weight.data(), kEps, nullptr,
                           again.data(), rstd.data()});
    EXPECT_EQ(out, again);

    const auto dout = noise(x.size(), 4), before = noise(x.size(), 5);
    auto dx = before;
    std::vector<float> dweight(width, 0.0f);
    kernels_.norm_backward({kRows, width, sum.data(), rstd.data(), weight.data(), dout.data(),
                            dx.data(), dweight.data()});
    for (std::size_t i = 0; i < x.size(); ++i) dx[i] -= before[i];  // it is added
    expect_gradient(
        "x", [&](const Doubles& at) { return dot(norm(at, widened(weight)), dout); }, sum, dx,
        1e-5);
    expect_gradient(
        "weight", [&](const Doubles& at) { return dot(norm(widened(sum), at), dout); }, weight,
        dweight, 1e-5);
  }
}

Doubles swiglu(const Doubles& gate_up, std::size_t width) {
  Doubles out;
  for (std::size_t row = 0; row < gate_up.size(); row += 2 * width) {
    for (std::size_t i = row; i < row + width; ++i) {
      out.push_back(gate_up[i] / (1.0 + std::exp(-gate_up[i])) * gate_up[i + width]);
    }
  }
  return out;
}

TEST_P(ModelKernelsTest, SwigluForwardAndBackward) {
  for (const std::size_t width : {1u, 16u, 35u}) {
    constexpr std::size_t kRows = 3;
    const auto gate_up = noise(kRows * 2 * width, 1, 6.0f), dact = noise(kRows * width, 2);
    std::vector<float> act(kRows * width), again(kRows * width);
    kernels_.swiglu_forward({kRows, width, gate_up.data(), act.data()});
    expect_close(act, swiglu(widened(gate_up), width), 1e-6);
    auto gradient = gate_up;
    kernels_.swiglu_backward({kRows, width, gradient.data(), dact.data(), again.data()});
    EXPECT_EQ(act, again);
    expect_gradient(
        "gate_up", [&](const Doubles& at) { return dot(swiglu(at, width), dact); }, gate_up,
        gradient, 1e-5);
  }
}

TEST_P(ModelKernelsTest, SwigluOfHugeNumbersIsFinite) {
  const std::vector<float> gate_up = {-1e30f, -200.0f, -90.0f, 1e30f, 200.0f, 0.0f,
                                      1.0f,   1.0f,    1.0f,   1.0f,  1.0f,   1.0f};
  std::vector<float> act(6);
  kernels_.swiglu_forward({1, 6, gate_up.data(), act.data()});
  EXPECT_NEAR(act[0], 0.0, 1e-7);
  EXPECT_NEAR(act[1], 0.0, 1e-30);
  EXPECT_EQ(act[3], 1e30f);
  EXPECT_EQ(act[4], 200.0f);
  EXPECT_EQ(act[5], 0.0f);
}

double log_loss(const Doubles& logits, std::size_t width,
                const std::vector<std::int32_t>& targets) {
  double loss = 0.0;
  for (std::size_t row = 0; row < targets.size(); ++row) {
    if (targets[row] < 0) continue;
    double sum = 0.0;
    for (std::size_t i = 0; i < width; ++i) sum += std::exp(logits[row * width + i]);
    loss += std::log(sum) - logits[row * width + static_cast<std::size_t>(targets[row])];
  }
  return loss;
}

TEST_P(ModelKernelsTest, CrossEntropyForwardAndBackward) {
  for (const std::size_t width : {2u, 16u, 37u, 200u}) {
    const std::vector<std::int32_t> targets = {0, -1, static_cast<std::int32_t>(width - 1), -100};
    const auto logits = noise(targets.size() * width, 1, 5.0f);
    auto gradient = logits;
    std::vector<double> losses(targets.size()), again(targets.size());
    std::vector<std::uint8_t> correct(targets.size(), 9);
    kernels_.cross_entropy({targets.size(), width, gradient.data(), targets.data(), true,
                            losses.data(), correct.data()});
    const double total = losses[0] + losses[2];
    EXPECT_NEAR(total, log_loss(widened(logits), width, targets), 1e-6 * total);
    EXPECT_EQ(losses[1], 0.0);
    for (std::size_t i = width; i < 2 * width; ++i) EXPECT_EQ(gradient[i], 0.0f);
    expect_gradient(
        "logits", [&](const Doubles& at) { return log_loss(at, width, targets); }, logits, gradient,
        1e-5);
    auto scratch = logits;
    kernels_.cross_entropy({targets.size(), width, scratch.data(), targets.data(), false,
                            again.data(), correct.data()});
    EXPECT_EQ(losses, again);
  }
}

TEST_P(ModelKernelsTest, CrossEntropyTellsWhetherTheTargetIsTheLikeliest) {
  for (const std::size_t width : {2u, 16u, 37u, 200u}) {
    const auto noisy = noise(4 * width, 1, 5.0f);
    const auto likeliest = [&](std::size_t row) {
      const auto begin = noisy.begin() + static_cast<std::ptrdiff_t>(row * width);
      return static_cast<std::int32_t>(
          std::max_element(begin, begin + static_cast<std::ptrdiff_t>(width)) - begin);
    };
    const auto other = (likeliest(1) + 1) % static_cast<std::int32_t>(width);
    const std::vector<std::int32_t> targets = {likeliest(0), other, -1, likeliest(3)};
    for (const bool gradient : {false, true}) {
      auto logits = noisy;
      std::vector<double> losses(targets.size());
      std::vector<std::uint8_t> correct(targets.size(), 9);
      kernels_.cross_entropy({targets.size(), width, logits.data(), targets.data(), gradient,
                              losses.data(), correct.data()});
      EXPECT_EQ(correct, (std::vector<std::uint8_t>{1, 0, 0, 1})) << width;
    }
  }
}

TEST_P(ModelKernelsTest, CrossEntropyShowsWhatIsNotFinite) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> logits(37, 0.5f);
    logits[20] = bad;
    const std::int32_t target = 3;
    double loss = 0.0;
    std::uint8_t correct = 9;
    kernels_.cross_entropy({1, logits.size(), logits.data(), &target, true, &loss, &correct});
    EXPECT_FALSE(std::isfinite(loss));
    EXPECT_TRUE(std::isnan(logits[3]));
  }
}

}  // namespace
}  // namespace lockstep::model_kernels_test
