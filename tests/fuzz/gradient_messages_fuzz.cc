// A connection as a gradient server reads it: recognised by its first bytes, then cut into frames,
// each decoded from pieces. What is decoded must encode to the same bytes, and a head that was
// read from a piece must not change when more arrives.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "lockstep/wire/gradient_messages.h"

using namespace lockstep;

namespace {

using Bytes = std::span<const std::byte>;

void require(bool condition) {
  if (!condition) std::abort();
}

void require_same(Bytes a, Bytes b) { require(std::equal(a.begin(), a.end(), b.begin(), b.end())); }

void check_opening(Bytes stream) {
  Opening last = Opening::kUndecided;
  for (std::size_t there = 0; there <= std::min<std::size_t>(stream.size(), 6); ++there) {
    const Opening now = recognise_opening(stream.first(there));
    require(last == Opening::kUndecided || now == last);
    last = now;
  }
  require(stream.size() < kFrameStartBytes || last != Opening::kUndecided);
}

// `frame` is what is there of a frame whose body has `length` bytes.
void check_gradient(Bytes frame, std::uint32_t length) {
  const Bytes body = frame.subspan(4);
  const HeadResult whole = decode_head(body, length);
  for (const std::size_t there : {body.size() / 2, body.size() - body.size() / 8}) {
    const HeadResult part = decode_head(body.first(there), length);
    require(part.state == HeadResult::State::kIncomplete || part.state == whole.state);
  }
  if (whole.state != HeadResult::State::kDone) return;
  const BulkHead& head = whole.head;
  require(decode_head(body.first(whole.size), length).head == head);
  require_same(encode_head(head), frame.first(4 + whole.size));
  const std::size_t element = element_bytes(head.tag);
  require(whole.size <= kMaxBulkHead && head.count <= length / element);
  require(whole.size + head.count * element + foot_bytes(head) == length);
  if (body.size() < length) return;
  const Bytes end = body.subspan(whole.size + head.count * element);
  const auto foot = decode_foot(head, end);
  require(foot.has_value());
  require_same(encode_foot(head, *foot), end);
}

void check_small(Bytes frame, std::uint32_t length) {
  const Bytes body = frame.subspan(4);
  if (body.size() < length) {
    static_cast<void>(decode_small(body));
    return;
  }
  if (const auto message = decode_small(body)) require_same(encode(*message), frame);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes stream = std::as_bytes(std::span(data, size));
  check_opening(stream);
  while (stream.size() >= kFrameStartBytes) {
    const auto start = decode_frame_start(stream.first<kFrameStartBytes>());
    if (!start) break;
    const Bytes frame = stream.first(std::min<std::size_t>(stream.size(), start->length + 4ull));
    if (is_bulk(start->tag)) {
      check_gradient(frame, start->length);
    } else {
      check_small(frame, start->length);
    }
    stream = stream.subspan(frame.size());
  }
  return 0;
}
