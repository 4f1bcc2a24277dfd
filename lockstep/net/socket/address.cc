#include "lockstep/net/socket/address.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <net/if.h>
#include <netdb.h>

#include <charconv>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/thread.h"

namespace lockstep {
namespace {

std::optional<std::uint16_t> parse_port(std::string_view text) {
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return port;
}

struct Lookup {
  int status = 0;
  std::vector<SocketAddress> addresses;
};

Lookup look_up(const HostPort& where, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  Lookup lookup;
  lookup.status =
      ::getaddrinfo(where.host.c_str(), std::to_string(where.port).c_str(), &hints, &found);
  if (lookup.status != 0) return lookup;
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    lookup.addresses.emplace_back(entry->ai_addr, entry->ai_addrlen);
  }
  ::freeaddrinfo(found);
  return lookup;
}

}  // namespace

std::optional<HostPort> parse_host_port(std::string_view text) {
  std::string_view host;
  std::string_view rest;
  if (text.starts_with('[')) {
    const auto close = text.find(']');
    if (close == std::string_view::npos) return std::nullopt;
    host = text.substr(1, close - 1);
    rest = text.substr(close + 1);
  } else {
    const auto colon = text.find(':');
    if (colon == std::string_view::npos) return std::nullopt;
    host = text.substr(0, colon);
    rest = text.substr(colon);
  }
  if (host.empty() || !rest.starts_with(':')) return std::nullopt;
  const auto port = parse_port(rest.substr(1));
  if (!port) return std::nullopt;
  return HostPort{std::string(host), *port};
}

HostPort require_host_port(std::string_view option, std::string_view text) {
  auto where = parse_host_port(text);
  if (!where) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} {}: not HOST:PORT", option, text));
  }
  return *std::move(where);
}

std::string to_string(const HostPort& where) {
  const bool v6 = where.host.find(':') != std::string::npos;
  return v6 ? fmt::format("[{}]:{}", where.host, where.port)
            : fmt::format("{}:{}", where.host, where.port);
}

SocketAddress::SocketAddress(const sockaddr* address, socklen_t size) : size_(size) {
  LOCKSTEP_CHECK(size <= sizeof(storage_));
  std::memcpy(&storage_, address, size);
}

std::optional<SocketAddress> SocketAddress::parse(std::string_view text) {
  const auto where = parse_host_port(text);
  if (!where) return std::nullopt;
  const Lookup lookup = look_up(*where, AI_NUMERICHOST);
  if (lookup.addresses.empty()) return std::nullopt;
  return lookup.addresses.front();
}

SocketAddress SocketAddress::loopback_v4(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return {reinterpret_cast<const sockaddr*>(&address), sizeof(address)};
}

SocketAddress SocketAddress::loopback_v6(std::uint16_t port) {
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_port = htons(port);
  address.sin6_addr = in6addr_loopback;
  return {reinterpret_cast<const sockaddr*>(&address), sizeof(address)};
}

SocketAddress SocketAddress::any(int family, std::uint16_t port) {
  SocketAddress address = family == AF_INET6 ? loopback_v6(port) : loopback_v4(port);
  if (family == AF_INET6) {
    reinterpret_cast<sockaddr_in6&>(address.storage_).sin6_addr = in6addr_any;
  } else {
    reinterpret_cast<sockaddr_in&>(address.storage_).sin_addr.s_addr = htonl(INADDR_ANY);
  }
  return address;
}

std::uint16_t SocketAddress::port() const {
  if (family() == AF_INET) return ntohs(v4().sin_port);
  if (family() == AF_INET6) return ntohs(v6().sin6_port);
  return 0;
}

SocketAddress SocketAddress::with_port(std::uint16_t port) const {
  SocketAddress copy = *this;
  if (family() == AF_INET) {
    reinterpret_cast<sockaddr_in&>(copy.storage_).sin_port = htons(port);
  } else if (family() == AF_INET6) {
    reinterpret_cast<sockaddr_in6&>(copy.storage_).sin6_port = htons(port);
  }
  return copy;
}

std::string SocketAddress::host() const {
  char text[NI_MAXHOST];
  const int status =
      ::getnameinfo(data(), size_, text, sizeof(text), nullptr, 0, NI_NUMERICHOST | NI_NUMERICSERV);
  return status == 0 ? text : "unknown address";
}

bool SocketAddress::is_loopback() const {
  if (family() == AF_INET) return ntohl(v4().sin_addr.s_addr) >> 24 == 127;
  if (family() != AF_INET6) return false;
  const in6_addr& address = v6().sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&address) ||
         (IN6_IS_ADDR_V4MAPPED(&address) && address.s6_addr[12] == 127);
}

bool SocketAddress::is_any() const {
  if (family() == AF_INET) return v4().sin_addr.s_addr == htonl(INADDR_ANY);
  return family() == AF_INET6 && IN6_IS_ADDR_UNSPECIFIED(&v6().sin6_addr);
}

bool SocketAddress::operator==(const SocketAddress& other) const {
  if (family() != other.family() || port() != other.port()) return false;
  if (family() == AF_INET) return v4().sin_addr.s_addr == other.v4().sin_addr.s_addr;
  return family() != AF_INET6 || (IN6_ARE_ADDR_EQUAL(&v6().sin6_addr, &other.v6().sin6_addr) &&
                                  v6().sin6_scope_id == other.v6().sin6_scope_id);
}

std::string to_string(const SocketAddress& address) {
  return to_string(HostPort{address.host(), address.port()});
}

std::vector<SocketAddress> resolve(const HostPort& where, Deadline deadline) {
  Lookup numeric = look_up(where, AI_NUMERICHOST);
  if (numeric.status == 0) return std::move(numeric.addresses);
  const Error too_late(ErrorCode::kTimeout, fmt::format("looking up the name {}", where.host));
  if (deadline.expired()) throw too_late;

  // The system's resolver knows no deadline, so it gets a thread of its own; if it takes too long
  // it is left to finish into memory that it shares.
  struct Shared {
    std::mutex mutex;
    std::condition_variable finished;
    std::optional<Lookup> lookup;  // guarded by mutex
  };
  const auto shared = std::make_shared<Shared>();
  const auto finish = [shared](Lookup lookup) {
    const std::lock_guard lock(shared->mutex);
    shared->lookup = std::move(lookup);
    shared->finished.notify_one();
  };
  Thread thread;
  thread.start(
      "the resolver's thread", [finish, where] { finish(look_up(where, 0)); },
      [finish](const Error&) { finish({.status = EAI_MEMORY, .addresses = {}}); });
  thread.detach();

  std::unique_lock lock(shared->mutex);
  if (!shared->finished.wait_until(lock, deadline.time(),
                                   [&] { return shared->lookup.has_value(); })) {
    throw too_late;
  }
  if (shared->lookup->status != 0) {
    throw Error(ErrorCode::kNoConnection,
                fmt::format("the name {} cannot be resolved: {}", where.host,
                            ::gai_strerror(shared->lookup->status)));
  }
  return std::move(shared->lookup->addresses);
}

}  // namespace lockstep
