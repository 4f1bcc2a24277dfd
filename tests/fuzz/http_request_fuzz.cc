// Feeds arbitrary streams to the parser of HTTP requests, cut where the first byte says. Whatever
// comes is a request, a status 4xx or a wait for more, and what is answered fits the bytes.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "lockstep/net/http/http_message.h"

using namespace lockstep;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  const auto whole = parse_http_request(bytes);
  if (!whole) return 0;
  if (whole->bytes == 0 || whole->bytes > bytes.size()) std::abort();
  if (whole->problem != 0 && (whole->problem < 400 || whole->problem > 499)) std::abort();
  if (whole->problem == 0 && !whole->request.path.starts_with('/')) std::abort();
  // A part of a request is no other request.
  const std::size_t cut = data[0] < whole->bytes ? data[0] : whole->bytes - 1;
  const auto part = parse_http_request(bytes.substr(0, cut));
  if (part && part->bytes > cut) std::abort();
  encode_http(http_problem(404, whole->request.path), whole->request.head,
              whole->request.keeps_alive);
  return 0;
}
