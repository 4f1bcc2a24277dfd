#include "lockstep/wire/mesh_frame.h"

#include "lockstep/base/hash/blake3.h"
#include "lockstep/base/hash/crc32c.h"
#include "lockstep/wire/bytes.h"

namespace lockstep {
namespace {

constexpr std::uint16_t kMagic = 0x534c;  // "LS"
constexpr std::uint8_t kVersion = 1;

// Where each field lies; the byte at kReservedAt is zero.
enum Offset : std::size_t {
  kMagicAt = 0,
  kVersionAt = 2,
  kKindAt = 3,
  kTypeAt = 4,
  kOpAt = 5,
  kAlgorithmAt = 6,
  kReservedAt = 7,
  kGenerationAt = 8,
  kGroupAt = 12,
  kSequenceAt = 16,
  kCountAt = 24,
  kShapeAt = 32,
  kStepAt = 40,
  kBucketAt = 44,
  kPartAt = 48,
  kChecksumAt = 52,
  kPayloadAt = 56,
};

}  // namespace

MeshFrameBytes encode(const MeshFrame& frame) {
  MeshFrameBytes bytes;
  store_little_endian(&bytes[kMagicAt], kMagic);
  store_little_endian(&bytes[kVersionAt], kVersion);
  store_little_endian(&bytes[kKindAt], frame.kind);
  store_little_endian(&bytes[kTypeAt], frame.type);
  store_little_endian(&bytes[kOpAt], frame.op);
  store_little_endian(&bytes[kAlgorithmAt], frame.algorithm);
  store_little_endian<std::uint8_t>(&bytes[kReservedAt], 0);
  store_little_endian(&bytes[kGenerationAt], frame.generation);
  store_little_endian(&bytes[kGroupAt], frame.group);
  store_little_endian(&bytes[kSequenceAt], frame.sequence);
  store_little_endian(&bytes[kCountAt], frame.count);
  store_little_endian(&bytes[kShapeAt], frame.shape);
  store_little_endian(&bytes[kStepAt], frame.step);
  store_little_endian(&bytes[kBucketAt], frame.bucket);
  store_little_endian(&bytes[kPartAt], frame.part);
  store_little_endian<std::uint32_t>(&bytes[kChecksumAt], 0);  // as the checksum sees itself
  store_little_endian(&bytes[kPayloadAt], frame.payload);
  store_little_endian(&bytes[kChecksumAt], crc32c(bytes));
  return bytes;
}

std::optional<MeshFrame> decode_mesh_frame(std::span<const std::byte, kMeshFrameBytes> bytes) {
  const std::byte* at = bytes.data();
  MeshFrameBytes unsealed;
  std::memcpy(unsealed.data(), at, kMeshFrameBytes);
  store_little_endian<std::uint32_t>(&unsealed[kChecksumAt], 0);
  if (load_little_endian<std::uint16_t>(at + kMagicAt) != kMagic ||
      load_little_endian<std::uint8_t>(at + kVersionAt) != kVersion ||
      load_little_endian<std::uint8_t>(at + kReservedAt) != 0 ||
      load_little_endian<std::uint32_t>(at + kChecksumAt) != crc32c(unsealed)) {
    return std::nullopt;
  }
  return MeshFrame{
      .kind = load_little_endian<std::uint8_t>(at + kKindAt),
      .type = load_little_endian<std::uint8_t>(at + kTypeAt),
      .op = load_little_endian<std::uint8_t>(at + kOpAt),
      .algorithm = load_little_endian<std::uint8_t>(at + kAlgorithmAt),
      .generation = load_little_endian<std::uint32_t>(at + kGenerationAt),
      .group = load_little_endian<std::uint32_t>(at + kGroupAt),
      .sequence = load_little_endian<std::uint64_t>(at + kSequenceAt),
      .count = load_little_endian<std::uint64_t>(at + kCountAt),
      .shape = load_little_endian<std::uint64_t>(at + kShapeAt),
      .step = load_little_endian<std::uint32_t>(at + kStepAt),
      .bucket = load_little_endian<std::uint32_t>(at + kBucketAt),
      .part = load_little_endian<std::uint32_t>(at + kPartAt),
      .payload = load_little_endian<std::uint64_t>(at + kPayloadAt),
  };
}

std::uint64_t call_digest(const MeshFrame& stamp) {
  MeshFrame call = stamp;
  call.part = 0;
  call.payload = 0;
  const Blake3Hash hash = blake3(encode(call));
  return load_little_endian<std::uint64_t>(hash.data());
}

}  // namespace lockstep
