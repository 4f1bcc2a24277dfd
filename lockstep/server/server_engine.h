#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/index.h"
#include "lockstep/comm/call.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/engine.h"
#include "lockstep/comm/scratch.h"
#include "lockstep/server/worker_client.h"
#include "lockstep/wire/mesh_frame.h"

namespace lockstep {

struct StarOptions {
  WorkerOptions worker;
  // Which rank this worker is; -1: whichever is left when the others have theirs, in the order of
  // joining.
  int rank = -1;
  // 0: as many as the coordinator waits for.
  int world_size = 0;
};

// Joins a gradient server in mode lanes and returns its workers as a group of ranks. Collective:
// returns when all are there. Leave in good order with Communicator::leave().
//
// Sums over lanes (reduce_nodes of f32 and f64) are taken by the server. Everything else travels as
// bytes through it, to whom it concerns, and is combined there. Values that the server adds must be
// finite (Engine::finite_only): it ends the job on NaN, infinity and overflow, naming the worker.
// There are no sub-groups: split() throws Error{kInvalidArgument}.
std::unique_ptr<Communicator> join_star(const StarOptions& options);
// The same over one of the ends of a LocalStar.
std::unique_ptr<Communicator> join_star(Socket end, const StarOptions& options);

// Tells the server what goes wrong in this worker; the server tells the others. Thread-safe.
class ServerSupervisor final : public Supervisor {
 public:
  explicit ServerSupervisor(WorkerClient& client);

  void set_name(std::string name, int rank);

  FailureLatch& latch() override { return latch_; }
  [[noreturn]] void fail(const Error& seen) override;
  void abort(const std::string& reason) override;
  ProgressBook& progress_book() override { return book_; }
  void look_around() override {}

 private:
  WorkerClient& client_;
  FailureLatch latch_;
  ProgressBook book_;
  // Constant once the group is there.
  std::string name_;
  int rank_ = -1;
};

// Collectives through a gradient server.
class ServerEngine final : public Engine {
 public:
  ServerEngine(std::unique_ptr<WorkerClient> client, const StarOptions& options);

  int rank() const override { return rank_; }
  int world_size() const override { return client_->total_workers(); }
  std::string name_of(int rank) const override { return names_[index_of(rank)]; }
  Supervisor& supervisor() override { return supervisor_; }
  Algorithm choose(const Call& call) const override;
  Outcome run(const Call& call, const MeshFrame& stamp, Deadline deadline) override;
  std::unique_ptr<Engine> split(const std::vector<int>& members, std::uint32_t group) override;
  Buffer allocate(std::size_t bytes) override { return Buffer::heap(bytes); }
  bool finite_only() const override { return true; }
  void leave(Deadline deadline) override;

  std::chrono::nanoseconds timeout() const { return client_->settings()->timeout; }

 private:
  // Learns the ranks and names of all workers.
  void introduce(const StarOptions& options);
  void assign_ranks(const std::vector<std::int32_t>& wanted);
  // Runs `body`, whose errors end the job.
  template <typename Body>
  void guarded(const MeshFrame& stamp, Deadline deadline, Body&& body);
  Error in_ranks(const Error& error, const MeshFrame& stamp) const;

  // One sum over `lanes`, into `sum`. Returns the sum of the tails, of `numbers` each.
  std::vector<double> add_up(std::size_t lanes, std::span<const LanePartial> partials,
                             std::size_t numbers, std::span<float> sum);
  // Waits until all ranks are in this collective: an empty sum, to which every rank brings a lane.
  void meet();
  // Where only some ranks wait for others, they may get ahead by so many bytes of calls.
  void count_ahead(std::size_t bytes);

  void reduce_nodes(const Call& call);
  void sum_nodes_f32(const Call& call, std::span<float> sum);
  void sum_nodes_f64(const Call& call, std::span<double> sum);
  // Reductions that the server does not take: ranks send their partials to each other. `partials`
  // are those of this rank's nodes, in order; rank r gets the elements wanted[r] of the result.
  void reduce_here(const Call& call, const LeafOwners& owners,
                   std::span<const std::byte* const> partials, const std::vector<Range>& wanted);
  void reduce_ranks(const Call& call);
  void broadcast(const Call& call);
  void gather(const Call& call);
  void scatter(const Call& call);
  void all_to_all(const Call& call);
  // As the server numbers the ranks.
  int worker_of(int rank) const { return worker_of_rank_[index_of(rank)]; }
  BytesOut to(int rank, ConstBufferView bytes) const;
  BytesIn from(int rank, BufferView bytes) const;

  const std::unique_ptr<WorkerClient> client_;
  ServerSupervisor supervisor_;
  // Constant once the group is there.
  int rank_ = -1;
  std::vector<std::string> names_;   // by rank
  std::vector<int> rank_of_worker_;  // as the server numbers them
  std::vector<int> worker_of_rank_;

  std::uint64_t next_step_ = 0;
  std::size_t ahead_ = 0;  // bytes of calls since all ranks have last waited for each other
  bool left_ = false;
  Scratch scratch_;
};

}  // namespace lockstep
