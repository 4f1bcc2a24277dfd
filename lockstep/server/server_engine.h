#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/index.h"
#include "lockstep/comm/collectives/node_exchange.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/engine.h"
#include "lockstep/server/round_control.h"
#include "lockstep/server/worker_client.h"

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
// Sums over lanes (reduce_nodes of f32 and f64) are taken by the server; everything else travels as
// bytes through it, to everybody, and is for small things. Values that the server adds must be
// finite (Engine::finite_only): it ends the job on NaN, infinity and overflow, naming the worker.
// There are no sub-groups: split() throws Error{kInvalidArgument}.
std::unique_ptr<Communicator> join_star(const StarOptions& options);
// The same over an end of a LocalStar.
std::unique_ptr<Communicator> join_star(Socket end, const StarOptions& options);

// Tells the server what goes wrong here; it tells the others.
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

// Collectives as rounds of a gradient server. server_engine.cc runs rounds, server_collectives.cc
// says which.
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
  // A call under way.
  struct Running {
    const Call& call;
    const MeshFrame& stamp;
    RoundControl control;

    DataType type() const { return call.out.type(); }
    std::size_t element() const { return size_of(type()); }
  };
  // What this rank brings to a round: a node of the tree, its elements, and numbers for the tail.
  struct Part {
    Range node;
    std::span<const float> data;
    std::vector<double> numbers;
  };

  // Learns the ranks and names of all workers.
  void introduce(const StarOptions& options);
  void assign_ranks(const std::vector<std::int32_t>& wanted);
  // Runs `body`, whose errors end the job.
  template <typename Body>
  void guarded(const MeshFrame& stamp, Deadline deadline, Body&& body);
  Error in_ranks(const Error& error, const MeshFrame& stamp) const;

  // One round: the sum over `lanes` of everybody's data, into `sum`; returns that of the numbers,
  // `numbers` of them.
  std::vector<double> round(const RoundControl& control, std::uint32_t lanes,
                            std::span<const Part> parts, std::size_t numbers, std::span<float> sum);
  // A round to which every rank brings its stamp and nothing else. Fails if they differ.
  void agree(const Running& running);
  void check_agreement(const Running& running, std::span<const double> sums);
  [[noreturn]] void explain_difference(const Running& running);
  // The bytes of one rank to all others. Null where this rank has no use for them.
  void spread(const RoundControl& control, int from, std::byte* bytes, std::size_t size);

  void reduce_nodes(const Running& running);
  void sum_nodes_f32(const Running& running, std::span<float> sum);
  void sum_nodes_f64(const Running& running, std::span<double> sum);
  // Combines everybody's rows here; `out` gets the elements of `piece`.
  void reduce_rows(const Running& running, const TreeInputs& inputs,
                   std::span<const std::byte* const> rows, Range piece, std::byte* out);
  void reduce_ranks(const Running& running);
  void gather(const Running& running);
  void scatter(const Running& running);
  void all_to_all(const Running& running);

  const std::unique_ptr<WorkerClient> client_;
  ServerSupervisor supervisor_;
  // Constant once the group is there.
  int rank_ = -1;
  std::vector<std::string> names_;   // by rank
  std::vector<int> rank_of_worker_;  // as the server numbers them

  std::uint64_t next_step_ = 0;
  bool left_ = false;
  std::vector<float> values_;
  Scratch scratch_;
};

}  // namespace lockstep
