#pragma once

#include <poll.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/index.h"
#include "lockstep/net/job/job.h"
#include "lockstep/server/frame_socket.h"
#include "lockstep/server/lane_sums.h"

namespace lockstep {

struct RankServerOptions {
  Deadline::Clock::duration timeout = std::chrono::seconds(30);
  // As in ServerOptions.
  std::size_t window = 256 * 1024;
  int stop_fd = -1;  // readable: end the job with Error{kAborted}
};

// The gradient server of ranks, which call collectives (docs/wire_protocol.md): it adds up their
// sums and passes on their bytes. The process is the centre of their job: who joins, who has died
// and who left in good order is decided on its control links, on the control plane's thread. A
// defect in what a rank sends is reported there, and the verdict reaches everybody. Where ranks
// survive losses they form another generation and connect anew; nothing is kept of the one before.
//
// One event loop, on the caller's thread, inside serve(). Used by one thread.
class RankServer {
 public:
  using Clock = Deadline::Clock;

  // `control` is the centre of a job, whose door lets in connections for the rendezvous and for the
  // gradient server (host_job). It outlives the server.
  RankServer(ControlPlane& control, RankServerOptions options);
  RankServer(const RankServer&) = delete;
  RankServer& operator=(const RankServer&) = delete;

  // Called when all ranks have come, with their names; with every piece of a sum and the time from
  // its first node to its last; and at every turn of the loop, several times a second.
  struct Observer {
    std::function<void(const std::vector<std::string>&)> formed;
    std::function<void(const LaneSums::Piece&, Clock::duration)> added;
    std::function<void()> turned;
  };
  // Serves until all ranks have left. Throws the first cause if the job fails.
  void serve(const Observer& observer = {});

 private:
  // The server's end of one rank's data.
  struct Connection {
    FrameSocket frames;
    std::optional<LaneValue> adding = {};                  // the open PartialSum, once accepted
    std::shared_ptr<std::vector<std::byte>> passing = {};  // the open Bytes, once accepted
  };

  void run(const Observer& observer);
  // Takes up the newest generation, if it is another one.
  void follow_generation();
  // A rank is lost to the others: ends the job, or all that belongs to this generation.
  void lose(const Error& error);
  void wait_for_events();
  void admit_all();
  void admit(Arrival arrival);
  void receive();
  void send();
  void drop_ended();

  // Notes that a rank is needed that has gone. Whether it died is not decided here.
  void miss_if_gone(int gone, int needed_by);
  void process_all(const Observer& observer);
  // Takes the frames of a rank that have come. Whether it got a step further.
  bool process(int rank);
  bool add(int rank);
  bool pass_on(int rank);
  void check_bytes(int rank, const BulkHead& head) const;
  bool has_room(const std::optional<Connection>& connection) const;
  template <typename Body>
  void for_each_receiver(const BulkHead& head, Body&& body) {
    for (int rank = 0; rank < ranks(); ++rank) {
      const auto number = static_cast<std::uint32_t>(rank);
      if (head.to == kEveryOther ? number != head.from : number == head.to) body(rank);
    }
  }
  Connection& connection(int rank) { return *connections_[index_of(rank)]; }
  int ranks() const { return static_cast<int>(connections_.size()); }
  bool all_came() const { return came_ > 0 && came_ == connections_.size(); }
  bool anybody_here() const;

  const RankServerOptions options_;
  ControlPlane& control_;

  // Of the newest generation.
  std::optional<RosterMessage> roster_;
  std::vector<std::string> names_;
  Deadline all_here_by_ = Deadline::at(Clock::time_point::max());
  std::vector<std::optional<Connection>> connections_;  // by rank
  std::vector<bool> has_come_;                          // by rank
  std::size_t came_ = 0;
  struct Missed {
    Deadline until;
    int rank;
    int needed_by;
  };
  std::optional<Missed> missed_;
  std::optional<LaneSums> lanes_;
  std::optional<Clock::time_point> opened_;  // the piece that is open
  std::vector<pollfd> entries_;
};

}  // namespace lockstep
