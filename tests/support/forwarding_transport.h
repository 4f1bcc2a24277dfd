#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/transport/transport.h"

namespace lockstep::test {

// A transport that does all as another does: a base for those that do one thing differently.
class ForwardingTransport : public Transport {
 public:
  explicit ForwardingTransport(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  std::string name_of(int rank) const override { return inner_->name_of(rank); }
  int job_rank(int rank) const override { return inner_->job_rank(rank); }
  Supervisor& supervisor() override { return inner_->supervisor(); }
  SharedSpace* shared_space() override { return inner_->shared_space(); }
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
           Deadline deadline) override {
    inner_->run(transfers, stamp, observer, deadline);
  }
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
    return inner_->split(members, group);
  }

 protected:
  const std::unique_ptr<Transport> inner_;
};

}  // namespace lockstep::test
