#include "lockstep/net/http/http_server.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/net/socket/poller.h"

namespace lockstep {
namespace {

constexpr std::uint64_t kStopKey = 0;
constexpr std::uint64_t kListenerKey = 1;
constexpr std::uint64_t kFirstConnection = 2;
constexpr int kLowestPriority = 19;
constexpr int kServerError = 500;
constexpr std::chrono::seconds kOften{1};
constexpr std::chrono::hours kIdle{1};  // a look around when nothing happens
// After connections could not be accepted: the process may have run out of descriptors.
constexpr std::chrono::milliseconds kPauseOfListener{200};

}  // namespace

// All that the thread has.
class HttpServer::Loop {
 public:
  explicit Loop(const HttpServer& server) : server_(server) {
    poller_.add(server_.stop_.fd(), kStopKey);
    poller_.add(server_.listener_.fd(), kListenerKey);
  }

  void run() {
    while (!stopped_) {
      for (const std::uint64_t key : poller_.wait(wake_at())) {
        if (key == kStopKey) {
          stopped_ = true;
        } else if (key == kListenerKey) {
          accept_all();
        } else {
          serve(key);
        }
      }
      end_overdue();
      listen_again();
      if (server_.often_ && Clock::now() >= often_at_) {
        server_.often_();
        often_at_ = Clock::now() + kOften;
      }
    }
  }

 private:
  using Clock = Deadline::Clock;
  struct Connection {
    Socket socket;
    std::string input = {};
    std::string output = {};
    std::size_t sent = 0;  // of the output
    bool closes = false;   // once the output is sent
    bool polled_to_send = false;
    Clock::time_point moved = Clock::now();  // when bytes last went either way
    Clock::time_point limit = {};            // for what it is about
  };
  using Connections = std::map<std::uint64_t, Connection>;

  void accept_all() {
    try {
      while (auto socket = try_accept(server_.listener_)) {
        if (connections_.size() >= server_.limits_.connections) close_idlest();
        Connection connection{std::move(*socket)};
        connection.limit = Clock::now() + server_.limits_.patience;
        poller_.add(connection.socket.fd(), next_);
        connections_.emplace(next_++, std::move(connection));
      }
    } catch (const Error&) {
      // A listener that stays readable would be asked again and again.
      poller_.remove(server_.listener_.fd());
      listens_at_ = Clock::now() + kPauseOfListener;
    }
  }

  void listen_again() {
    if (!listens_at_ || Clock::now() < *listens_at_) return;
    poller_.add(server_.listener_.fd(), kListenerKey);
    listens_at_.reset();
  }

  void close_idlest() {
    connections_.erase(std::ranges::min_element(
        connections_, {}, [](const auto& entry) { return entry.second.moved; }));
  }

  void serve(std::uint64_t key) {
    const auto found = connections_.find(key);
    if (found == connections_.end()) return;  // closed in this turn
    Connection& connection = found->second;
    try {
      if (receive(connection)) {
        answer(connection);
        if (send(key, connection)) return;
      }
    } catch (const std::exception&) {  // a broken connection, or no memory: of no other interest
    }
    connections_.erase(found);
  }

  // What is there, up to a buffer full; the poller tells of the rest. Returns whether the
  // connection goes on, as send() does.
  static bool receive(Connection& connection) {
    std::array<std::byte, 4096> bytes{};
    const auto count = connection.socket.try_recv(bytes);  // throws at the end of the stream
    if (!count || connection.closes) return true;
    connection.moved = Clock::now();
    connection.input.append(reinterpret_cast<const char*>(bytes.data()), *count);
    // One that asks on and on while it takes no answer is none of ours.
    return connection.output.empty() || connection.input.size() <= kMaxRequestHead;
  }

  // The first request that is whole, if no answer is under way.
  void answer(Connection& connection) {
    if (!connection.output.empty() || connection.closes) return;
    const auto parsed = parse_http_request(connection.input);
    if (!parsed) return;
    connection.input.erase(0, parsed->bytes);
    const bool bad = parsed->problem != 0;
    connection.closes = bad || !parsed->request.keeps_alive;
    const HttpResponse response =
        bad ? http_problem(parsed->problem, "this is no request that is answered here")
            : respond(parsed->request);
    connection.output = encode_http(response, !bad && parsed->request.head, !connection.closes);
    connection.sent = 0;
    connection.limit = Clock::now() + server_.limits_.patience;
  }

  HttpResponse respond(const HttpRequest& request) const {
    try {
      return server_.handler_(request);
    } catch (const std::exception& error) {
      return http_problem(kServerError, error.what());
    }
  }

  bool send(std::uint64_t key, Connection& connection) {
    while (!connection.output.empty()) {
      const auto left = std::as_bytes(std::span(connection.output)).subspan(connection.sent);
      const auto count = connection.socket.try_send(left);
      if (!count) break;
      connection.sent += *count;
      connection.moved = Clock::now();
      connection.limit = connection.moved + server_.limits_.patience;
      if (connection.sent < connection.output.size()) continue;
      connection.output = {};
      if (connection.closes) {
        connection.socket.close_gently();
        return false;
      }
      answer(connection);  // what came meanwhile
    }
    const bool waits = !connection.output.empty();
    if (waits != connection.polled_to_send) {
      poller_.set_sending(connection.socket.fd(), key, waits);
      connection.polled_to_send = waits;
    }
    return true;
  }

  void end_overdue() {
    const auto now = Clock::now();
    std::erase_if(connections_, [&](const auto& entry) { return entry.second.limit <= now; });
  }

  Deadline wake_at() const {
    Deadline first = server_.often_ ? Deadline::at(often_at_) : Deadline::after(kIdle);
    if (listens_at_) first = earlier(first, Deadline::at(*listens_at_));
    for (const auto& [key, connection] : connections_) {
      first = earlier(first, Deadline::at(connection.limit));
    }
    return first;
  }

  const HttpServer& server_;
  Poller poller_;
  Connections connections_;
  std::uint64_t next_ = kFirstConnection;
  std::optional<Clock::time_point> listens_at_;  // again
  Clock::time_point often_at_ = Clock::now();
  bool stopped_ = false;
};

HttpServer::HttpServer(Socket listener, Handler handler, std::function<void()> often,
                       HttpLimits limits)
    : listener_(std::move(listener)),
      handler_(std::move(handler)),
      often_(std::move(often)),
      limits_(limits) {
  thread_.start(
      "the HTTP thread",
      [this] {
        // Of this thread alone, as Linux has it. Where it is not allowed, nothing is lost.
        ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kLowestPriority);
        Loop(*this).run();
      },
      [](const Error& error) {
        log(LogLevel::kWarning, "the HTTP server has ended: {}", error.message());
      });
}

HttpServer::~HttpServer() { stop_.set(); }

}  // namespace lockstep
