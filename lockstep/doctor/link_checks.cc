#include "lockstep/doctor/link_checks.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/event.h"
#include "lockstep/base/hash/blake3.h"
#include "lockstep/base/host.h"
#include "lockstep/base/index.h"
#include "lockstep/base/thread.h"
#include "lockstep/base/version.h"
#include "lockstep/files/json.h"
#include "lockstep/net/job/handshake.h"
#include "lockstep/net/socket/interface.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kMostMessage = 1 << 20;
constexpr auto kProofPatience = 3s;
constexpr auto kConnectPatience = 2s;
constexpr auto kProbePatience = 10s;  // for all of one probe
constexpr int kRoundTrips = 30;
constexpr std::size_t kFirstBytes = std::size_t{1} << 20;
constexpr double kBulkSeconds = 0.15;
constexpr std::size_t kMostBytes = std::size_t{256} << 20;
constexpr double kSlowLink = 100e6;    // bytes per second
constexpr double kFarLink = 5e-3;      // seconds
constexpr double kClocksDiffer = 1.0;  // seconds

// What a probe asks for.
enum class Ask : char { kEcho = 'e', kTake = 't', kTime = 'c' };

Error unexpected(const Socket& socket, std::string_view what) {
  return Error(ErrorCode::kUnexpectedMessage, fmt::format("{} {}", socket.peer(), what));
}

void send_message(const Socket& socket, const Json& message, Deadline deadline) {
  const std::string text = to_text(message);
  const auto size = static_cast<std::uint32_t>(text.size());
  socket.send_all(std::as_bytes(std::span(&size, 1)), deadline);
  socket.send_all(std::as_bytes(std::span(text)), deadline);
}

Json receive_message(const Socket& socket, Deadline deadline) {
  std::uint32_t size = 0;
  socket.recv_all(std::as_writable_bytes(std::span(&size, 1)), deadline);
  if (size > kMostMessage) throw unexpected(socket, "is no doctor");
  std::string text(size, '\0');
  socket.recv_all(std::as_writable_bytes(std::span(text)), deadline);
  return parse_json(text);
}

// Proves that both ends know the secret, and tells nothing of it.
std::string proof(const std::string& secret, std::string_view who, const std::string& first,
                  const std::string& second) {
  const std::string context = "lockstep doctor " + secret;
  const Blake3Hash key = blake3(std::as_bytes(std::span(context)));
  Blake3 hash = Blake3::keyed(std::span<const std::byte, 32>(key));
  const std::string text = fmt::format("{} {} {}", who, first, second);
  hash.update(std::as_bytes(std::span(text)));
  return to_hex(hash.finish());
}

bool same_proof(const std::string& a, const std::string& b) {
  unsigned difference = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    difference |= static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[i]);
  }
  return difference == 0;
}

[[noreturn]] void refuse(const Socket& socket) {
  throw Error(ErrorCode::kAuthentication,
              fmt::format("{} has another token, or none", socket.peer()));
}

void prove_as_server(const Socket& socket, const std::string& secret) {
  const Deadline deadline = Deadline::after(kProofPatience);
  const std::string own = random_secret();
  send_message(socket, {{"nonce", own}}, deadline);
  const Json answer = receive_message(socket, deadline);
  JsonReader reader(answer);
  const std::string theirs = reader.text("nonce");
  if (!same_proof(reader.text("proof"), proof(secret, "client", own, theirs))) refuse(socket);
  send_message(socket, {{"proof", proof(secret, "server", theirs, own)}}, deadline);
}

void prove_as_client(const Socket& socket, const std::string& secret) {
  const Deadline deadline = Deadline::after(kProofPatience);
  const Json question = receive_message(socket, deadline);
  const std::string theirs = JsonReader(question).text("nonce");
  const std::string own = random_secret();
  send_message(socket, {{"nonce", own}, {"proof", proof(secret, "client", theirs, own)}}, deadline);
  const Json answer = receive_message(socket, deadline);
  if (!same_proof(JsonReader(answer).text("proof"), proof(secret, "server", own, theirs))) {
    refuse(socket);
  }
}

double unix_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Answers probes of others on a thread of its own, one at a time.
class ProbeServer {
 public:
  ProbeServer(const SocketAddress& address, std::string secret)
      : listener_(listen_tcp(address)), secret_(std::move(secret)) {
    thread_.start(
        "the thread that answers probes", [this] { serve(); }, [](const Error&) {});
  }
  ~ProbeServer() {
    end_.set();
    thread_.join();
  }
  ProbeServer(const ProbeServer&) = delete;
  ProbeServer& operator=(const ProbeServer&) = delete;

  std::uint16_t port() const { return listener_.local_address().port(); }

 private:
  void serve() {
    for (;;) {
      std::array<pollfd, 2> polled{{{end_.fd(), POLLIN, 0}, {listener_.fd(), POLLIN, 0}}};
      ::poll(polled.data(), polled.size(), -1);
      if (polled[0].revents != 0) return;
      try {
        if (auto caller = try_accept(listener_)) answer(*caller);
      } catch (const Error&) {  // the caller tells what it has seen
      }
    }
  }

  void answer(const Socket& socket) {
    tune_tcp(socket, kProbePatience);
    prove_as_server(socket, secret_);
    const Deadline deadline = Deadline::after(kProbePatience);
    std::vector<std::byte> bytes(kFirstBytes);
    for (;;) {
      std::array<std::byte, 9> head{};  // what, and how much
      socket.recv_all(head, deadline);
      switch (static_cast<Ask>(head[0])) {
        case Ask::kEcho: socket.send_all(head, deadline); break;
        case Ask::kTime: {
          const double now = unix_seconds();
          socket.send_all(std::as_bytes(std::span(&now, 1)), deadline);
          break;
        }
        case Ask::kTake: {
          std::uint64_t left = 0;
          std::memcpy(&left, head.data() + 1, sizeof left);
          if (left > kMostBytes) return;
          while (left > 0) {
            const std::size_t now = std::min<std::size_t>(left, bytes.size());
            socket.recv_all(std::span(bytes).first(now), deadline);
            left -= now;
          }
          socket.send_all(std::span(head).first(1), deadline);
          break;
        }
        default: return;
      }
    }
  }

  const Socket listener_;
  const std::string secret_;
  Event end_;
  Thread thread_;
};

// The head of a question.
std::array<std::byte, 9> question(Ask what, std::uint64_t size = 0) {
  std::array<std::byte, 9> head{};
  head[0] = static_cast<std::byte>(what);
  std::memcpy(head.data() + 1, &size, sizeof size);
  return head;
}

double time_bulk(const Socket& socket, std::size_t bytes, Deadline deadline) {
  const std::vector<std::byte> block(std::min(bytes, kFirstBytes));
  const auto begin = Clock::now();
  socket.send_all(question(Ask::kTake, bytes), deadline);
  for (std::size_t left = bytes; left > 0;) {
    const std::size_t now = std::min(left, block.size());
    socket.send_all(std::span(block).first(now), deadline);
    left -= now;
  }
  std::array<std::byte, 1> done{};
  socket.recv_all(done, deadline);
  return seconds_since(begin);
}

void measure(const Socket& socket, LinkReport& report) {
  const Deadline deadline = Deadline::after(kProbePatience);
  std::vector<double> trips;
  std::array<std::byte, 9> echo{};
  for (int i = 0; i < kRoundTrips; ++i) {
    const auto begin = Clock::now();
    socket.send_all(question(Ask::kEcho), deadline);
    socket.recv_all(echo, deadline);
    trips.push_back(seconds_since(begin));
  }
  std::ranges::sort(trips);
  report.round_trip = trips[trips.size() / 2];

  const double before = unix_seconds();
  double theirs = 0;
  socket.send_all(question(Ask::kTime), deadline);
  socket.recv_all(std::as_writable_bytes(std::span(&theirs, 1)), deadline);
  report.clock_ahead = theirs - (before + unix_seconds()) / 2;

  const double first = time_bulk(socket, kFirstBytes, deadline);
  const double wanted = static_cast<double>(kFirstBytes) / first * kBulkSeconds;
  const auto bytes = static_cast<std::size_t>(
      std::clamp(wanted, static_cast<double>(kFirstBytes), static_cast<double>(kMostBytes)));
  report.bytes_per_second = static_cast<double>(bytes) / time_bulk(socket, bytes, deadline);
}

LinkReport probe(int from, int to, const SocketAddress& where, const std::string& secret) {
  LinkReport report{.from = from, .to = to, .address = to_string(where)};
  try {
    const Socket socket = connect_tcp(where, Deadline::after(kConnectPatience));
    tune_tcp(socket, kProbePatience);
    prove_as_client(socket, secret);
    measure(socket, report);
  } catch (const Error& error) {
    report.error = error.what();
  }
  return report;
}

// Why nobody who knows the secret answers there; empty: somebody does.
std::string try_port(const SocketAddress& where, const std::string& secret) {
  try {
    const Socket socket = connect_tcp(where, Deadline::after(kConnectPatience));
    prove_as_client(socket, secret);
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

Json to_json(const LinkReport& report) {
  return {{"from", report.from},
          {"to", report.to},
          {"address", report.address},
          {"error", report.error},
          {"round_trip", report.round_trip},
          {"bytes_per_second", report.bytes_per_second},
          {"clock_ahead", report.clock_ahead},
          {"port_error", report.port_error}};
}

std::optional<LinkReport> parse_link(const Json& json) {
  JsonReader reader(json);
  LinkReport report;
  report.from = static_cast<int>(reader.whole("from", INT32_MAX));
  report.to = static_cast<int>(reader.whole("to", INT32_MAX));
  report.address = reader.text("address");
  report.error = reader.text("error");
  report.round_trip = reader.number("round_trip");
  report.bytes_per_second = reader.number("bytes_per_second");
  report.clock_ahead = reader.number("clock_ahead");
  report.port_error = reader.text("port_error");
  return reader.problem() ? std::nullopt : std::optional(report);
}

// What a process tells of itself when it comes to the hub.
struct Introduction {
  int rank = 0;
  std::string label;
  std::string version;
  std::string processor;
  std::uint16_t port = 0;  // of its probe server
  std::string token;       // keyed by the secret: only equality can be seen
  std::vector<Finding> findings;
};

Introduction introduction(const LinkCheckOptions& options, std::uint16_t port) {
  return {.rank = options.rank,
          .label = options.label,
          .version = std::string(version()),
          .processor = host_fingerprint(),
          .port = port,
          .token = options.token.empty() ? "" : proof(options.secret, "token", options.token, ""),
          .findings = options.findings};
}

Json to_json(const Introduction& own) {
  Json findings = Json::array();
  for (const Finding& each : own.findings) {
    findings.push_back({{"host", each.host},
                        {"check", each.check},
                        {"verdict", static_cast<int>(each.verdict)},
                        {"found", each.found},
                        {"advice", each.advice}});
  }
  return {{"rank", own.rank},
          {"label", own.label},
          {"version", own.version},
          {"processor", own.processor},
          {"port", own.port},
          {"token", own.token},
          {"findings", std::move(findings)}};
}

std::optional<Introduction> parse_introduction(const Json& json) {
  JsonReader reader(json);
  Introduction came;
  came.rank = static_cast<int>(reader.whole("rank", INT32_MAX));
  came.label = reader.text("label");
  came.version = reader.text("version");
  came.processor = reader.text("processor");
  came.port = static_cast<std::uint16_t>(reader.whole("port", UINT16_MAX));
  came.token = reader.text("token");
  for (const Json& each : reader.list("findings")) {
    JsonReader finding(each);
    came.findings.push_back(
        {finding.text("host"), finding.text("check"),
         static_cast<Verdict>(finding.whole("verdict", static_cast<int>(Verdict::kBad))),
         finding.text("found"), finding.text("advice")});
    if (finding.problem()) reader.fail(*finding.problem());
  }
  return reader.problem() ? std::nullopt : std::optional(came);
}

std::unique_ptr<ProbeServer> make_probe_server(const std::string& secret, std::uint16_t port = 0) {
  if (secret.empty()) {
    return std::make_unique<ProbeServer>(SocketAddress::loopback_v4(port), secret);
  }
  try {
    return std::make_unique<ProbeServer>(SocketAddress::any(AF_INET6, port), secret);
  } catch (const Error&) {  // a host without IPv6
    return std::make_unique<ProbeServer>(SocketAddress::any(AF_INET, port), secret);
  }
}

// Null: the port is 0, or somebody else has it, which is a finding of the host.
std::unique_ptr<ProbeServer> make_port_server(const LinkCheckOptions& options) {
  if (options.port == 0) return nullptr;
  try {
    return make_probe_server(options.secret, options.port);
  } catch (const Error&) {
    return nullptr;
  }
}

// A rank other than 0.
void take_part(const LinkCheckOptions& options) {
  const auto server = make_probe_server(options.secret);
  const Socket hub = connect_with_retry(options.hub, Deadline::after(options.timeout));
  prove_as_client(hub, options.secret);
  send_message(hub, to_json(introduction(options, server->port())),
               Deadline::after(kProofPatience));
  for (;;) {
    // Others may come late, and rounds take as long as their slowest probe.
    const Json order = receive_message(hub, Deadline::after(options.timeout + kProbePatience));
    JsonReader reader(order);
    if (reader.flag("end")) return;
    const int to = static_cast<int>(reader.whole("to", INT32_MAX));
    const std::string host = reader.text("host");
    const auto port = static_cast<std::uint16_t>(reader.whole("port", UINT16_MAX));
    const auto run_port = static_cast<std::uint16_t>(reader.whole("run_port", UINT16_MAX));
    if (reader.problem()) throw unexpected(hub, *reader.problem());
    // No host: where this process has reached the hub.
    const SocketAddress where =
        host.empty() ? hub.peer_address().with_port(port)
                     : resolve({host, port}, Deadline::after(kConnectPatience)).front();
    LinkReport report = probe(options.rank, to, where, options.secret);
    if (run_port != 0) report.port_error = try_port(where.with_port(run_port), options.secret);
    send_message(hub, to_json(report), Deadline::after(kProofPatience));
  }
}

// Rank 0.
class Hub {
 public:
  explicit Hub(LinkCheckOptions options)
      : options_(std::move(options)),
        listener_(options_.listener ? std::move(*options_.listener) : open_listener()),
        server_(make_probe_server(options_.secret)),
        port_server_(make_port_server(options_)) {}

  LinkChecks run() {
    members_.resize(index_of(options_.world_size));
    members_[0].came = introduction(options_, server_->port());
    gather();
    for (int round = 1; round < options_.world_size; ++round) probe_round(round);
    for (const Member& each : members_) {
      if (each.socket) each.socket->send_if_heard(end_message());
    }
    return conclude();
  }

 private:
  struct Member {
    std::optional<Introduction> came;
    std::optional<Socket> socket;  // none: rank 0, or lost
    SocketAddress address;
    std::string why_not;
  };

  Socket open_listener() const {
    const auto addresses = resolve(options_.hub, Deadline::after(kConnectPatience));
    require_token_for(addresses.front(), options_.secret);
    try {
      return listen_tcp(addresses.front());
    } catch (const Error&) {  // an address that this host has only for others, as behind a NAT
      if (addresses.front().is_loopback()) throw;
      return listen_tcp(SocketAddress::any(addresses.front().family(), options_.hub.port));
    }
  }

  static std::vector<std::byte> end_message() {
    const std::string text = to_text({{"end", true}});
    const auto size = static_cast<std::uint32_t>(text.size());
    std::vector<std::byte> bytes(sizeof size + text.size());
    std::memcpy(bytes.data(), &size, sizeof size);
    std::memcpy(bytes.data() + sizeof size, text.data(), text.size());
    return bytes;
  }

  bool all_here() const {
    return std::ranges::all_of(
        members_, [](const Member& each) { return each.came || !each.why_not.empty(); });
  }

  void gather() {
    const Deadline deadline = Deadline::after(options_.timeout);
    while (!all_here() && !deadline.expired()) {
      pollfd polled{listener_.fd(), POLLIN, 0};
      ::poll(&polled, 1, deadline.poll_timeout(200ms));
      try {
        if (auto visitor = try_accept(listener_)) welcome(std::move(*visitor));
      } catch (const Error& error) {
        strangers_.push_back(error.what());
      }
      for (int rank = 1; options_.gone && rank < options_.world_size; ++rank) {
        Member& member = members_[index_of(rank)];
        if (member.came || !member.why_not.empty()) continue;
        if (const auto why = options_.gone(rank)) member.why_not = *why;
      }
    }
  }

  void welcome(Socket socket) {
    prove_as_server(socket, options_.secret);
    const Json told = receive_message(socket, Deadline::after(kProofPatience));
    const auto came = parse_introduction(told);
    if (!came || came->rank <= 0 || came->rank >= options_.world_size) {
      throw unexpected(socket, "does not introduce itself");
    }
    Member& member = members_[index_of(came->rank)];
    if (member.came) throw unexpected(socket, fmt::format("is rank {} a second time", came->rank));
    socket.set_peer(name_of(*came), came->rank);
    member.address = socket.peer_address();
    member.came = came;
    member.socket = std::move(socket);
  }

  static std::string name_of(const Introduction& each) {
    return fmt::format("rank {} ({})", each.rank, each.label);
  }

  // Everybody calls the one `round` places on.
  void probe_round(int round) {
    const int n = options_.world_size;
    for (int from = 1; from < n; ++from) {
      Member& member = members_[index_of(from)];
      const int to = (from + round) % n;
      const Member& other = members_[index_of(to)];
      if (!member.socket || !other.came) continue;
      const bool by_hub = to == 0 || (other.address.is_loopback() && !member.address.is_loopback());
      lose_if_fails(member, [&] {
        send_message(*member.socket,
                     {{"end", false},
                      {"to", to},
                      {"host", by_hub ? "" : other.address.host()},
                      {"port", other.came->port},
                      {"run_port", to == 0 && port_server_ ? port_server_->port() : 0}},
                     Deadline::after(kProofPatience));
      });
    }
    const Member& own_target = members_[index_of(round)];
    if (own_target.came) {
      links_.push_back(
          probe(0, round, own_target.address.with_port(own_target.came->port), options_.secret));
    }
    for (int from = 1; from < n; ++from) {
      Member& member = members_[index_of(from)];
      if (!member.socket || !members_[index_of((from + round) % n)].came) continue;
      lose_if_fails(member, [&] {
        const Deadline deadline =
            Deadline::after(2 * (kConnectPatience + 2 * kProofPatience) + kProbePatience);
        if (const auto link = parse_link(receive_message(*member.socket, deadline))) {
          links_.push_back(*link);
        }
      });
    }
  }

  template <typename Work>
  void lose_if_fails(Member& member, const Work& work) {
    try {
      work();
    } catch (const Error& error) {
      member.why_not = error.what();
      member.socket.reset();
    }
  }

  LinkChecks conclude() {
    LinkChecks checks;
    const Introduction& own = *members_[0].came;
    for (int rank = 0; rank < options_.world_size; ++rank) {
      const Member& member = members_[index_of(rank)];
      checks.labels.push_back(member.came ? member.came->label : "");
      if (!member.came || !member.why_not.empty()) {
        checks.findings.push_back(absence(rank, member));
      }
      if (!member.came) continue;
      const Introduction& came = *member.came;
      for (const Finding& each : came.findings) checks.findings.push_back(each);
      if (came.version != own.version) {
        checks.findings.push_back(
            {came.label, "version", Verdict::kBad,
             fmt::format("{}, but {} has {}", came.version, own.label, own.version),
             "install the same version everywhere: others are refused"});
      }
      // Where somebody has none, that is a finding already.
      if (!came.token.empty() && !own.token.empty() && !same_proof(came.token, own.token)) {
        checks.findings.push_back({came.label, "token", Verdict::kBad,
                                   fmt::format("another than that of {}", own.label),
                                   "the same one on all hosts: LOCKSTEP_TOKEN, or --token-file"});
      }
      if (came.processor != own.processor) {
        checks.findings.push_back({came.label, "processor", Verdict::kWarning,
                                   fmt::format("another than that of {}", own.label),
                                   "the bits of a result may depend on which host computes what"});
      }
    }
    std::ranges::sort(links_, {},
                      [](const LinkReport& each) { return std::pair(each.from, each.to); });
    for (const LinkReport& link : links_) {
      checks.findings.push_back(finding_of(link));
      if (link.to == 0 && port_server_) checks.findings.push_back(port_finding_of(link));
      if (link.from == 0 && link.error.empty() && std::abs(link.clock_ahead) > kClocksDiffer) {
        checks.findings.push_back(
            {members_[index_of(link.to)].came->label, "clock", Verdict::kWarning,
             fmt::format("{:+.1f} s against {}", link.clock_ahead, own.label),
             "times in logs will not fit together (timedatectl set-ntp true, chrony)"});
      }
    }
    checks.links = std::move(links_);
    return checks;
  }

  Finding absence(int rank, const Member& member) const {
    const std::string who = member.came ? member.came->label : fmt::format("rank {}", rank);
    std::string found =
        member.why_not.empty()
            ? fmt::format("did not come to {} within {:.0f} s", to_string(options_.hub),
                          std::chrono::duration<double>(options_.timeout).count())
            : member.why_not;
    if (!strangers_.empty()) found += fmt::format("; turned away: {}", strangers_.front());
    return {who, "attendance", Verdict::kBad, found,
            fmt::format("start it with the same token, and let TCP through to {}",
                        to_string(options_.hub))};
  }

  Finding finding_of(const LinkReport& link) const {
    const std::string& from = members_[index_of(link.from)].came->label;
    const std::string& to = members_[index_of(link.to)].came->label;
    Finding finding{from, fmt::format("to {}", to), Verdict::kGood, "", ""};
    if (!link.error.empty()) {
      finding.verdict = Verdict::kBad;
      finding.found = fmt::format("{}: {}", link.address, link.error);
      finding.advice = fmt::format(
          "let TCP through from {} to {}, all ports that programs are given (a firewall, a "
          "security "
          "group, a missing route)",
          from, to);
      return finding;
    }
    finding.found = fmt::format("{:.2f} ms there and back, {:.0f} MB/s ({})", link.round_trip * 1e3,
                                link.bytes_per_second / 1e6, link.address);
    if (link.round_trip > kFarLink) {
      finding.verdict = Verdict::kWarning;
      finding.advice = "far away: steps wait for it; --interface chooses another network";
    } else if (link.bytes_per_second < kSlowLink) {
      finding.verdict = Verdict::kWarning;
      finding.advice =
          "slow: a step sends four bytes per parameter; --interface, --wire-dtype bf16, a larger "
          "--global-batch";
    }
    return finding;
  }

  Finding port_finding_of(const LinkReport& link) const {
    const std::string& from = members_[index_of(link.from)].came->label;
    const std::string& to = members_[0].came->label;
    Finding finding{from, fmt::format("port {} of {}", port_server_->port(), to), Verdict::kGood,
                    "can be reached", ""};
    if (link.port_error.empty()) return finding;
    finding.verdict = Verdict::kBad;
    finding.found = link.port_error;
    finding.advice = fmt::format("let TCP through from {} to port {} of {}, or take another --port",
                                 from, port_server_->port(), to);
    return finding;
  }

  LinkCheckOptions options_;
  const Socket listener_;
  const std::unique_ptr<ProbeServer> server_;
  const std::unique_ptr<ProbeServer> port_server_;  // where a run would listen; may be null
  std::vector<Member> members_;
  std::vector<LinkReport> links_;
  std::vector<std::string> strangers_;
};

}  // namespace

LinkChecks check_links(LinkCheckOptions options) {
  if (options.rank == 0) return Hub(std::move(options)).run();
  take_part(options);
  return {};
}

}  // namespace lockstep
