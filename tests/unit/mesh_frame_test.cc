#include "lockstep/wire/mesh_frame.h"

#include <gtest/gtest.h>

#include "lockstep/base/hash/crc32c.h"
#include "lockstep/wire/bytes.h"

namespace lockstep::mesh_frame_test {
namespace {

const MeshFrame kFrame{
    .kind = 0x11,
    .type = 0x12,
    .op = 0x13,
    .algorithm = 0x14,
    .generation = 0x21222324,
    .group = 0x31323334,
    .sequence = 0x4142434445464748,
    .count = 0x5152535455565758,
    .shape = 0x6162636465666768,
    .step = 0x71727374,
    .bucket = 0x81828384,
    .part = 0x91929394,
    .payload = 0xa1a2a3a4a5a6a7a8,
};

// Writes the header field by field, in the order of the specification.
std::vector<std::byte> specified(const MeshFrame& frame, std::uint32_t checksum) {
  ByteWriter writer;
  writer.u16(0x534c);
  writer.u8(1);
  writer.u8(frame.kind);
  writer.u8(frame.type);
  writer.u8(frame.op);
  writer.u8(frame.algorithm);
  writer.u8(0);
  writer.u32(frame.generation);
  writer.u32(frame.group);
  writer.u64(frame.sequence);
  writer.u64(frame.count);
  writer.u64(frame.shape);
  writer.u32(frame.step);
  writer.u32(frame.bucket);
  writer.u32(frame.part);
  writer.u32(checksum);
  writer.u64(frame.payload);
  return std::move(writer).take();
}

// `bytes` with a checksum that is right.
MeshFrameBytes resealed(MeshFrameBytes bytes) {
  store_little_endian<std::uint32_t>(&bytes[52], 0);
  store_little_endian(&bytes[52], crc32c(bytes));
  return bytes;
}

TEST(MeshFrame, ADigestTellsCallsApartAndNotTheFramesOfOne) {
  MeshFrame other = kFrame;
  other.part = 1;
  other.payload = 2;
  EXPECT_EQ(call_digest(other), call_digest(kFrame));
  const auto differs = [](auto member) {
    MeshFrame frame = kFrame;
    frame.*member ^= 1;
    return call_digest(frame) != call_digest(kFrame);
  };
  EXPECT_TRUE(differs(&MeshFrame::kind) && differs(&MeshFrame::type) && differs(&MeshFrame::op));
  EXPECT_TRUE(differs(&MeshFrame::algorithm) && differs(&MeshFrame::generation));
  EXPECT_TRUE(differs(&MeshFrame::group) && differs(&MeshFrame::sequence));
  EXPECT_TRUE(differs(&MeshFrame::count) && differs(&MeshFrame::shape));
  EXPECT_TRUE(differs(&MeshFrame::step) && differs(&MeshFrame::bucket));
}

TEST(MeshFrame, LiesAsSpecified) {
  const auto unsealed = specified(kFrame, 0);
  const auto expected = specified(kFrame, crc32c_portable(unsealed));
  const auto bytes = encode(kFrame);
  EXPECT_EQ(std::vector(bytes.begin(), bytes.end()), expected);
  EXPECT_EQ(bytes[0], std::byte{'L'});
  EXPECT_EQ(bytes[1], std::byte{'S'});
}

TEST(MeshFrame, DecodesWhatItEncodes) {
  EXPECT_EQ(decode_mesh_frame(encode(kFrame)), kFrame);
  EXPECT_EQ(decode_mesh_frame(encode(MeshFrame{})), MeshFrame{});
}

TEST(MeshFrame, AnyFlippedBitIsFound) {
  const auto good = encode(kFrame);
  for (std::size_t bit = 0; bit < 8 * kMeshFrameBytes; ++bit) {
    auto bad = good;
    bad[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    EXPECT_FALSE(decode_mesh_frame(bad)) << "bit " << bit;
  }
}

TEST(MeshFrame, ForeignBytesAreRefusedEvenWithARightChecksum) {
  for (const std::size_t at : {0, 1, 2, 7}) {  // magic, version, reserved
    auto bytes = encode(kFrame);
    bytes[at] ^= std::byte{0x80};
    EXPECT_FALSE(decode_mesh_frame(resealed(bytes))) << "byte " << at;
  }
  auto other = encode(kFrame);
  other[3] ^= std::byte{0x80};
  EXPECT_TRUE(decode_mesh_frame(resealed(other))) << "the checksum itself was right";
}

TEST(MeshFrame, ZerosAreNoFrame) { EXPECT_FALSE(decode_mesh_frame(resealed(MeshFrameBytes{}))); }

}  // namespace
}  // namespace lockstep::mesh_frame_test
