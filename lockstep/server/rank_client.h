#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/failure_latch.h"
#include "lockstep/base/range.h"
#include "lockstep/comm/wait_note.h"
#include "lockstep/net/job/job.h"
#include "lockstep/net/socket/address.h"
#include "lockstep/server/frame_socket.h"
#include "lockstep/wire/mesh_frame.h"

namespace lockstep {

// The sum of a rank over a node of T(0, lanes) that it owns.
struct LanePartial {
  Range node;
  std::span<const float> data;
  std::vector<double> tail;
};

// What a client keeps of a rank that sends bytes before this one waits for them; more is an error
// that names it. For the call that this rank is in, that call may have more.
inline constexpr std::size_t kMostEarly = std::size_t{40} << 20;

// Bytes for a rank or, with kEveryOther, for all others.
struct BytesOut {
  std::uint32_t to = kEveryOther;
  std::span<const std::byte> bytes;
};
// Where bytes of a rank belong. Those of one rank come in the order in which it sends them.
struct BytesIn {
  int from = -1;
  std::span<std::byte> bytes;
};

// A rank's connection for data to the gradient server that serves its job (docs/wire_protocol.md).
// Who lives and who has died is the control plane's to tell: calls throw its verdict once its latch
// trips, Error{kPeerLost} when the server has gone, and Error{kTimeout} at the deadline. An error
// is final. Used by one thread, but for waits_for().
class RankClient {
 public:
  // Connects under the job's identity. The job's control plane must outlive the client.
  RankClient(const HostPort& coordinator, const JoinedJob& job);
  // Over a connection to it that is open.
  RankClient(Socket coordinator, const JoinedJob& job);
  ~RankClient();
  RankClient(const RankClient&) = delete;
  RankClient& operator=(const RankClient&) = delete;

  // This rank enters a collective, which is to end by the deadline. The calls that follow belong to
  // it, and what other ranks send for it must come with the same stamp: Error{kCollectiveMismatch}
  // names the rank whose does not.
  void enter(const MeshFrame& stamp, Deadline deadline);

  // Adds the partial sums of all ranks along T(0, lanes): `partials` are this rank's nodes, any
  // number of them. Every rank calls it for as many elements, with tails of the same length. `sum`
  // may be the data of a partial. Returns the tail's sum.
  std::vector<double> add_up(std::uint32_t lanes, std::span<const LanePartial> partials,
                             std::size_t tail_count, std::span<float> sum);
  // Sends bytes to other ranks and receives theirs, all at once. All ranks of a collective move
  // matching bytes. Bytes that a rank ahead of this one sends are kept for later calls.
  void move_bytes(std::span<const BytesOut> out, std::span<const BytesIn> in);

  // The rank whose bytes this one has been waiting for lately, -1: none. Callable from any thread.
  int waits_for() const { return waits_->rank(); }
  // Before the first collective: where waits are noted. It must outlive the client.
  void note_waits_in(WaitNote& waits) { waits_ = &waits; }

 private:
  // Bytes of a rank that this one waits for.
  struct Awaited {
    std::span<std::byte> bytes;
    std::size_t done = 0;
  };
  struct Early {
    MeshFrame stamp;
    std::vector<std::byte> bytes;
  };
  // The Bytes that are being read.
  struct OpenBytes {
    int from = -1;
    bool early = false;  // they are kept for later
    Early kept = {};
    std::span<std::byte> place = {};
    std::size_t done = 0;
  };
  // What another rank sends to this one.
  struct Peer {
    std::string name;
    std::uint32_t sent = 0;            // frames to it in this collective
    std::uint32_t received = 0;        // frames of it in this collective
    std::deque<Awaited> awaited = {};  // in the order in which they will come
    std::deque<Early> early = {};
    std::uint64_t early_bytes = 0;  // of them, and of one that is being read
  };

  // Moves bytes until `done`, which takes what has come. `what` is what we wait for.
  void drive(const std::string& what, const std::function<bool()>& done);
  void wait(const std::string& what);
  // Bytes are at the front or open, and take_all_bytes() has not got them all yet.
  bool bytes_are_next() const;
  // Takes the Bytes that have come, up to something else.
  void take_all_bytes();
  bool take_bytes();
  void open_bytes();
  // Takes what has come of the RawSum that is expected. The foot, once all of it is taken.
  std::optional<BulkFoot> take_sum(const BulkHead& expected, std::span<float> into,
                                   std::size_t& done);
  bool open_sum(const BulkHead& expected);
  // Throws if bytes of that rank with that stamp belong to no collective that is still to come.
  void check_stamp(int from, const MeshFrame& stamp) const;
  // Counts bytes that are to be kept; throws if they are too many.
  void count_early(int from, const BulkHead& head);
  // Where the next bytes of a rank belong, which this one waits for; compares the whole stamp.
  std::span<std::byte> place_of(int from, const MeshFrame& stamp) const;
  void count_placed(int from);
  // Puts bytes that came before this rank waited for them where they belong.
  void take_early(int from);

  const int rank_;
  const FailureLatch& latch_;
  FrameSocket frames_;
  std::vector<Peer> peers_;  // by rank; this one's own is not used
  Deadline deadline_ = Deadline::at(Deadline::Clock::time_point::max());
  std::uint64_t next_step_ = 0;  // of the sums
  MeshFrame call_;               // the collective entered last
  std::uint64_t digest_ = 0;     // of it
  OpenBytes open_;
  WaitNote own_waits_;
  WaitNote* waits_ = &own_waits_;
};

}  // namespace lockstep
