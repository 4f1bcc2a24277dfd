// An honest rank and a peer that does as the input says: over a stream of messages, through a ring
// in shared memory whose counters it writes as it likes, or in collectives through shared memory,
// with a board of its own. The rank ends with an Error or with a result.
#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/comm/collectives/plan_engine.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/flight_recorder.h"
#include "lockstep/comm/transport/mesh_transport.h"
#include "lockstep/comm/transport/ring_stream.h"
#include "tests/fuzz/script.h"

using namespace lockstep;

namespace {

// To map its memory for every input would take most of the time.
std::shared_ptr<FlightRecorder> shared_recorder() {
  static const auto recorder = std::make_shared<FlightRecorder>();
  return recorder;
}

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
      std::chrono::seconds(2), 0, shared_recorder());
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

// The memory of two ranks. Whenever rank 0 has waited for a while, rank 1 does what comes next in
// the script; when that has ended, so has the job.
class HostileSpace final : public SharedSpace {
 public:
  HostileSpace(fuzz::Script& script, FailureLatch& latch) : script_(script), latch_(latch) {
    for (Board& board : boards()) {
      for (Board::Entry& entry : board.entries) entry.sequence = 0;
      board.staged = board.finished = 0;
      board.sleepers = board.bell = board.inside = 0;
    }
  }
  void connect(Deadline) override {}
  Board& board(int rank) override { return boards()[rank]; }
  std::optional<std::uint64_t> publish(const std::byte* data, std::size_t bytes) const override {
    const std::span<std::byte> own = arena(0);
    if (data < own.data() || data + bytes > own.data() + own.size()) return std::nullopt;
    return static_cast<std::uint64_t>(data - own.data());
  }
  std::byte* locate(int rank, std::uint64_t published, std::size_t bytes) const override {
    const std::span<std::byte> theirs = arena(rank);
    if (published > theirs.size() || bytes > theirs.size() - published) return nullptr;
    return theirs.data() + published;
  }
  Buffer allocate(std::size_t bytes) override { return Buffer::heap(bytes); }
  static std::span<std::byte> arena(int rank) {
    static std::array<std::vector<std::byte>, 2> memory{std::vector<std::byte>(kArenaBytes),
                                                        std::vector<std::byte>(kArenaBytes)};
    return memory[static_cast<std::size_t>(rank)];
  }

  // Up to something that looks honest: rank 0 would sleep after anything else.
  void act() {
    for (bool honest = false; !honest && !script_.ended();) {
      const std::uint8_t what = script_.byte();
      honest = what % 16 >= 8;
      if (honest) look_honest();
      write(what);
    }
    if (!script_.ended()) return;
    look_honest();
    latch_.trip(Error(ErrorCode::kPeerLost, "it has left"));
  }

 private:
  static constexpr std::size_t kArenaBytes = 200'000;
  static std::span<Board> boards() {
    static const auto memory = std::make_unique<Board[]>(2);
    return {memory.get(), 2};
  }

  // In the same collective as rank 0, and as far.
  static void look_honest() {
    const Board& own = boards()[0];
    Board& theirs = boards()[1];
    for (std::size_t i = 0; i < 2; ++i) {
      theirs.entries[i].digest = own.entries[i].digest;
      theirs.stamps[i] = own.stamps[i];
      theirs.first_non_finite[i] = UINT64_MAX;
      theirs.entries[i].sequence = own.entries[i].sequence.load();
    }
    theirs.staged = own.staged.load();
    theirs.finished = own.finished.load();
  }

  void write(std::uint8_t what) {
    Board& theirs = boards()[1];
    const std::size_t parity = what / 16 % 2;
    switch (what % 8) {
      case 0: theirs.entries[parity].sequence = script_.number(1 + script_.byte() % 8); break;
      case 1: theirs.entries[parity].digest = script_.number(8); break;
      case 2: {
        const auto bytes = script_.bytes(sizeof(MeshFrame));
        std::ranges::copy(bytes, reinterpret_cast<std::byte*>(&theirs.stamps[parity]));
        break;
      }
      case 3: theirs.staged = script_.number(1 + script_.byte() % 8); break;
      case 4: theirs.finished = script_.number(1 + script_.byte() % 8); break;
      case 5: theirs.first_non_finite[parity] = script_.number(8); break;
      case 6: {
        const auto bytes = script_.bytes(script_.byte());
        std::ranges::copy(bytes, theirs.entries[parity].data);
        break;
      }
      default: theirs.bell += 1; break;
    }
  }

  fuzz::Script& script_;
  FailureLatch& latch_;
};

class SharingPeer final : public Streams {
 public:
  SharingPeer(HostileSpace& space, Supervisor& supervisor)
      : space_(space), supervisor_(supervisor) {}
  Stream& to(int, Deadline) override { throw Error(ErrorCode::kPeerLost, "it has no stream"); }
  std::string name_of(int rank) const override { return "rank " + std::to_string(rank); }
  // Is asked by who has waited for a while.
  int job_rank(int rank) const override {
    if (rank == 1) space_.act();
    return rank;
  }
  Supervisor& supervisor() override { return supervisor_; }
  std::unique_ptr<Streams> split(const std::vector<int>&, int, std::uint32_t) override {
    return {};
  }
  SharedSpace* shared_space() override { return &space_; }
  bool oversubscribed() const override { return false; }
  bool spare_cores() const override { return false; }

 private:
  HostileSpace& space_;
  Supervisor& supervisor_;
};

void meet_in_shared_memory(fuzz::Script& script) {
  constexpr std::size_t kLarge = 20'000;  // elements: too many for an entry
  Thrower supervisor;
  HostileSpace space(script, supervisor.latch());
  auto streams = std::make_unique<SharingPeer>(space, supervisor);
  Communicator communicator(
      std::make_unique<PlanEngine>(std::make_unique<MeshTransport>(0, 2, 1, 0, std::move(streams))),
      std::chrono::seconds(5), 0, shared_recorder());
  static std::vector<float> heap(2 * kLarge, 1.0F);
  const std::span<float> shown(reinterpret_cast<float*>(HostileSpace::arena(0).data()), 2 * kLarge);
  CallOptions options;
  options.check_finite = true;
  try {
    for (int i = 0; i < 4; ++i) {
      const std::uint8_t what = script.byte();
      const std::size_t count = what / 8 % 2 == 0 ? 1 + what / 16 : kLarge;
      const std::span<float> all = what / 128 == 0 ? shown : std::span(heap);
      const std::span<float> data = all.first(count);
      switch (what % 8) {
        case 0: communicator.barrier(); break;
        case 1: communicator.broadcast(data, 1); break;
        case 2: communicator.broadcast(data, 0); break;
        case 3:
          communicator.all_gather(std::span<const float>(data), all.first(2 * count), {}, options);
          break;
        case 4:
          communicator.reduce(std::span<const float>(data), data, ReduceOp::kMax, 1, options);
          break;
        default: communicator.all_reduce(data, ReduceOp::kSum, options); break;
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
  const std::uint8_t where = script.byte();
  if (where >= 250) {
    meet_in_shared_memory(script);
  } else if (where % 2 == 0) {
    meet_on_a_mesh(script);
  } else {
    meet_in_a_ring(script);
  }
  return 0;
}
