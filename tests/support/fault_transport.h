#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/transport/shared_space.h"
#include "lockstep/comm/transport/transport.h"

namespace lockstep::test {

// Where inside a collective a fault happens.
enum class FaultPoint {
  kHalfway,  // half of a round's bytes have moved; after the first round if they are none
  kShowing,  // shared memory: about to show its memory to the others, or a copy
  kLocated,  // shared memory: everybody has entered, nobody has the result yet
  kWaiting,  // shared memory: inside, with nothing to do until a peer comes
};

// A transport that does as another does. Once armed, it calls `fault` at the given point of the
// next collective, on the thread that runs it, and no more. So does a group that is split from it.
class FaultTransport final : public Transport {
 public:
  FaultTransport(std::unique_ptr<Transport> inner, FaultPoint point, std::function<void()> fault);
  ~FaultTransport() override;

  void arm() { *armed_ = true; }

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  std::string name_of(int rank) const override { return inner_->name_of(rank); }
  int job_rank(int rank) const override { return inner_->job_rank(rank); }
  Supervisor& supervisor() override;
  SharedSpace* shared_space() override;
  std::vector<int> hosts() const override { return inner_->hosts(); }
  bool oversubscribed() const override { return inner_->oversubscribed(); }
  bool crowded() const override { return inner_->crowded(); }
  int rails() const override { return inner_->rails(); }
  void note_waits_in(WaitNote& waits) override {
    inner_->note_waits_in(waits);
    Transport::note_waits_in(waits);
  }
  int waits_for() const override { return std::max(inner_->waits_for(), Transport::waits_for()); }
  void run(std::span<Transfer> transfers, const MeshFrame& stamp, TransferObserver* observer,
           Deadline deadline) override;
  bool run_if_begun(Transfer& receive, const MeshFrame& stamp, Deadline begin,
                    Deadline deadline) override {
    return inner_->run_if_begun(receive, stamp, begin, deadline);
  }
  std::optional<MeshFrame> next_frame(int peer, Deadline deadline) override {
    return inner_->next_frame(peer, deadline);
  }
  bool opened_by(int sender, std::uint32_t group) override {
    return inner_->opened_by(sender, group);
  }
  std::unique_ptr<Transport> split(const std::vector<int>& members, std::uint32_t group) override {
    return std::unique_ptr<Transport>(
        new FaultTransport(inner_->split(members, group), point_, fault_, armed_));
  }

 private:
  class Space;
  class Watch;
  class Meter;

  FaultTransport(std::unique_ptr<Transport> inner, FaultPoint point, std::function<void()> fault,
                 std::shared_ptr<bool> armed);
  void reach(FaultPoint point);

  const std::unique_ptr<Transport> inner_;
  const FaultPoint point_;
  const std::function<void()> fault_;
  const std::shared_ptr<bool> armed_;  // of all groups that are split from this one, too
  std::unique_ptr<Space> space_;       // null without shared memory
  std::unique_ptr<Watch> watch_;
};

}  // namespace lockstep::test
