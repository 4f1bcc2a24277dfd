#include "lockstep/wire/gradient_messages.h"

#include <fmt/format.h>

#include <algorithm>
#include <concepts>
#include <type_traits>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/utf8.h"
#include "lockstep/wire/bytes.h"

namespace lockstep {
namespace {

constexpr std::string_view kHandshakeMagic = "LSKP";  // as it lies on the wire
constexpr std::size_t kLengthBytes = 4;

// Each list of fields is written down once and serves both directions: Put and Take are called
// with the fields in order.
class Put {
 public:
  explicit Put(ByteWriter& writer) : writer_(writer) {}

  void operator()(std::uint8_t value) { writer_.u8(value); }
  void operator()(std::uint32_t value) { writer_.u32(value); }
  void operator()(std::uint64_t value) { writer_.u64(value); }
  void operator()(float value) { writer_.f32(value); }
  void operator()(const std::string& text) {
    if (!is_utf8(text)) throw Error(ErrorCode::kInvalidArgument, "a text that is no UTF-8");
    writer_.string(text, kMaxWireText);
  }
  void operator()(const WireError& error) { write_error(writer_, error.error()); }
  void operator()(const MeshFrame& stamp) { writer_.bytes(encode(stamp)); }
  void operator()(const std::vector<std::uint32_t>& sizes) {
    writer_.count(sizes.size(), kMaxComponents);
    writer_.bytes(std::as_bytes(std::span(sizes)));
  }

 private:
  ByteWriter& writer_;
};

class Take {
 public:
  explicit Take(ByteReader& reader) : reader_(reader) {}

  void operator()(std::uint8_t& value) { value = reader_.u8(); }
  void operator()(std::uint32_t& value) { value = reader_.u32(); }
  void operator()(std::uint64_t& value) { value = reader_.u64(); }
  void operator()(float& value) { value = reader_.f32(); }
  void operator()(std::string& text) { text = reader_.text(kMaxWireText); }
  void operator()(WireError& error) { error = read_error(reader_); }
  void operator()(MeshFrame& stamp) {
    const auto bytes = reader_.bytes(kMeshFrameBytes);
    if (bytes.empty()) return;  // not all there
    const auto decoded = decode_mesh_frame(bytes.first<kMeshFrameBytes>());
    malformed_ = !decoded;
    if (decoded) stamp = *decoded;
  }
  void operator()(std::vector<std::uint32_t>& sizes) {
    const std::uint32_t count = reader_.u32();
    malformed_ = count > kMaxComponents;
    if (malformed_) return reader_.fail();
    const auto bytes = reader_.bytes(std::size_t{count} * sizeof(std::uint32_t));
    sizes.resize(bytes.size() / sizeof(std::uint32_t));
    if (!bytes.empty()) std::memcpy(sizes.data(), bytes.data(), bytes.size());
  }
  // More bytes would not help.
  bool malformed() const { return malformed_; }

 private:
  ByteReader& reader_;
  bool malformed_ = false;
};

template <typename M, typename T>
concept Is = std::same_as<std::remove_const_t<M>, T>;

void fields(auto& visit, Is<JoinRequest> auto& message) {
  visit(message.node_id);
  visit(message.gpu_count);
  visit(message.backend);
}
void fields(auto& visit, Is<JoinAccepted> auto& message) {
  visit(message.worker_id);
  visit(message.total_workers);
}
void fields(auto& visit, Is<ShardAssignment> auto& message) {
  visit(message.step);
  visit(message.shard_start);
  visit(message.shard_end);
}
void fields(auto& visit, Is<Heartbeat> auto& message) {
  visit(message.node_id);
  visit(message.timestamp_ms);
}
void fields(auto&, Is<Shutdown> auto&) {}
void fields(auto&, Is<Alive> auto&) {}
void fields(auto& visit, Is<Halt> auto& message) { visit(message.error); }
void fields(auto& visit, Is<Refusal> auto& message) { visit(message.error); }
void fields(auto& visit, Is<Totals> auto& message) {
  visit(message.step);
  visit(message.loss);
  visit(message.correct);
  visit(message.total);
}

void fields(auto& visit, Is<Welcome> auto& message) {
  visit(message.timeout_ms);
  visit(message.mode);
  visit(message.average);
  visit(message.total_samples);
  visit(message.largest_frame);
}

void fields(auto& visit, Is<BulkHead> auto& head) {
  if (head.tag == WireTag::kBytes) {
    visit(head.to);
    visit(head.from);
    return visit(head.stamp);
  }
  visit(head.step);
  switch (head.tag) {
    case WireTag::kGradientPayload: visit(head.worker_id); break;
    case WireTag::kBlockGradientPayload:
      visit(head.worker_id);
      visit(head.block_idx);
      visit(head.num_blocks);
      visit(head.component_sizes);
      break;
    case WireTag::kAveragedBlockGradient:
      visit(head.block_idx);
      visit(head.component_sizes);
      break;
    case WireTag::kNonBlockGradientPayload:
      visit(head.worker_id);
      visit(head.component);
      break;
    case WireTag::kAveragedNonBlockGradient: visit(head.component); break;
    case WireTag::kPartialSum:
      visit(head.offset);
      visit(head.lanes);
      visit(head.lane_begin);
      visit(head.lane_end);
      visit(head.call);
      visit(head.tail_count);
      break;
    case WireTag::kRawSum:
      visit(head.offset);
      visit(head.lanes);
      visit(head.call);
      visit(head.tail_count);
      break;
    default: break;
  }
  visit(head.count);
}

constexpr std::size_t kLargestHead =
    1 + 8 + 3 * 4 + 4 + std::size_t{kMaxComponents} * 4 + 8;  // a block payload's
static_assert(kLargestHead <= kMaxBulkHead);

void fields(auto& visit, auto& foot, WireTag tag) {
  if (tag == WireTag::kGradientPayload || tag == WireTag::kAveragedGradient) visit(foot.loss);
  if (tag == WireTag::kGradientPayload) {
    visit(foot.correct);
    visit(foot.total);
  }
}

WireTag tag_for(const JoinRequest&) { return WireTag::kJoinRequest; }
WireTag tag_for(const JoinAccepted&) { return WireTag::kJoinAccepted; }
WireTag tag_for(const ShardAssignment&) { return WireTag::kShardAssignment; }
WireTag tag_for(const Heartbeat&) { return WireTag::kHeartbeat; }
WireTag tag_for(const Shutdown&) { return WireTag::kShutdown; }
WireTag tag_for(const Alive&) { return WireTag::kAlive; }
WireTag tag_for(const Halt&) { return WireTag::kHalt; }
WireTag tag_for(const Refusal&) { return WireTag::kRefusal; }
WireTag tag_for(const Totals&) { return WireTag::kTotals; }
WireTag tag_for(const Welcome&) { return WireTag::kWelcome; }

std::uint8_t raw(WireTag tag) { return static_cast<std::uint8_t>(tag); }

// A node of some T(0, lanes) lies inside it and is not empty; whether it is a node at all, the
// server knows.
bool plausible(const BulkHead& head) {
  if (head.tail_count > kMaxTail) return false;
  return head.tag != WireTag::kPartialSum ||
         (head.lane_begin < head.lane_end && head.lane_end <= head.lanes);
}

}  // namespace

std::string_view to_string(WireTag tag) {
  switch (tag) {
    case WireTag::kJoinRequest: return "JoinRequest";
    case WireTag::kJoinAccepted: return "JoinAccepted";
    case WireTag::kShardAssignment: return "ShardAssignment";
    case WireTag::kGradientPayload: return "GradientPayload";
    case WireTag::kAveragedGradient: return "AveragedGradient";
    case WireTag::kHeartbeat: return "Heartbeat";
    case WireTag::kShutdown: return "Shutdown";
    case WireTag::kBlockGradientPayload: return "BlockGradientPayload";
    case WireTag::kAveragedBlockGradient: return "AveragedBlockGradient";
    case WireTag::kNonBlockGradientPayload: return "NonBlockGradientPayload";
    case WireTag::kAveragedNonBlockGradient: return "AveragedNonBlockGradient";
    case WireTag::kPartialSum: return "PartialSum";
    case WireTag::kRawSum: return "RawSum";
    case WireTag::kAlive: return "Alive";
    case WireTag::kHalt: return "Halt";
    case WireTag::kRefusal: return "Refusal";
    case WireTag::kTotals: return "Totals";
    case WireTag::kWelcome: return "Welcome";
    case WireTag::kBytes: return "Bytes";
  }
  return "unknown message";
}

bool is_bulk(WireTag tag) {
  switch (tag) {
    case WireTag::kGradientPayload:
    case WireTag::kAveragedGradient:
    case WireTag::kBlockGradientPayload:
    case WireTag::kAveragedBlockGradient:
    case WireTag::kNonBlockGradientPayload:
    case WireTag::kAveragedNonBlockGradient:
    case WireTag::kPartialSum:
    case WireTag::kRawSum:
    case WireTag::kBytes: return true;
    default: return false;
  }
}

std::size_t element_bytes(WireTag tag) { return tag == WireTag::kBytes ? 1 : sizeof(float); }

std::optional<FrameStart> decode_frame_start(std::span<const std::byte, kFrameStartBytes> bytes) {
  ByteReader reader(bytes);
  FrameStart start;
  start.length = reader.u32_big_endian();
  start.tag = static_cast<WireTag>(reader.u8());
  if (start.length == 0 || to_string(start.tag) == "unknown message") return std::nullopt;
  return start;
}

Opening recognise_opening(std::span<const std::byte> first_bytes) {
  static_assert(kMaxSmallFrame <= 0xffff, "the first byte of a JoinRequest is zero, never an L");
  const std::string_view text(reinterpret_cast<const char*>(first_bytes.data()),
                              std::min(first_bytes.size(), kHandshakeMagic.size()));
  if (kHandshakeMagic.starts_with(text)) {
    return text == kHandshakeMagic ? Opening::kHandshake : Opening::kUndecided;
  }
  // Big-endian: after two zeros the length is at most 65535.
  for (std::size_t i = 0; i < std::min<std::size_t>(first_bytes.size(), 2); ++i) {
    if (first_bytes[i] != std::byte{0}) return Opening::kStranger;
  }
  const auto zero = [](std::byte byte) { return byte == std::byte{0}; };
  if (first_bytes.size() >= 4 && std::ranges::all_of(first_bytes.first(4), zero)) {
    return Opening::kStranger;
  }
  if (first_bytes.size() < kFrameStartBytes) return Opening::kUndecided;
  const auto start = decode_frame_start(first_bytes.first<kFrameStartBytes>());
  return start && start->tag == WireTag::kJoinRequest && start->length <= kMaxSmallFrame
             ? Opening::kJoinRequest
             : Opening::kStranger;
}

WireTag tag_of(const SmallMessage& message) {
  return std::visit([](const auto& each) { return tag_for(each); }, message);
}

std::vector<std::byte> encode(const SmallMessage& message) {
  ByteWriter body;
  Put put(body);
  put(raw(tag_of(message)));
  std::visit([&](const auto& each) { fields(put, each); }, message);
  ByteWriter frame;
  frame.u32_big_endian(static_cast<std::uint32_t>(body.written().size()));
  frame.bytes(body.written());
  return std::move(frame).take();
}

namespace {

template <typename T>
bool take_if(WireTag tag, ByteReader& reader, std::optional<SmallMessage>& found) {
  T message;
  if (tag_for(message) != tag) return false;
  Take take(reader);
  fields(take, message);
  if (reader.finished()) found = std::move(message);
  return true;
}

template <typename... T>
std::optional<SmallMessage> take_any(ByteReader& reader, std::variant<T...>*) {
  const auto tag = static_cast<WireTag>(reader.u8());
  std::optional<SmallMessage> found;
  static_cast<void>((take_if<T>(tag, reader, found) || ...));
  return found;
}

}  // namespace

std::optional<SmallMessage> decode_small(std::span<const std::byte> body) {
  ByteReader reader(body);
  return take_any(reader, static_cast<SmallMessage*>(nullptr));
}

std::size_t foot_bytes(const BulkHead& head) {
  switch (head.tag) {
    case WireTag::kGradientPayload: return 4 + 8 + 8;
    case WireTag::kAveragedGradient: return 4;
    case WireTag::kPartialSum:
    case WireTag::kRawSum: return std::size_t{head.tail_count} * sizeof(double);
    default: return 0;
  }
}

std::uint64_t frame_length(const BulkHead& head) {
  ByteWriter body;
  Put put(body);
  put(raw(head.tag));
  fields(put, head);
  return body.written().size() + foot_bytes(head) + head.count * element_bytes(head.tag);
}

std::vector<std::byte> encode_head(const BulkHead& head) {
  LOCKSTEP_CHECK(is_bulk(head.tag));
  LOCKSTEP_CHECK(head.tag != WireTag::kBytes || head.stamp.payload == head.count);
  const std::size_t element = element_bytes(head.tag);
  ByteWriter body;
  Put put(body);
  put(raw(head.tag));
  fields(put, head);
  const std::uint64_t around = body.written().size() + foot_bytes(head);
  if (head.tail_count > kMaxTail || head.count > (UINT32_MAX - around) / element) {
    throw Error(ErrorCode::kMessageTooLarge,
                fmt::format("a {} of {} elements and a tail of {}", to_string(head.tag), head.count,
                            head.tail_count));
  }
  ByteWriter frame;
  frame.reserve(kLengthBytes + body.written().size());
  frame.u32_big_endian(static_cast<std::uint32_t>(around + head.count * element));
  frame.bytes(body.written());
  return std::move(frame).take();
}

std::vector<std::byte> encode_foot(const BulkHead& head, const BulkFoot& foot) {
  LOCKSTEP_CHECK(foot.tail.size() == head.tail_count);
  ByteWriter writer;
  Put put(writer);
  fields(put, foot, head.tag);
  writer.bytes(std::as_bytes(std::span(foot.tail)));
  return std::move(writer).take();
}

HeadResult decode_head(std::span<const std::byte> body, std::uint32_t length) {
  using State = HeadResult::State;
  body = body.first(std::min<std::size_t>(body.size(), length));
  ByteReader reader(body);
  BulkHead head;
  head.tag = static_cast<WireTag>(reader.u8());
  if (reader.ok() && !is_bulk(head.tag)) return {};
  Take take(reader);
  fields(take, head);
  if (take.malformed()) return {};
  if (!reader.ok()) {
    const bool all = body.size() >= std::min<std::size_t>(length, kMaxBulkHead);
    return {all ? State::kMalformed : State::kIncomplete, {}, 0};
  }
  if (head.tag == WireTag::kBytes) head.count = head.stamp.payload;
  // Divides, because a product with a count off the wire could overflow.
  const std::size_t size = body.size() - reader.remaining();
  const std::size_t foot = foot_bytes(head);
  if (!plausible(head) || foot > length - size) return {};
  const std::size_t data = length - size - foot;
  const std::size_t element = element_bytes(head.tag);
  if (data % element != 0 || head.count != data / element) return {};
  return {State::kDone, std::move(head), size};
}

std::optional<BulkFoot> decode_foot(const BulkHead& head, std::span<const std::byte> bytes) {
  if (bytes.size() != foot_bytes(head)) return std::nullopt;
  ByteReader reader(bytes);
  Take take(reader);
  BulkFoot foot;
  fields(take, foot, head.tag);
  const auto tail = reader.bytes(reader.remaining());
  foot.tail.resize(tail.size() / sizeof(double));
  if (!tail.empty()) std::memcpy(foot.tail.data(), tail.data(), tail.size());
  return foot;
}

}  // namespace lockstep
