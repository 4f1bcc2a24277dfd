// One round of the gradient server (collect, check, average, send back) beside the same bytes over
// loopback TCP with no arithmetic at all. Both run between the same processes, alternately:
// a coordinator and N workers. A round's time is from the word "go" until the last worker has
// everything.
//
//   star [N=4] [BYTES=67108864] [ROUNDS=15] [WINDOW=the server's own]
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <memory>

#include "bench/common.h"
#include "lockstep/server/gradient_server.h"
#include "lockstep/server/worker_client.h"

namespace {

using namespace lockstep;

constexpr std::size_t kMostAtOnce = 60 * 1024;  // as in raw_tcp
constexpr char kOurs = 'o';
constexpr char kRaw = 'r';
constexpr char kQuit = 'q';

struct Pipe {
  int read_end = -1;
  int write_end = -1;
};

Pipe make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) bench::fail("pipe");
  return {ends[0], ends[1]};
}
void put(const Pipe& pipe, char word) {
  if (::write(pipe.write_end, &word, 1) != 1) bench::fail("a process went away");
}
char get(const Pipe& pipe) {
  char word = kQuit;
  if (::read(pipe.read_end, &word, 1) != 1) bench::fail("a process went away");
  return word;
}

std::size_t moved(ssize_t bytes) {
  if (bytes == 0 || (bytes < 0 && errno != EAGAIN)) bench::fail("a peer went away");
  return bytes > 0 ? static_cast<std::size_t>(bytes) : 0;
}

// A worker's raw round: all out, then all in.
void raw_worker_round(int fd, std::byte* data, std::size_t size) {
  for (std::size_t done = 0; done < size;) {
    done += moved(::send(fd, data + done, std::min(kMostAtOnce, size - done), MSG_NOSIGNAL));
  }
  for (std::size_t done = 0; done < size;) {
    done += moved(::recv(fd, data + done, size - done, 0));
  }
}

// The coordinator's raw round: as the server does it, all workers at once and in turns of 256 KiB.
class RawStar {
 public:
  RawStar(std::vector<int> sockets, std::size_t size)
      : sockets_(std::move(sockets)), size_(size), scratch_(256 * 1024), result_(size) {}

  void round() {
    move_all(POLLIN, [this](int fd, std::size_t done) {
      const std::size_t most = std::min(scratch_.size(), size_ - done);
      return ::recv(fd, scratch_.data(), most, MSG_DONTWAIT);
    });
    move_all(POLLOUT, [this](int fd, std::size_t done) {
      return ::send(fd, result_.data() + done, std::min(kMostAtOnce, size_ - done),
                    MSG_DONTWAIT | MSG_NOSIGNAL);
    });
  }

 private:
  template <typename Move>
  void move_all(short events, Move&& move) {
    std::vector<std::size_t> done(sockets_.size());
    std::vector<pollfd> entries;
    for (const int fd : sockets_) entries.push_back({fd, events, 0});
    for (std::size_t left = sockets_.size(); left > 0;) {
      ::poll(entries.data(), entries.size(), -1);
      for (std::size_t i = 0; i < entries.size(); ++i) {
        if (entries[i].revents == 0) continue;
        for (std::size_t turn = 0; turn < scratch_.size() && done[i] < size_;) {
          const std::size_t bytes = moved(move(entries[i].fd, done[i]));
          if (bytes == 0) break;
          turn += bytes;
          done[i] += bytes;
        }
        if (done[i] < size_) continue;
        entries[i].fd = -1;
        --left;
      }
    }
  }

  const std::vector<int> sockets_;
  const std::size_t size_;
  std::vector<std::byte> scratch_;
  std::vector<std::byte> result_;
};

float element(int worker, std::size_t index) {
  return static_cast<float>((index + 5 * static_cast<std::size_t>(worker)) % 13);
}

struct Setup {
  int workers = 4;
  std::size_t bytes = std::size_t{64} << 20;
  std::size_t window = 0;
  SocketAddress ours;
  SocketAddress raw;
};

// Serves words from `orders` and answers each when it has everything.
void work(const Setup& setup, const Pipe& orders, const Pipe& answers) {
  WorkerOptions options;
  options.coordinator = {setup.ours.host(), setup.ours.port()};
  WorkerClient client(options);
  const Socket raw = connect_tcp(setup.raw, Deadline::after(std::chrono::seconds(10)));
  ::fcntl(raw.fd(), F_SETFL, 0);  // blocking
  const std::size_t count = setup.bytes / sizeof(float);
  std::vector<float> data(count);
  for (std::uint64_t step = 0;;) {
    for (std::size_t i = 0; i < count; ++i) data[i] = element(client.worker_id(), i);
    put(answers, 'w');  // ready
    const char word = get(orders);
    if (word == kQuit) return;
    if (word == kRaw) {
      raw_worker_round(raw.fd(), reinterpret_cast<std::byte*>(data.data()), setup.bytes);
    } else {
      client.send_gradient(step, data, 0, 0, 1);
      client.receive_averaged(step, data);
      ++step;
    }
    put(answers, 'd');
    if (word == kRaw) continue;
    // Sums of small whole numbers are exact, and so is a quarter of them.
    for (std::size_t i = 0; i < count; ++i) {
      float sum = 0;
      for (int w = 0; w < setup.workers; ++w) sum += element(w, i);
      if (data[i] != sum * (1.0F / static_cast<float>(setup.workers))) bench::fail("wrong average");
    }
  }
}

class Coordinator {
 public:
  Coordinator(const Setup& setup, Socket ours, const Socket& raw, const std::vector<Pipe>& orders,
              const std::vector<Pipe>& answers)
      : orders_(orders),
        answers_(answers),
        door_(host_job({}, {std::move(ours), {Purpose::kServer}, /*original=*/true})),
        server_(&door_->arrivals(), options(setup)) {
    server_.wait_for_workers();
    std::vector<int> sockets;
    for (int i = 0; i < setup.workers; ++i) {
      raw_.push_back(accept(raw, Deadline::after(std::chrono::seconds(10))));
      sockets.push_back(raw_.back().fd());
    }
    star_ = std::make_unique<RawStar>(sockets, setup.bytes);
  }

  double time(char word) {
    for (const Pipe& each : answers_) get(each);
    const double start = bench::now();
    for (const Pipe& each : orders_) put(each, word);
    if (word == kRaw) {
      star_->round();
    } else {
      server_.broadcast(server_.reduce({RoundKind::kVector, step_++, {}, 0}));
      server_.drain();
    }
    for (const Pipe& each : answers_) get(each);
    return bench::now() - start;
  }
  void quit() {
    for (const Pipe& each : answers_) get(each);
    for (const Pipe& each : orders_) put(each, kQuit);
  }

 private:
  static ServerOptions options(const Setup& setup) {
    ServerOptions options;
    options.workers = setup.workers;
    if (setup.window > 0) options.window = setup.window;
    return options;
  }

  const std::vector<Pipe>& orders_;
  const std::vector<Pipe>& answers_;
  const std::unique_ptr<ControlPlane> door_;
  GradientServer server_;
  std::vector<Socket> raw_;
  std::unique_ptr<RawStar> star_;
  std::uint64_t step_ = 0;
};

void print(const char* name, std::vector<double> times) {
  std::sort(times.begin(), times.end());
  std::printf("%-28s %9.1f %9.1f %9.1f\n", name, times.front() * 1e3, times[times.size() / 2] * 1e3,
              times[times.size() * 99 / 100] * 1e3);
}

}  // namespace

int main(int argc, char** argv) {
  Setup setup;
  if (argc > 1) setup.workers = std::stoi(argv[1]);
  if (argc > 2) setup.bytes = std::stoull(argv[2]);
  const int rounds = argc > 3 ? std::stoi(argv[3]) : 15;
  if (argc > 4) setup.window = std::stoull(argv[4]);
  Socket ours = listen_tcp(SocketAddress::loopback_v4());
  const Socket raw = listen_tcp(SocketAddress::loopback_v4());
  setup.ours = ours.local_address();
  setup.raw = raw.local_address();
  std::vector<Pipe> orders;
  std::vector<Pipe> answers;
  for (int i = 0; i < setup.workers; ++i) {
    orders.push_back(make_pipe());
    answers.push_back(make_pipe());
  }
  return bench::fork_ranks(setup.workers + 1, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    if (rank < setup.workers) return work(setup, orders[index], answers[index]);
    Coordinator coordinator(setup, std::move(ours), raw, orders, answers);
    std::vector<double> our_times;
    std::vector<double> raw_times;
    std::vector<double> ratios;
    for (int i = -2; i < rounds; ++i) {  // two to warm up
      const double our_time = coordinator.time(kOurs);
      const double raw_time = coordinator.time(kRaw);
      if (i < 0) continue;
      our_times.push_back(our_time);
      raw_times.push_back(raw_time);
      ratios.push_back(raw_time / our_time);
    }
    coordinator.quit();
    std::sort(ratios.begin(), ratios.end());
    std::printf("one round, %d workers, %zu bytes each (ms)\n", setup.workers, setup.bytes);
    std::printf("%-28s %9s %9s %9s\n", "", "min", "median", "p99");
    print("gradient server", our_times);
    print("raw TCP, no arithmetic", raw_times);
    std::printf("of raw TCP's rate: %.0f %% (median of %zu ratios)\n",
                100 * ratios[ratios.size() / 2], ratios.size());
    std::fflush(stdout);
  });
}
