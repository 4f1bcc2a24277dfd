#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/doctor/finding.h"
#include "lockstep/net/socket/address.h"
#include "lockstep/net/socket/socket.h"

namespace lockstep {

// What one process found of the way to another.
struct LinkReport {
  int from = 0;
  int to = 0;
  std::string address = {};     // of `to`
  std::string error = {};       // empty: it works
  double round_trip = 0;        // seconds
  double bytes_per_second = 0;  // from `from` to `to`
  double clock_ahead = 0;       // seconds that the clock of `to` is ahead
  std::string port_error = {};  // why the port of a run there cannot be reached; empty: it can
};

struct LinkCheckOptions {
  int rank = 0;
  int world_size = 1;
  HostPort hub;                                   // rank 0, as the others reach it
  std::optional<Socket> listener = std::nullopt;  // of rank 0, where it is open already
  // All must know it. Empty: the hub must be on loopback.
  std::string secret;
  // The job's, where it is not the secret: those of all hosts are compared. It is never sent.
  std::string token = {};
  // On rank 0: where a run would listen, which the others try as well; 0: anywhere.
  std::uint16_t port = 0;
  std::string label;                                            // how tables call this host
  std::vector<Finding> findings;                                // of this host
  std::chrono::nanoseconds timeout = std::chrono::seconds(20);  // for all to come
  // On rank 0, while it waits for others: why a rank will not come, if somebody knows.
  std::function<std::optional<std::string>(int rank)> gone = {};
};

// What rank 0 knows in the end.
struct LinkChecks {
  std::vector<std::string> labels;  // by rank; empty: it did not come
  std::vector<Finding> findings;    // of all hosts, and of the links between them
  std::vector<LinkReport> links;
};

// One process per host. All of them meet at rank 0, tell what they have found there, and then each
// opens a connection to every other one, in both directions, and measures it: with n processes in
// n - 1 rounds, in which every one is called by one and calls one. Who calls rank 0 calls its
// `port`, too. Rank 0 returns all of it, the others nothing. A process that does not come, and a
// way that does not work, are findings. Throws what keeps this process from taking part at all.
LinkChecks check_links(LinkCheckOptions options);

}  // namespace lockstep
