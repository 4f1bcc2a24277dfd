#include "lockstep/comm/communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/canonical_tree.h"
#include "lockstep/c.h"
#include "lockstep/c/guard.h"
#include "lockstep/c/handles.h"
#include "lockstep/comm/call.h"
#include "lockstep/comm/types.h"

namespace lockstep::c {
namespace {

// The values are those of our enumerations, which the mesh protocol fixes.
static_assert(LOCKSTEP_F32 == static_cast<int>(DataType::kF32));
static_assert(LOCKSTEP_U8 == static_cast<int>(DataType::kU8));
static_assert(LOCKSTEP_SUM == static_cast<int>(ReduceOp::kSum));
static_assert(LOCKSTEP_PRODUCT == static_cast<int>(ReduceOp::kProduct));

DataType type_of(int type) {
  if (type < LOCKSTEP_F32 || type > LOCKSTEP_U8) refuse(fmt::format("{} is no type", type));
  return static_cast<DataType>(type);
}

ReduceOp op_of(int op) {
  if (op < LOCKSTEP_SUM || op > LOCKSTEP_PRODUCT) refuse(fmt::format("{} is no operation", op));
  return static_cast<ReduceOp>(op);
}

CallOptions options_of(const lockstep_call_options* given) {
  const auto known = known_part(given, "options of a call");
  CallOptions options;
  if (known.timeout_ms < 0) refuse("the timeout of a call is negative");
  if (known.timeout_ms > 0) {
    options.deadline = Deadline::after(std::chrono::milliseconds(known.timeout_ms));
  }
  options.check_finite = known.check_finite != 0;
  options.step = known.step;
  options.bucket = known.bucket;
  return options;
}

BufferView view(void* data, std::size_t count, int type) {
  if (count > 0) require(data, "memory of a collective");
  return {data, count, type_of(type)};
}

ConstBufferView view(const void* data, std::size_t count, int type) {
  if (count > 0) require(data, "memory of a collective");
  return {data, count, type_of(type)};
}

std::vector<std::size_t> counts_of(const lockstep_communicator* group, const size_t* counts) {
  if (counts == nullptr) return {};
  return {counts, counts + group->get().world_size()};
}

// Carries the call out, or starts it where the caller wants a handle.
template <typename MakeCall>
int carry_out(lockstep_communicator* group, lockstep_work** work, MakeCall&& make_call) {
  return guarded([&] {
    require(group, "the communicator");
    Communicator& communicator = group->get();
    Call call = make_call();
    if (work == nullptr) {
      communicator.run(std::move(call));
    } else {
      *work = nullptr;
      *work = new lockstep_work{communicator.start(std::move(call))};
    }
    return LOCKSTEP_OK;
  });
}

lockstep_communicator* handle_of(std::unique_ptr<Communicator> part) {
  if (part == nullptr) return nullptr;
  auto handle = std::make_unique<lockstep_communicator>();
  handle->owned = std::move(part);
  return handle.release();
}

}  // namespace
}  // namespace lockstep::c

namespace calls = lockstep::calls;
using lockstep::c::carry_out;
using lockstep::c::counts_of;
using lockstep::c::guarded;
using lockstep::c::handle_of;
using lockstep::c::op_of;
using lockstep::c::options_of;
using lockstep::c::refuse;
using lockstep::c::require;
using lockstep::c::view;
using lockstep::c::write_known_part;

lockstep::Communicator& lockstep_communicator::get() const {
  if (owned != nullptr) return *owned;
  if (job->newcomer()) refuse("a newcomer has no communicator until it has regrouped");
  return job->communicator();
}

int lockstep_communicator_rank(const lockstep_communicator* group) { return group->get().rank(); }

int lockstep_communicator_world_size(const lockstep_communicator* group) {
  return group->get().world_size();
}

int lockstep_communicator_name_of(const lockstep_communicator* group, int rank, char* name,
                                  size_t room) {
  return guarded([&] {
    require(group, "lockstep_communicator_name_of: group");
    require(name, "lockstep_communicator_name_of: name");
    const lockstep::Communicator& communicator = group->get();
    if (rank < 0 || rank >= communicator.world_size()) {
      throw lockstep::Error(
          lockstep::ErrorCode::kInvalidRank,
          fmt::format("rank {} is not in [0, {})", rank, communicator.world_size()));
    }
    if (room == 0) refuse("lockstep_communicator_name_of: no room");
    const std::string text = communicator.name_of(rank);
    const std::size_t bytes = std::min(text.size(), room - 1);
    std::memcpy(name, text.data(), bytes);
    name[bytes] = '\0';
    return LOCKSTEP_OK;
  });
}

int lockstep_communicator_split(lockstep_communicator* group, int color, int key,
                                lockstep_communicator** part) {
  return guarded([&] {
    require(group, "lockstep_communicator_split: group");
    require(part, "lockstep_communicator_split: part");
    *part = nullptr;
    *part = handle_of(group->get().split(color, key));
    return LOCKSTEP_OK;
  });
}

int lockstep_communicator_subgroup(lockstep_communicator* group, const int* members, size_t count,
                                   const char* label, lockstep_communicator** part) {
  return guarded([&] {
    require(group, "lockstep_communicator_subgroup: group");
    require(members, "lockstep_communicator_subgroup: members");
    require(label, "lockstep_communicator_subgroup: label");
    require(part, "lockstep_communicator_subgroup: part");
    *part = nullptr;
    *part = handle_of(group->get().subgroup({members, members + count}, label));
    return LOCKSTEP_OK;
  });
}

void lockstep_communicator_destroy(lockstep_communicator* group) {
  if (group != nullptr && group->owned != nullptr) delete group;
}

int lockstep_communicator_abort(lockstep_communicator* group, const char* reason) {
  return guarded([&] {
    require(group, "lockstep_communicator_abort: group");
    group->get().abort(lockstep::c::or_empty(reason));
    return LOCKSTEP_OK;
  });
}

int lockstep_communicator_check(const lockstep_communicator* group) {
  return guarded([&] {
    require(group, "lockstep_communicator_check: group");
    group->get().check();
    return LOCKSTEP_OK;
  });
}

int lockstep_buffer_create(lockstep_communicator* group, size_t bytes, lockstep_buffer** buffer) {
  return guarded([&] {
    require(group, "lockstep_buffer_create: group");
    require(buffer, "lockstep_buffer_create: buffer");
    *buffer = nullptr;
    *buffer = new lockstep_buffer{group->get().allocate(bytes)};
    return LOCKSTEP_OK;
  });
}

void* lockstep_buffer_data(lockstep_buffer* buffer) { return buffer->buffer.data(); }
void lockstep_buffer_destroy(lockstep_buffer* buffer) { delete buffer; }

size_t lockstep_type_size(int type) {
  if (type < LOCKSTEP_F32 || type > LOCKSTEP_U8) return 0;
  return lockstep::size_of(static_cast<lockstep::DataType>(type));
}

int lockstep_all_reduce(lockstep_communicator* group, void* data, size_t count, int type, int op,
                        const lockstep_call_options* options, lockstep_work** work) {
  return carry_out(group, work, [&] {
    return calls::all_reduce(view(data, count, type), op_of(op), options_of(options));
  });
}

int lockstep_reduce_scatter(lockstep_communicator* group, const void* in, size_t in_count,
                            void* out, size_t out_count, int type, int op, const size_t* counts,
                            const lockstep_call_options* options, lockstep_work** work) {
  return carry_out(group, work, [&] {
    return calls::reduce_scatter(view(in, in_count, type), view(out, out_count, type), op_of(op),
                                 counts_of(group, counts), options_of(options));
  });
}

int lockstep_all_gather(lockstep_communicator* group, const void* in, size_t in_count, void* out,
                        size_t out_count, int type, const size_t* counts,
                        const lockstep_call_options* options, lockstep_work** work) {
  return carry_out(group, work, [&] {
    return calls::all_gather(view(in, in_count, type), view(out, out_count, type),
                             counts_of(group, counts), options_of(options));
  });
}

int lockstep_broadcast(lockstep_communicator* group, void* data, size_t count, int type, int root,
                       const lockstep_call_options* options, lockstep_work** work) {
  return carry_out(group, work, [&] {
    return calls::broadcast(view(data, count, type), root, options_of(options));
  });
}

int lockstep_reduce(lockstep_communicator* group, const void* in, void* out, size_t count, int type,
                    int op, int root, const lockstep_call_options* options, lockstep_work** work) {
  return carry_out(group, work, [&] {
    const std::size_t out_count = group->get().rank() == root ? count : 0;
    return calls::reduce(view(in, count, type), view(out, out_count, type), op_of(op), root,
                         options_of(options));
  });
}

int lockstep_gather(lockstep_communicator* group, const void* in, size_t in_count, void* out,
                    size_t out_count, int type, int root, const size_t* counts,
                    const lockstep_call_options* options, lockstep_work** work) {
  return carry_out(group, work, [&] {
    const std::size_t used = group->get().rank() == root ? out_count : 0;
    return calls::gather(view(in, in_count, type), view(out, used, type), root,
                         counts_of(group, counts), options_of(options));
  });
}

int lockstep_scatter(lockstep_communicator* group, const void* in, size_t in_count, void* out,
                     size_t out_count, int type, int root, const size_t* counts,
                     const lockstep_call_options* options, lockstep_work** work) {
  return carry_out(group, work, [&] {
    const std::size_t used = group->get().rank() == root ? in_count : 0;
    return calls::scatter(view(in, used, type), view(out, out_count, type), root,
                          counts_of(group, counts), options_of(options));
  });
}

int lockstep_all_to_all(lockstep_communicator* group, const void* in, size_t in_count, void* out,
                        size_t out_count, int type, const size_t* send_counts,
                        const size_t* recv_counts, const lockstep_call_options* options,
                        lockstep_work** work) {
  return carry_out(group, work, [&] {
    return calls::all_to_all(view(in, in_count, type), view(out, out_count, type),
                             counts_of(group, send_counts), counts_of(group, recv_counts),
                             options_of(options));
  });
}

int lockstep_barrier(lockstep_communicator* group, const lockstep_call_options* options,
                     lockstep_work** work) {
  return carry_out(group, work, [&] { return calls::barrier(options_of(options)); });
}

int lockstep_send(lockstep_communicator* group, const void* data, size_t count, int type, int to,
                  uint32_t tag, const lockstep_call_options* options, lockstep_work** work) {
  return carry_out(group, work, [&] {
    return calls::send(view(data, count, type), to, tag, options_of(options));
  });
}

int lockstep_recv(lockstep_communicator* group, void* data, size_t count, int type, int from,
                  uint32_t tag, const lockstep_call_options* options, lockstep_work** work) {
  return carry_out(group, work, [&] {
    return calls::recv(view(data, count, type), from, tag, options_of(options));
  });
}

int lockstep_recv_any(lockstep_communicator* group, void* data, size_t count, int type,
                      uint32_t tag, const lockstep_call_options* options, lockstep_work** work) {
  return carry_out(group, work, [&] {
    return calls::recv_any(view(data, count, type), tag, options_of(options));
  });
}

int lockstep_reduce_nodes(lockstep_communicator* group, const void* const* partials,
                          size_t partial_count, uint32_t lanes, void* out, size_t count, int type,
                          const lockstep_call_options* options, lockstep_work** work) {
  return carry_out(group, work, [&] {
    if (partial_count > 0) require(partials, "lockstep_reduce_nodes: partials");
    std::vector<lockstep::ConstBufferView> views;
    for (std::size_t i = 0; i < partial_count; ++i) views.push_back(view(partials[i], count, type));
    return calls::reduce_nodes(
        std::move(views), lockstep::even_owners(lanes, group->get().world_size()),
        view(out, count, type), lockstep::ReduceOp::kSum, options_of(options));
  });
}

int lockstep_work_wait(lockstep_work* work, int64_t timeout_ms, lockstep_outcome* outcome) {
  return guarded([&]() -> int {
    require(work, "lockstep_work_wait: work");
    // Without a limit: the collective has its own, and so has all work before it.
    const auto limit = timeout_ms < 0 ? lockstep::Deadline::Clock::duration::max()
                                      : std::chrono::milliseconds(timeout_ms);
    const lockstep::Deadline deadline = lockstep::Deadline::after(limit);
    if (!work->work.wait_until(deadline)) return LOCKSTEP_NOT_YET;
    const lockstep::Outcome ended = work->work.wait(deadline);
    if (outcome == nullptr) return LOCKSTEP_OK;
    const int64_t first =
        ended.first_non_finite ? static_cast<int64_t>(*ended.first_non_finite) : -1;
    write_known_part(outcome, {0, first, ended.took.count(), ended.source},
                     "lockstep_work_wait: outcome");
    return LOCKSTEP_OK;
  });
}

int lockstep_work_done(const lockstep_work* work) { return work->work.done() ? 1 : 0; }
void lockstep_work_destroy(lockstep_work* work) { delete work; }
