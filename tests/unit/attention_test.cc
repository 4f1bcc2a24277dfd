#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "lockstep/model/cpu/kernels.h"
#include "tests/support/finite_difference.h"

namespace lockstep::attention_test {
namespace {

using test::noise;
using test::widened;
using Doubles = std::vector<double>;

struct Size {
  std::size_t queries, group, head_dim;
};

// One sequence whose rows are `group` heads of q, then one of k and one of v.
struct Sequence {
  explicit Sequence(const Size& s)
      : size(s),
        width((s.group + 2) * s.head_dim),
        qkv(noise(s.queries * width, 1, 2.0f)),
        out(s.queries * s.group * s.head_dim),
        lse(s.queries * s.group),
        scratch(std::max(attention_scratch(s.queries, s.head_dim),
                         bf16_attention_scratch(s.queries, s.head_dim))) {
    for (std::size_t t = 0; t < s.queries; ++t) {
      for (std::size_t i = 0; i < s.head_dim / 2; ++i) {
        const double angle = static_cast<double>(t) * std::pow(0.3, static_cast<double>(i));
        cos.push_back(static_cast<float>(std::cos(angle)));
        sin.push_back(static_cast<float>(std::sin(angle)));
      }
    }
  }

  AttentionShape shape() const {
    return {.first = 0,
            .queries = size.queries,
            .group = size.group,
            .head_dim = size.head_dim,
            .q_stride = width,
            .kv_stride = width,
            .out_stride = size.group * size.head_dim,
            .cos = cos.data(),
            .sin = sin.data()};
  }
  std::size_t k() const { return size.group * size.head_dim; }
  std::size_t v() const { return k() + size.head_dim; }

  AttentionForward forward() {
    return {shape(),    qkv.data(), qkv.data() + k(), qkv.data() + v(),
            out.data(), lse.data(), scratch.data()};
  }

  Size size;
  std::size_t width;
  std::vector<float> qkv, cos, sin, out, lse, scratch;
};

// As plainly as possible.
Doubles attention(const Sequence& s, const Doubles& qkv) {
  const std::size_t queries = s.size.queries;
  const std::size_t group = s.size.group;
  const std::size_t dim = s.size.head_dim;
  const auto rotated = [&](std::size_t t, std::size_t offset) {
    Doubles x(dim);
    for (std::size_t i = 0; i < dim / 2; ++i) {
      const double a = qkv[t * s.width + offset + i];
      const double b = qkv[t * s.width + offset + i + dim / 2];
      const double cos = s.cos[t * dim / 2 + i];
      const double sin = s.sin[t * dim / 2 + i];
      x[i] = a * cos - b * sin;
      x[i + dim / 2] = b * cos + a * sin;
    }
    return x;
  };
  std::vector<Doubles> keys;
  for (std::size_t t = 0; t < queries; ++t) keys.push_back(rotated(t, s.k()));
  Doubles out(queries * group * dim, 0.0);
  for (std::size_t t = 0; t < queries; ++t) {
    for (std::size_t head = 0; head < group; ++head) {
      const Doubles q = rotated(t, head * dim);
      Doubles p;
      double sum = 0.0;
      for (std::size_t j = 0; j <= t; ++j) {
        const double score = std::inner_product(q.begin(), q.end(), keys[j].begin(), 0.0);
        p.push_back(std::exp(score / std::sqrt(static_cast<double>(dim))));
        sum += p.back();
      }
      for (std::size_t j = 0; j <= t; ++j) {
        for (std::size_t i = 0; i < dim; ++i) {
          out[(t * group + head) * dim + i] += p[j] / sum * qkv[j * s.width + s.v() + i];
        }
      }
    }
  }
  return out;
}

struct Kind {
  std::string name;
  void (*forward)(const AttentionForward&);
  void (*backward)(const AttentionBackward&);
  double tolerance;  // of results that are around 1

  friend std::ostream& operator<<(std::ostream& out, const Kind& kind) { return out << kind.name; }
};

std::vector<Kind> kinds() {
  std::vector<Kind> all;
  for (const ModelKernels* kernels : supported_model_kernels()) {
    all.push_back({kernels->name, kernels->attention_forward, kernels->attention_backward, 3e-5});
    for (char& c : all.back().name) c = c == '-' ? '_' : c;
  }
  if (const Bf16Attention* emulated = emulated_bf16_attention()) {
    all.push_back({"bf16_emulated", emulated->forward, emulated->backward, 3e-2});
  }
  if (const Bf16Attention* amx = bf16_attention()) {
    all.push_back({"bf16_amx", amx->forward, amx->backward, 3e-2});
  }
  return all;
}

class AttentionTest : public testing::TestWithParam<Kind> {
 protected:
  const Kind& kernels_ = GetParam();
};

INSTANTIATE_TEST_SUITE_P(Kinds, AttentionTest, testing::ValuesIn(kinds()),
                         [](const auto& test) { return test.param.name; });

// Sizes around the blocks of 64 queries and 256 keys, around vectors and panels.
const std::vector<Size> kSizes = {{1, 1, 2},   {2, 1, 6},   {7, 3, 16},   {33, 2, 10}, {64, 1, 32},
                                  {65, 2, 32}, {127, 1, 8}, {130, 1, 64}, {300, 2, 6}, {40, 1, 80}};

TEST_P(AttentionTest, Forward) {
  for (const Size& size : kSizes) {
    Sequence s(size);
    kernels_.forward(s.forward());
    const Doubles expected = attention(s, widened(s.qkv));
    for (std::size_t i = 0; i < s.out.size(); ++i) {
      ASSERT_NEAR(s.out[i], expected[i], kernels_.tolerance)
          << size.queries << " queries, element " << i;
    }
  }
}

TEST_P(AttentionTest, Backward) {
  for (const Size& size : kSizes) {
    Sequence s(size);
    kernels_.forward(s.forward());
    const std::vector<float> dout = noise(s.out.size(), 2);
    std::vector<float> dqkv(s.qkv.size());
    kernels_.backward({s.shape(), s.qkv.data(), s.qkv.data() + s.k(), s.qkv.data() + s.v(),
                       s.out.data(), s.lse.data(), dout.data(), dqkv.data(), dqkv.data() + s.k(),
                       dqkv.data() + s.v(), s.scratch.data()});
    const auto weighted = [&](const Doubles& at) {
      const Doubles out = attention(s, at);
      return std::inner_product(out.begin(), out.end(), dout.begin(), 0.0);
    };
    test::expect_gradient(std::to_string(size.queries) + " queries", weighted, s.qkv, dqkv,
                          2 * kernels_.tolerance, size.queries > 64 ? 12 : 40);
  }
}

// A query's result, to the bit, does not depend on the queries beside it.
TEST_P(AttentionTest, InPiecesGivesTheSameBits) {
  for (const Size& size : {Size{150, 2, 32}, Size{37, 1, 6}}) {
    Sequence s(size);
    kernels_.forward(s.forward());
    const std::vector<float> whole = s.out;
    for (const std::size_t piece : {1u, 7u, 50u}) {
      std::fill(s.out.begin(), s.out.end(), -1.0f);
      for (std::size_t first = 0; first < size.queries; first += piece) {
        AttentionForward call = s.forward();
        call.shape.first = first;
        call.shape.queries = std::min(piece, size.queries - first);
        call.q += first * s.width;
        call.out += first * call.shape.out_stride;
        kernels_.forward(call);
      }
      EXPECT_EQ(s.out, whole) << "in pieces of " << piece;
    }
  }
}

TEST_P(AttentionTest, LaterTokensDoNotMatter) {
  Sequence s({100, 1, 32});
  kernels_.forward(s.forward());
  const std::vector<float> before(s.out.begin(), s.out.begin() + 70 * 32);
  for (std::size_t i = 70 * s.width; i < s.qkv.size(); ++i) s.qkv[i] = 1e3f;
  kernels_.forward(s.forward());
  EXPECT_TRUE(std::equal(before.begin(), before.end(), s.out.begin()));
}

}  // namespace
}  // namespace lockstep::attention_test
