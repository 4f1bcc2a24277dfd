#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "lockstep/comm/transport/shared_space.h"
#include "tests/support/forwarding_transport.h"

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
class FaultTransport final : public ForwardingTransport {
 public:
  FaultTransport(std::unique_ptr<Transport> inner, FaultPoint point, std::function<void()> fault);
  ~FaultTransport() override;

  void arm() { *armed_ = true; }

  Supervisor& supervisor() override;
  SharedSpace* shared_space() override;
  void run(std::span<Transfer> transfers, const MeshFrame& stamp, TransferObserver* observer,
           Deadline deadline) override;
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

  const FaultPoint point_;
  const std::function<void()> fault_;
  const std::shared_ptr<bool> armed_;  // of all groups that are split from this one, too
  std::unique_ptr<Space> space_;       // null without shared memory
  std::unique_ptr<Watch> watch_;
};

}  // namespace lockstep::test
