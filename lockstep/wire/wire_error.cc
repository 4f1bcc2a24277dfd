#include "lockstep/wire/wire_error.h"

#include <utility>

#include "lockstep/wire/bytes.h"

namespace lockstep {

// The order of ErrorCode is part of the protocol: new codes go to the end.
static_assert(static_cast<int>(ErrorCode::kInvalidArgument) == 0);
static_assert(static_cast<int>(ErrorCode::kPeerLost) == 9);
static_assert(static_cast<int>(ErrorCode::kMessageTooLarge) == 16);
static_assert(static_cast<int>(ErrorCode::kDevice) == 21);
constexpr auto kLastCode = static_cast<std::uint8_t>(ErrorCode::kDevice);

void write_error(ByteWriter& writer, const Error& error) {
  writer.u8(static_cast<std::uint8_t>(error.code()));
  writer.i32(error.rank());
  writer.text(error.message(), kMaxErrorText);
}

WireError read_error(ByteReader& reader) {
  WireError error;
  const std::uint8_t code = reader.u8();
  error.rank = reader.i32();
  error.message = reader.text(kMaxErrorText);
  if (code > kLastCode || error.rank < -1) {
    reader.fail();
    return {};
  }
  error.code = static_cast<ErrorCode>(code);
  return error;
}

std::vector<std::byte> encode_wire_error(const Error& error) {
  ByteWriter writer;
  write_error(writer, error);
  return std::move(writer).take();
}

std::optional<WireError> decode_wire_error(std::span<const std::byte> body) {
  ByteReader reader(body);
  WireError error = read_error(reader);
  if (!reader.finished()) return std::nullopt;
  return error;
}

}  // namespace lockstep
