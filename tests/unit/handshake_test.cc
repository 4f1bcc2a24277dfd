#include "lockstep/net/job/handshake.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sodium.h>

#include <array>
#include <string_view>
#include <utility>

#include "lockstep/net/socket/unix_socket.h"
#include "lockstep/wire/bytes.h"
#include "lockstep/wire/wire_error.h"
#include "tests/support/ranks.h"

namespace lockstep::handshake_test {
namespace {

using ::testing::HasSubstr;
using namespace test;
using Role = Handshake::Role;

Identity make_identity(int rank, const std::string& token = "secret") {
  return {"job", 3, random_member_id(), rank, token};
}

Message unframe(const std::vector<std::byte>& bytes) {
  MessageBuffer buffer;
  buffer.append(bytes);
  auto message = buffer.next(kMaxHandshakeBody, "peer");
  EXPECT_TRUE(message && buffer.rest().empty());
  return message.value_or(Message{});
}

// Client and server as state machines; the messages between them are kept.
struct Exchange {
  Exchange(const Identity& client_identity, const Identity& server_identity,
           Purpose client_purpose = Purpose::kMesh, Purpose server_purpose = Purpose::kMesh)
      : client(Role::kClient, client_identity, client_purpose, 5),
        server(Role::kServer, server_identity, server_purpose) {}

  void run() {
    auto bytes = client.opening();
    for (bool to_server = true; !bytes.empty(); to_server = !to_server) {
      messages.push_back(unframe(bytes));
      Handshake& receiver = to_server ? server : client;
      auto step = receiver.receive(messages.back());
      if (step.failure) (to_server ? server_error : client_error) = step.failure;
      bytes = step.reply;
    }
  }

  Handshake client;
  Handshake server;
  std::vector<Message> messages;
  std::optional<Error> client_error;
  std::optional<Error> server_error;
};

TEST(Handshake, TellsEachWhoTheOtherIs) {
  const Identity a = make_identity(1);
  const Identity b = make_identity(2);
  Exchange exchange(a, b);
  exchange.run();
  ASSERT_TRUE(exchange.client.done() && exchange.server.done());
  EXPECT_EQ(exchange.client.peer(), (PeerIdentity{b.id, 2, 5, 3}));
  EXPECT_EQ(exchange.server.peer(), (PeerIdentity{a.id, 1, 5, 3}));
  EXPECT_EQ(exchange.messages.size(), 4u);
}

TEST(Handshake, WorksWithoutATokenOnBothSides) {
  Exchange exchange(make_identity(0, ""), make_identity(1, ""));
  exchange.run();
  EXPECT_TRUE(exchange.client.done() && exchange.server.done());
}

void expect_refused(Exchange& exchange, std::string_view reason) {
  exchange.run();
  EXPECT_FALSE(exchange.client.done());
  EXPECT_FALSE(exchange.server.done());
  ASSERT_TRUE(exchange.server_error && exchange.client_error);
  EXPECT_EQ(exchange.server_error->code(), ErrorCode::kAuthentication);
  EXPECT_EQ(exchange.client_error->code(), ErrorCode::kAuthentication);
  EXPECT_THAT(exchange.server_error->what(), HasSubstr(std::string(reason)));
  EXPECT_THAT(exchange.client_error->what(), HasSubstr(std::string(reason)));
}

TEST(Handshake, RefusesAnotherToken) {
  Exchange exchange(make_identity(0, "secret"), make_identity(1, "secret2"));
  expect_refused(exchange, "wrong token");
}

TEST(Handshake, RefusesAMissingTokenOnEitherSide) {
  Exchange client_without(make_identity(0, ""), make_identity(1));
  expect_refused(client_without, "token missing: the connecting side has none");
  Exchange server_without(make_identity(0), make_identity(1, ""));
  expect_refused(server_without, "token missing: the listening side has none");
}

TEST(Handshake, RefusesAnotherJobOrPurposeNamingBoth) {
  Identity a = make_identity(0);
  Identity b = make_identity(1);
  b.job = "other";
  Exchange job(a, b);
  expect_refused(job, "another job: the connecting side has 'job', the listening side 'other'");
  Exchange purpose(a, make_identity(1), Purpose::kMesh, Purpose::kRendezvous);
  expect_refused(purpose, "another purpose: the connecting side has mesh");
}

TEST(Handshake, NeverSendsTheToken) {
  const std::string token = "a token to look for";
  Exchange exchange(make_identity(0, token), make_identity(1, token));
  exchange.run();
  for (const Message& message : exchange.messages) {
    const std::string text(reinterpret_cast<const char*>(message.body.data()), message.body.size());
    EXPECT_EQ(text.find(token), std::string::npos);
  }
}

TEST(Handshake, RefusesAReplay) {
  const Identity a = make_identity(1);
  const Identity b = make_identity(2);
  Exchange recorded(a, b);
  recorded.run();
  ASSERT_TRUE(recorded.server.done());
  // The client's messages again, to the same server: its nonce is another one.
  Handshake server(Role::kServer, b, Purpose::kMesh);
  EXPECT_FALSE(server.receive(recorded.messages[0]).failure);
  const auto step = server.receive(recorded.messages[2]);
  ASSERT_TRUE(step.failure);
  EXPECT_EQ(step.failure->code(), ErrorCode::kAuthentication);
  // The server's messages again, to the same client.
  Handshake client(Role::kClient, a, Purpose::kMesh, 5);
  EXPECT_FALSE(client.receive(recorded.messages[1]).failure);
  EXPECT_TRUE(client.receive(recorded.messages[3]).failure);
  EXPECT_FALSE(server.done() || client.done());
}

TEST(Handshake, RefusesAReflectedProof) {
  // A peer without the token that sends back whatever it receives, hello and proof alike.
  Handshake client(Role::kClient, make_identity(1), Purpose::kMesh);
  const Message hello = unframe(client.opening());
  const auto proof = client.receive(hello);
  ASSERT_FALSE(proof.failure);
  const auto step = client.receive(unframe(proof.reply));
  ASSERT_TRUE(step.failure);
  EXPECT_EQ(step.failure->code(), ErrorCode::kAuthentication);
  EXPECT_FALSE(client.done());
}

TEST(Handshake, ProofCoversEveryFieldOfBothHellos) {
  // Somebody in between changes one byte of a hello on its way.
  const Identity a = make_identity(1);
  const Identity b = make_identity(2);
  const std::size_t size =
      unframe(Handshake(Role::kClient, a, Purpose::kMesh).opening()).body.size();
  for (std::size_t i = 0; i < size; ++i) {
    for (const bool to_server : {true, false}) {
      Handshake client(Role::kClient, a, Purpose::kMesh);
      Handshake server(Role::kServer, b, Purpose::kMesh);
      Message hello = unframe(client.opening());
      if (to_server) hello.body[i] ^= std::byte{1};
      auto step = server.receive(hello);
      if (step.failure) continue;
      hello = unframe(step.reply);
      if (!to_server) hello.body[i] ^= std::byte{1};
      step = client.receive(hello);
      if (step.failure) continue;
      EXPECT_TRUE(server.receive(unframe(step.reply)).failure) << i << to_server;
      EXPECT_FALSE(server.done());
    }
  }
}

TEST(Handshake, MessagesOutOfPlaceEndIt) {
  for (const MessageKind kind :
       {MessageKind::kProof, MessageKind::kJoin, MessageKind::kHeartbeat}) {
    Handshake server(Role::kServer, make_identity(0), Purpose::kMesh);
    EXPECT_TRUE(server.receive({kind, {}}).failure);
    EXPECT_TRUE(
        server
            .receive(unframe(Handshake(Role::kClient, make_identity(1), Purpose::kMesh).opening()))
            .failure)
        << "a failed handshake stays failed";
  }
}

TEST(Handshake, HelloIsExact) {
  const Hello hello{Purpose::kShared, "job", 7, 8, random_member_id(), 9, true, {}};
  const auto body = encode(hello);
  EXPECT_EQ(decode_hello(body), hello);
  for (std::size_t size = 0; size < body.size(); ++size) {
    EXPECT_FALSE(decode_hello(std::span(body).first(size)));
  }
  auto foreign = body;
  foreign.back() = std::byte{0xff};  // of the job's name
  EXPECT_FALSE(decode_hello(foreign));
}

TEST(Handshake, WhoSeesAnotherHostDecidesOnTheWire) {
  using enum Protection;
  EXPECT_EQ(agreed(kNone, kNone), kNone);
  EXPECT_EQ(agreed(kNone, kSealed), kSealed);
  EXPECT_EQ(agreed(kSealed, kNone), kSealed);
  EXPECT_EQ(agreed(kSealed, kSealed), kSealed);
  EXPECT_EQ(agreed(kChecked, kNone), kChecked);
  EXPECT_EQ(agreed(kChecked, kChecked), kChecked);
  EXPECT_EQ(agreed(kChecked, kSealed), std::nullopt);
  EXPECT_EQ(agreed(kSealed, kChecked), std::nullopt);
}

// Client and server that need this protection, over a pair of sockets if they agree.
struct ProtectedExchange : Exchange {
  ProtectedExchange(Protection client_needs, Protection server_needs)
      : Exchange(make_identity(1), make_identity(0)) {
    client = Handshake(Role::kClient, make_identity(1), Purpose::kMesh, 5, client_needs);
    server = Handshake(Role::kServer, make_identity(0), Purpose::kMesh, 0, server_needs);
    run();
  }
};

TEST(Handshake, BothSidesSealWithTheSameKeys) {
  for (const Protection needed : {Protection::kSealed, Protection::kChecked, Protection::kNone}) {
    ProtectedExchange exchange(needed, Protection::kNone);
    ASSERT_TRUE(exchange.client.done() && exchange.server.done());
    EXPECT_EQ(exchange.server.protection(), needed);
    auto [near, far] = unix_socket_pair();
    exchange.client.protect(near);
    exchange.server.protect(far);
    EXPECT_EQ(near.records() != nullptr, needed != Protection::kNone);
    const std::string text = "to be read by the other side alone";
    std::string got(text.size(), ' ');
    for (const auto& [from, to] : {std::pair(&near, &far), std::pair(&far, &near)}) {
      from->send_all(std::as_bytes(std::span(text)), soon());
      to->recv_all(std::as_writable_bytes(std::span(got)), soon());
      EXPECT_EQ(got, text);
    }
  }
}

TEST(Handshake, EveryConnectionHasKeysOfItsOwn) {
  ProtectedExchange one(Protection::kSealed, Protection::kSealed);
  ProtectedExchange other(Protection::kSealed, Protection::kSealed);
  auto ends = unix_socket_pair();
  one.client.protect(ends.first);
  other.server.protect(ends.second);
  ends.first.send_all(std::as_bytes(std::span("secret", 6)), soon());
  std::array<std::byte, 6> got;
  EXPECT_EQ(error_of([&] { ends.second.recv_all(got, soon()); }).code(), ErrorCode::kPeerLost);
}

TEST(Handshake, APlainWireIsForAllOrNobody) {
  ProtectedExchange exchange(Protection::kChecked, Protection::kSealed);
  ASSERT_TRUE(exchange.server_error && exchange.client_error);
  for (const auto& error : {exchange.server_error, exchange.client_error}) {
    EXPECT_EQ(error->code(), ErrorCode::kAuthentication);
    EXPECT_THAT(error->what(),
                HasSubstr("the connecting side asks for a plain wire (--plain-wire)"));
  }
}

// A member whose X25519 key would make the secret one that everybody knows.
TEST(Handshake, AKeyThatIsNoneIsRefused) {
  Handshake server(Role::kServer, make_identity(0), Purpose::kMesh, 0, Protection::kSealed);
  Hello hello{Purpose::kMesh, "job", 3, 0, random_member_id(), 1, true, {}, {}, {}};
  const auto own = encode(hello);
  const auto theirs = unframe(server.receive({MessageKind::kHello, own}).reply).body;
  ByteWriter transcript;
  transcript.u8(1);
  transcript.u16(kProtocolVersion);
  transcript.bytes(own);
  transcript.bytes(theirs);
  std::vector<std::byte> proof(32);
  const TokenKey key = token_key("secret");
  ::crypto_auth_hmacsha256(reinterpret_cast<unsigned char*>(proof.data()),
                           reinterpret_cast<const unsigned char*>(transcript.written().data()),
                           transcript.written().size(),
                           reinterpret_cast<const unsigned char*>(key.data()));
  const auto step = server.receive({MessageKind::kProof, proof});
  ASSERT_TRUE(step.failure);
  EXPECT_THAT(step.failure->what(), HasSubstr("X25519"));
}

// docs/mesh_protocol.md has the same.
TEST(Handshake, TestVectorOfTheSessionKeys) {
  std::array<std::byte, 32> shared;
  for (std::size_t i = 0; i < shared.size(); ++i) shared[i] = static_cast<std::byte>(i);
  const auto bytes = [](std::string_view text) { return std::as_bytes(std::span(text)); };
  const SessionKeys keys = session_keys(token_key("0123456789abcdef"), shared,
                                        bytes("client hello"), bytes("server hello"));
  const auto hex = [](const RecordKey& key) {
    std::string text;
    for (const std::byte byte : key) text += fmt::format("{:02x}", std::to_integer<int>(byte));
    return text;
  };
  EXPECT_EQ(hex(keys.from_client),
            "b1e0e441513861f858ab584a9d509ae0a0d41952d7e246a85f9e124f4a6f6d06");
  EXPECT_EQ(hex(keys.from_server),
            "896b6290fce13828c7d60c9bb65974de69050fb89d8c7342a5b49bfa9dc14c8e");
}

struct Connected {
  Connected() {
    const Socket listener = listen_tcp(SocketAddress::loopback_v4());
    client = connect_tcp(listener.local_address(), soon());
    server = accept(listener, soon());
  }
  Socket client;
  Socket server;
};

TEST(HandshakeOnSockets, LeavesTheBytesThatFollow) {
  Connected connected;
  const Identity a = make_identity(1);
  const Identity b = make_identity(0);
  const auto errors = run_ranks(2, [&](int rank) {
    if (rank == 0) {
      EXPECT_EQ(server_handshake(connected.server, b, Purpose::kMesh, soon()),
                (PeerIdentity{a.id, 1, 9, 3}));
      std::byte byte;
      connected.server.recv_all(std::span(&byte, 1), soon());
      EXPECT_EQ(byte, std::byte{77});
    } else {
      EXPECT_EQ(client_handshake(connected.client, a, Purpose::kMesh, 9, soon()).id, b.id);
      const std::byte byte{77};
      connected.client.send_all(std::span(&byte, 1), soon());
    }
  });
  for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
}

TEST(HandshakeOnSockets, TellsBothSidesOfAWrongToken) {
  Connected connected;
  const auto errors = run_ranks(2, [&](int rank) {
    if (rank == 0) {
      server_handshake(connected.server, make_identity(0, "x"), Purpose::kMesh, soon());
    } else {
      client_handshake(connected.client, make_identity(1, "y"), Purpose::kMesh, 0, soon());
    }
  });
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kAuthentication);
    EXPECT_THAT(error->what(), HasSubstr("wrong token"));
  }
}

TEST(HandshakeOnSockets, TellsBothSidesOfAnotherVersion) {
  Connected connected;
  auto hello = Handshake(Role::kClient, make_identity(1), Purpose::kMesh).opening();
  hello[4] = std::byte{kProtocolVersion + 1};
  connected.client.send_all(hello, soon());
  const Error error = error_of(
      [&] { server_handshake(connected.server, make_identity(0), Purpose::kMesh, soon()); });
  EXPECT_EQ(error.code(), ErrorCode::kVersionMismatch);
  std::vector<std::byte> header(kMessageHeaderBytes);
  connected.client.recv_all(header, soon());
  EXPECT_EQ(header[4], std::byte{kProtocolVersion});
  EXPECT_EQ(header[6], static_cast<std::byte>(MessageKind::kRefusal));
}

// Without a token a peer is known by its user, who cannot be told once it has gone.
TEST(HandshakeOnSockets, ARefusalIsToldThoughThePeerHasGone) {
  const Socket listener = listen_tcp(SocketAddress::loopback_v4());
  Socket client = connect_tcp(listener.local_address(), soon());
  {
    const Socket server = accept(listener, soon());
    const Error refusal(ErrorCode::kAuthentication, "no room");
    server.send_all(frame(MessageKind::kRefusal, encode_wire_error(refusal)), soon());
  }
  const Error error = error_of(
      [&] { client_handshake(client, make_identity(1, ""), Purpose::kMesh, 0, soon()); });
  EXPECT_THAT(error.what(), HasSubstr("refused by the peer: no room"));
}

TEST(HandshakeOnSockets, ASilentPeerEndsAtTheDeadline) {
  Connected connected;
  EXPECT_EQ(error_of([&] {
              server_handshake(connected.server, make_identity(0), Purpose::kMesh,
                               Deadline::after(20ms));
            }).code(),
            ErrorCode::kTimeout);
}

TEST(HandshakeOnSockets, AHugeLengthIsRefusedBeforeItsBytesCome) {
  Connected connected;
  auto hello = Handshake(Role::kClient, make_identity(1), Purpose::kMesh).opening();
  store_little_endian<std::uint32_t>(hello.data() + 8, 0x7fffffff);
  connected.client.send_all(hello, soon());
  EXPECT_EQ(error_of([&] {
              server_handshake(connected.server, make_identity(0), Purpose::kMesh, soon());
            }).code(),
            ErrorCode::kMessageTooLarge);
}

}  // namespace
}  // namespace lockstep::handshake_test
