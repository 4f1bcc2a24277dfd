#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// The envelope of handshake, rendezvous and control messages (docs/mesh_protocol.md):
// magic u32, version u16, kind u8, zero u8, length of the body u32; little-endian.

inline constexpr std::uint32_t kMessageMagic = 0x504b534c;  // "LSKP"
inline constexpr std::uint16_t kProtocolVersion = 6;
inline constexpr std::size_t kMessageHeaderBytes = 12;

// Values are part of the protocol.
enum class MessageKind : std::uint8_t {
  kHello = 1,
  kProof = 2,
  kRefusal = 3,
  kJoin = 16,
  kRoster = 17,
  kRosterChange = 18,
  kWelcome = 19,
  kReady = 20,
  kGo = 21,
  kRedirect = 22,
  kDescription = 23,
  kHeartbeat = 32,
  kPing = 33,
  kReport = 34,
  kVerdict = 35,
  kGoodbye = 36,
  kEnd = 37,
  kWish = 38,
  kLine = 39,
};
std::string_view to_string(MessageKind kind);

struct Message {
  MessageKind kind{};
  std::vector<std::byte> body;

  bool operator==(const Message&) const = default;
};

// Envelope and body, ready to be sent.
std::vector<std::byte> frame(MessageKind kind, std::span<const std::byte> body);

// The same for a message that may go to many.
using SharedBytes = std::shared_ptr<const std::vector<std::byte>>;
SharedBytes shared_frame(MessageKind kind, std::span<const std::byte> body);

struct MessageHeader {
  MessageKind kind{};
  std::uint32_t length = 0;
};
// Throws Error{kUnexpectedMessage} if these are not our bytes, Error{kVersionMismatch} naming both
// versions, Error{kMessageTooLarge} for a body over `most` bytes. `peer` is named in all of them.
MessageHeader parse_header(std::span<const std::byte, kMessageHeaderBytes> bytes, std::size_t most,
                           std::string_view peer);

// Cuts a stream of bytes back into messages. Memory grows with the bytes that arrived, never with
// the length that a header claims.
class MessageBuffer {
 public:
  void append(std::span<const std::byte> bytes);
  // The next whole message, if there is one. Throws as parse_header() does.
  std::optional<Message> next(std::size_t most, std::string_view peer);
  // What has come and is no whole message yet.
  std::span<const std::byte> rest() const { return std::span(bytes_).subspan(consumed_); }

 private:
  std::vector<std::byte> bytes_;
  std::size_t consumed_ = 0;
};

}  // namespace lockstep
