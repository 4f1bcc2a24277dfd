#include "lockstep/comm/types.h"

namespace lockstep {

std::string_view to_string(DataType type) {
  switch (type) {
    case DataType::kF32: return "f32";
    case DataType::kF64: return "f64";
    case DataType::kF16: return "f16";
    case DataType::kBf16: return "bf16";
    case DataType::kI32: return "i32";
    case DataType::kI64: return "i64";
    case DataType::kU8: return "u8";
  }
  return "?";
}

std::string_view to_string(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return "sum";
    case ReduceOp::kMean: return "mean";
    case ReduceOp::kMin: return "min";
    case ReduceOp::kMax: return "max";
    case ReduceOp::kProduct: return "product";
  }
  return "?";
}

std::string_view to_string(WireCompression compression) {
  switch (compression) {
    case WireCompression::kAuto: return "auto";
    case WireCompression::kOn: return "on";
    case WireCompression::kOff: return "off";
  }
  return "?";
}

}  // namespace lockstep
