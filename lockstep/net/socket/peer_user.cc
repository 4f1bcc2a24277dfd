#include "lockstep/net/socket/peer_user.h"

#include <fmt/format.h>
#include <netinet/in.h>
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

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

// That of the thread's own network namespace, whichever the process began in.
constexpr std::array kTables = {"/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"};

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
  in6_addr v6{};
  if (address.family() == AF_INET6) {
    v6 = reinterpret_cast<const sockaddr_in6*>(address.data())->sin6_addr;
  } else {
    v6.s6_addr[10] = v6.s6_addr[11] = 0xff;
    const in_addr v4 = reinterpret_cast<const sockaddr_in*>(address.data())->sin_addr;
    std::memcpy(&v6.s6_addr[12], &v4, sizeof v4);
  }
  const std::string port = fmt::format(":{:04X}", address.port());
  std::vector<std::string> all = {words_of(&v6, 4) + port};
  if (IN6_IS_ADDR_V4MAPPED(&v6)) all.push_back(words_of(&v6.s6_addr[12], 1) + port);
  return all;
}

constexpr const char* kRemedy = "; a job of several users needs a token (--token-file)";

void require_same_user(uid_t user, const std::string& who, const char* remedy) {
  if (user == 0 || user == ::geteuid()) return;
  throw Error(
      ErrorCode::kAuthentication,
      fmt::format("{} runs as user {}, this process as user {}{}", who, user, ::geteuid(), remedy));
}

}  // namespace

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
  for (const char* name : kTables) {
    std::ifstream file(name);
    const std::string table(std::istreambuf_iterator<char>(file), {});
    if (const auto user = owner_in_table(table, peer, own)) {
      return require_same_user(*user, socket.peer(), kRemedy);
    }
  }
  throw Error(ErrorCode::kAuthentication, fmt::format("whose process {} is cannot be seen in {}{}",
                                                      socket.peer(), kTables[0], kRemedy));
}

}  // namespace lockstep
