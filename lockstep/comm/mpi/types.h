#pragma once

#include <mpi.h>

#include <cstddef>

#include "lockstep/comm/types.h"

namespace lockstep {

// To be called under mpi_lock().
MPI_Datatype mpi_type(DataType type);
// kMean is MPI_SUM. Our kernels combine f16 and bf16, which MPI does not know, and u8.
MPI_Op mpi_op(ReduceOp op, DataType type);

// Fills `data` with what changes nothing when combined: of a rank that brings nothing.
void fill_neutral(ReduceOp op, DataType type, void* data, std::size_t count);

}  // namespace lockstep
