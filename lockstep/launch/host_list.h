#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// A host of `lockstep launch`, as its remote shell takes it, and how many workers it gets.
struct LaunchHost {
  std::string name;
  int workers = 1;

  bool operator==(const LaunchHost&) const = default;
};

// "a,b:4,user@c,[fe80::1]:2". A host that is named several times has the workers of all its places.
// Throws Error{kInvalidArgument} that quotes what makes no sense.
std::vector<LaunchHost> parse_hosts(std::string_view list);

// A host file as mpirun has it: a host on each line, "b slots=4" or "b:4"; what follows # is a
// comment; max_slots is of no account. `path` is for messages.
std::vector<LaunchHost> parse_host_file(std::string_view text, const std::string& path);

// "c" of "user@c", without the brackets of an IPv6 address.
std::string name_on_network(const LaunchHost& host);

}  // namespace lockstep
