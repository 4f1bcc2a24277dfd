#include "lockstep/wire/message.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/wire/bytes.h"

namespace lockstep {

std::string_view to_string(MessageKind kind) {
  switch (kind) {
    case MessageKind::kHello: return "hello";
    case MessageKind::kProof: return "proof";
    case MessageKind::kRefusal: return "refusal";
    case MessageKind::kJoin: return "join";
    case MessageKind::kRoster: return "roster";
    case MessageKind::kRosterChange: return "change of the roster";
    case MessageKind::kWelcome: return "welcome";
    case MessageKind::kReady: return "ready";
    case MessageKind::kGo: return "go";
    case MessageKind::kRedirect: return "redirection";
    case MessageKind::kDescription: return "description";
    case MessageKind::kHeartbeat: return "heartbeat";
    case MessageKind::kPing: return "ping";
    case MessageKind::kReport: return "report";
    case MessageKind::kVerdict: return "verdict";
    case MessageKind::kGoodbye: return "goodbye";
    case MessageKind::kEnd: return "end of a generation";
    case MessageKind::kWish: return "wish";
    case MessageKind::kLine: return "line";
  }
  return "unknown message";
}

std::vector<std::byte> frame(MessageKind kind, std::span<const std::byte> body) {
  ByteWriter writer;
  writer.reserve(kMessageHeaderBytes + body.size());
  writer.u32(kMessageMagic);
  writer.u16(kProtocolVersion);
  writer.u8(static_cast<std::uint8_t>(kind));
  writer.u8(0);
  writer.count(body.size());
  writer.bytes(body);
  return std::move(writer).take();
}

SharedBytes shared_frame(MessageKind kind, std::span<const std::byte> body) {
  return std::make_shared<const std::vector<std::byte>>(frame(kind, body));
}

MessageHeader parse_header(std::span<const std::byte, kMessageHeaderBytes> bytes, std::size_t most,
                           std::string_view peer) {
  ByteReader reader(bytes);
  const std::uint32_t magic = reader.u32();
  const std::uint16_t version = reader.u16();
  const auto kind = static_cast<MessageKind>(reader.u8());
  const std::uint8_t zero = reader.u8();
  const std::uint32_t length = reader.u32();
  if (magic != kMessageMagic) {
    throw Error(ErrorCode::kUnexpectedMessage, fmt::format("{} does not speak our protocol", peer));
  }
  if (version != kProtocolVersion) {
    throw Error(ErrorCode::kVersionMismatch,
                fmt::format("{} speaks protocol version {}, this process version {}", peer, version,
                            kProtocolVersion));
  }
  if (zero != 0) {
    throw Error(ErrorCode::kUnexpectedMessage, fmt::format("{} sent a malformed header", peer));
  }
  if (length > most) {
    throw Error(ErrorCode::kMessageTooLarge,
                fmt::format("{} announced a {} of {} bytes; {} are allowed", peer, to_string(kind),
                            length, most));
  }
  return {kind, length};
}

void MessageBuffer::append(std::span<const std::byte> bytes) {
  if (consumed_ > 0) {
    bytes_.erase(bytes_.begin(), bytes_.begin() + static_cast<std::ptrdiff_t>(consumed_));
    consumed_ = 0;
  }
  bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
}

std::optional<Message> MessageBuffer::next(std::size_t most, std::string_view peer) {
  if (rest().size() < kMessageHeaderBytes) return std::nullopt;
  const MessageHeader header = parse_header(rest().first<kMessageHeaderBytes>(), most, peer);
  const auto after = rest().subspan(kMessageHeaderBytes);
  if (after.size() < header.length) return std::nullopt;
  const auto body = after.first(header.length);
  consumed_ += kMessageHeaderBytes + header.length;
  return Message{header.kind, {body.begin(), body.end()}};
}

}  // namespace lockstep
