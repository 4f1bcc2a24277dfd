#include "lockstep/wire/join_messages.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/wire/bytes.h"

namespace lockstep {
namespace {

// A card takes at least this much: its numbers, and the lengths of its texts.
constexpr std::size_t kMinCardBytes = 4 + 4 + 16 + 4 + 8 + 7 * 4;

void write_card(ByteWriter& writer, const Card& card) {
  writer.i32(card.rank);
  writer.i32(card.world_size);
  writer.bytes(card.id);
  writer.i32(card.pid);
  writer.u64(card.host.network_namespace);
  for (const std::string* text :
       {&card.version, &card.host.hostname, &card.host.boot_id, &card.mesh_address, &card.unix_name,
        &card.fingerprint, &card.cores}) {
    writer.string(*text, kMaxCardText);
  }
}

Card read_card(ByteReader& reader) {
  Card card;
  card.rank = reader.i32();
  card.world_size = reader.i32();
  std::ranges::copy(reader.bytes(card.id.size()), card.id.begin());
  card.pid = reader.i32();
  card.host.network_namespace = reader.u64();
  for (std::string* text : {&card.version, &card.host.hostname, &card.host.boot_id,
                            &card.mesh_address, &card.unix_name, &card.fingerprint, &card.cores}) {
    *text = reader.string(kMaxCardText);
  }
  return card;
}

}  // namespace

std::string name_of(const Card& card) {
  const std::string who = card.rank >= 0 ? fmt::format("rank {}", card.rank) : "a rank";
  return fmt::format("{} ({}, pid {})", who, card.host.hostname, card.pid);
}

std::string name_of(const CentreCard& centre) {
  const std::string who = centre.rank >= 0 ? fmt::format("rank {}", centre.rank) : centre.title;
  return fmt::format("{} ({}, pid {})", who, centre.hostname, centre.pid);
}

std::vector<std::byte> encode(const Join& join) {
  ByteWriter writer;
  writer.u32(
      static_cast<std::uint32_t>(std::clamp<std::int64_t>(join.patience.count(), 0, UINT32_MAX)));
  write_card(writer, join.card);
  return std::move(writer).take();
}

std::optional<Join> decode_join(std::span<const std::byte> body) {
  ByteReader reader(body);
  Join join;
  join.patience = std::chrono::milliseconds(reader.u32());
  join.card = read_card(reader);
  if (!reader.finished()) return std::nullopt;
  return join;
}

std::vector<std::byte> encode(const RosterMessage& message) {
  ByteWriter writer;
  writer.i32(message.centre.rank);
  writer.i32(message.centre.pid);
  writer.string(message.centre.title, kMaxCardText);
  writer.string(message.centre.hostname, kMaxCardText);
  writer.u32(static_cast<std::uint32_t>(message.timeout.count()));
  writer.count(message.roster.size(), kMaxWorldSize);
  for (const Card& card : message.roster) write_card(writer, card);
  return std::move(writer).take();
}

std::optional<RosterMessage> decode_roster(std::span<const std::byte> body) {
  ByteReader reader(body);
  RosterMessage message;
  message.centre.rank = reader.i32();
  message.centre.pid = reader.i32();
  message.centre.title = reader.string(kMaxCardText);
  message.centre.hostname = reader.string(kMaxCardText);
  message.timeout = std::chrono::milliseconds(reader.u32());
  const std::uint32_t count = reader.count(kMinCardBytes, kMaxWorldSize);
  message.roster.reserve(count);
  for (std::uint32_t i = 0; i < count && reader.ok(); ++i) {
    message.roster.push_back(read_card(reader));
    // Every rank at its own place, all of one job.
    const Card& card = message.roster.back();
    if (card.rank != static_cast<int>(i) || card.world_size != static_cast<int>(count)) {
      reader.fail();
    }
  }
  const int centre = message.centre.rank;
  if (!reader.finished() || count == 0 || centre < -1 || centre >= static_cast<int>(count) ||
      message.timeout.count() == 0) {
    return std::nullopt;
  }
  return message;
}

}  // namespace lockstep
