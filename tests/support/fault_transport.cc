#include "tests/support/fault_transport.h"

#include <utility>

namespace lockstep::test {

// Peers' memory is looked up once everybody has entered.
class FaultTransport::Space final : public SharedSpace {
 public:
  Space(FaultTransport& owner, SharedSpace& inner) : owner_(owner), inner_(inner) {}

  void connect(Deadline deadline) override { inner_.connect(deadline); }
  Board& board(int rank) override { return inner_.board(rank); }
  std::optional<std::uint64_t> publish(const std::byte* data, std::size_t bytes) const override {
    owner_.reach(FaultPoint::kShowing);
    return inner_.publish(data, bytes);
  }
  std::byte* locate(int rank, std::uint64_t published, std::size_t bytes) const override {
    owner_.reach(FaultPoint::kLocated);
    return inner_.locate(rank, published, bytes);
  }
  Buffer allocate(std::size_t bytes) override { return inner_.allocate(bytes); }

 private:
  FaultTransport& owner_;
  SharedSpace& inner_;
};

// Waiting ranks look around.
class FaultTransport::Watch final : public Supervisor {
 public:
  Watch(FaultTransport& owner, Supervisor& inner) : owner_(owner), inner_(inner) {}

  FailureLatch& latch() override { return inner_.latch(); }
  void fail(const Error& seen) override { inner_.fail(seen); }
  void abort(const std::string& reason) override { inner_.abort(reason); }
  ProgressBook& progress_book() override { return inner_.progress_book(); }
  void look_around() override {
    owner_.reach(FaultPoint::kWaiting);
    inner_.look_around();
  }

 private:
  FaultTransport& owner_;
  Supervisor& inner_;
};

class FaultTransport::Meter final : public TransferObserver {
 public:
  Meter(FaultTransport& owner, std::span<const Transfer> transfers, TransferObserver* inner)
      : owner_(owner), transfers_(transfers), inner_(inner) {
    for (const Transfer& transfer : transfers) total_ += transfer.layout.bytes();
  }

  std::size_t total() const { return total_; }
  bool watches_sends() const override { return true; }
  void advanced(Transfer& transfer) override {
    if (inner_ != nullptr) inner_->advanced(transfer);
    std::size_t done = 0;
    for (const Transfer& each : transfers_) done += each.done;
    if (2 * done >= total_) owner_.reach(FaultPoint::kHalfway);
  }

 private:
  FaultTransport& owner_;
  const std::span<const Transfer> transfers_;
  TransferObserver* const inner_;
  std::size_t total_ = 0;
};

FaultTransport::FaultTransport(std::unique_ptr<Transport> inner, FaultPoint point,
                               std::function<void()> fault)
    : FaultTransport(std::move(inner), point, std::move(fault), std::make_shared<bool>(false)) {}

FaultTransport::FaultTransport(std::unique_ptr<Transport> inner, FaultPoint point,
                               std::function<void()> fault, std::shared_ptr<bool> armed)
    : ForwardingTransport(std::move(inner)),
      point_(point),
      fault_(std::move(fault)),
      armed_(std::move(armed)),
      watch_(std::make_unique<Watch>(*this, inner_->supervisor())) {
  if (SharedSpace* space = inner_->shared_space()) space_ = std::make_unique<Space>(*this, *space);
}

FaultTransport::~FaultTransport() = default;

Supervisor& FaultTransport::supervisor() { return *watch_; }

SharedSpace* FaultTransport::shared_space() { return space_.get(); }

void FaultTransport::run(std::span<Transfer> transfers, const MeshFrame& stamp,
                         TransferObserver* observer, Deadline deadline) {
  if (!*armed_ || point_ != FaultPoint::kHalfway) {
    return inner_->run(transfers, stamp, observer, deadline);
  }
  Meter meter(*this, transfers, observer);
  inner_->run(transfers, stamp, &meter, deadline);
  if (meter.total() == 0) reach(FaultPoint::kHalfway);
}

void FaultTransport::reach(FaultPoint point) {
  if (point == point_ && std::exchange(*armed_, false)) fault_();
}

}  // namespace lockstep::test
