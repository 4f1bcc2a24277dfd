// The table of one instruction set. Each kernels_*.cc defines LOCKSTEP_MODEL_KERNELS and
// LOCKSTEP_MODEL_KERNELS_NAME and includes this file once.
#pragma once

#include "lockstep/model/cpu/attention_impl.h"
#include "lockstep/model/cpu/rows_impl.h"

namespace lockstep {

const ModelKernels LOCKSTEP_MODEL_KERNELS = {
    .name = LOCKSTEP_MODEL_KERNELS_NAME,
    .squares = squares,
    .adamw = adamw,
    .norm_forward = norm_forward,
    .norm_backward = norm_backward,
    .swiglu_forward = swiglu_forward,
    .swiglu_backward = swiglu_backward,
    .cross_entropy = cross_entropy,
    .add_rows = add_rows,
    .attention_forward = attention_forward,
    .attention_backward = attention_backward,
};

}  // namespace lockstep
