#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "lockstep/wire/mesh_frame.h"
#include "lockstep/wire/wire_error.h"

namespace lockstep {

// The gradient server's protocol; docs/wire_protocol.md specifies the bytes. A frame is a
// big-endian u32 length and as many bytes of body: a tag and little-endian fields. Pure, no I/O.
// Decoders never throw and allocate no more than the bytes they are given; encoders throw
// Error{kMessageTooLarge} for what no receiver would take.

enum class WireTag : std::uint8_t {
  kJoinRequest = 0x01,
  kJoinAccepted = 0x02,
  kShardAssignment = 0x03,
  kGradientPayload = 0x04,
  kAveragedGradient = 0x05,
  kHeartbeat = 0x06,
  kShutdown = 0x07,
  kBlockGradientPayload = 0x08,
  kAveragedBlockGradient = 0x09,
  kNonBlockGradientPayload = 0x0a,
  kAveragedNonBlockGradient = 0x0b,
  // Extensions, between peers that opened with our handshake.
  kPartialSum = 0x40,
  kRawSum = 0x41,
  kAlive = 0x42,
  kHalt = 0x43,
  kRefusal = 0x44,
  kTotals = 0x45,
  kWelcome = 0x46,
  kBytes = 0x47,
};
std::string_view to_string(WireTag tag);  // "unknown message" for others
// It carries data, f32 elements or bytes: a BulkHead describes it. All other messages are small.
bool is_bulk(WireTag tag);
// Bytes of one element of its data.
std::size_t element_bytes(WireTag tag);

inline constexpr std::uint32_t kMaxWireText = 4096;       // bytes of any string
inline constexpr std::uint32_t kMaxSmallFrame = 16384;    // body of a message without data
inline constexpr std::uint32_t kMaxComponents = 4096;     // of a block
inline constexpr std::uint32_t kMaxTail = 65536;          // f64 numbers beside a partial sum
inline constexpr std::uint32_t kEveryOther = 0xffffffff;  // Bytes for all ranks but the sender
inline constexpr std::size_t kMaxBulkHead = 16448;        // tag and fields ahead of the data
// Peers of the original protocol refuse frames whose length field says more.
inline constexpr std::uint32_t kOriginalLargestFrame = 100'000'000;

// The first bytes of every frame.
struct FrameStart {
  std::uint32_t length = 0;  // of the body, tag included; never 0
  WireTag tag{};

  bool operator==(const FrameStart&) const = default;
};
inline constexpr std::size_t kFrameStartBytes = 5;
// Nothing for a length of 0 or an unknown tag. The caller compares the length with its limits.
std::optional<FrameStart> decode_frame_start(std::span<const std::byte, kFrameStartBytes> bytes);

// Who is calling, told from the first bytes of a connection. Our own peers open with the handshake,
// whose envelope begins with the bytes LSKP; a worker of the original protocol opens with a
// JoinRequest, whose length is so small that its first two bytes are zero.
enum class Opening : std::uint8_t { kUndecided, kHandshake, kJoinRequest, kStranger };
// Decided by the first byte that decides it, at the latest by the fifth.
Opening recognise_opening(std::span<const std::byte> first_bytes);

// Small messages: decoded when all of the body is there.

struct JoinRequest {
  std::string node_id;
  std::uint32_t gpu_count = 0;
  std::string backend;
  bool operator==(const JoinRequest&) const = default;
};
struct JoinAccepted {
  std::uint32_t worker_id = 0;
  std::uint32_t total_workers = 0;
  bool operator==(const JoinAccepted&) const = default;
};
struct ShardAssignment {
  std::uint64_t step = 0;
  std::uint64_t shard_start = 0;
  std::uint64_t shard_end = 0;
  bool operator==(const ShardAssignment&) const = default;
};
struct Heartbeat {
  std::string node_id;
  std::uint64_t timestamp_ms = 0;
  bool operator==(const Heartbeat&) const = default;
};
struct Shutdown {
  bool operator==(const Shutdown&) const = default;
};
// Our own heartbeat, both ways.
struct Alive {
  bool operator==(const Alive&) const = default;
};
// The job is over; `error` is the cause, the same for everybody. Both ways.
struct Halt {
  WireError error;
  bool operator==(const Halt&) const = default;
};
// The answer to a join that is not accepted.
struct Refusal {
  WireError error;
  bool operator==(const Refusal&) const = default;
};
// What ends a GradientPayload, sent ahead of it: the weight is then known before the first element.
struct Totals {
  std::uint64_t step = 0;
  float loss = 0;
  std::uint64_t correct = 0;
  std::uint64_t total = 0;
  bool operator==(const Totals&) const = default;
};
// Follows JoinAccepted: the coordinator's settings, so that one --timeout rules both sides, a
// worker need not be told the mode, and anyone can recompute an average.
struct Welcome {
  std::uint64_t timeout_ms = 0;
  std::uint8_t mode = 0;     // 0 vector, 1 blocks, 2 lanes
  std::uint8_t average = 0;  // 0 mean, 1 weighted
  std::uint64_t total_samples = 0;
  std::uint32_t largest_frame = 0;  // of a worker, in bytes
  bool operator==(const Welcome&) const = default;
};
using SmallMessage = std::variant<JoinRequest, JoinAccepted, ShardAssignment, Heartbeat, Shutdown,
                                  Alive, Halt, Refusal, Totals, Welcome>;
WireTag tag_of(const SmallMessage& message);
// A whole frame.
std::vector<std::byte> encode(const SmallMessage& message);
// `body` is all of the body. Nothing if the tag is not that of a small message, a byte is missing
// or left over, a text is too long or no UTF-8.
std::optional<SmallMessage> decode_small(std::span<const std::byte> body);

// Messages with data are never held whole: head, data, foot. Which fields travel depends on the
// tag; the others are ignored by the encoder and zero from the decoder.
struct BulkHead {
  WireTag tag{};
  std::uint64_t step = 0;
  std::uint32_t worker_id = 0;                 // payloads: who the sender says it is
  std::uint32_t block_idx = 0;                 // blocks
  std::uint32_t num_blocks = 0;                // block payloads
  std::uint8_t component = 0;                  // non-block: 0 lm_head, 1 final_norm, 2 embedding
  std::vector<std::uint32_t> component_sizes;  // blocks
  std::uint64_t offset = 0;                    // sums: flat index of the first element
  std::uint32_t lanes = 0;                     // sums: leaves of the whole tree
  std::uint32_t lane_begin = 0;                // partial sums: the node [lane_begin, lane_end)
  std::uint32_t lane_end = 0;
  std::uint64_t call = 0;        // sums: call_digest() of the sender's stamp; 0 where it has none
  std::uint32_t tail_count = 0;  // sums: f64 numbers behind the data
  std::uint32_t to = 0;          // Bytes: for which rank, or kEveryOther
  std::uint32_t from = 0;        // Bytes: the sender's rank
  MeshFrame stamp;               // Bytes: the sender's call; its payload is `count`
  std::uint64_t count = 0;       // elements; of Bytes, bytes

  bool operator==(const BulkHead&) const = default;
};

// Fields behind the data.
struct BulkFoot {
  float loss = 0;             // vector payload and average
  std::uint64_t correct = 0;  // vector payload
  std::uint64_t total = 0;
  std::vector<double> tail;  // sums

  bool operator==(const BulkFoot&) const = default;
};
std::size_t foot_bytes(const BulkHead& head);

// What the length field of this message says, or would say if it were wide enough.
std::uint64_t frame_length(const BulkHead& head);
// Length, tag and all fields ahead of the data. Send this, the elements as they lie in memory, and
// the foot.
std::vector<std::byte> encode_head(const BulkHead& head);
// The foot may be empty. `foot.tail` has head.tail_count numbers.
std::vector<std::byte> encode_foot(const BulkHead& head, const BulkFoot& foot);

struct HeadResult {
  enum class State : std::uint8_t { kDone, kIncomplete, kMalformed };
  State state = State::kMalformed;
  BulkHead head;         // when done; head.count elements and the foot fill the frame exactly
  std::size_t size = 0;  // when done: bytes of the body that the head takes; the data follow
};
// `body` is the beginning of a body of `length` bytes, tag included. Never incomplete once
// min(length, kMaxBulkHead) bytes are there.
HeadResult decode_head(std::span<const std::byte> body, std::uint32_t length);
// Nothing unless `bytes` is exactly foot_bytes(head) long.
std::optional<BulkFoot> decode_foot(const BulkHead& head, std::span<const std::byte> bytes);

}  // namespace lockstep
