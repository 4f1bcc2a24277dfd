#include "lockstep/page/page.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/hash/blake3.h"
#include "lockstep/base/host.h"
#include "lockstep/net/socket/interface.h"
#include "lockstep/page/document.h"

namespace lockstep {
namespace {

constexpr const char* kJsonType = "application/json";
constexpr const char* kHtmlType = "text/html; charset=utf-8";
constexpr const char* kPrometheusType = "text/plain; version=0.0.4; charset=utf-8";
constexpr std::size_t kMostLines = 100'000;  // that wait, where the server has ended
constexpr std::size_t kMostRuns = 50;        // that are listed beside this one
// Of another run's file, at a time: about a tenth of a second.
constexpr std::size_t kBytesAtOnce = std::size_t{8} << 20;
constexpr auto kResolvePatience = std::chrono::seconds(10);
// The page asks once a second.
constexpr auto kReaderIsThere = std::chrono::seconds(3);
constexpr auto kFarewell = std::chrono::seconds(2);

// Not the token itself, and nothing that it could be found from.
constexpr std::string_view kSecretContext = "lockstep page secret, version 1";
constexpr std::size_t kSecretDigits = 32;

bool same_text(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned char different = 0;  // looks at all of them, whatever it finds
  for (std::size_t i = 0; i < a.size(); ++i) {
    different |= static_cast<unsigned char>(a[i] ^ b[i]);
  }
  return different == 0;
}

// The host of a Host header, without its port.
std::string_view host_of(std::string_view header) {
  if (header.starts_with('[')) return header.substr(0, header.find(']') + 1);
  return header.substr(0, header.find(':'));
}

bool is_loopback_name(std::string_view host) {
  if (host == "localhost" || host == "[::1]") return true;
  const auto address = SocketAddress::parse(std::string(host) + ":1");
  return address && address->is_loopback();
}

HttpResponse json_response(std::string text) {
  HttpResponse response;
  response.type = kJsonType;
  response.body = std::move(text);
  return response;
}

std::string run_name(const std::string& out) {
  const auto path = (std::filesystem::path(out).lexically_normal() / "").parent_path();
  return out.empty() ? "this run" : path.filename().string();
}

Socket open_page(const SocketAddress& address) {
  try {
    return listen_tcp(address);
  } catch (const Error& error) {
    throw Error(ErrorCode::kIo,
                fmt::format("--page {}: {}; another port, or 0 for any, may be free",
                            to_string(address), error.message()));
  }
}

}  // namespace

SocketAddress parse_page_address(std::string_view text, std::string_view token) {
  const auto port = parse_whole(text);
  const auto where = port && *port <= UINT16_MAX
                         ? std::optional(HostPort{"127.0.0.1", static_cast<std::uint16_t>(*port)})
                         : parse_host_port(text);
  if (!where) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--page {}: neither PORT nor HOST:PORT", text));
  }
  SocketAddress address;
  try {
    address = resolve(*where, Deadline::after(kResolvePatience)).front();
  } catch (const Error& error) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("--page {}: {}", text, error.message()));
  }
  if (!address.is_loopback() && token.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--page {}: a page that others can reach needs the job's secret "
                            "(--token-file or LOCKSTEP_TOKEN), which its own is made from",
                            text));
  }
  try {
    require_token_for(address, std::string(token));
  } catch (const Error& error) {  // it can be guessed from the page's secret
    throw Error(ErrorCode::kInvalidArgument, fmt::format("--page {}: {}", text, error.message()));
  }
  return address;
}

std::string page_secret(std::string_view token) {
  const Blake3Hash key = blake3(std::as_bytes(std::span(kSecretContext)));
  Blake3 hash = Blake3::keyed(key);
  hash.update(std::as_bytes(std::span(token)));
  return to_hex(hash.finish()).substr(0, kSecretDigits);
}

Page::Page(PageOptions options)
    : options_(std::move(options)),
      secret_(options_.address.is_loopback() ? "" : page_secret(options_.token)),
      name_(run_name(options_.out)),
      history_bytes_(options_.goes_on ? metrics_bytes(options_.out) : 0) {
  LOCKSTEP_CHECK(secret_.empty() || !options_.token.empty());
  if (history_bytes_ > 0) history_.emplace(options_.out);
  Socket listener = open_page(options_.address);
  bound_ = listener.local_address();
  cookie_ = fmt::format("lockstep_page_{}", bound_.port());
  server_.emplace(
      std::move(listener), [this](const HttpRequest& request) { return answer(request); },
      [this] { take_lines(); });
}

std::string Page::link() const {
  const std::string host = bound_.is_any() ? this_host().hostname : bound_.host();
  const bool brackets = host.find(':') != std::string::npos;
  return fmt::format("http://{}{}{}:{}/{}", brackets ? "[" : "", host, brackets ? "]" : "",
                     bound_.port(), secret_.empty() ? "" : "?secret=" + secret_);
}

void Page::tell(std::string line) {
  const std::lock_guard lock(mutex_);
  if (lines_.size() < kMostLines) lines_.push_back(std::move(line));
}

void Page::see_out() {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point asked = asked_;
  if (asked == Clock::time_point{} || Clock::now() - asked > kReaderIsThere) return;
  std::this_thread::sleep_for(kFarewell);
}

void Page::offer(std::string path, std::function<std::string()> json) {
  const std::lock_guard lock(mutex_);
  offered_[std::move(path)] = std::move(json);
}

void Page::take_lines() {
  if (history_) {  // what was told since this page was opened comes after it
    history_->read(history_bytes_);
    record_ = history_->record();
    history_.reset();
  }
  std::vector<std::string> lines;
  {
    const std::lock_guard lock(mutex_);
    lines.swap(lines_);
  }
  for (const std::string& line : lines) record_.add(line);
}

bool Page::is_allowed(const HttpRequest& request) const {
  const auto given = request.query.find("secret");
  if (given != request.query.end()) return same_text(given->second, secret_);
  constexpr std::string_view kBearer = "Bearer ";
  const std::string_view header = request.header("authorization");
  if (header.starts_with(kBearer)) return same_text(header.substr(kBearer.size()), secret_);
  const auto cookie = request.cookie(cookie_);
  return cookie && same_text(*cookie, secret_);
}

HttpResponse Page::answer(const HttpRequest& request) {
  // A name that leads here by somebody else's doing would let his page read ours.
  if (secret_.empty() && !is_loopback_name(host_of(request.header("host")))) {
    return http_problem(421, "this page is for this host: ask for localhost");
  }
  if (!secret_.empty() && !is_allowed(request)) {
    return http_problem(401, "this page needs its secret: open the link that the run has printed");
  }
  take_lines();
  HttpResponse response = answer_known(request);
  response.headers.emplace_back("Cache-Control", "no-store");
  response.headers.emplace_back("X-Content-Type-Options", "nosniff");
  if (response.type == kHtmlType) {
    response.headers.emplace_back("Content-Security-Policy",
                                  "default-src 'none'; script-src 'unsafe-inline'; style-src "
                                  "'unsafe-inline'; img-src data:; connect-src 'self'");
    response.headers.emplace_back("Referrer-Policy", "no-referrer");
    if (!secret_.empty()) {
      response.headers.emplace_back(
          "Set-Cookie", fmt::format("{}={}; Path=/; HttpOnly; SameSite=Strict", cookie_, secret_));
    }
  }
  return response;
}

HttpResponse Page::answer_known(const HttpRequest& request) {
  if (request.path == "/") {
    HttpResponse response;
    response.type = kHtmlType;
    response.body = live_document();
    return response;
  }
  if (request.path == "/api/run") {
    asked_ = std::chrono::steady_clock::now();
    Json json = run_json(record_);
    json["name"] = name_;
    json["out"] = options_.out;
    return json_response(to_text(json));
  }
  if (request.path == "/api/steps") return steps_of(request);
  if (request.path == "/api/runs") return runs();
  if (request.path == "/metrics") {
    HttpResponse response;
    response.type = kPrometheusType;
    response.body = prometheus_text(record_, name_);
    return response;
  }
  std::function<std::string()> offered;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = offered_.find(request.path); found != offered_.end()) {
      offered = found->second;
    }
  }
  if (offered) return json_response(offered());
  return http_problem(
      404, "there is no such page; / is the page, /api/run, /api/steps and /metrics are its data");
}

HttpResponse Page::steps_of(const HttpRequest& request) {
  std::optional<std::int64_t> after = 0;
  if (const auto given = request.query.find("after"); given != request.query.end()) {
    after = parse_whole(given->second);
  }
  if (!after) return http_problem(400, "after: not a step");
  const auto run = request.query.find("run");
  const RunRecord* record = run == request.query.end() ? &record_ : record_of(run->second);
  if (record == nullptr) return http_problem(404, "run: there is no such run beside this one");
  return json_response(to_text(steps_json(*record, *after)));
}

// Null where there is none. Only names that were found in the folder lead to files.
const RunRecord* Page::record_of(const std::string& run) {
  if (run == name_) return &record_;
  if (options_.out.empty()) return nullptr;
  auto known = others_.find(run);
  if (known == others_.end()) {
    const auto names = runs_beside(options_.out, kMostRuns);
    if (std::ranges::find(names, run) == names.end()) return nullptr;
    const auto folder = (std::filesystem::path(options_.out).lexically_normal() / "").parent_path();
    known = others_.emplace(run, RunFolder((folder.parent_path() / run).string())).first;
  }
  known->second.read(kBytesAtOnce);
  return &known->second.record();
}

HttpResponse Page::runs() {
  Json names = Json::array({name_});
  if (!options_.out.empty()) {
    for (const std::string& name : runs_beside(options_.out, kMostRuns)) names.push_back(name);
  }
  return json_response(to_text(Json{{"runs", std::move(names)}}));
}

}  // namespace lockstep
