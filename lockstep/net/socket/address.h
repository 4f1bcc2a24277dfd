#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"

namespace lockstep {

// A host as a user writes it, by name or by number, and a port.
struct HostPort {
  std::string host;
  std::uint16_t port = 0;

  bool operator==(const HostPort&) const = default;
};

// "host:port", "1.2.3.4:port", "[::1]:port". Nothing if it is malformed.
std::optional<HostPort> parse_host_port(std::string_view text);
// The same for the value of an option. Throws Error{kInvalidArgument} that names the option.
HostPort require_host_port(std::string_view option, std::string_view text);
std::string to_string(const HostPort& where);

// A numeric IPv4 or IPv6 address with a port: where a socket is bound or connected.
class SocketAddress {
 public:
  SocketAddress() = default;  // of no family
  SocketAddress(const sockaddr* address, socklen_t size);

  // "1.2.3.4:80" or "[::1]:80"; names are not looked up.
  static std::optional<SocketAddress> parse(std::string_view text);
  static SocketAddress loopback_v4(std::uint16_t port = 0);
  static SocketAddress loopback_v6(std::uint16_t port = 0);
  static SocketAddress any(int family, std::uint16_t port = 0);

  int family() const { return storage_.ss_family; }
  std::uint16_t port() const;
  SocketAddress with_port(std::uint16_t port) const;
  std::string host() const;  // numeric, without brackets
  // 127.0.0.0/8, ::1, and the former mapped into IPv6.
  bool is_loopback() const;
  bool is_any() const;

  const sockaddr* data() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t size() const { return size_; }

  bool operator==(const SocketAddress& other) const;

 private:
  const sockaddr_in& v4() const { return reinterpret_cast<const sockaddr_in&>(storage_); }
  const sockaddr_in6& v6() const { return reinterpret_cast<const sockaddr_in6&>(storage_); }

  sockaddr_storage storage_{};
  socklen_t size_ = 0;
};

std::string to_string(const SocketAddress& address);

// All addresses of a name, in the system's order of preference; a numeric host needs no lookup.
// Throws Error{kNoConnection} for a name that cannot be resolved, Error{kTimeout} at the deadline.
std::vector<SocketAddress> resolve(const HostPort& where, Deadline deadline);

}  // namespace lockstep
