#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "lockstep/comm/kernels/kernels.h"
#include "lockstep/comm/types.h"

namespace lockstep {

// Internal to kernels*.cc and their test: the loops of kernels.h, compiled once per instruction
// set. All give the same bits.

// A stack of this depth serves any program over 2^32 leaves.
constexpr std::size_t kMaxTreeDepth = 33;

// The arguments of reduce_tree as plain pointers.
struct TreeLoop {
  ReduceOp op;
  DataType type;
  int mean_of;
  const CombineStep* program;
  std::size_t steps;
  const void* const* inputs;
  void* const* outputs;
  std::size_t output_count;
  std::size_t count;
};

struct KernelTable {
  const char* name;
  void (*combine)(ReduceOp op, DataType type, void* dst, const void* lhs, const void* rhs,
                  std::size_t count);
  void (*finish_mean)(DataType type, void* data, std::size_t count, int n);
  void (*reduce_tree)(const TreeLoop& loop);
  std::size_t (*find_non_finite)(DataType type, const void* data, std::size_t count);
};

extern const KernelTable kKernelsGeneric;
extern const KernelTable kKernelsV3;  // defined for x86-64 only, as is the next
extern const KernelTable kKernelsV4;

// What this processor can run, the fastest first.
std::vector<const KernelTable*> supported_kernels();

void reduce_tree(const KernelTable& kernels, const TreeReduction& reduction,
                 std::span<const void* const> inputs, std::span<void* const> outputs,
                 std::size_t count);

}  // namespace lockstep
