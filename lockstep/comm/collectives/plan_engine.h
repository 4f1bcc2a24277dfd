#pragma once

#include <memory>

#include "lockstep/comm/collectives/algorithm_table.h"
#include "lockstep/comm/collectives/node_reduction.h"
#include "lockstep/comm/collectives/rails.h"
#include "lockstep/comm/collectives/round_runner.h"
#include "lockstep/comm/collectives/shared_collectives.h"
#include "lockstep/comm/collectives/two_level_collectives.h"
#include "lockstep/comm/engine.h"
#include "lockstep/comm/transport/transport.h"

namespace lockstep {

struct PlanOptions {
  // For tests, which make it small to reach the paths of large messages: what travels at once.
  // 0: the number of ranks decides.
  std::size_t segment_bytes = 0;
  // For tests: how many rails a reduction of any size has. 0: what the transport says.
  int rails = 0;
};

// Our own collectives over a Transport, through shared memory where the transport has it: between
// all ranks, or between those of a host.
class PlanEngine final : public Engine {
 public:
  // `group` is the number of the transport's group.
  explicit PlanEngine(std::unique_ptr<Transport> transport, PlanOptions options = {},
                      std::uint32_t group = 0);

  int rank() const override { return transport_->rank(); }
  int world_size() const override { return transport_->world_size(); }
  std::string name_of(int rank) const override { return transport_->name_of(rank); }
  int job_rank(int rank) const override { return transport_->job_rank(rank); }
  Supervisor& supervisor() override { return transport_->supervisor(); }
  Algorithm choose(const Call& call) const override;
  Outcome run(const Call& call, const MeshFrame& stamp, CollectiveStay& stay) override;
  std::optional<MeshFrame> next_frame(int peer, Deadline deadline) override {
    return transport_->next_frame(peer, deadline);
  }
  bool opened_by(int sender, std::uint32_t group) override {
    return transport_->opened_by(sender, group);
  }
  std::unique_ptr<Engine> split(const std::vector<int>& members, std::uint32_t group) override;
  bool split_waits() const override { return transport_->split_waits(); }
  Buffer allocate(std::size_t bytes) override;
  int waits_for() const override { return transport_->waits_for(); }
  void note_waits_in(WaitNote& waits) override;

 private:
  struct Running;  // a call with its stamp and deadline

  Outcome all_reduce(const Running& running);
  Outcome reduce_scatter(const Running& running);
  Outcome reduce(const Running& running);
  Outcome reduce_nodes(const Running& running);
  void all_gather(const Running& running);
  void broadcast(const Running& running);
  void scatter_or_gather(const Running& running);
  void all_to_all(const Running& running);
  void barrier(const Running& running);

  // Combines this rank's chunk of everybody's partials into `out`; where it is not finite, if
  // asked. With `gathered`, all chunks come there, too.
  std::optional<std::size_t> reduce_own_chunk(const Running& running, const TreeInputs& inputs,
                                              std::span<const std::byte* const> partials,
                                              std::span<const Range> chunks, std::byte* out,
                                              std::byte* gathered = nullptr);
  int rails_for(const Call& call) const;
  void gather_chunks(const Running& running, std::span<const Range> chunks, BufferView data);
  void run_plan(const Running& running, const Plan& plan, BufferView data);
  std::size_t segment_bytes() const;
  Sharing sharing() const;

  const std::unique_ptr<Transport> transport_;
  const PlanOptions options_;
  const TreeInputs ranks_;
  std::unique_ptr<SharedCollectives> shared_;       // null unless all ranks share memory
  std::unique_ptr<TwoLevelCollectives> two_level_;  // null unless those of some host do
  Scratch scratch_;
  Scratch temporary_;
  Rails rails_;
};

}  // namespace lockstep
