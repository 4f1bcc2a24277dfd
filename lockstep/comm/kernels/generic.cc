#define LOCKSTEP_KERNEL_TABLE kKernelsGeneric
#define LOCKSTEP_KERNEL_NAME "generic"
#include "lockstep/comm/kernels/impl.h"
