#define LOCKSTEP_KERNEL_TABLE kKernelsV3
#define LOCKSTEP_KERNEL_NAME "x86-64-v3"
#include "lockstep/comm/kernels/impl.h"
