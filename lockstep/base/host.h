#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

// Where a process runs. Two processes are on the same host when boot id and network namespace
// agree: then they may share memory and reach each other's loopback.
struct HostIdentity {
  std::string hostname;
  std::string boot_id;
  std::uint64_t network_namespace = 0;

  bool operator==(const HostIdentity&) const = default;
};

HostIdentity this_host();
// Processes that share it see the same processes under the same numbers.
std::string own_process_space();
bool same_host(const HostIdentity& a, const HostIdentity& b);

// What may change floating-point bits between hosts: instruction set and C library.
std::string host_fingerprint();

}  // namespace lockstep
