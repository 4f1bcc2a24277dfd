// Both ends of a protected connection with somebody on the way. The first byte chooses the
// protection, compression and how the stream is cut; the rest says which bytes of the stream become
// others. What is opened is a prefix of what was sealed, never anything else. With checksums alone
// arbitrary bytes are opened, too.
#include <algorithm>
#include <array>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/net/socket/records.h"
#include "tests/fuzz/script.h"

using namespace lockstep;
using fuzz::require;

namespace {

std::vector<std::byte> open_all(std::span<const std::byte> wire, std::optional<RecordKey> key,
                                std::size_t at_once, std::size_t room) {
  RecordOpener opener(key);
  std::vector<std::byte> plain;
  std::vector<std::byte> place(room);
  try {
    while (true) {
      const std::size_t got =
          opener.open(std::span(place).first(room / 3), std::span(place).subspan(room / 3));
      plain.insert(plain.end(), place.begin(), place.begin() + static_cast<long>(got));
      if (got > 0) continue;
      require(!opener.ready() && !opener.room().empty());
      if (wire.empty()) break;
      const auto part = wire.first(std::min({at_once, wire.size(), opener.room().size()}));
      std::ranges::copy(part, opener.room().begin());
      opener.received(part.size());
      wire = wire.subspan(part.size());
    }
  } catch (const Error& error) {
    require(error.code() == ErrorCode::kPeerLost);
  }
  return plain;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Script script(data, size);
  const std::uint8_t how = script.byte();
  const std::size_t at_once = 1 + script.byte();
  const std::size_t room = 1 + script.byte();
  if (how % 4 == 0) {  // anything at all
    open_all(script.bytes(size), std::nullopt, at_once, room);
    return 0;
  }
  std::optional<RecordKey> key;
  if (how % 4 != 1) key.emplace();
  RecordSealer sealer(key);
  const bool compressed = (how & 4) != 0;
  sealer.set_compression(compressed);
  const std::size_t unit = compressed ? 32 : 1;
  std::vector<std::byte> plain(3 * unit * script.byte());
  for (std::size_t i = 0; i < plain.size(); ++i) {
    plain[i] = static_cast<std::byte>(compressed && i % 4 == 3 ? 60 : i);
  }
  std::vector<std::byte> wire;
  for (std::size_t begin = 0; begin < plain.size();) {
    const std::size_t end = std::min(begin + 1 + unit * script.byte(), plain.size());
    sealer.seal({}, std::span(plain).subspan(begin, end - begin));
    wire.insert(wire.end(), sealer.unsent().begin(), sealer.unsent().end());
    sealer.sent(sealer.unsent().size());
    require(sealer.take_done() == end - begin);
    begin = end;
  }
  const bool encrypted = key.has_value();
  bool changed = false;
  while (!script.ended() && !wire.empty()) {
    const std::size_t at = script.number(2) % wire.size();
    const auto mask = static_cast<std::byte>(script.byte());
    wire[at] ^= mask;
    changed = changed || mask != std::byte{0};
  }
  const std::vector<std::byte> got = open_all(wire, key, at_once, room);
  if (encrypted || !changed) {
    require(got.size() <= plain.size() && std::equal(got.begin(), got.end(), plain.begin()));
    require(changed || got.size() == plain.size());
  }
  return 0;
}
