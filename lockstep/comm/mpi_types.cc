#include "lockstep/comm/mpi_types.h"

#include <algorithm>
#include <array>
#include <limits>

#include "lockstep/comm/kernels.h"

namespace lockstep {
namespace {

template <ReduceOp kOp, DataType kType>
void combine_into(void* in, void* inout, int* count, MPI_Datatype*) {
  combine(kOp, kType, inout, in, inout, static_cast<std::size_t>(*count));
}

// A 16-bit type as MPI sees it; lives as long as MPI.
struct HalfType {
  MPI_Datatype type = MPI_DATATYPE_NULL;
  MPI_Op sum = MPI_OP_NULL;
  MPI_Op min = MPI_OP_NULL;
  MPI_Op max = MPI_OP_NULL;
  MPI_Op product = MPI_OP_NULL;
};

template <DataType kType>
const HalfType& half_type() {
  static const HalfType half = [] {
    constexpr int kCommutes = 1;
    HalfType made;
    MPI_Type_contiguous(2, MPI_BYTE, &made.type);
    MPI_Type_commit(&made.type);
    MPI_Op_create(combine_into<ReduceOp::kSum, kType>, kCommutes, &made.sum);
    MPI_Op_create(combine_into<ReduceOp::kMin, kType>, kCommutes, &made.min);
    MPI_Op_create(combine_into<ReduceOp::kMax, kType>, kCommutes, &made.max);
    MPI_Op_create(combine_into<ReduceOp::kProduct, kType>, kCommutes, &made.product);
    return made;
  }();
  return half;
}

template <typename T>
void fill(void* data, std::size_t count, T value) {
  std::fill_n(static_cast<T*>(data), count, value);
}

template <typename T>
T neutral(ReduceOp op) {
  using Limits = std::numeric_limits<T>;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean: return Limits::is_integer ? T{0} : static_cast<T>(-0.0);
    case ReduceOp::kMin: return Limits::has_infinity ? Limits::infinity() : Limits::max();
    case ReduceOp::kMax: return Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
    case ReduceOp::kProduct: return T{1};
  }
  return T{};
}

std::uint16_t neutral_half(ReduceOp op, std::uint16_t infinity, std::uint16_t one) {
  constexpr std::uint16_t kMinus = 0x8000;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean: return kMinus;
    case ReduceOp::kMin: return infinity;
    case ReduceOp::kMax: return kMinus | infinity;
    case ReduceOp::kProduct: return one;
  }
  return 0;
}

}  // namespace

MPI_Datatype mpi_type(DataType type) {
  switch (type) {
    case DataType::kF32: return MPI_FLOAT;
    case DataType::kF64: return MPI_DOUBLE;
    case DataType::kF16: return half_type<DataType::kF16>().type;
    case DataType::kBf16: return half_type<DataType::kBf16>().type;
    case DataType::kI32: return MPI_INT32_T;
    case DataType::kI64: return MPI_INT64_T;
    case DataType::kU8: return MPI_UINT8_T;
  }
  return MPI_DATATYPE_NULL;
}

MPI_Op mpi_op(ReduceOp op, DataType type) {
  const bool f16 = type == DataType::kF16;
  const bool half = f16 || type == DataType::kBf16;
  const HalfType native{MPI_DATATYPE_NULL, MPI_SUM, MPI_MIN, MPI_MAX, MPI_PROD};
  const HalfType& ops = !half ? native
                        : f16 ? half_type<DataType::kF16>()
                              : half_type<DataType::kBf16>();
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean: return ops.sum;
    case ReduceOp::kMin: return ops.min;
    case ReduceOp::kMax: return ops.max;
    case ReduceOp::kProduct: return ops.product;
  }
  return MPI_OP_NULL;
}

void fill_neutral(ReduceOp op, DataType type, void* data, std::size_t count) {
  switch (type) {
    case DataType::kF32: return fill(data, count, neutral<float>(op));
    case DataType::kF64: return fill(data, count, neutral<double>(op));
    case DataType::kF16: return fill(data, count, neutral_half(op, 0x7c00, 0x3c00));
    case DataType::kBf16: return fill(data, count, neutral_half(op, 0x7f80, 0x3f80));
    case DataType::kI32: return fill(data, count, neutral<std::int32_t>(op));
    case DataType::kI64: return fill(data, count, neutral<std::int64_t>(op));
    case DataType::kU8: return fill(data, count, neutral<std::uint8_t>(op));
  }
}

}  // namespace lockstep
