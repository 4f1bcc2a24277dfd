#include "lockstep/net/socket/records.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sodium.h>
#include <sys/socket.h>

#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/hash/crc32c.h"
#include "lockstep/comm/transport/tcp_stream.h"
#include "lockstep/net/job/link.h"
#include "lockstep/net/socket/unix_socket.h"
#include "lockstep/server/frame_socket.h"
#include "lockstep/wire/bytes.h"
#include "tests/support/ranks.h"

namespace lockstep::records_test {
namespace {

using ::testing::HasSubstr;
using namespace test;
using Bytes = std::vector<std::byte>;

RecordKey counting_key(int first = 0) {
  RecordKey key;
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::byte>(first + i);
  return key;
}

Bytes bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

std::string hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte byte : bytes) text += fmt::format("{:02x}", std::to_integer<int>(byte));
  return text;
}

Bytes pattern(std::size_t size) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 31 % 251);
  return bytes;
}

// As a gradient's, exponents that are nearly alike.
Bytes numbers(std::size_t size) {
  Bytes bytes = pattern(size);
  std::mt19937 generator(5);
  for (std::size_t i = 3; i < size; i += 4)
    bytes[i] = static_cast<std::byte>(0x3b + generator() % 3);
  return bytes;
}

Bytes sealed(RecordSealer& sealer, const Bytes& plain) {
  sealer.seal({}, plain);
  const auto out = sealer.unsent();
  Bytes copy(out.begin(), out.end());
  sealer.sent(out.size());
  EXPECT_EQ(sealer.take_done(), plain.size());
  return copy;
}

// Gives the opener what has come, a few bytes at a time, and takes what it opens.
Bytes opened(RecordOpener& opener, std::span<const std::byte> wire, std::size_t at_once,
             std::size_t room) {
  Bytes plain;
  Bytes place(room);
  while (true) {
    const std::size_t half = room / 2;
    const std::size_t got =
        opener.open(std::span(place).first(half), std::span(place).subspan(half));
    EXPECT_LE(got, room);
    plain.insert(plain.end(), place.begin(), place.begin() + static_cast<long>(got));
    if (got > 0) continue;
    EXPECT_FALSE(opener.ready());
    if (wire.empty()) return plain;
    const std::size_t part = std::min({at_once, wire.size(), opener.room().size()});
    EXPECT_GT(part, 0U);
    std::ranges::copy(wire.first(part), opener.room().begin());
    opener.received(part);
    wire = wire.subspan(part);
  }
}

using MaybeKey = std::optional<RecordKey>;

TEST(Records, BringWhatWasSent) {
  for (const MaybeKey& key : {MaybeKey(counting_key()), MaybeKey()}) {
    for (const std::size_t size : {1, 100, 16383, 16384, 16385, 60 * 1024}) {
      for (const auto& [at_once, room] :
           {std::pair<std::size_t, std::size_t>{1 << 20, 1 << 20}, {1000, 700}, {7, 5000}}) {
        RecordSealer sealer(key);
        RecordOpener opener(key);
        Bytes wire = sealed(sealer, pattern(size));
        const Bytes more = sealed(sealer, pattern(3));
        wire.insert(wire.end(), more.begin(), more.end());
        Bytes expected = pattern(size);
        const Bytes last = pattern(3);
        expected.insert(expected.end(), last.begin(), last.end());
        EXPECT_EQ(opened(opener, wire, at_once, room), expected) << size << " " << at_once;
      }
    }
  }
}

TEST(Records, ManyConnectionsThatSayLittleKeepLittleMemory) {
  RecordOpener opener{MaybeKey()};
  EXPECT_LE(opener.room().size(), 4096U);
  RecordSealer sealer{MaybeKey()};
  Bytes wire;
  for (int i = 0; i < 100; ++i) {
    const Bytes some = sealed(sealer, pattern(10'000));
    wire.insert(wire.end(), some.begin(), some.end());
  }
  opened(opener, wire, 1 << 20, 1 << 20);
  EXPECT_GE(opener.room().size(), 100'000U) << "one that streams gets more";
}

// docs/mesh_protocol.md has the same.
TEST(Records, TestVectors) {
  RecordSealer sealer{MaybeKey(counting_key())};
  const Bytes first = sealed(sealer, bytes_of("lockstep"));
  EXPECT_EQ(hex(first), "0800000062d3d6b5c658e6cdefdea8ce86e90bdb7938760a6929dd1b");
  EXPECT_EQ(hex(sealed(sealer, bytes_of("lockstep"))),
            "080000008e43e154d7db8977fab8dcb6065f151c6f68f70bb12c3a7f");
  RecordSealer checked{MaybeKey()};
  EXPECT_EQ(hex(sealed(checked, bytes_of("lockstep"))), "080000006c6f636b7374657098385548");
}

// Another implementation opens them: libsodium's, where the processor has what it needs.
Bytes opened_by_sodium(const RecordKey& key, std::uint64_t number, const Bytes& record) {
  std::array<unsigned char, 12> nonce{};
  std::memcpy(nonce.data(), &number, sizeof(number));
  Bytes plain(record.size() - 20);
  const auto* raw = reinterpret_cast<const unsigned char*>(record.data());
  unsigned long long size = 0;
  const int result = ::crypto_aead_aes256gcm_decrypt(
      reinterpret_cast<unsigned char*>(plain.data()), &size, nullptr, raw + 4, record.size() - 4,
      raw, 4, nonce.data(), reinterpret_cast<const unsigned char*>(key.data()));
  return result == 0 ? plain : Bytes();
}

TEST(Records, AreWhatThePageSays) {
  ASSERT_GE(::sodium_init(), 0);
  if (::crypto_aead_aes256gcm_is_available() == 0) GTEST_SKIP() << "no AES instructions here";
  RecordSealer sealer{MaybeKey(counting_key())};
  for (std::uint64_t number = 0; number < 3; ++number) {
    const Bytes plain = pattern(100 + number);
    EXPECT_EQ(opened_by_sodium(counting_key(), number, sealed(sealer, plain)), plain);
  }
}

// After 2^20 records both sides use another key, and count from zero again.
TEST(Records, KeysChangeOnTheWay) {
  ASSERT_GE(::sodium_init(), 0);
  if (::crypto_aead_aes256gcm_is_available() == 0) GTEST_SKIP() << "no AES instructions here";
  const RecordKey key = counting_key();
  RecordSealer sealer{MaybeKey(key)};
  RecordOpener opener{MaybeKey(key)};
  const Bytes one = pattern(1);
  std::byte got{};
  const auto pass = [&](const Bytes& record) {
    std::ranges::copy(record, opener.room().begin());
    opener.received(record.size());
    EXPECT_EQ(opener.open({}, {&got, 1}), 1U);
    EXPECT_EQ(opener.open({}, {&got, 1}), 0U);  // makes room
  };
  for (int i = 0; i < 1 << 20; ++i) pass(sealed(sealer, one));
  RecordKey next;
  const std::string_view label = "lockstep next key 1\n";
  ::crypto_auth_hmacsha256(reinterpret_cast<unsigned char*>(next.data()),
                           reinterpret_cast<const unsigned char*>(label.data()), label.size(),
                           reinterpret_cast<const unsigned char*>(key.data()));
  // docs/mesh_protocol.md has the same.
  EXPECT_EQ(hex(next), "53679d7d9cbe7e1a232f79cc716f05625d431b328093e5fb00aaaae09158dbe6");
  const Bytes text = bytes_of("lockstep");
  const Bytes after = sealed(sealer, text);
  EXPECT_EQ(hex(after), "080000005cdac4c44bb9be968a9ba928198fd2b189bd27e802aa6dab");
  EXPECT_EQ(opened_by_sodium(next, 0, after), text);
  EXPECT_EQ(opened(opener, after, 100, 100), text);
}

TEST(Records, OneThatWasChangedIsRefused) {
  for (const auto& [key, compressed] : {std::pair(MaybeKey(counting_key()), false),
                                        {MaybeKey(), false},
                                        {MaybeKey(counting_key()), true},
                                        {MaybeKey(), true}}) {
    RecordSealer sealer(key);
    sealer.set_compression(compressed);
    const Bytes wire = sealed(sealer, compressed ? numbers(2000) : pattern(40));
    EXPECT_EQ(wire.size() < 2000 && wire.size() > 1000, compressed);
    for (std::size_t i = 0; i < wire.size(); ++i) {
      Bytes changed = wire;
      changed[i] ^= std::byte{4};
      RecordOpener opener(key);
      try {
        // A longer length has the opener wait for more.
        const Bytes plain = opened(opener, changed, 1 << 20, 1 << 20);
        EXPECT_TRUE(i < 2 && plain.empty()) << i;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kPeerLost);
        EXPECT_THAT(error.what(), HasSubstr("damaged or changed on the way"));
      }
    }
  }
}

TEST(Records, ThatAreCompressedBringTheSameInFewerBytes) {
  for (const MaybeKey& key : {MaybeKey(counting_key()), MaybeKey()}) {
    for (const auto& [at_once, room] :
         {std::pair<std::size_t, std::size_t>{1 << 20, 1 << 20}, {1000, 700}, {7, 5000}}) {
      RecordSealer sealer(key);
      RecordOpener opener(key);
      sealer.set_compression(true);
      const Bytes plain = numbers(60'000);
      Bytes wire = sealed(sealer, plain);
      EXPECT_LT(wire.size(), plain.size() * 9 / 10);
      const CompressionCost cost = sealer.take_cost();
      EXPECT_EQ(cost.bytes, plain.size());
      EXPECT_GT(cost.time.count(), 0);
      EXPECT_EQ(sealer.take_cost().bytes, 0U);
      sealer.set_compression(false);
      const Bytes more = sealed(sealer, plain);
      EXPECT_GT(more.size(), plain.size());
      wire.insert(wire.end(), more.begin(), more.end());
      Bytes expected = plain;
      expected.insert(expected.end(), plain.begin(), plain.end());
      EXPECT_EQ(opened(opener, wire, at_once, room), expected);
    }
  }
}

TEST(Records, OfHeadAndBodyAreCompressedAsOne) {
  RecordSealer sealer{MaybeKey(counting_key())};
  RecordOpener opener{MaybeKey(counting_key())};
  sealer.set_compression(true);
  const Bytes plain = numbers(10'064);
  sealer.seal(std::span(plain).first(64), std::span(plain).subspan(64));
  const auto wire = sealer.unsent();
  EXPECT_LT(wire.size(), 9'300U);
  std::byte nothing{};
  for (auto rest = wire; !rest.empty();) {
    EXPECT_EQ(opener.open({}, {&nothing, 1}), 0U);  // makes room
    const auto part = rest.first(std::min(rest.size(), opener.room().size()));
    std::ranges::copy(part, opener.room().begin());
    opener.received(part.size());
    rest = rest.subspan(part.size());
  }
  Bytes head(64), body(10'000);
  EXPECT_EQ(opener.open(head, body), plain.size());
  EXPECT_TRUE(std::equal(head.begin(), head.end(), plain.begin()));
  EXPECT_TRUE(std::equal(body.begin(), body.end(), plain.begin() + 64));
}

// A checksum is right for bytes that never were compressed, too.
TEST(Records, BytesThatCannotBeDecompressedAreRefused) {
  RecordSealer sealer{MaybeKey()};
  Bytes wire = sealed(sealer, pattern(100));
  store_little_endian(wire.data(), std::uint32_t{100 | 2000 << 16});
  const std::size_t covered = wire.size() - 4;
  store_little_endian(wire.data() + covered, crc32c(std::span(wire).first(covered)));
  RecordOpener opener{MaybeKey()};
  EXPECT_THAT([&] { opened(opener, wire, 1 << 20, 1 << 20); },
              ::testing::ThrowsMessage<Error>(HasSubstr("cannot be decompressed")));
}

TEST(Records, NoneCanBeRepeatedLeftOutOrMovedToTheOtherDirection) {
  RecordSealer sealer{MaybeKey(counting_key())};
  const Bytes first = sealed(sealer, pattern(10));
  const Bytes second = sealed(sealer, pattern(10));
  const auto take = [](const RecordKey& key, std::initializer_list<Bytes> records) {
    RecordOpener opener{MaybeKey(key)};
    for (const Bytes& record : records) opened(opener, record, 1 << 20, 100);
  };
  take(counting_key(), {first, second});
  EXPECT_THROW(take(counting_key(), {first, first}), Error);
  EXPECT_THROW(take(counting_key(), {second}), Error);
  EXPECT_THROW(take(counting_key(1), {first}), Error);
}

TEST(Records, LengthsThatCannotBeAreRefused) {
  // Of a record as it is; then of one that would not become longer, and one that becomes too long.
  for (const std::uint32_t size :
       {0U, 16385U, UINT32_MAX, 100U << 16 | 100U, 16385U << 16 | 100U, 100U << 16}) {
    for (const MaybeKey& key : {MaybeKey(counting_key()), MaybeKey()}) {
      RecordOpener opener(key);
      store_little_endian(opener.room().data(), size);
      opener.received(4);
      EXPECT_TRUE(opener.ready());
      std::byte byte;
      EXPECT_THROW(opener.open({}, {&byte, 1}), Error) << size;
    }
  }
}

// Two sockets with records between them, over buffers that fill up soon.
std::pair<Socket, Socket> protected_pair(bool encrypted) {
  auto pair = unix_socket_pair();
  const RecordKey there = counting_key();
  const RecordKey back = counting_key(100);
  for (Socket* socket : {&pair.first, &pair.second}) {
    const int small = 4096;
    ::setsockopt(socket->fd(), SOL_SOCKET, SO_SNDBUF, &small, sizeof(small));
    const bool first = socket == &pair.first;
    const RecordKeys keys = first ? RecordKeys{there, back} : RecordKeys{back, there};
    socket->protect(std::make_unique<Records>(encrypted ? std::optional(keys) : std::nullopt));
  }
  return pair;
}

TEST(ProtectedSocket, CarriesBothWaysAtOnce) {
  for (const bool encrypted : {true, false}) {
    const auto pair = protected_pair(encrypted);
    const Socket& a = pair.first;
    const Socket& b = pair.second;
    const Bytes data = pattern(3'000'000);
    const auto send = [&](const Socket& socket) { socket.send_all(data, soon()); };
    std::thread there([&] { send(a); });
    std::thread back([&] { send(b); });
    std::thread reading([&] {
      Bytes got(data.size());
      a.recv_all(got, soon());
      EXPECT_EQ(got, data);
    });
    Bytes got(data.size());
    b.recv_all(got, soon());
    EXPECT_EQ(got, data);
    there.join();
    back.join();
    reading.join();
  }
}

TEST(ProtectedSocket, ALinkHearsAllThatHasCome) {
  auto [a, b] = protected_pair(true);
  const Bytes body = pattern(100);
  std::thread sending([&, &from = a] {
    for (int i = 0; i < 5000; ++i) from.send_all(frame(MessageKind::kHeartbeat, body), soon());
  });
  Link link(std::move(b), 1000);
  int heard = 0;
  while (heard < 5000) {
    pollfd entry{link.socket().fd(), POLLIN, 0};
    ASSERT_EQ(::poll(&entry, 1, 20'000), 1) << "stuck after " << heard;
    link.pump();
    while (const auto message = link.next()) {
      EXPECT_EQ(message->body, body);
      ++heard;
    }
    ASSERT_FALSE(link.failure()) << link.failure()->what();
  }
  sending.join();
}

// What has begun to go out goes out whole, whatever else is forgotten.
TEST(ProtectedSocket, AFrameThatIsHalfSentIsNotDropped) {
  auto [a, b] = protected_pair(true);
  FrameSocket out(std::move(a), 1 << 16, UINT32_MAX);
  std::vector<float> data(100'000, 1.5F);
  BulkHead head;
  head.tag = WireTag::kGradientPayload;
  head.count = data.size();
  for (int i = 0; i < 3; ++i) {
    out.queue({encode_head(head), std::as_bytes(std::span(data)), encode_foot(head, {}), {}});
  }
  while (out.flush(1 << 20) > 0) {
  }
  ASSERT_TRUE(out.socket().midway());
  out.drop_unsent();
  out.queue(encode(Shutdown{}));
  FrameSocket in(std::move(b), 1 << 16, UINT32_MAX);
  const Deadline deadline = soon();
  bool done = false;
  while (!done && !deadline.expired()) {
    out.flush(1 << 20);
    if (!in.full()) in.fill(1 << 16);
    ASSERT_FALSE(in.ended());
    if (in.bulk_is_open()) {
      in.consume_elements(in.elements_here());
      if (in.elements_left() == 0) in.take_foot();
    } else if (const auto start = in.start()) {
      if (is_bulk(start->tag)) {
        in.open_bulk();
      } else if (const auto message = in.take_small()) {
        EXPECT_TRUE(std::holds_alternative<Shutdown>(*message));
        done = true;
      }
    }
  }
  EXPECT_TRUE(done);
}

// The socket itself is empty then: who waited for it would wait for ever.
TEST(ProtectedSocket, NobodyWaitsForWhatHasCome) {
  auto [a, b] = protected_pair(true);
  TcpStream in(std::move(b), 20s);
  a.send_all(pattern(1000), soon());
  Bytes got(100);
  ASSERT_EQ(in.read_some({}, got), got.size());
  std::vector<pollfd> waiting;
  EXPECT_FALSE(in.prepare_wait(Direction::kRecv, waiting));
  EXPECT_TRUE(in.prepare_wait(Direction::kSend, waiting));
  Bytes rest(900);
  ASSERT_EQ(in.read_some({}, rest), rest.size());
  EXPECT_TRUE(in.prepare_wait(Direction::kRecv, waiting));
}

TEST(ProtectedSocket, StreamsOfRandomPieces) {
  for (const auto& [encrypted, compression] : {std::pair(true, WireCompression::kOff),
                                               {false, WireCompression::kOff},
                                               {true, WireCompression::kOn}}) {
    auto [a, b] = protected_pair(encrypted);
    TcpStream out(std::move(a), 20s, compression);
    TcpStream in(std::move(b), 20s);
    const Bytes data = numbers(1'000'000);
    Bytes got(data.size());
    std::mt19937 random(encrypted ? 1 : 2);
    std::size_t written = 0;
    std::size_t read = 0;
    std::size_t head = 0;  // of the piece that is being written: it does not change until it is
    std::size_t body = 0;
    while (read < data.size()) {
      if (head + body == 0 && written < data.size()) {
        head = std::min<std::size_t>(random() % 80, data.size() - written);
        body = std::min<std::size_t>(random() % 200'000, data.size() - written - head);
      }
      const std::span left = std::span(data).subspan(written);
      const std::size_t moved = out.write_some(left.first(head), left.subspan(head, body));
      written += moved;
      const std::size_t in_head = std::min(moved, head);
      head -= in_head;
      body -= moved - in_head;
      const std::span room = std::span(got).subspan(read);
      const std::size_t first = std::min<std::size_t>(random() % 80, room.size());
      const std::size_t second = std::min<std::size_t>(random() % 100'000, room.size() - first);
      read += in.read_some(room.first(first), room.subspan(first, second));
    }
    EXPECT_EQ(got, data);
  }
}

}  // namespace
}  // namespace lockstep::records_test
