#include "lockstep/model/cpu/matmul.h"

#include <algorithm>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

float at(const Operand& operand, std::size_t row, std::size_t col) {
  return operand.transposed ? operand.data[col * operand.stride + row]
                            : operand.data[row * operand.stride + col];
}

void multiply_row(const Product& product, std::size_t row) {
  float* out = product.out + row * product.out_stride;
  for (std::size_t col = 0; col < product.cols; ++col) {
    float sum = 0;
    for (std::size_t k = 0; k < product.depth; ++k) {
      sum += at(product.a, row, k) * at(product.b, k, col);
    }
    out[col] = product.add ? product.add[row * product.out_stride + col] + sum : sum;
  }
}

}  // namespace

std::string_view to_string(Precision precision) {
  return precision == Precision::kF32 ? "fp32" : "bf16";
}

bool supports(Precision precision) { return precision == Precision::kF32; }

struct Matmul::Scratch {};

Matmul::Matmul(ThreadPool& pool, Precision precision) : pool_(pool), precision_(precision) {
  if (!supports(precision)) {
    throw Error(ErrorCode::kInvalidArgument,
                "this processor has no instructions for bf16 products; use --precision fp32");
  }
}

Matmul::~Matmul() = default;

void Matmul::operator()(const Product& product) {
  pool_.run(product.rows, [&](std::size_t row) { multiply_row(product, row); });
}

void Matmul::on_worker(int, const Product& product) {
  for (std::size_t row = 0; row < product.rows; ++row) multiply_row(product, row);
}

}  // namespace lockstep
