#define LOCKSTEP_MODEL_KERNELS kModelKernelsV3
#define LOCKSTEP_MODEL_KERNELS_NAME "x86-64-v3"
#include "lockstep/model/cpu/kernels_impl.h"
