#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep {

// Requests and responses of HTTP/1.1, as far as a server needs them that only shows things: GET and
// HEAD, no bodies in requests. Pure.

inline constexpr std::size_t kMaxRequestHead = 8192;

struct HttpRequest {
  bool head = false;                                // HEAD: the answer is sent without its body
  std::string path;                                 // decoded: "/api/steps"
  std::map<std::string, std::string> query = {};    // decoded; of a name that comes twice, the last
  std::map<std::string, std::string> headers = {};  // names in lower case; likewise
  bool keeps_alive = true;                          // more requests may follow on the connection

  // Of a header, or an empty text.
  std::string_view header(const std::string& name) const;
  // The value of a cookie, if there is one.
  std::optional<std::string> cookie(std::string_view name) const;
};

struct HttpResponse {
  int status = 200;
  std::string type = "text/plain; charset=utf-8";
  std::string body = {};
  std::vector<std::pair<std::string, std::string>> headers = {};
};

// A refusal with a line of text.
HttpResponse http_problem(int status, std::string_view text);

struct ParsedRequest {
  int problem = 0;  // a status 4xx: this is no request that can be answered
  HttpRequest request = {};
  std::size_t bytes = 0;  // of the request
};
// The first request in `bytes`; nothing while more must come.
std::optional<ParsedRequest> parse_http_request(std::string_view bytes);

// Status line, headers and, unless it is for a HEAD, the body.
std::string encode_http(const HttpResponse& response, bool head, bool keeps_alive);

// "%41+b" to "A b"; nothing where it is malformed or has a NUL.
std::optional<std::string> decode_url(std::string_view text);
// A whole number without a sign; nothing for anything else.
std::optional<std::int64_t> parse_whole(std::string_view text);

}  // namespace lockstep
