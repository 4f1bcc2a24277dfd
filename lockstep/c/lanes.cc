#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <span>
#include <vector>

#include "lockstep/base/canonical_tree.h"
#include "lockstep/base/cores.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/hash/blake3.h"
#include "lockstep/base/index.h"
#include "lockstep/base/thread_pool.h"
#include "lockstep/c.h"
#include "lockstep/c/guard.h"
#include "lockstep/c/handles.h"
#include "lockstep/comm/kernels/kernels.h"
#include "lockstep/comm/types.h"
#include "lockstep/lockstep.h"
#include "lockstep/train/gradient_tree.h"

namespace lockstep::c {
namespace {

LeafOwners checked_owners(std::uint32_t lanes, int world_size, int rank) {
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    throw Error(ErrorCode::kInvalidRank, fmt::format("rank {} of {}", rank, world_size));
  }
  if (lanes < static_cast<std::uint32_t>(world_size)) {
    refuse(fmt::format("{} lanes are too few for {} workers", lanes, world_size));
  }
  return even_owners(lanes, world_size);
}

LaneSum& sum_of(lockstep_lane_sum* sum) {
  require(sum, "the lane sum");
  if (sum->job.newcomer()) refuse("a newcomer has no lanes until it has regrouped");
  return sum->sum;
}

DataType summed_type(int type) {
  if (lockstep_type_size(type) == 0) refuse(fmt::format("{} is no type", type));
  return static_cast<DataType>(type);
}

void write_hash(const Blake3Hash& hash, std::uint8_t* place) {
  std::memcpy(place, hash.data(), hash.size());
}

// Pieces of it on all threads of the pool.
Blake3Hash hash_of(const void* data, std::size_t bytes, ThreadPool& pool) {
  constexpr std::size_t kPiece = 1 << 20;
  const std::span all(static_cast<const std::byte*>(data), bytes);
  if (bytes <= kPiece || pool.threads() == 1) return blake3(all);
  Blake3Pieces hash(bytes, kPiece);
  pool.run(hash.pieces(), [&](std::size_t index) {
    hash.update(index, all.subspan(index * kPiece, std::min(kPiece, bytes - index * kPiece)));
  });
  return hash.finish();
}

// Threads are worth their start from some MiB on.
int threads_for(std::size_t bytes) {
  constexpr std::size_t kPerThread = 4 << 20;
  constexpr std::size_t kMost = 8;
  const std::size_t useful = std::max<std::size_t>(1, bytes / kPerThread);
  return static_cast<int>(std::min({useful, kMost, index_of(available_cores())}));
}

}  // namespace
}  // namespace lockstep::c

using lockstep::c::checked_owners;
using lockstep::c::guarded;
using lockstep::c::refuse;
using lockstep::c::require;
using lockstep::c::sum_of;

int lockstep_lanes_of(uint32_t lanes, int world_size, int rank, uint32_t* begin, uint32_t* end) {
  return guarded([&] {
    require(begin, "lockstep_lanes_of: begin");
    require(end, "lockstep_lanes_of: end");
    const auto owners = checked_owners(lanes, world_size, rank);
    const auto [first, last] = std::equal_range(owners.begin(), owners.end(), rank);
    *begin = static_cast<uint32_t>(first - owners.begin());
    *end = static_cast<uint32_t>(last - owners.begin());
    return LOCKSTEP_OK;
  });
}

int lockstep_partials_of(uint32_t lanes, int world_size, int rank, lockstep_range* nodes,
                         size_t room, size_t* count) {
  return guarded([&] {
    require(count, "lockstep_partials_of: count");
    if (room > 0) require(nodes, "lockstep_partials_of: nodes");
    const auto owned = lockstep::owned_nodes(checked_owners(lanes, world_size, rank), rank);
    *count = owned.size();
    for (std::size_t i = 0; i < std::min(room, owned.size()); ++i) {
      nodes[i] = {owned[i].begin, owned[i].end};
    }
    return LOCKSTEP_OK;
  });
}

int lockstep_lane_schedule(uint32_t lanes, int world_size, int rank, lockstep_lane_step* steps,
                           size_t* step_count, lockstep_merge* merges, size_t* merge_count,
                           uint32_t* accumulators) {
  return guarded([&] {
    for (const void* place :
         {static_cast<const void*>(steps), static_cast<const void*>(step_count),
          static_cast<const void*>(merges), static_cast<const void*>(merge_count),
          static_cast<const void*>(accumulators)}) {
      require(place, "lockstep_lane_schedule: a place for the result");
    }
    const auto schedule = lockstep::schedule_lanes(
        lockstep::owned_nodes(checked_owners(lanes, world_size, rank), rank));
    *step_count = 0;
    *merge_count = 0;
    *accumulators = schedule.accumulators;
    for (const lockstep::LaneWork& work : schedule.lanes) {
      steps[(*step_count)++] = {work.lane, work.accumulator, static_cast<uint32_t>(*merge_count),
                                static_cast<uint32_t>(work.merges.size())};
      for (const auto& merge : work.merges) merges[(*merge_count)++] = {merge.into, merge.from};
    }
    return LOCKSTEP_OK;
  });
}

int lockstep_accumulate(void* into, const void* from, size_t count, int type) {
  return guarded([&] {
    if (count == 0) return LOCKSTEP_OK;
    require(into, "lockstep_accumulate: into");
    require(from, "lockstep_accumulate: from");
    lockstep::combine(lockstep::ReduceOp::kSum, lockstep::c::summed_type(type), into, into, from,
                      count);
    return LOCKSTEP_OK;
  });
}

size_t lockstep_find_non_finite(const void* data, size_t count, int type) {
  if (data == nullptr || lockstep_type_size(type) == 0) return count;
  return lockstep::find_non_finite(static_cast<lockstep::DataType>(type), data, count);
}

int lockstep_lane_sum_create(lockstep_job* job, uint32_t lanes, size_t elements, size_t numbers,
                             size_t bucket_bytes, lockstep_lane_sum** sum) {
  return guarded([&] {
    require(job, "lockstep_lane_sum_create: job");
    require(sum, "lockstep_lane_sum_create: sum");
    *sum = nullptr;
    constexpr std::size_t kBucket = std::size_t{4} << 20;
    *sum = new lockstep_lane_sum{job->job,
                                 lockstep::LaneSum(job->job, lanes, elements, numbers,
                                                   bucket_bytes > 0 ? bucket_bytes : kBucket)};
    return LOCKSTEP_OK;
  });
}

void lockstep_lane_sum_destroy(lockstep_lane_sum* sum) { delete sum; }

int lockstep_lane_sum_count(lockstep_lane_sum* sum, size_t* own_lanes) {
  return guarded([&] {
    require(own_lanes, "lockstep_lane_sum_count: own_lanes");
    *own_lanes = sum_of(sum).own_lanes().size();
    return LOCKSTEP_OK;
  });
}

int lockstep_lane_sum_lane(lockstep_lane_sum* sum, size_t index, uint32_t* lane) {
  return guarded([&] {
    require(lane, "lockstep_lane_sum_lane: lane");
    const auto lanes = sum_of(sum).own_lanes();
    if (index >= lanes.size()) {
      refuse(fmt::format("lockstep_lane_sum_lane: this worker has {} lanes, not {}", lanes.size(),
                         index + 1));
    }
    *lane = lanes[index];
    return LOCKSTEP_OK;
  });
}

int lockstep_lane_sum_begin(lockstep_lane_sum* sum, int64_t step) {
  return guarded([&] {
    sum_of(sum).begin(step);
    return LOCKSTEP_OK;
  });
}

int lockstep_lane_sum_gradient(lockstep_lane_sum* sum, size_t index, float** gradient,
                               double** numbers) {
  return guarded([&] {
    if (gradient != nullptr) *gradient = sum_of(sum).lane_gradient(index).data();
    if (numbers != nullptr) *numbers = sum_of(sum).lane_numbers(index).data();
    return LOCKSTEP_OK;
  });
}

int lockstep_lane_sum_ready(lockstep_lane_sum* sum, size_t index, size_t begin, size_t end) {
  return guarded([&] {
    sum_of(sum).ready(index, {begin, end});
    return LOCKSTEP_OK;
  });
}

int lockstep_lane_sum_finish(lockstep_lane_sum* sum, int64_t timeout_ms, float** gradient,
                             double* numbers) {
  return guarded([&]() -> int {
    lockstep::LaneSum& lanes = sum_of(sum);
    if (timeout_ms >= 0 &&
        !lanes.wait_until(lockstep::Deadline::after(std::chrono::milliseconds(timeout_ms)))) {
      return LOCKSTEP_NOT_YET;
    }
    const lockstep::LaneSum::Sum ended = lanes.finish();
    if (gradient != nullptr) *gradient = ended.gradient.data();
    if (numbers != nullptr) std::ranges::copy(ended.numbers, numbers);
    return LOCKSTEP_OK;
  });
}

int lockstep_blake3(const void* data, size_t bytes, uint8_t hash[LOCKSTEP_HASH_BYTES]) {
  return guarded([&] {
    if (bytes > 0) require(data, "lockstep_blake3: data");
    require(hash, "lockstep_blake3: hash");
    lockstep::ThreadPool pool(lockstep::c::threads_for(bytes));
    lockstep::c::write_hash(lockstep::c::hash_of(data, bytes, pool), hash);
    return LOCKSTEP_OK;
  });
}

int lockstep_blake3_many(const void* const* data, const size_t* bytes, size_t count,
                         uint8_t hash[LOCKSTEP_HASH_BYTES]) {
  return guarded([&] {
    if (count > 0) {
      require(data, "lockstep_blake3_many: data");
      require(bytes, "lockstep_blake3_many: bytes");
    }
    require(hash, "lockstep_blake3_many: hash");
    lockstep::ThreadPool pool(
        lockstep::c::threads_for(std::accumulate(bytes, bytes + count, std::size_t{0})));
    lockstep::Blake3 all;
    for (std::size_t i = 0; i < count; ++i) {
      if (bytes[i] > 0) require(data[i], "lockstep_blake3_many: a piece of memory");
      all.update(lockstep::c::hash_of(data[i], bytes[i], pool));
    }
    lockstep::c::write_hash(all.finish(), hash);
    return LOCKSTEP_OK;
  });
}
