#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep {

class ByteReader;
class ByteWriter;

// An Error as it travels: code u8, rank i32, message in UTF-8. Longer messages are cut.
inline constexpr std::uint32_t kMaxErrorText = 4096;

struct WireError {
  ErrorCode code{};
  int rank = -1;
  std::string message;

  Error error() const { return Error(code, message, rank); }
  bool operator==(const WireError&) const = default;
};

void write_error(ByteWriter& writer, const Error& error);
// An unknown code, a rank below -1 or a message that is no UTF-8 makes the reader fail.
WireError read_error(ByteReader& reader);

std::vector<std::byte> encode_wire_error(const Error& error);
std::optional<WireError> decode_wire_error(std::span<const std::byte> body);

}  // namespace lockstep
