#include "lockstep/net/http/http_message.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdint>
#include <string>

namespace lockstep {
namespace {

constexpr int kBadRequest = 400;
constexpr int kMethodNotAllowed = 405;
constexpr int kBodyTooLarge = 413;
constexpr int kHeadTooLarge = 431;

std::string_view reason_of(int status) {
  switch (status) {
    case 200: return "OK";
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 413: return "Content Too Large";
    case 421: return "Misdirected Request";
    case 431: return "Request Header Fields Too Large";
    case 503: return "Service Unavailable";
    default: return "Error";
  }
}

bool is_token(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](unsigned char c) {
    return std::isalnum(c) != 0 ||
           std::string_view("!#$%&'*+-.^_`|~").find(static_cast<char>(c)) != std::string_view::npos;
  });
}

bool is_printable(std::string_view text) {
  return std::ranges::all_of(text, [](unsigned char c) { return c >= ' ' && c != 0x7f; });
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

std::string lower_case(std::string_view text) {
  std::string lower(text);
  std::ranges::transform(lower, lower.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return lower;
}

// What stands before `end`; `text` is what stands after it.
std::string_view cut(std::string_view& text, char end) {
  const std::size_t at = text.find(end);
  const std::string_view before = text.substr(0, at);
  text = at == std::string_view::npos ? std::string_view() : text.substr(at + 1);
  return before;
}

bool parse_query(std::string_view text, std::map<std::string, std::string>& query) {
  while (!text.empty()) {
    std::string_view value = cut(text, '&');
    if (value.empty()) continue;
    const auto name = decode_url(cut(value, '='));
    const auto decoded = decode_url(value);
    if (!name || !decoded) return false;
    query[*name] = *decoded;
  }
  return true;
}

// "GET /path?query HTTP/1.1". Returns 0, or the status of what is wrong with it.
int parse_request_line(std::string_view line, HttpRequest& request) {
  if (!is_printable(line)) return kBadRequest;
  const std::string_view method = cut(line, ' ');
  std::string_view target = cut(line, ' ');
  if (!is_token(method) || (line != "HTTP/1.1" && line != "HTTP/1.0")) return kBadRequest;
  if (!target.starts_with('/')) return kBadRequest;
  request.keeps_alive = line == "HTTP/1.1";
  request.head = method == "HEAD";
  if (!request.head && method != "GET") return kMethodNotAllowed;
  const auto path = decode_url(cut(target, '?'));
  if (!path) return kBadRequest;
  request.path = *path;
  return parse_query(target, request.query) ? 0 : kBadRequest;
}

int parse_head(std::string_view head, HttpRequest& request) {
  std::string_view line = cut(head, '\n');
  if (line.ends_with('\r')) line.remove_suffix(1);
  if (const int problem = parse_request_line(line, request)) return problem;
  while (!head.empty()) {
    line = cut(head, '\n');
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.find(':') == std::string_view::npos) return kBadRequest;
    const std::string_view name = cut(line, ':');
    const std::string_view value = trimmed(line);
    if (!is_token(name) || !is_printable(value)) return kBadRequest;
    request.headers[lower_case(name)] = std::string(value);
  }
  const std::string_view length = request.header("content-length");
  if (request.headers.contains("transfer-encoding")) return kBodyTooLarge;
  if (!length.empty() && !parse_whole(length)) return kBadRequest;
  if (!length.empty() && *parse_whole(length) > 0) return kBodyTooLarge;
  const std::string connection = lower_case(request.header("connection"));
  if (connection == "close") request.keeps_alive = false;
  if (connection == "keep-alive") request.keeps_alive = true;
  return 0;
}

}  // namespace

std::string_view HttpRequest::header(const std::string& name) const {
  const auto found = headers.find(name);
  return found == headers.end() ? std::string_view() : std::string_view(found->second);
}

std::optional<std::string> HttpRequest::cookie(std::string_view name) const {
  std::string_view rest = header("cookie");
  while (!rest.empty()) {
    std::string_view value = trimmed(cut(rest, ';'));
    if (cut(value, '=') == name) return std::string(value);
  }
  return std::nullopt;
}

HttpResponse http_problem(int status, std::string_view text) {
  HttpResponse response;
  response.status = status;
  response.body = fmt::format("{}\n", text);
  if (status == kMethodNotAllowed) response.headers.emplace_back("Allow", "GET, HEAD");
  return response;
}

std::optional<ParsedRequest> parse_http_request(std::string_view bytes) {
  // Lines end with CR LF; a bare LF will do.
  std::size_t end = bytes.find("\r\n\r\n");
  std::size_t separator = 4;
  if (const std::size_t bare = bytes.find("\n\n"); bare < end) {
    end = bare;
    separator = 2;
  }
  ParsedRequest parsed;
  if (end == std::string_view::npos || end > kMaxRequestHead) {
    if (bytes.size() <= kMaxRequestHead) return std::nullopt;
    parsed.problem = kHeadTooLarge;
    parsed.bytes = bytes.size();
    return parsed;
  }
  parsed.bytes = end + separator;
  parsed.problem = parse_head(bytes.substr(0, end), parsed.request);
  return parsed;
}

std::string encode_http(const HttpResponse& response, bool head, bool keeps_alive) {
  std::string text =
      fmt::format("HTTP/1.1 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: {}\r\n",
                  response.status, reason_of(response.status), response.type, response.body.size(),
                  keeps_alive ? "keep-alive" : "close");
  for (const auto& [name, value] : response.headers) text += fmt::format("{}: {}\r\n", name, value);
  text += "\r\n";
  if (!head) text += response.body;
  return text;
}

std::optional<std::string> decode_url(std::string_view text) {
  std::string decoded;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      decoded += text[i] == '+' ? ' ' : text[i];
      continue;
    }
    std::uint8_t byte = 0;
    const std::string_view digits = text.substr(i + 1, 2);
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), byte, 16);
    if (digits.size() != 2 || error != std::errc() || end != digits.data() + 2 || byte == 0) {
      return std::nullopt;
    }
    decoded += static_cast<char>(byte);
    i += 2;
  }
  return decoded;
}

std::optional<std::int64_t> parse_whole(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool digits = !text.empty() && text.front() != '-';
  if (!digits || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace lockstep
