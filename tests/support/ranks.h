#pragma once

#include <gtest/gtest.h>
#include <poll.h>

#include <functional>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/net/job/job.h"
#include "lockstep/net/job/link.h"
#include "lockstep/net/job/supervisor.h"
#include "lockstep/wire/wire_error.h"

namespace lockstep::test {

using namespace std::chrono_literals;

// Long enough never to matter, short enough to end a test that hangs.
inline Deadline soon() { return Deadline::after(20s); }

// Runs `body(rank)` for all ranks at once, each on a thread of its own, and returns what each
// threw.
inline std::vector<std::optional<Error>> run_ranks(int count,
                                                   const std::function<void(int)>& body) {
  std::vector<std::future<std::optional<Error>>> running;
  for (int rank = 0; rank < count; ++rank) {
    running.push_back(std::async(std::launch::async, [&body, rank]() -> std::optional<Error> {
      try {
        body(rank);
        return std::nullopt;
      } catch (const Error& error) {
        return error;
      }
    }));
  }
  std::vector<std::optional<Error>> errors;
  for (auto& rank : running) errors.push_back(rank.get());
  return errors;
}

// The error that `body` throws; a failure of the test if it throws none.
template <typename Body>
Error error_of(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error was thrown";
  return Error(ErrorCode::kInvalidArgument, "no error was thrown");
}

// Waits until the latch trips and returns its error.
inline Error wait_for_failure(FailureLatch& latch) {
  pollfd entry{latch.fd(), POLLIN, 0};
  if (::poll(&entry, 1, 20000) != 1) {
    ADD_FAILURE() << "the latch did not trip";
    return Error(ErrorCode::kInvalidArgument, "the latch did not trip");
  }
  return *latch.error();
}

// The options of a job on loopback whose rendezvous listens already.
struct LoopbackJob {
  explicit LoopbackJob(int size, std::chrono::milliseconds limit = 10s,
                       const SocketAddress& at = SocketAddress::loopback_v4())
      : world_size(size),
        timeout(limit),
        listener(listen_tcp(at)),
        where(listener.local_address()) {}

  JobOptions options(int rank) const {
    JobOptions options;
    options.rank = rank;
    options.world_size = world_size;
    options.master_host = where.host();
    options.master_port = where.port();
    options.version = "1.0";
    options.token = token;
    options.timeout = timeout;
    return options;
  }
  JoinedJob join(int rank) {
    if (rank == 0) return join_job(options(0), std::move(listener));
    return join_job(options(rank));
  }
  // The rendezvous in a process that is no rank.
  std::unique_ptr<ControlPlane> serve() {
    HostOptions options;
    options.world_size = world_size;
    options.version = "1.0";
    options.token = token;
    options.timeout = timeout;
    return host_job(options, {std::move(listener), {Purpose::kRendezvous}});
  }
  // All ranks join, on threads; they must succeed.
  std::vector<JoinedJob> join_all() {
    std::vector<JoinedJob> jobs(world_size);
    const auto errors = run_ranks(world_size, [&](int rank) { jobs[rank] = join(rank); });
    for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
    return jobs;
  }

  int world_size;
  std::chrono::milliseconds timeout;
  std::string token = "secret";
  Socket listener;
  SocketAddress where;
};

// A rank without a control thread: what it says and when, and when it falls silent or closes, is up
// to the test.
struct RankByHand {
  RankByHand(const LoopbackJob& job, int rank)
      : identity{"lockstep", 0, random_member_id(), rank, job.token},
        link(connect_to_rendezvous({job.where.host(), job.where.port()}, identity, soon()),
             kMaxRosterBody) {
    card.rank = rank;
    card.world_size = job.world_size;
    card.version = "1.0";
    card.id = identity.id;
    card.host = this_host();
    card.fingerprint = host_fingerprint();
    card.mesh_address = "127.0.0.1:1";
  }

  void send_join(std::chrono::milliseconds patience) {
    link.send(MessageKind::kJoin, encode(Join{.card = card, .patience = patience}), soon());
  }
  // Throws the verdict if that is the answer.
  RosterMessage join() {
    send_join(20s);
    const Message answer = link.receive(soon());
    if (answer.kind == MessageKind::kVerdict) throw decode_wire_error(answer.body)->error();
    link.set_limit(kMaxControlBody);
    RosterMessage roster = decode_roster(answer.body).value();
    tag = tag_of(roster.generation);
    return roster;
  }

  Identity identity;
  Card card;
  Link link;
  std::uint32_t tag = 0;  // of the generation, once joined
};

}  // namespace lockstep::test
