#include "lockstep/net/socket/peer_user.h"

#include <fmt/format.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/base/descriptor.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

// That of the thread's own network namespace, whichever the process began in.
constexpr std::array kTables = {"/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"};

// IPv4 as IPv6 spells it.
in6_addr as_v6(const SocketAddress& address) {
  if (address.family() == AF_INET6) {
    return reinterpret_cast<const sockaddr_in6*>(address.data())->sin6_addr;
  }
  in6_addr v6{};
  v6.s6_addr[10] = v6.s6_addr[11] = 0xff;
  const in_addr v4 = reinterpret_cast<const sockaddr_in*>(address.data())->sin_addr;
  std::memcpy(&v6.s6_addr[12], &v4, sizeof v4);
  return v6;
}

// As the tables write it: words of the address as this machine stores them, and the port. An IPv4
// address may stand in the table of IPv6, too.
std::vector<std::string> spellings(const SocketAddress& address) {
  const auto words_of = [](const void* bytes, std::size_t count) {
    std::string text;
    for (std::size_t i = 0; i < count; ++i) {
      std::uint32_t word = 0;
      std::memcpy(&word, static_cast<const char*>(bytes) + i * sizeof word, sizeof word);
      text += fmt::format("{:08X}", word);
    }
    return text;
  };
  const in6_addr v6 = as_v6(address);
  const std::string port = fmt::format(":{:04X}", address.port());
  std::vector<std::string> all = {words_of(&v6, 4) + port};
  if (IN6_IS_ADDR_V4MAPPED(&v6)) all.push_back(words_of(&v6.s6_addr[12], 1) + port);
  return all;
}

constexpr const char* kRemedy =
    "; a job of several users needs a token of 16 bytes or more (--token-file)";

void require_same_user(uid_t user, const std::string& who, const char* remedy) {
  if (user == 0 || user == ::geteuid()) return;
  throw Error(
      ErrorCode::kAuthentication,
      fmt::format("{} runs as user {}, this process as user {}{}", who, user, ::geteuid(), remedy));
}

// The other side, whatever it has sent before.
bool has_closed(const Socket& socket) {
  pollfd entry{socket.fd(), POLLRDHUP, 0};
  return ::poll(&entry, 1, 0) == 1 && (entry.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

}  // namespace

std::optional<uid_t> owner_by_kernel(const SocketAddress& local, const SocketAddress& remote) {
  struct Question {
    nlmsghdr header{};
    inet_diag_req_v2 socket{};
  } question;
  question.header.nlmsg_len = sizeof question;
  question.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  question.header.nlmsg_flags = NLM_F_REQUEST;
  question.socket.sdiag_family = AF_INET6;  // finds both: an IPv4 address is asked for as mapped
  question.socket.sdiag_protocol = IPPROTO_TCP;
  question.socket.idiag_states = ~0U;
  inet_diag_sockid& id = question.socket.id;
  id.idiag_sport = htons(local.port());
  id.idiag_dport = htons(remote.port());
  const in6_addr from = as_v6(local);
  const in6_addr to = as_v6(remote);
  std::memcpy(id.idiag_src, &from, sizeof from);
  std::memcpy(id.idiag_dst, &to, sizeof to);
  id.idiag_cookie[0] = id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;

  const Descriptor kernel(::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
  if (::send(kernel.get(), &question, sizeof question, 0) != sizeof question) return {};
  struct Answer {
    nlmsghdr header{};
    inet_diag_msg socket{};
    std::array<char, 4096> more{};
  } answer;
  sockaddr_nl sender{};
  socklen_t sender_size = sizeof sender;
  const ssize_t size = ::recvfrom(kernel.get(), &answer, sizeof answer, MSG_DONTWAIT,
                                  reinterpret_cast<sockaddr*>(&sender), &sender_size);
  constexpr ssize_t kLeast = sizeof(nlmsghdr) + sizeof(inet_diag_msg);
  const bool from_kernel = sender_size == sizeof sender && sender.nl_pid == 0;
  if (size < kLeast || !from_kernel || answer.header.nlmsg_type != SOCK_DIAG_BY_FAMILY) return {};
  // Where there is no such connection the kernel tells of a listener at that port.
  const inet_diag_msg& found = answer.socket;
  if (found.idiag_state == TCP_LISTEN || found.id.idiag_sport != id.idiag_sport ||
      found.id.idiag_dport != id.idiag_dport || found.idiag_inode == 0) {
    return {};
  }
  return found.idiag_uid;
}

std::optional<uid_t> owner_in_table(std::string_view table, const SocketAddress& local,
                                    const SocketAddress& remote) {
  const auto is_one_of = [](const std::string& text, const std::vector<std::string>& all) {
    return std::find(all.begin(), all.end(), text) != all.end();
  };
  const auto from = spellings(local);
  const auto to = spellings(remote);
  std::istringstream lines{std::string(table)};
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string slot, own, other, state, queues, timer, retries, user, timeout, inode;
    words >> slot >> own >> other >> state >> queues >> timer >> retries >> user >> timeout >>
        inode;
    if (!words || !is_one_of(own, from) || !is_one_of(other, to)) continue;
    // Without an inode no process has it any more, or not yet; then the user is not told.
    if (inode == "0" || user.find_first_not_of("0123456789") != std::string::npos) return {};
    return static_cast<uid_t>(std::strtoul(user.c_str(), nullptr, 10));
  }
  return std::nullopt;
}

void require_trusted_peer(const Socket& socket) {
  const SocketAddress peer = socket.peer_address();
  if (peer.family() == AF_UNIX) {
    ucred credentials{};
    socklen_t size = sizeof(credentials);
    if (::getsockopt(socket.fd(), SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
      throw_io("asking for a peer's credentials", errno);
    }
    return require_same_user(credentials.uid,
                             fmt::format("{} (pid {})", socket.peer(), credentials.pid), "");
  }
  const SocketAddress own = socket.local_address();
  if (const auto user = owner_by_kernel(peer, own)) {
    return require_same_user(*user, socket.peer(), kRemedy);
  }
  // A table of all sockets takes milliseconds, and may lack some if it changes while it is read.
  for (const char* name : kTables) {
    std::ifstream file(name);
    const std::string table(std::istreambuf_iterator<char>(file), {});
    if (const auto user = owner_in_table(table, peer, own)) {
      return require_same_user(*user, socket.peer(), kRemedy);
    }
  }
  if (has_closed(socket)) {
    throw Error(ErrorCode::kChannelClosed,
                fmt::format("receiving from {}: it closed the connection", socket.peer()),
                socket.peer_rank());
  }
  throw Error(ErrorCode::kAuthentication, fmt::format("whose process {} is cannot be seen in {}{}",
                                                      socket.peer(), kTables[0], kRemedy));
}

}  // namespace lockstep
