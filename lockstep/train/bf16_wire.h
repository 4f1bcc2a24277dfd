#pragma once

#include <span>

#include "lockstep/comm/types.h"

namespace lockstep {

// Gradients as bf16 on the wire, with error feedback. Rounding is to nearest even; NaN stays NaN.

// value = sum + residual;  rounded = bf16(value);  residual = value - rounded.
void round_with_feedback(std::span<const float> sum, std::span<float> residual,
                         std::span<BFloat16> rounded);

void widen(std::span<const BFloat16> values, std::span<float> out);

}  // namespace lockstep
