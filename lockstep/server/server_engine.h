#pragma once

#include <array>
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
// Sums over lanes (reduce_nodes of f32 and f64) are taken by the server; everything else travels as
// bytes through it, to everybody, and is for small things. Values that the server adds must be
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

// The numbers ahead of the tail of every round that a ServerEngine runs. The server adds them like
// any others; their sums tell whether the job ends, and whether all ranks are in the same call.
class RoundControl {
 public:
  // Whether this is the job's last round. It is the tail's first number (docs/wire_protocol.md).
  static constexpr std::size_t kLast = 0;
  static constexpr std::size_t kNumbers = 8;

  RoundControl(const MeshFrame& stamp, bool last);

  // What this rank brings, once per round.
  const std::array<double, kNumbers>& numbers() const { return numbers_; }
  // Whether all ranks that brought theirs have the stamp of this one.
  bool agrees(std::span<const double> sums) const;

 private:
  std::array<double, kNumbers> numbers_{};
};

// Collectives as rounds of a gradient server.
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

  // Learns the ranks and names of all workers.
  void introduce(const StarOptions& options);
  void assign_ranks(const std::vector<std::int32_t>& wanted);
  // Runs `body`, whose errors end the job.
  template <typename Body>
  void guarded(const MeshFrame& stamp, Deadline deadline, Body&& body);
  Error in_ranks(const Error& error, const MeshFrame& stamp) const;

  // One round: the sum over `lanes` of everybody's data, into `sum`. Returns the sum of the tails,
  // of `numbers` each, behind that of the RoundControl.
  std::vector<double> round(const RoundControl& control, std::uint32_t lanes,
                            std::span<const LanePartial> partials, std::size_t numbers,
                            std::span<float> sum);
  // A round to which every rank brings its stamp and nothing else. Fails if they differ.
  void agree(const Running& running);
  void check_agreement(const Running& running, std::span<const double> sums);
  [[noreturn]] void explain_difference(const Running& running);
  // The bytes of one rank to all others. Null where this rank has no use for them.
  void spread(const RoundControl& control, int from, std::byte* bytes, std::size_t size);

  void reduce_nodes(const Running& running);
  void sum_nodes_f32(const Running& running, std::span<float> sum);
  void sum_nodes_f64(const Running& running, std::span<double> sum);
  // Combines everybody's partials here. `partials` are those of this rank's nodes, in order; `out`,
  // unless null, gets the elements of `chunk`.
  void reduce_partials(const Running& running, const LeafOwners& owners,
                       std::span<const std::byte* const> partials, Range chunk, std::byte* out);
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
