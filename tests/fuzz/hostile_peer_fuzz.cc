// An honest rank and peers that do as the input says: over streams of messages, on one or two
// rails, to receives from any rank; through a ring in shared memory whose counters they write as
// they like; in collectives through shared memory with a board of their own, among ranks of one
// host or of two. The rank ends with an Error or with a result.
#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/call_check.h"
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

// Takes all that is written; what is read is the script, then the end. The script's last byte says
// how many messages of a collective get a frame that is right, as long as they are as long as ours.
class ScriptStream final : public Stream {
  static constexpr int kPatience = 100;  // reads

 public:
  explicit ScriptStream(std::vector<std::byte> bytes) : bytes_(std::move(bytes)) {
    if (bytes_.empty()) return;
    right_frames_ = static_cast<std::uint8_t>(bytes_.back());
    bytes_.pop_back();
  }

  // What is written first here comes from `other`, too.
  void pass_on_to(ScriptStream& other) { other_ = &other; }

  std::size_t write_some(std::span<const std::byte> head,
                         std::span<const std::byte> body) override {
    if (ScriptStream* const other = std::exchange(other_, nullptr)) {
      other->insert(other->at_, body);
      other->insert(other->at_, head);
      other->right_until_ = other->at_ + head.size() + body.size();
      ++other->messages_;
    }
    if (head.size() == kMeshFrameBytes) {
      put_right_frames(*decode_mesh_frame(head.first<kMeshFrameBytes>()));
    }
    return head.size() + body.size();
  }
  std::size_t read_some(std::span<std::byte> head, std::span<std::byte> body) override {
    // A right frame is known once we have said ours.
    if (right_frames_ > 0 && at_ >= right_until_ && waited_++ < kPatience) return 0;
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
  void insert(std::size_t at, std::span<const std::byte> some) {
    bytes_.insert(bytes_.begin() + static_cast<long>(at), some.begin(), some.end());
  }
  // An honest peer is in the same collective: what we say first it says, too.
  void put_right_frames(MeshFrame frame) {
    if (frame.sequence == sequence_) return;
    sequence_ = frame.sequence;
    std::size_t at = at_;
    for (std::size_t i = 0; i < right_frames_ && at <= bytes_.size(); ++i) {
      frame.part = messages_++;
      insert(at, encode(frame));
      at += kMeshFrameBytes + frame.payload;
    }
    right_until_ = at;
    waited_ = 0;
  }

  std::vector<std::byte> bytes_;
  std::size_t at_ = 0;
  std::size_t right_frames_ = 0;
  std::size_t right_until_ = 0;
  int waited_ = 0;
  std::uint32_t messages_ = 0;  // with right frames
  std::uint64_t sequence_ = 0;  // of the collective that has them
  ScriptStream* other_ = nullptr;
};

// The peers of a group. What each says is known when the group is made.
class Peers : public Streams {
 public:
  using Words = std::function<std::vector<std::byte>(int peer, std::uint32_t group)>;
  // `members` are ranks of the job, of which this is rank 0.
  Peers(const std::vector<int>& members, Words words, Supervisor& supervisor,
        std::uint32_t group = 0)
      : words_(std::move(words)), supervisor_(supervisor) {
    for (const int member : members) {
      streams_.push_back(std::make_unique<ScriptStream>(member == 0 ? std::vector<std::byte>()
                                                                    : words_(member, group)));
    }
  }
  Stream& to(int peer, Deadline) override { return stream(peer); }
  std::string name_of(int rank) const override { return "rank " + std::to_string(rank); }
  int job_rank(int rank) const override { return rank; }
  Supervisor& supervisor() override { return supervisor_; }
  std::unique_ptr<Streams> split(const std::vector<int>& members, int,
                                 std::uint32_t group) override {
    return std::make_unique<Peers>(members, words_, supervisor_, group);
  }
  SharedSpace* shared_space() override { return nullptr; }
  bool oversubscribed() const override { return true; }
  bool spare_cores() const override { return false; }

 protected:
  ScriptStream& stream(int peer) { return *streams_[index_of(peer)]; }

 private:
  const Words words_;
  Supervisor& supervisor_;
  std::vector<std::unique_ptr<ScriptStream>> streams_;
};

std::unique_ptr<Engine> engine_over(std::unique_ptr<Streams> streams, int world_size,
                                    PlanOptions options = {}) {
  return std::make_unique<PlanEngine>(
      std::make_unique<MeshTransport>(0, world_size, 1, 0, std::move(streams)), options);
}

void meet_on_a_mesh(fuzz::Script& script, int rails) {
  const std::uint8_t collective = script.byte() % 4;
  // Of so few elements that a rail may have none, or more than a segment.
  const std::size_t more = rails > 1 ? script.number(2) % 4096 : script.byte() % 64;
  std::vector<float> data(1 + more, 1.0F);
  const auto words = [&](int, std::uint32_t) {
    return script.bytes(rails > 1 ? script.number(2) : SIZE_MAX);
  };
  Thrower supervisor;
  Communicator communicator(
      engine_over(std::make_unique<Peers>(std::vector{0, 1}, words, supervisor), 2,
                  {.segment_bytes = 4096, .rails = rails}),
      std::chrono::seconds(2), 0, shared_recorder());
  CallOptions options;
  if (rails > 1) options.algorithm = Algorithm::kDirect;
  try {
    switch (collective) {
      case 0: communicator.all_reduce(std::span(data), ReduceOp::kSum, options); break;
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

// A message to rank 0, right but for what the script says.
std::vector<std::byte> message_of(fuzz::Script& script, std::uint32_t group, std::uint64_t number) {
  const std::uint8_t wrong = script.byte() % 16;
  std::vector<float> data(1 + script.byte() % 8, 1.0F);
  Call call = calls::recv_any(std::span(data), script.byte() % 3);
  call.root = 0;
  complete_call(call, 1, 2);
  MeshFrame frame = stamp_of(call);
  frame.algorithm = static_cast<std::uint8_t>(choose_algorithm(call, 2, Sharing::kNone, false));
  frame.generation = 1;
  frame.group = group;
  frame.sequence = number + 1;
  frame.part = static_cast<std::uint32_t>(number);
  frame.payload = data.size() * sizeof(float);
  switch (wrong) {
    case 1: frame.generation = static_cast<std::uint32_t>(script.number(4)); break;
    case 2: frame.group = static_cast<std::uint32_t>(script.number(4)); break;
    case 3: frame.sequence = script.number(8); break;
    case 4: frame.count = script.number(8); break;
    case 5: frame.shape = script.number(8); break;
    case 6: frame.part = static_cast<std::uint32_t>(script.number(4)); break;
    case 7: frame.payload = script.number(8); break;
    case 8: frame.kind = script.byte(); break;
    case 9: frame.type = script.byte(); break;
    case 10: frame.op = script.byte(); break;
    case 11: frame.algorithm = script.byte(); break;
    default: break;
  }
  const MeshFrameBytes head = encode(frame);
  std::vector<std::byte> message(head.begin(), head.end());
  const auto body = std::as_bytes(std::span(data));
  message.insert(message.end(), body.begin(), body.end());
  if (wrong == 12) message.resize(script.number(2) % message.size());
  if (wrong == 13) message[script.byte() % kMeshFrameBytes] ^= std::byte{1};
  return message;
}

// Two peers send up to four messages each; rank 0 receives from any of them, or from one.
void receive_from_any(fuzz::Script& script) {
  struct Receive {
    std::vector<float> data;
    std::uint32_t tag;
    int source;
  };
  std::vector<Receive> receives(1 + script.byte() % 6);
  for (Receive& receive : receives) {
    receive.data.resize(1 + script.byte() % 8);
    receive.tag = script.byte() % 3;
    const std::uint8_t source = script.byte() % 4;
    receive.source = source == 0 || source == 3 ? kAnySource : source;
  }
  const std::vector<std::byte> first = script.bytes(script.byte());
  const std::vector<std::byte> second = script.bytes(SIZE_MAX);
  const auto words = [&](int peer, std::uint32_t group) {
    const std::vector<std::byte>& bytes = peer == 1 ? first : second;
    fuzz::Script own(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
    std::vector<std::byte> all;
    const std::uint64_t messages = group == 0 ? 0 : own.byte() % 5;
    for (std::uint64_t i = 0; i < messages; ++i) {
      const std::vector<std::byte> message = message_of(own, group, i);
      all.insert(all.end(), message.begin(), message.end());
    }
    all.push_back({});  // no frames but these
    return all;
  };
  Thrower supervisor;
  Communicator communicator(
      engine_over(std::make_unique<Peers>(std::vector{0, 1, 2}, words, supervisor), 3),
      std::chrono::seconds(2), 0, shared_recorder());
  CallOptions options;
  options.deadline = Deadline::after(std::chrono::milliseconds(5));
  std::vector<Work> works;
  try {
    for (Receive& receive : receives) {
      works.push_back(communicator.start(
          receive.source == kAnySource
              ? calls::recv_any(std::span(receive.data), receive.tag, options)
              : calls::recv(std::span(receive.data), receive.source, receive.tag, options)));
    }
  } catch (const Error&) {
  }
  for (Work& work : works) {
    try {
      work.wait(Deadline::after(std::chrono::seconds(5)));
    } catch (const Error&) {
    }
  }
}

// The memory of two ranks. Whenever rank 0 has waited for a while, rank 1 does what comes next in
// the script; when that has ended, so has the job.
class HostileSpace final : public SharedSpace {
 public:
  HostileSpace(fuzz::Script& script, FailureLatch& latch) : script_(script), latch_(latch) {
    for (Board& board : boards()) {
      for (Board::Entry& entry : board.entries) {
        entry.sequence = 0;
        std::memset(entry.data, 0, 256);
      }
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
  Communicator communicator(engine_over(std::move(streams), 2), std::chrono::seconds(5), 0,
                            shared_recorder());
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

// Rank 1 shares memory with rank 0, rank 2 does not.
class HostPeers final : public Peers {
 public:
  HostPeers(HostileSpace& space, Words words, bool agree, Supervisor& supervisor)
      : Peers({0, 1, 2}, std::move(words), supervisor), space_(space) {
    // In a ring of three all say first how they see the hosts.
    if (agree) stream(1).pass_on_to(stream(2));
  }
  bool shares_memory(int rank, int other) const override {
    return rank == other || (rank < 2 && other < 2);
  }
  std::unique_ptr<Streams> split(const std::vector<int>&, int, std::uint32_t) override {
    return std::make_unique<SharingPeer>(space_, supervisor());
  }

 private:
  HostileSpace& space_;
};

void meet_on_two_hosts(fuzz::Script& script) {
  constexpr std::size_t kMost = 16'000;  // elements: three times as many are in the arena
  const bool agree = script.byte() % 8 != 0;
  const std::uint8_t collective = script.byte();
  const std::size_t count = 1 + script.number(2) % kMost;
  const auto words = [&](int, std::uint32_t) { return script.bytes(script.number(2)); };
  Thrower supervisor;
  HostileSpace space(script, supervisor.latch());
  auto streams = std::make_unique<HostPeers>(space, words, agree, supervisor);
  Communicator communicator(engine_over(std::move(streams), 3, {.segment_bytes = 4096}),
                            std::chrono::seconds(5), 0, shared_recorder());
  const std::span<float> all(reinterpret_cast<float*>(HostileSpace::arena(0).data()), 3 * kMost);
  const std::span<float> data = all.first(count);
  CallOptions options;
  options.algorithm = Algorithm::kTwoLevel;
  options.check_finite = true;
  try {
    for (int i = 0; i < 2; ++i) {
      switch (collective % 4) {
        case 0: communicator.broadcast(data, collective / 4 % 3, options); break;
        case 1:
          communicator.all_gather(std::span<const float>(data), all.first(3 * count), {}, options);
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
  fuzz::Script script(data, std::min<std::size_t>(size, 20'000));
  const std::uint8_t where = script.byte();
  if (where >= 250) {
    meet_in_shared_memory(script);
  } else if (where == 249) {
    meet_on_a_mesh(script, 2);
  } else if (where == 248) {
    receive_from_any(script);
  } else if (where == 247) {
    meet_on_two_hosts(script);
  } else if (where % 2 == 0) {
    meet_on_a_mesh(script, 1);
  } else {
    meet_in_a_ring(script);
  }
  return 0;
}
