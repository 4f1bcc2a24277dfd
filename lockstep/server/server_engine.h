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
#include "lockstep/net/job/job.h"
#include "lockstep/net/socket/address.h"
#include "lockstep/server/rank_client.h"
#include "lockstep/wire/mesh_frame.h"

namespace lockstep {

struct StarOptions {
  HostPort coordinator;
  // Which rank this is; -1: the coordinator gives one.
  int rank = -1;
  // 0: as many as the coordinator waits for.
  int world_size = 0;
  std::string job = "lockstep";
  std::string token;
  WireChoice wire = WireChoice::kSealed;
  // For joining. Afterwards the coordinator's own timeout counts.
  Deadline::Clock::duration timeout = std::chrono::seconds(30);
  // As in JobOptions.
  bool survives = false;
  std::uint32_t min_workers = 1;
  Deadline::Clock::duration patience{};
};

// Joins the job of a coordinator that serves ranks. Collective: returns when all are there.
JoinedJob join_star(const StarOptions& options);
// A generation of that job as a group.
//
// Sums over lanes (reduce_nodes of f32 and f64) are taken by the server. Everything else travels as
// bytes through it, to whom it concerns, and is combined there. Values that the server adds must be
// finite (Engine::finite_only): it ends the job on NaN, infinity and overflow, naming the rank.
// There are no sub-groups: split() throws Error{kInvalidArgument}.
std::unique_ptr<Communicator> connect_star(const StarOptions& options, const JoinedJob& job,
                                           std::shared_ptr<FlightRecorder> flight = nullptr);

// Collectives through a gradient server.
class ServerEngine final : public Engine {
 public:
  // `client` is the rank's connection for data.
  ServerEngine(JoinedJob job, std::unique_ptr<RankClient> client);

  int rank() const override { return rank_; }
  int world_size() const override { return job_.world_size(); }
  std::string name_of(int rank) const override {
    return lockstep::name_of(job_.roster[index_of(rank)]);
  }
  Supervisor& supervisor() override { return *job_.control; }
  Algorithm choose(const Call& call) const override;
  Outcome run(const Call& call, const MeshFrame& stamp, CollectiveStay& stay) override;
  std::unique_ptr<Engine> split(const std::vector<int>& members, std::uint32_t group) override;
  Buffer allocate(std::size_t bytes) override { return Buffer::heap(bytes); }
  bool finite_only() const override { return true; }
  int waits_for() const override { return client_->waits_for(); }
  void note_waits_in(WaitNote& waits) override { client_->note_waits_in(waits); }

 private:
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
  static BytesOut to(int rank, ConstBufferView bytes);
  static BytesIn from(int rank, BufferView bytes);

  const JoinedJob job_;
  const int rank_;
  const std::unique_ptr<RankClient> client_;
  std::size_t ahead_ = 0;  // bytes of calls since all ranks have last waited for each other
  Scratch scratch_;
};

}  // namespace lockstep
