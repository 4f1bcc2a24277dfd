#include "lockstep/wire/handshake_messages.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/wire/bytes.h"

namespace lockstep {

std::string to_string(const MemberId& id) {
  std::string text;
  for (const std::byte byte : id) text += fmt::format("{:02x}", std::to_integer<unsigned>(byte));
  return text;
}

std::string_view to_string(Purpose purpose) {
  switch (purpose) {
    case Purpose::kRendezvous: return "rendezvous";
    case Purpose::kMesh: return "mesh";
    case Purpose::kShared: return "shared memory";
    case Purpose::kServer: return "gradient server";
  }
  return "unknown purpose";
}

std::optional<Protection> agreed(Protection client, Protection server) {
  if (client == Protection::kNone) return server;
  if (server == Protection::kNone || server == client) return client;
  return std::nullopt;
}

std::vector<std::byte> encode(const Hello& hello) {
  ByteWriter writer;
  writer.u8(static_cast<std::uint8_t>(hello.purpose));
  writer.u8(hello.has_token ? 1 : 0);
  writer.u8(static_cast<std::uint8_t>(hello.protection));
  writer.u8(0);
  writer.u32(hello.generation);
  writer.u32(hello.group);
  writer.i32(hello.rank);
  writer.bytes(hello.id);
  writer.bytes(hello.nonce);
  writer.bytes(hello.key);
  writer.string(hello.job, kMaxJobName);
  return std::move(writer).take();
}

std::optional<Hello> decode_hello(std::span<const std::byte> body) {
  ByteReader reader(body);
  Hello hello;
  hello.purpose = static_cast<Purpose>(reader.u8());
  const std::uint8_t has_token = reader.u8();
  hello.protection = static_cast<Protection>(reader.u8());
  const std::uint8_t zero = reader.u8();
  hello.generation = reader.u32();
  hello.group = reader.u32();
  hello.rank = reader.i32();
  std::ranges::copy(reader.bytes(hello.id.size()), hello.id.begin());
  std::ranges::copy(reader.bytes(hello.nonce.size()), hello.nonce.begin());
  std::ranges::copy(reader.bytes(hello.key.size()), hello.key.begin());
  hello.job = reader.text(kMaxJobName);
  hello.has_token = has_token == 1;
  if (!reader.finished() || has_token > 1 || hello.protection > Protection::kChecked || zero != 0 ||
      hello.rank < -1) {
    return std::nullopt;
  }
  return hello;
}

}  // namespace lockstep
