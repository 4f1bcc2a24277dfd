#include "lockstep/model/cpu/matmul.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/random.h"
#include "lockstep/model/cpu/matmul_kernel.h"

namespace lockstep::matmul_test {
namespace {

struct Shape {
  std::size_t rows, cols, depth;
};

std::vector<float> noise(std::size_t size, std::uint64_t stream) {
  std::vector<float> values(size);
  for (std::size_t i = 0; i < size; ++i) values[i] = 2 * random_f32(7, stream, i) - 1;
  return values;
}

// Operands with room between their rows, as sub-matrices of larger ones have.
struct Problem {
  Problem(const Shape& size, bool a_turned, bool b_turned)
      : shape(size),
        a_stride((a_turned ? size.rows : size.depth) + 3),
        b_stride((b_turned ? size.depth : size.cols) + 5),
        out_stride(size.cols + 2),
        a_transposed(a_turned),
        b_transposed(b_turned),
        a(noise(a_stride * std::max(shape.rows, shape.depth), 1)),
        b(noise(b_stride * std::max(shape.cols, shape.depth), 2)),
        add(noise(out_stride * shape.rows, 3)),
        out(out_stride * shape.rows, kUntouched) {}

  Product product(bool with_add) {
    return {.rows = shape.rows,
            .cols = shape.cols,
            .depth = shape.depth,
            .a = {a.data(), a_stride, a_transposed},
            .b = {b.data(), b_stride, b_transposed},
            .out = out.data(),
            .out_stride = out_stride,
            .add = with_add ? add.data() : nullptr};
  }

  double expected(std::size_t row, std::size_t col, bool with_add) const {
    double sum = with_add ? add[row * out_stride + col] : 0;
    for (std::size_t k = 0; k < shape.depth; ++k) {
      sum += static_cast<double>(a_transposed ? a[k * a_stride + row] : a[row * a_stride + k]) *
             (b_transposed ? b[col * b_stride + k] : b[k * b_stride + col]);
    }
    return sum;
  }

  static constexpr float kUntouched = 12345;
  Shape shape;
  std::size_t a_stride, b_stride, out_stride;
  bool a_transposed, b_transposed;
  std::vector<float> a, b, add, out;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

const Shape kShapes[] = {{1, 1, 1},     {1, 1, 0},     {3, 5, 7},      {14, 32, 16},
                         {15, 33, 17},  {28, 64, 512}, {113, 70, 513}, {6, 16, 1100},
                         {40, 1100, 5}, {130, 48, 65}, {1, 300, 1537}, {300, 1, 64}};

TEST(Matmul, IsTheProductForEveryInstructionSetOrderAndShape) {
  ThreadPool pool(2);
  for (const Shape& shape : kShapes) {
    for (int order = 0; order < 8; ++order) {
      const bool with_add = (order & 4) != 0;
      const Problem fresh(shape, (order & 1) != 0, (order & 2) != 0);
      std::vector<double> expected;
      for (std::size_t row = 0; row < shape.rows; ++row) {
        for (std::size_t col = 0; col < shape.cols; ++col) {
          expected.push_back(fresh.expected(row, col, with_add));
        }
      }
      const double tolerance = 1e-6 * (1 + std::sqrt(static_cast<double>(shape.depth)) * 4);
      for (const MatmulKernel* kernel : supported_kernels(Precision::kF32)) {
        SCOPED_TRACE(std::string(kernel->name) + " " + std::to_string(shape.rows) + "x" +
                     std::to_string(shape.cols) + "x" + std::to_string(shape.depth) + " order " +
                     std::to_string(order));
        Problem problem = fresh;
        Matmul(pool, *kernel)(problem.product(with_add));
        for (std::size_t row = 0; row < shape.rows; ++row) {
          const float* line = problem.out.data() + row * problem.out_stride;
          for (std::size_t col = 0; col < shape.cols; ++col) {
            ASSERT_NEAR(line[col], expected[row * shape.cols + col], tolerance)
                << row << "," << col;
          }
          ASSERT_EQ(line[shape.cols], Problem::kUntouched);
          ASSERT_EQ(line[shape.cols + 1], Problem::kUntouched);
        }
      }
    }
  }
}

TEST(Matmul, GivesTheSameBitsOnAnyNumberOfThreads) {
  for (const Shape& shape : kShapes) {
    Problem alone(shape, false, true);
    ThreadPool one(1);
    Matmul(one, Precision::kF32)(alone.product(true));
    for (int threads : {2, 3, 5}) {
      ThreadPool pool(threads);
      Matmul multiply(pool, Precision::kF32);
      Problem together(shape, false, true);
      multiply(together.product(true));
      EXPECT_TRUE(same_bits(alone.out, together.out));
    }
  }
}

TEST(Matmul, AnElementDependsOnItsRowAndColumnOnly) {
  ThreadPool pool(2);
  const Shape shape{97, 83, 700};
  for (const MatmulKernel* kernel : supported_kernels(Precision::kF32)) {
    Matmul multiply(pool, *kernel);
    Problem whole(shape, false, true);
    multiply(whole.product(false));
    // Every cut of rows and columns, down to one.
    for (std::size_t cut : {1, 2, 13, 32, 50}) {
      Problem part(shape, false, true);
      Product product = part.product(false);
      product.rows -= cut;
      product.cols -= cut;
      product.a.data += cut * product.a.stride;
      product.b.data += cut * product.b.stride;
      multiply(product);
      for (std::size_t row = 0; row < product.rows; ++row) {
        ASSERT_EQ(std::memcmp(part.out.data() + row * part.out_stride,
                              whole.out.data() + (row + cut) * whole.out_stride + cut,
                              product.cols * sizeof(float)),
                  0)
            << kernel->name << " row " << row << " cut " << cut;
      }
    }
  }
}

TEST(Matmul, TransposedOperandsGiveTheSameBits) {
  ThreadPool pool(2);
  const Shape shape{45, 77, 600};
  Problem plain(shape, false, false);
  Problem turned(shape, true, true);
  for (std::size_t k = 0; k < shape.depth; ++k) {
    for (std::size_t i = 0; i < shape.rows; ++i) {
      turned.a[k * turned.a_stride + i] = plain.a[i * plain.a_stride + k];
    }
    for (std::size_t j = 0; j < shape.cols; ++j) {
      turned.b[j * turned.b_stride + k] = plain.b[k * plain.b_stride + j];
    }
  }
  Matmul multiply(pool, Precision::kF32);
  multiply(plain.product(false));
  multiply(turned.product(false));
  EXPECT_TRUE(same_bits(plain.out, turned.out));
}

TEST(Matmul, AddsInPlace) {
  ThreadPool pool(2);
  Problem apart({60, 90, 1030}, true, false);
  Problem in_place({60, 90, 1030}, true, false);
  Matmul multiply(pool, Precision::kF32);
  multiply(apart.product(true));
  in_place.out = in_place.add;
  Product product = in_place.product(false);
  product.add = product.out;
  multiply(product);
  for (std::size_t row = 0; row < 60; ++row) {
    for (std::size_t col = 0; col < 90; ++col) {
      ASSERT_EQ(apart.out[row * 92 + col], in_place.out[row * 92 + col]);
    }
  }
}

TEST(Matmul, X86LevelsAgreeToTheBit) {
  ThreadPool pool(1);
  std::vector<std::vector<float>> results;
  for (const MatmulKernel* kernel : supported_kernels(Precision::kF32)) {
    if (kernel == &kMatmulGeneric) continue;  // has no fused multiply-add
    Problem problem({30, 70, 900}, false, true);
    Matmul(pool, *kernel)(problem.product(true));
    results.push_back(problem.out);
  }
  for (const auto& result : results) EXPECT_TRUE(same_bits(result, results.front()));
}

float rounded_to_bf16(float value) {
  auto bits = std::bit_cast<std::uint32_t>(value);
  bits += 0x7fff + (bits >> 16 & 1);
  return std::bit_cast<float>(bits & 0xffff0000);
}

TEST(Matmul, Bf16MultipliesRoundedInputsOrIsRefusedWithTheWayOut) {
  ThreadPool pool(2);
  if (!supports(Precision::kBf16)) {
    try {
      Matmul multiply(pool, Precision::kBf16);
      FAIL() << "not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), testing::HasSubstr("--precision fp32"));
    }
    return;
  }
  Matmul multiply(pool, Precision::kBf16);
  ThreadPool one(1);
  Matmul alone(one, Precision::kBf16);
  for (const Shape& shape : kShapes) {
    for (int order = 0; order < 8; ++order) {
      const bool with_add = (order & 4) != 0;
      Problem problem(shape, (order & 1) != 0, (order & 2) != 0);
      Problem other = problem;
      multiply(problem.product(with_add));
      alone(other.product(with_add));
      EXPECT_TRUE(same_bits(problem.out, other.out));
      std::ranges::transform(problem.a, problem.a.begin(), rounded_to_bf16);
      std::ranges::transform(problem.b, problem.b.begin(), rounded_to_bf16);
      const double tolerance = 1e-6 * (1 + std::sqrt(static_cast<double>(shape.depth)) * 8);
      for (std::size_t row = 0; row < shape.rows; ++row) {
        for (std::size_t col = 0; col < shape.cols; ++col) {
          ASSERT_NEAR(problem.out[row * problem.out_stride + col],
                      problem.expected(row, col, with_add), tolerance)
              << shape.rows << "x" << shape.cols << "x" << shape.depth << " order " << order;
        }
        ASSERT_EQ(problem.out[row * problem.out_stride + shape.cols], Problem::kUntouched);
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::matmul_test
