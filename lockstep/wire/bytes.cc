#include "lockstep/wire/bytes.h"

#include <fmt/format.h>

#include "lockstep/base/error.h"
#include "lockstep/base/utf8.h"

namespace lockstep {

std::uint32_t ByteReader::count(std::size_t element_bytes, std::uint32_t most) {
  const std::uint32_t count = u32();
  // Divides, because the product could overflow.
  if (count > most || (element_bytes > 0 && count > remaining() / element_bytes)) {
    fail();
    return 0;
  }
  return count;
}

std::string_view ByteReader::string(std::uint32_t most) {
  const auto text = bytes(count(1, most));
  return {reinterpret_cast<const char*>(text.data()), text.size()};
}

std::string_view ByteReader::text(std::uint32_t most) {
  const std::string_view text = string(most);
  if (is_utf8(text)) return text;
  fail();
  return {};
}

void ByteWriter::bytes(std::span<const std::byte> bytes) {
  bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
}

void ByteWriter::count(std::size_t count, std::uint32_t most) {
  if (count > most) {
    throw Error(ErrorCode::kMessageTooLarge, fmt::format("{} elements, at most {}", count, most));
  }
  u32(static_cast<std::uint32_t>(count));
}

void ByteWriter::string(std::string_view text, std::uint32_t most) {
  if (text.size() > most) {
    throw Error(ErrorCode::kMessageTooLarge,
                fmt::format("a string of {} bytes, at most {}", text.size(), most));
  }
  u32(static_cast<std::uint32_t>(text.size()));
  bytes(std::as_bytes(std::span(text)));
}

void ByteWriter::text(std::string_view text, std::uint32_t most) {
  const std::string repaired = repair_utf8(text, "?");
  string(utf8_prefix(repaired, most), most);
}

}  // namespace lockstep
