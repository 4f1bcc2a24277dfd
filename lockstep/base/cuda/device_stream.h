#pragma once

struct CUstream_st;

namespace lockstep {

using DeviceStream = CUstream_st*;  // a cudaStream_t, for files that do not know CUDA

}  // namespace lockstep
