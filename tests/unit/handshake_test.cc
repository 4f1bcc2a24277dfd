#include "lockstep/net/job/handshake.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
