#include <algorithm>
#include <cstring>

#include "lockstep/comm/kernels/kernels.h"
#include "lockstep/comm/mpi/engine.h"
#include "lockstep/comm/mpi/types.h"

namespace lockstep {
namespace {

bool overlap(ConstBufferView a, ConstBufferView b) {
  return a.data() < b.data() + b.bytes() && b.data() < a.data() + a.bytes();
}

std::vector<Range> whole(std::size_t count) { return {{0, count}}; }

// One after another: MPI's part of the sum follows no order either.
void fold(const Call& call, std::byte* out) {
  const DataType type = call.out.type();
  if (call.partials.empty()) return fill_neutral(call.op, type, out, call.total);
  std::vector<const void*> inputs;
  std::vector<CombineStep> program;
  for (const ConstBufferView& partial : call.partials) {
    inputs.push_back(partial.data());
    program.push_back({.push = true});
    if (inputs.size() > 1) program.push_back({.push = false});
  }
  // The mean comes at the very end.
  const ReduceOp op = call.op == ReduceOp::kMean ? ReduceOp::kSum : call.op;
  void* const output = out;
  reduce_tree({op, type, program}, inputs, {&output, 1}, call.total);
}

void finish(const Call& call, int mean_of) {
  if (call.op != ReduceOp::kMean) return;
  finish_mean(call.out.type(), call.out.data(), call.out.count(), mean_of);
}

}  // namespace

void MpiEngine::all_reduce(const Running& running) {
  const Call& call = running.call;
  in_parts(running, "MPI_Iallreduce", call.total,
           [&](std::size_t begin, int count, MPI_Request* request) {
             return MPI_Iallreduce(MPI_IN_PLACE, call.out.data() + begin * running.element(), count,
                                   mpi_type(running.type()), mpi_op(call.op, running.type()),
                                   group_->comm(), request);
           });
  if (call.owners.empty()) finish(call, world_size());
}

void MpiEngine::reduce(const Running& running) {
  const Call& call = running.call;
  const bool at_root = rank() == call.root;
  const bool in_place = at_root && call.in.data() == call.out.data();
  in_parts(running, "MPI_Ireduce", call.total,
           [&](std::size_t begin, int count, MPI_Request* request) {
             const std::size_t offset = begin * running.element();
             return MPI_Ireduce(in_place ? MPI_IN_PLACE : call.in.data() + offset,
                                at_root ? call.out.data() + offset : nullptr, count,
                                mpi_type(running.type()), mpi_op(call.op, running.type()),
                                call.root, group_->comm(), request);
           });
  if (at_root) finish(call, world_size());
}

void MpiEngine::reduce_scatter(const Running& running, ConstBufferView in) {
  const Call& call = running.call;
  if (overlap(in, call.out)) {
    std::byte* copy = vector_.get(in.bytes());
    std::memcpy(copy, in.data(), in.bytes());
    in = {copy, in.count(), in.type()};
  }
  MpiSlices sent(in.data(), chunks_of(call.counts, call.total, world_size()), running.element());
  MpiSlices received(call.out.data(), whole(call.out.count()), running.element());
  in_rounds(running, "MPI_Ireduce_scatter", sent, received, [&](bool, MPI_Request* request) {
    return MPI_Ireduce_scatter(sent.data(), received.data(), sent.counts(),
                               mpi_type(running.type()), mpi_op(call.op, running.type()),
                               group_->comm(), request);
  });
  if (call.owners.empty()) finish(call, world_size());
}

void MpiEngine::reduce_nodes(const Running& running) {
  const Call& call = running.call;
  if (call.collective == Collective::kReduceNodes) {
    fold(call, call.out.data());
    all_reduce(running);
  } else {
    std::byte* sum = vector_.get(call.total * running.element());
    fold(call, sum);
    reduce_scatter(running, {sum, call.total, running.type()});
  }
  finish(call, static_cast<int>(call.owners.size()));
}

void MpiEngine::broadcast(const Running& running) {
  const Call& call = running.call;
  in_parts(running, "MPI_Ibcast", call.total,
           [&](std::size_t begin, int count, MPI_Request* request) {
             return MPI_Ibcast(call.out.data() + begin * running.element(), count,
                               mpi_type(running.type()), call.root, group_->comm(), request);
           });
}

void MpiEngine::all_gather(const Running& running) {
  const Call& call = running.call;
  MpiSlices sent(call.in.data(), whole(call.in.count()), running.element());
  MpiSlices received(call.out.data(), chunks_of(call.counts, call.total, world_size()),
                     running.element());
  in_rounds(running, "MPI_Iallgatherv", sent, received, [&](bool all, MPI_Request* request) {
    const bool in_place = all && overlap(call.in, call.out);
    return MPI_Iallgatherv(in_place ? MPI_IN_PLACE : sent.data(), sent.counts()[0],
                           mpi_type(running.type()), received.data(), received.counts(),
                           received.displacements(), mpi_type(running.type()), group_->comm(),
                           request);
  });
}

void MpiEngine::gather(const Running& running) {
  const Call& call = running.call;
  const bool at_root = rank() == call.root;
  MpiSlices sent(call.in.data(), whole(call.in.count()), running.element());
  MpiSlices received(
      call.out.data(),
      at_root ? chunks_of(call.counts, call.total, world_size()) : std::vector<Range>{},
      running.element());
  in_rounds(running, "MPI_Igatherv", sent, received, [&](bool all, MPI_Request* request) {
    const bool in_place = all && at_root && overlap(call.in, call.out);
    return MPI_Igatherv(in_place ? MPI_IN_PLACE : sent.data(), sent.counts()[0],
                        mpi_type(running.type()), received.data(), received.counts(),
                        received.displacements(), mpi_type(running.type()), call.root,
                        group_->comm(), request);
  });
}

void MpiEngine::scatter(const Running& running) {
  const Call& call = running.call;
  const bool at_root = rank() == call.root;
  MpiSlices sent(call.in.data(),
                 at_root ? chunks_of(call.counts, call.total, world_size()) : std::vector<Range>{},
                 running.element());
  MpiSlices received(call.out.data(), whole(call.out.count()), running.element());
  in_rounds(running, "MPI_Iscatterv", sent, received, [&](bool all, MPI_Request* request) {
    const bool in_place = all && at_root && overlap(call.in, call.out);
    return MPI_Iscatterv(sent.data(), sent.counts(), sent.displacements(), mpi_type(running.type()),
                         in_place ? MPI_IN_PLACE : received.data(), received.counts()[0],
                         mpi_type(running.type()), call.root, group_->comm(), request);
  });
}

void MpiEngine::all_to_all(const Running& running) {
  const Call& call = running.call;
  compare_counts(running);
  MpiSlices sent(call.in.data(), chunks_of(call.counts, call.in.count(), world_size()),
                 running.element());
  MpiSlices received(call.out.data(), chunks_of(call.recv_counts, call.out.count(), world_size()),
                     running.element());
  in_rounds(running, "MPI_Ialltoallv", sent, received, [&](bool, MPI_Request* request) {
    return MPI_Ialltoallv(sent.data(), sent.counts(), sent.displacements(),
                          mpi_type(running.type()), received.data(), received.counts(),
                          received.displacements(), mpi_type(running.type()), group_->comm(),
                          request);
  });
}

}  // namespace lockstep
