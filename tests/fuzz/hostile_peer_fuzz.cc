// An honest rank and a peer that sends the input: over a stream of messages, or through a ring in
// shared memory whose counters it writes as it likes. The rank ends with an Error or with a result.
#include <algorithm>
#include <memory>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/comm/collectives/plan_engine.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/transport/mesh_transport.h"
#include "lockstep/comm/transport/ring_stream.h"
#include "tests/fuzz/script.h"

using namespace lockstep;

namespace {

class Thrower final : public Supervisor {
 public:
  FailureLatch& latch() override { return latch_; }
  void fail(const Error& seen) override { throw Error(seen); }
  void abort(const std::string&) override {}
  ProgressBook& progress_book() override { return book_; }
  void look_around() override {}

 private:
  FailureLatch latch_;
  ProgressBook book_;
};

// Takes all that is written; what is read is the script, then the end. With every message it may
// put a frame that is right ahead of what the script says.
class ScriptStream final : public Stream {
 public:
  explicit ScriptStream(std::vector<std::byte> bytes) : bytes_(std::move(bytes)) {}

  std::size_t write_some(std::span<const std::byte> head,
                         std::span<const std::byte> body) override {
    // An honest peer is in the same collective: what we say first it says, too.
    if (head.size() == kMeshFrameBytes && !bytes_.empty() && bytes_.back() != std::byte{0}) {
      bytes_.insert(bytes_.begin() + static_cast<long>(at_), head.begin(), head.end());
      bytes_.back() = std::byte{0};
    }
    return head.size() + body.size();
  }
  std::size_t read_some(std::span<std::byte> head, std::span<std::byte> body) override {
    if (at_ == bytes_.size()) throw Error(ErrorCode::kChannelClosed, "it has left");
    std::size_t done = 0;
    for (const std::span<std::byte> part : {head, body}) {
      const std::size_t size = std::min(part.size(), bytes_.size() - at_);
      std::copy_n(bytes_.begin() + static_cast<long>(at_), size, part.begin());
      at_ += size;
      done += size;
    }
    return done;
  }
  bool prepare_wait(Direction, std::vector<pollfd>&) override { return false; }
  void finish_wait(Direction) override {}

 private:
  std::vector<std::byte> bytes_;
  std::size_t at_ = 0;
};

class OnePeer final : public Streams {
 public:
  OnePeer(std::vector<std::byte> bytes, Supervisor& supervisor)
      : stream_(std::move(bytes)), supervisor_(supervisor) {}
  Stream& to(int, Deadline) override { return stream_; }
  std::string name_of(int rank) const override { return "rank " + std::to_string(rank); }
  int job_rank(int rank) const override { return rank; }
  Supervisor& supervisor() override { return supervisor_; }
  std::unique_ptr<Streams> split(const std::vector<int>&, int, std::uint32_t) override {
    return {};
  }
  SharedSpace* shared_space() override { return nullptr; }
  bool oversubscribed() const override { return true; }
  bool spare_cores() const override { return false; }

 private:
  ScriptStream stream_;
  Supervisor& supervisor_;
};

void meet_on_a_mesh(fuzz::Script& script) {
  const std::uint8_t collective = script.byte() % 4;
  std::vector<float> data(1 + script.byte() % 64, 1.0F);
  Thrower supervisor;
  auto streams = std::make_unique<OnePeer>(script.bytes(SIZE_MAX), supervisor);
  Communicator communicator(
      std::make_unique<PlanEngine>(std::make_unique<MeshTransport>(0, 2, 1, 0, std::move(streams))),
      std::chrono::seconds(2));
  try {
    switch (collective) {
      case 0: communicator.all_reduce(std::span(data), ReduceOp::kSum); break;
      case 1: communicator.broadcast(std::span(data), 1); break;
      case 2: communicator.barrier(); break;
      default: {
        std::vector<float> all(2 * data.size());
        communicator.all_gather(std::span<const float>(data), std::span(all));
      }
    }
  } catch (const Error&) {
  }
}

void meet_in_a_ring(fuzz::Script& script) {
  static const auto memory = std::make_shared<RingPair>();
  static const auto up = make_ring_bells();
  static const auto down = make_ring_bells();
  for (ByteRing& ring : memory->rings) {
    ring.written = ring.read = 0;
    ring.closed = 0;
  }
  RingStream honest(memory, 0, up, down);
  std::vector<std::byte> place(600'000);
  while (!script.ended()) {
    ByteRing& ring = memory->rings[script.byte() % 2];
    const std::uint64_t number = script.number(1 + script.byte() % 8);
    try {
      switch (script.byte() % 5) {
        case 0: ring.written = number; break;
        case 1: ring.read = number; break;
        case 2: ring.closed = number % 2; break;
        case 3:
          honest.write_some(std::span(place).first(64),
                            std::span(place).first(number % place.size()));
          break;
        default:
          honest.read_some(std::span(place).first(64),
                           std::span(place).subspan(64, number % 500'000));
          break;
      }
    } catch (const Error&) {
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Script script(data, std::min<std::size_t>(size, 5000));
  if (script.byte() % 2 == 0) {
    meet_on_a_mesh(script);
  } else {
    meet_in_a_ring(script);
  }
  return 0;
}
