// The loops over rows and over flat buffers, for kernels_impl.h.
#pragma once

#include "lockstep/model/cpu/kernels.h"
#include "lockstep/model/cpu/vec.h"

namespace lockstep {
namespace {

// Squares of f32 are exact in f64, and the sixteen partial sums are the same at every width.
double squares(const float* values, std::size_t count) {
  constexpr std::size_t kSums = 16;
  double sums[kSums] = {};
  std::size_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (std::size_t j = 0; j < kSums; ++j) {
      const double value = values[i + j];
      sums[j] += value * value;
    }
  }
  for (std::size_t j = 0; i + j < count; ++j) {
    const double value = values[i + j];
    sums[j] += value * value;
  }
  for (std::size_t half = kSums / 2; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) sums[j] += sums[j + half];
  }
  return sums[0];
}

// Without fused operations: the same bits at every width. In vectors by hand, because compilers
// keep a loop scalar for a square root that may have to set errno.
void adamw(const AdamWScalars& s, std::size_t count, const float* sum, float* parameters,
           float* first, float* second) {
  Row{count}.each([&](auto get, auto put) {
    const Vec g = get(sum) * set1(s.factor);
    const Vec m = set1(s.beta1) * get(first) + set1(s.rest1) * g;
    const Vec v = set1(s.beta2) * get(second) + set1(s.rest2) * (g * g);
    const Vec step = set1(s.rate) * m / (sqrt(v) * set1(s.root_scale) + set1(s.eps));
    put(parameters, get(parameters) * set1(s.keep) - step);
    put(first, m);
    put(second, v);
  });
}

void norm_forward(const NormForward& call) {
  const Row row = {call.width};
  for (std::size_t r = 0; r < call.rows; ++r) {
    const float* x = call.x + r * call.width;
    Vec squares_sum = set1(0.0f);
    if (call.y != nullptr) {
      const float* y = call.y + r * call.width;
      float* sum = call.sum + r * call.width;
      row.each([&](auto get, auto put) {
        const Vec value = get(x) + get(y);
        put(sum, value);
        squares_sum = fma(value, value, squares_sum);
      });
      x = sum;
    } else {
      row.each([&](auto get, auto) { squares_sum = fma(get(x), get(x), squares_sum); });
    }
    const float mean = sum_of(squares_sum) / static_cast<float>(call.width);
    const float rstd = 1.0f / __builtin_sqrtf(mean + call.eps);
    call.rstd[r] = rstd;
    float* out = call.out + r * call.width;
    row.each([&](auto get, auto put) { put(out, get(x) * set1(rstd) * get(call.weight)); });
  }
}

void norm_backward(const NormBackward& call) {
  const Row row = {call.width};
  for (std::size_t r = 0; r < call.rows; ++r) {
    const float* x = call.x + r * call.width;
    const float* dout = call.dout + r * call.width;
    float* dx = call.dx + r * call.width;
    const float rstd = call.rstd[r];
    Vec along = set1(0.0f);  // how much of the gradient points along x
    row.each([&](auto get, auto put) {
      const Vec dx_hat = get(dout) * get(x);
      along = fma(dx_hat, get(call.weight), along);
      put(call.dweight, fma(dx_hat, set1(rstd), get(call.dweight)));
    });
    const float pull = sum_of(along) * rstd * rstd * rstd / static_cast<float>(call.width);
    row.each([&](auto get, auto put) {
      const Vec through = get(dout) * get(call.weight) * set1(rstd);
      put(dx, get(dx) + fnma(get(x), set1(pull), through));
    });
  }
}

inline Vec sigmoid(Vec x) { return set1(1.0f) / (set1(1.0f) + exp(set1(0.0f) - x)); }

void swiglu_forward(const SwigluForward& call) {
  const Row row = {call.width};
  for (std::size_t r = 0; r < call.rows; ++r) {
    const float* gate = call.gate_up + r * 2 * call.width;
    const float* up = gate + call.width;
    float* act = call.act + r * call.width;
    row.each([&](auto get, auto put) {
      const Vec g = get(gate);
      put(act, g * sigmoid(g) * get(up));
    });
  }
}

void swiglu_backward(const SwigluBackward& call) {
  const Row row = {call.width};
  for (std::size_t r = 0; r < call.rows; ++r) {
    float* gate = call.gate_up + r * 2 * call.width;
    float* up = gate + call.width;
    const float* dact = call.dact + r * call.width;
    float* act = call.act + r * call.width;
    row.each([&](auto get, auto put) {
      const Vec g = get(gate);
      const Vec u = get(up);
      const Vec d = get(dact);
      const Vec s = sigmoid(g);
      const Vec silu = g * s;
      put(act, silu * u);
      put(up, d * silu);
      put(gate, d * u * fma(silu, set1(1.0f) - s, s));
    });
  }
}

void cross_entropy(const CrossEntropy& call) {
  const Row row = {call.width};
  const Vec lowest = set1(-__builtin_inff());
  for (std::size_t r = 0; r < call.rows; ++r) {
    float* logits = call.logits + r * call.width;
    const std::int32_t target = call.targets[r];
    if (target < 0) {
      call.loss[r] = 0.0;
      call.correct[r] = 0;
      if (call.gradient) row.each([&](auto, auto put) { put(logits, set1(0.0f)); });
      continue;
    }
    Vec most = lowest;
    for_vectors(
        call.width, [&](std::size_t i) { most = max(load(logits + i), most); },
        [&](std::size_t i, std::size_t n) { most = max(load_part(logits + i, n, lowest), most); });
    const float top = max_of(most);
    const float at_target = logits[target];
    call.correct[r] = at_target == top ? 1 : 0;
    Vec total = set1(0.0f);
    for_vectors(
        call.width,
        [&](std::size_t i) {
          const Vec e = exp(load(logits + i) - set1(top));
          store(logits + i, e);
          total = total + e;
        },
        [&](std::size_t i, std::size_t n) {
          const Vec e = exp(load_part(logits + i, n, lowest) - set1(top));
          store_part(logits + i, n, e);
          total = total + e;
        });
    const float sum = sum_of(total);
    call.loss[r] = __builtin_log(static_cast<double>(sum)) +
                   (static_cast<double>(top) - static_cast<double>(at_target));
    if (!call.gradient) continue;
    const Vec scale = set1(1.0f / sum);
    row.each([&](auto get, auto put) { put(logits, get(logits) * scale); });
    logits[target] -= 1.0f;
  }
}

void add_rows(std::size_t rows, std::size_t width, const float* values, std::size_t stride,
              float* out) {
  const Row row = {width};
  for (std::size_t r = 0; r < rows; ++r) {
    const float* value = values + r * stride;
    row.each([&](auto get, auto put) { put(out, get(out) + get(value)); });
  }
}

}  // namespace
}  // namespace lockstep
