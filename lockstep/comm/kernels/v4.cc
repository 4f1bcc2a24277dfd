#define LOCKSTEP_KERNEL_TABLE kKernelsV4
#define LOCKSTEP_KERNEL_NAME "x86-64-v4"
#include "lockstep/comm/kernels/impl.h"
