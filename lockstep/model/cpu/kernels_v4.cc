#define LOCKSTEP_MODEL_KERNELS kModelKernelsV4
#define LOCKSTEP_MODEL_KERNELS_NAME "x86-64-v4"
#include "lockstep/model/cpu/kernels_impl.h"
