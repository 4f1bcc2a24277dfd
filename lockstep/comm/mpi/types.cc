#include "lockstep/comm/mpi/types.h"

#include <algorithm>
#include <array>
#include <limits>

#include "lockstep/comm/kernels/kernels.h"

namespace lockstep {
namespace {

template <ReduceOp kOp, DataType kType>
void combine_into(void* in, void* inout, int* count, MPI_Datatype*) {
  combine(kOp, kType, inout, in, inout, static_cast<std::size_t>(*count));
}

// A type as MPI sees it, with the operations on it.
struct MpiType {
  MPI_Datatype type;
  MPI_Op sum;
  MPI_Op min;
  MPI_Op max;
  MPI_Op product;
};

MPI_Op make_op(MPI_User_function* function) {
  constexpr int kCommutes = 1;
  MPI_Op op = MPI_OP_NULL;
  MPI_Op_create(function, kCommutes, &op);
  return op;
}

MpiType native(MPI_Datatype type) { return {type, MPI_SUM, MPI_MIN, MPI_MAX, MPI_PROD}; }

// Combined by our kernels. Lives as long as MPI.
template <DataType kType>
MpiType ours() {
  static const MpiType made = [] {
    MPI_Datatype type = MPI_DATATYPE_NULL;
    MPI_Type_contiguous(static_cast<int>(size_of(kType)), MPI_BYTE, &type);
    MPI_Type_commit(&type);
    return MpiType{type, make_op(combine_into<ReduceOp::kSum, kType>),
                   make_op(combine_into<ReduceOp::kMin, kType>),
                   make_op(combine_into<ReduceOp::kMax, kType>),
                   make_op(combine_into<ReduceOp::kProduct, kType>)};
  }();
  return made;
}

MpiType describe_type(DataType type) {
  switch (type) {
    case DataType::kF32: return native(MPI_FLOAT);
    case DataType::kF64: return native(MPI_DOUBLE);
    case DataType::kI32: return native(MPI_INT32_T);
    case DataType::kI64: return native(MPI_INT64_T);
    case DataType::kF16: return ours<DataType::kF16>();
    case DataType::kBf16: return ours<DataType::kBf16>();
    // Open MPI 4.1 saturates sums of MPI_UINT8_T, MPICH 4.0 takes its minimum as if it had a sign.
    case DataType::kU8: return ours<DataType::kU8>();
  }
  return native(MPI_DATATYPE_NULL);
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

MPI_Datatype mpi_type(DataType type) { return describe_type(type).type; }

MPI_Op mpi_op(ReduceOp op, DataType type) {
  const MpiType t = describe_type(type);
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean: return t.sum;
    case ReduceOp::kMin: return t.min;
    case ReduceOp::kMax: return t.max;
    case ReduceOp::kProduct: return t.product;
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
