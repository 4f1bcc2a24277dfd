#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// What the handshake that opens every connection says; docs/mesh_protocol.md specifies the bytes.

inline constexpr std::size_t kMaxJobName = 255;
inline constexpr std::size_t kMaxHandshakeBody = 8192;  // of any of its messages

// Names a process for as long as it lives.
using MemberId = std::array<std::byte, 16>;
std::string to_string(const MemberId& id);  // 32 hex digits

// What a connection is for. Values are part of the protocol.
enum class Purpose : std::uint8_t { kRendezvous = 1, kMesh = 2, kShared = 3, kServer = 4 };
std::string_view to_string(Purpose purpose);

// How the bytes of a connection travel behind the handshake. Values are part of the protocol.
enum class Protection : std::uint8_t {
  kNone = 0,     // as they are: the connection does not leave the host
  kSealed = 1,   // in records that are encrypted and authenticated
  kChecked = 2,  // in records with a checksum: the network is trusted
};
// What two sides that ask for these will use: nothing if they cannot agree. Who takes its
// connection for one of this host yields to who does not.
std::optional<Protection> agreed(Protection client, Protection server);

// What each side says first. The proofs cover all of it.
struct Hello {
  Purpose purpose{};
  std::string job;
  std::uint32_t generation = 0;
  std::uint32_t group = 0;
  MemberId id{};
  std::int32_t rank = -1;
  bool has_token = false;  // only to tell a missing token from a wrong one
  Protection protection{};
  std::array<std::byte, 32> nonce{};
  std::array<std::byte, 32> key{};  // X25519, made for this handshake

  bool operator==(const Hello&) const = default;
};
std::vector<std::byte> encode(const Hello& hello);
// Nothing for bytes that are malformed, out of bounds or left over.
std::optional<Hello> decode_hello(std::span<const std::byte> body);

}  // namespace lockstep
