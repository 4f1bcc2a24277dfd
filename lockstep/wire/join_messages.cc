#include "lockstep/wire/join_messages.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/hash/blake3.h"
#include "lockstep/base/index.h"
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
    writer.text(*text, kMaxCardText);
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
    *text = reader.text(kMaxCardText);
  }
  return card;
}

void write_cards(ByteWriter& writer, const Roster& roster) {
  writer.count(roster.size(), kMaxWorldSize);
  for (const Card& card : roster) write_card(writer, card);
}

Roster read_cards(ByteReader& reader) {
  Roster roster;
  const std::uint32_t count = reader.count(kMinCardBytes, kMaxWorldSize);
  roster.reserve(count);
  for (std::uint32_t i = 0; i < count && reader.ok(); ++i) roster.push_back(read_card(reader));
  return roster;
}

void write_generation(ByteWriter& writer, const GenerationName& generation) {
  writer.u32(generation.number);
  writer.bytes(generation.id);
}

GenerationName read_generation(ByteReader& reader) {
  GenerationName generation;
  generation.number = reader.u32();
  const auto id = reader.bytes(generation.id.size());
  std::ranges::copy(id, generation.id.begin());
  return generation;
}

void write_centre(ByteWriter& writer, const CentreCard& centre) {
  writer.i32(centre.rank);
  writer.i32(centre.pid);
  writer.text(centre.title, kMaxCardText);
  writer.text(centre.hostname, kMaxCardText);
}

CentreCard read_centre(ByteReader& reader) {
  CentreCard centre;
  centre.rank = reader.i32();
  centre.pid = reader.i32();
  centre.title = reader.text(kMaxCardText);
  centre.hostname = reader.text(kMaxCardText);
  return centre;
}

void write_departed(ByteWriter& writer, const std::vector<Departure>& departed) {
  writer.count(departed.size(), kMaxWorldSize);
  for (const Departure& each : departed) {
    writer.i32(each.rank);
    writer.u8(static_cast<std::uint8_t>(each.kind));
    writer.text(each.name, kMaxWhy);
    writer.text(each.why, kMaxWhy);
  }
}

std::vector<Departure> read_departed(ByteReader& reader) {
  std::vector<Departure> departed;
  const std::uint32_t count = reader.count(4 + 1 + 4 + 4, kMaxWorldSize);
  for (std::uint32_t i = 0; i < count && reader.ok(); ++i) {
    Departure each;
    each.rank = reader.i32();
    each.kind = static_cast<Departure::Kind>(reader.u8());
    each.name = reader.text(kMaxWhy);
    each.why = reader.text(kMaxWhy);
    const bool ascending = departed.empty() ? each.rank >= 0 : each.rank > departed.back().rank;
    if (!ascending || each.kind > Departure::Kind::kLeft) reader.fail();
    departed.push_back(std::move(each));
  }
  return departed;
}

bool read_flag(ByteReader& reader) {
  const std::uint8_t flag = reader.u8();
  if (flag > 1) reader.fail();
  return flag == 1;
}

}  // namespace

std::uint32_t tag_of(const GenerationName& generation) {
  if (generation.number == 0) return 0;
  ByteWriter writer;
  write_generation(writer, generation);
  const Blake3Hash hash = blake3(writer.written());
  return load_little_endian<std::uint32_t>(hash.data());
}

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
  writer.u8(static_cast<std::uint8_t>(join.standing));
  writer.u8(join.survives ? 1 : 0);
  writer.u32(join.min_workers);
  write_generation(writer, join.last);
  writer.i64(join.step);
  write_card(writer, join.card);
  return std::move(writer).take();
}

std::optional<Join> decode_join(std::span<const std::byte> body) {
  ByteReader reader(body);
  Join join;
  join.patience = std::chrono::milliseconds(reader.u32());
  join.standing = static_cast<Standing>(reader.u8());
  join.survives = read_flag(reader);
  join.min_workers = reader.u32();
  join.last = read_generation(reader);
  join.step = reader.i64();
  join.card = read_card(reader);
  const bool known = join.standing <= Standing::kEnters;
  if (!reader.finished() || !known || join.step < 0 || join.min_workers > kMaxWorldSize) {
    return std::nullopt;
  }
  return join;
}

std::vector<std::byte> encode(const RosterMessage& message) {
  ByteWriter writer;
  write_centre(writer, message.centre);
  writer.u32(static_cast<std::uint32_t>(message.timeout.count()));
  write_generation(writer, message.generation);
  writer.u8(message.survives ? 1 : 0);
  writer.u8(message.too_few ? 1 : 0);
  writer.u32(message.newcomers);
  writer.i64(message.step);
  write_departed(writer, message.departed);
  write_cards(writer, message.roster);
  return std::move(writer).take();
}

std::optional<RosterMessage> decode_roster(std::span<const std::byte> body) {
  ByteReader reader(body);
  RosterMessage message;
  message.centre = read_centre(reader);
  message.timeout = std::chrono::milliseconds(reader.u32());
  message.generation = read_generation(reader);
  message.survives = read_flag(reader);
  message.too_few = read_flag(reader);
  message.newcomers = reader.u32();
  message.step = reader.i64();
  message.departed = read_departed(reader);
  message.roster = read_cards(reader);
  if (!reader.finished() || message.roster.empty() || message.timeout.count() == 0 ||
      message.newcomers > message.roster.size() || message.step < 0) {
    return std::nullopt;
  }
  // Every rank at its own place, all of one job.
  const int count = static_cast<int>(message.roster.size());
  for (int rank = 0; rank < count; ++rank) {
    const Card& card = message.roster[index_of(rank)];
    if (card.rank != rank || card.world_size != count) return std::nullopt;
  }
  if (message.centre.rank < -1 || message.centre.rank >= count) return std::nullopt;
  return message;
}

std::vector<std::byte> encode(const RosterChange& change) {
  ByteWriter writer;
  write_generation(writer, change.base);
  write_centre(writer, change.centre);
  write_generation(writer, change.generation);
  writer.u8(change.too_few ? 1 : 0);
  writer.u32(change.newcomers);
  writer.i64(change.step);
  write_departed(writer, change.departed);
  write_cards(writer, change.added);
  return std::move(writer).take();
}

std::optional<RosterChange> decode_roster_change(std::span<const std::byte> body) {
  ByteReader reader(body);
  RosterChange change;
  change.base = read_generation(reader);
  change.centre = read_centre(reader);
  change.generation = read_generation(reader);
  change.too_few = read_flag(reader);
  change.newcomers = reader.u32();
  change.step = reader.i64();
  change.departed = read_departed(reader);
  change.added = read_cards(reader);
  if (!reader.finished() || change.step < 0) return std::nullopt;
  return change;
}

std::optional<RosterMessage> changed(const RosterMessage& before, const RosterChange& change) {
  if (change.base != before.generation) return std::nullopt;
  RosterMessage after = before;
  after.centre = change.centre;
  after.generation = change.generation;
  after.too_few = change.too_few;
  after.step = change.step;
  after.departed = change.departed;
  after.roster.clear();
  auto lost = change.departed.begin();
  for (const Card& card : before.roster) {
    if (lost != change.departed.end() && lost->rank == card.rank) {
      ++lost;
    } else {
      after.roster.push_back(card);
    }
  }
  after.roster.insert(after.roster.end(), change.added.begin(), change.added.end());
  after.newcomers = change.newcomers;
  const int count = static_cast<int>(after.roster.size());
  if (lost != change.departed.end() || count == 0 || count > kMaxWorldSize) return std::nullopt;
  if (after.newcomers > after.roster.size()) return std::nullopt;
  if (change.centre.rank < -1 || change.centre.rank >= count) return std::nullopt;
  for (int rank = 0; rank < count; ++rank) {
    after.roster[index_of(rank)].rank = rank;
    after.roster[index_of(rank)].world_size = count;
  }
  return after;
}

std::vector<std::byte> encode(const Description& description) {
  ByteWriter writer;
  writer.u32(description.most_workers);
  writer.count(description.contents.size(), kMaxJobDescription);
  writer.bytes(description.contents);
  return std::move(writer).take();
}

std::optional<Description> decode_description(std::span<const std::byte> body) {
  ByteReader reader(body);
  Description description;
  description.most_workers = reader.u32();
  const std::uint32_t size = reader.count(1, kMaxJobDescription);
  const auto contents = reader.bytes(size);
  description.contents.assign(contents.begin(), contents.end());
  if (!reader.finished()) return std::nullopt;
  return description;
}

}  // namespace lockstep
