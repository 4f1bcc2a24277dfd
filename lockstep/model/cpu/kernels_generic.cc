#define LOCKSTEP_MODEL_KERNELS kModelKernelsGeneric
#define LOCKSTEP_MODEL_KERNELS_NAME "generic"
#include "lockstep/model/cpu/kernels_impl.h"
