#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/comm/communicator.h"

namespace lockstep::test {

// One collective with known inputs and a known result, on any communicator.
struct Case {
  Collective collective = Collective::kAllReduce;
  int world_size = 1;
  // Elements of the whole vector. Where all ranks bring or get equally much, each has
  // equal_share(count, world_size) instead.
  std::size_t count = 0;
  DataType type = DataType::kF32;
  ReduceOp op = ReduceOp::kSum;
  Algorithm algorithm = Algorithm::kAuto;
  int root = 0;
  bool uneven = false;           // shares differ, some are empty
  bool in_place = false;         // the output lies where the input is
  std::uint32_t lanes = 0;       // reductions over nodes: leaves
  bool scattered_lanes = false;  // they belong to random ranks, some of which own nothing
  // Values for which every order of summation gives the same bits; otherwise arbitrary ones with
  // NaN, infinities, zeros of both signs and denormals among them.
  bool small_values = false;
  bool allocated = false;     // in memory from Communicator::allocate
  bool asynchronous = false;  // by start() and wait()
  // For the call; the communicator's own limit if there is none.
  std::optional<std::chrono::nanoseconds> time;

  bool operator==(const Case&) const = default;
};

std::string to_string(const Case& c);
bool reduces(Collective collective);
bool over_nodes(Collective collective);
// Whether another order than the canonical one may give other bits.
bool order_matters(const Case& c);
std::size_t equal_share(std::size_t count, int world_size);

// The inputs of all ranks, and the result computed one element at a time along the canonical tree.
struct CaseData {
  std::vector<std::vector<std::byte>> leaves;
  std::vector<std::byte> result;  // of reductions
};

// The value of the canonical tree over some leaves, before a mean is finished.
std::vector<std::byte> reduce_leaves(const Case& c, std::span<const std::vector<std::byte>> leaves);

// Equal for cases that differ only in what does not change the data.
bool same_data(const Case& a, const Case& b);
CaseData make_data(const Case& c);

// Runs this rank's part and checks what it gets, bit by bit; where the algorithm is order-free,
// that all ranks got the same. Throws std::runtime_error with the first difference.
void run_case(Communicator& comm, const Case& c, const CaseData& data);

}  // namespace lockstep::test
