// What TCP needs for the bytes of an all-reduce, nothing computed: every rank sends 2(n-1)/n of its
// buffer, evenly to its peers, and receives as much, all directions at once. N ranks use loopback;
// with --hosts, one rank has its sockets in each of these network namespaces (needs root).
// usage: raw_tcp N | --hosts NAMESPACE=ADDRESS,... BYTES... | --serve FOLDER
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <array>
#include <memory>
#include <utility>

#include "bench/common.h"

namespace {

// Calls of just under 64 KiB, the largest packet, are the fastest and steadiest where BBR paces
// packets. On loopback Reno does not, and long calls are faster; docs/decisions/tcp_writes.md.
constexpr std::size_t kMostAtOnce = 60 * 1024;
constexpr std::size_t kMostOnLoopback = 512 * 1024;
constexpr double kSpin = 20e-6;

// Where a rank's sockets are.
struct Place {
  std::string name_space;  // of `ip netns`; empty: this one
  std::string address = "127.0.0.1";
};

// A socket stays in the namespace that it was made in.
int socket_in(const Place& place) {
  if (!place.name_space.empty()) {
    const int file = ::open(("/run/netns/" + place.name_space).c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0 || ::setns(file, CLONE_NEWNET) != 0)
      bench::fail("cannot enter " + place.name_space);
    ::close(file);
  }
  return ::socket(AF_INET, SOCK_STREAM, 0);
}

std::pair<int, int> connected_pair(const Place& from, const Place& to) {
  const int listener = socket_in(to);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  if (::inet_pton(AF_INET, to.address.c_str(), &address.sin_addr) != 1) {
    bench::fail("no address: " + to.address);
  }
  auto* where = reinterpret_cast<sockaddr*>(&address);
  socklen_t size = sizeof address;
  const int one = socket_in(from);
  if (::bind(listener, where, size) != 0 || ::listen(listener, 1) != 0 ||
      ::getsockname(listener, where, &size) != 0 || ::connect(one, where, size) != 0) {
    bench::fail("cannot connect to " + to.address);
  }
  const int other = ::accept(listener, nullptr, nullptr);
  ::close(listener);
  const int yes = 1;
  for (const int fd : {one, other}) {
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    if (from.name_space.empty()) ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
  }
  return {one, other};
}

// sockets[a][b] is rank a's end of its connection with rank b.
using Sockets = std::vector<std::vector<int>>;

Sockets connect_all(const std::vector<Place>& places) {
  const std::size_t n = places.size();
  Sockets sockets(n, std::vector<int>(n, -1));
  for (std::size_t a = 0; a < n; ++a) {
    for (std::size_t b = a + 1; b < n; ++b) {
      std::tie(sockets[a][b], sockets[b][a]) = connected_pair(places[a], places[b]);
    }
  }
  return sockets;
}

// Both directions with one peer, for one operation: a chunk for it and a chunk for all others go
// out, a contribution (combined at once, so it needs little room) and a finished chunk come in.
struct Exchange {
  int fd = -1;
  std::array<std::byte*, 2> out{};
  std::byte* scratch = nullptr;
  std::byte* in = nullptr;
  std::size_t chunk = 0;
  std::size_t most_at_once = 0;
  std::size_t sent = 0;
  std::size_t received = 0;

  bool done() const { return sent == 2 * chunk && received == 2 * chunk; }

  bool advance() {
    bool moved = false;
    if (sent < 2 * chunk) {
      const std::size_t at = sent % chunk;
      moved = count(::send(fd, out[sent / chunk] + at, std::min(most_at_once, chunk - at),
                           MSG_DONTWAIT | MSG_NOSIGNAL),
                    sent);
    }
    if (received < 2 * chunk) {
      const std::size_t at = received % chunk;
      std::byte* const to = received < chunk ? scratch : in + at;
      moved = count(::recv(fd, to, std::min(most_at_once, chunk - at), MSG_DONTWAIT), received) ||
              moved;
    }
    return moved;
  }

  static bool count(ssize_t moved, std::size_t& total) {
    if (moved > 0) total += static_cast<std::size_t>(moved);
    if (moved == 0 || (moved < 0 && errno != EAGAIN)) bench::fail("a peer went away");
    return moved > 0;
  }
};

class RawTcp final : public bench::Subject {
 public:
  RawTcp(int rank, const Sockets& sockets, std::size_t most_at_once, bench::Team& team)
      : Subject(rank, static_cast<int>(sockets.size())),
        sockets_(sockets[static_cast<std::size_t>(rank)]),
        team_(team),
        scratch_(most_at_once) {}

  std::function<void()> prepare(float* data, std::size_t count) override {
    auto* const bytes = reinterpret_cast<std::byte*>(data);
    const auto n = static_cast<std::size_t>(ranks());
    const auto own = static_cast<std::size_t>(rank());
    const std::size_t chunk = std::max<std::size_t>(1, count * sizeof(float) / n);
    std::vector<Exchange> all;
    for (std::size_t step = 1; step < n; ++step) {
      const std::size_t peer = (own + step) % n;
      Exchange exchange;
      exchange.fd = sockets_[peer];
      exchange.out = {bytes + peer * chunk, bytes + own * chunk};
      exchange.scratch = scratch_.data();
      exchange.in = bytes + peer * chunk;
      exchange.chunk = chunk;
      exchange.most_at_once = scratch_.size();
      all.push_back(exchange);
    }
    return [all] { run(all); };
  }
  void barrier() override { team_.barrier(); }
  void maximum(std::vector<double>& values) override { team_.maximum(rank(), values); }
  bool computes_sum() const override { return false; }

 private:
  static void run(std::vector<Exchange> all) {
    double idle_since = 0;
    while (true) {
      bool moved = false;
      bool done = true;
      for (Exchange& exchange : all) {
        if (exchange.done()) continue;
        moved = exchange.advance() || moved;
        done = done && exchange.done();
      }
      if (done) return;
      if (moved) {
        idle_since = 0;
      } else if (idle_since == 0) {
        idle_since = bench::now();
      } else if (bench::now() - idle_since > kSpin) {
        sleep_until_ready(all);
        idle_since = 0;
      }
    }
  }

  static void sleep_until_ready(const std::vector<Exchange>& all) {
    std::vector<pollfd> polled;
    for (const Exchange& exchange : all) {
      short events = 0;
      if (exchange.sent < 2 * exchange.chunk) events = POLLOUT;
      if (exchange.received < 2 * exchange.chunk) events = static_cast<short>(events | POLLIN);
      if (events != 0) polled.push_back({exchange.fd, events, 0});
    }
    ::poll(polled.data(), polled.size(), -1);
  }

  const std::vector<int> sockets_;
  bench::Team& team_;
  std::vector<std::byte> scratch_;
};

std::vector<Place> places_of(const std::string& list) {
  std::vector<Place> places;
  std::istringstream words(list);
  for (std::string word; std::getline(words, word, ',');) {
    const std::size_t middle = word.find('=');
    if (middle == std::string::npos) bench::fail("not NAMESPACE=ADDRESS: " + word);
    places.push_back({word.substr(0, middle), word.substr(middle + 1)});
  }
  return places;
}

}  // namespace

int main(int argc, char** argv) {
  const bool hosts = argc > 1 && std::string(argv[1]) == "--hosts";
  const int first = hosts ? 3 : 2;
  if (argc <= first) {
    bench::fail("usage: raw_tcp N | --hosts NAMESPACE=ADDRESS,... BYTES... | --serve FOLDER");
  }
  const auto places =
      hosts ? places_of(argv[2]) : std::vector<Place>(static_cast<std::size_t>(std::stoi(argv[1])));
  const int ranks = static_cast<int>(places.size());
  const Sockets sockets = connect_all(places);
  bench::Team team(ranks);
  return bench::fork_ranks(ranks, [&](int rank) {
    bench::Commands commands({argv + first, argv + argc}, rank);
    RawTcp subject(rank, sockets, hosts ? kMostAtOnce : kMostOnLoopback, team);
    bench::measure_all(subject, commands);
  });
}
