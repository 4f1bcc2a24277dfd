#include "lockstep/net/socket/interface.h"

#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <system_error>
#include <vector>

#include "lockstep/base/descriptor.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

struct InterfaceAddress {
  std::string name;
  SocketAddress address;
};

// Interfaces that are up, with the addresses that a peer can be told.
std::vector<InterfaceAddress> interface_addresses() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) throw_io("listing network interfaces", errno);
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, ::freeifaddrs);
  std::vector<InterfaceAddress> found;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family == AF_INET) {
      found.push_back({entry->ifa_name, SocketAddress(entry->ifa_addr, sizeof(sockaddr_in))});
    } else if (family == AF_INET6) {
      // A link-local address means nothing without the interface's number on the peer's side.
      const auto* v6 = reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr);
      if (IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr)) continue;
      found.push_back({entry->ifa_name, SocketAddress(entry->ifa_addr, sizeof(sockaddr_in6))});
    }
  }
  return found;
}

}  // namespace

SocketAddress local_address_toward(const SocketAddress& peer) {
  const Descriptor probe(::socket(peer.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!probe) throw_io("opening a UDP socket", errno);
  // Connecting a UDP socket only asks the routing table. Port 0 is no destination.
  const SocketAddress target = peer.port() == 0 ? peer.with_port(9) : peer;
  if (::connect(probe.get(), target.data(), target.size()) != 0) {
    throw Error(ErrorCode::kNoConnection, fmt::format("no route to {}: {}", peer.host(),
                                                      std::generic_category().message(errno)));
  }
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);
  if (::getsockname(probe.get(), reinterpret_cast<sockaddr*>(&storage), &size) != 0) {
    throw_io("asking for a socket's own address", errno);
  }
  return SocketAddress(reinterpret_cast<const sockaddr*>(&storage), size).with_port(0);
}

std::optional<SocketAddress> address_for_others(int family) {
  constexpr const char* kV4 = "198.51.100.1:9";  // addresses of documentation: nobody's
  constexpr const char* kV6 = "[2001:db8::1]:9";
  for (const char* far : {kV4, kV6}) {
    const auto target = SocketAddress::parse(far);
    if (family == AF_INET && target->family() != family) continue;
    try {
      return local_address_toward(*target);
    } catch (const Error&) {  // there is no such way
    }
  }
  std::optional<SocketAddress> found;
  for (const auto& [name, address] : interface_addresses()) {
    if (address.is_loopback() || (family == AF_INET && address.family() != family)) continue;
    if (address.family() == AF_INET) return address;
    if (!found) found = address;
  }
  return found;
}

SocketAddress interface_address(const std::string& interface, int family) {
  std::optional<SocketAddress> other_family;
  std::vector<std::string> there_are;
  for (const auto& [name, address] : interface_addresses()) {
    if (name == interface) {
      if (address.family() == family) return address;
      if (!other_family) other_family = address;
    }
    there_are.push_back(fmt::format("{} ({})", name, address.host()));
  }
  if (other_family) return *other_family;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("no interface {} with an address; there are: {}", interface,
                          list_of(there_are, ", ")));
}

void require_token_for(const SocketAddress& address, const std::string& token) {
  if (address.is_loopback()) return;
  if (!token.empty() && token.size() < kLeastToken) {
    throw Error(ErrorCode::kAuthentication,
                fmt::format("the job's token has {} bytes: between hosts it needs {} or more, at "
                            "random (openssl rand -hex 16 >FILE)",
                            token.size(), kLeastToken));
  }
  if (!token.empty()) return;
  throw Error(
      ErrorCode::kAuthentication,
      fmt::format("{} can be reached from other hosts, so the job needs a token: give every "
                  "rank the same one (--token-file FILE), or stay on 127.0.0.1",
                  address.is_any() ? "a socket on all interfaces" : address.host()));
}

}  // namespace lockstep
