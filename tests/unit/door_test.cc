#include "lockstep/net/job/door.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <vector>

#include "lockstep/base/log.h"
#include "lockstep/net/socket/unix_socket.h"
#include "lockstep/wire/gradient_messages.h"
#include "lockstep/wire/message.h"
#include "lockstep/wire/wire_error.h"
#include "tests/support/other_user.h"
#include "tests/support/ranks.h"

namespace lockstep::door_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using namespace test;
using Clock = Deadline::Clock;

Identity identity_of(const std::string& token, int rank = -1) {
  return {"lockstep", 0, random_member_id(), rank, token};
}

// A door on loopback that is served by hand.
struct OpenDoor {
  explicit OpenDoor(std::vector<Purpose> purposes = {Purpose::kRendezvous}, bool original = false,
                    const std::string& token = "secret", bool insecure = false) {
    open({listen_tcp(SocketAddress::loopback_v4()), std::move(purposes), original, insecure},
         token);
  }
  explicit OpenDoor(Entrance entrance) { open(std::move(entrance), "secret"); }

  void open(Entrance entrance, const std::string& token) {
    std::vector<Entrance> entrances;
    entrances.push_back(std::move(entrance));
    where = entrances[0].listener.local_address();
    const Identity identity = identity_of(token);
    own = identity.id;
    door.emplace(identity, std::move(entrances), 10s);
  }

  // Serves whatever is ready until nothing is, as if it were `later`.
  void serve(Clock::duration later = 0s) {
    pollfd entry{door->fd(), POLLIN, 0};
    do {
      for (Arrival& arrival : door->serve(Clock::now() + later)) {
        arrivals.push_back(std::move(arrival));
      }
    } while (::poll(&entry, 1, 0) == 1);
  }
  // Serves until the body, on a thread of its own, has ended.
  void serve_while(const std::function<void()>& body) {
    auto done = std::async(std::launch::async, body);
    while (done.wait_for(1ms) != std::future_status::ready) serve();
    serve();
    done.get();
  }
  Socket visit() const { return connect_tcp(where, soon()); }

  SocketAddress where;
  MemberId own{};
  std::optional<Door> door;
  std::vector<Arrival> arrivals;
};

bool is_closed(const Socket& socket) {
  std::byte byte;
  try {
    return !socket.try_recv({&byte, 1}) && false;
  } catch (const Error&) {
    return true;
  }
}

TEST(Door, HandsOnWhoProvesTheSecret) {
  OpenDoor at({Purpose::kRendezvous, Purpose::kServer});
  const Identity caller = identity_of("secret", 3);
  at.serve_while([&] {
    for (const Purpose purpose : {Purpose::kServer, Purpose::kRendezvous}) {
      Socket socket = at.visit();
      client_handshake(socket, caller, purpose, 5, soon());
      socket.send_all(std::as_bytes(std::span("next", 4)), soon());
    }
  });
  ASSERT_EQ(at.arrivals.size(), 2u);
  EXPECT_EQ(at.arrivals[0].purpose, Purpose::kServer);
  EXPECT_EQ(at.arrivals[1].purpose, Purpose::kRendezvous);
  EXPECT_EQ(at.arrivals[0].peer, (PeerIdentity{caller.id, 3, 5}));
  EXPECT_EQ(at.door->wake_at(), Clock::time_point::max());  // nobody is left
}

TEST(Door, TurnsAwayWhoComesForSomethingElse) {
  OpenDoor at;
  at.serve_while([&] {
    Socket socket = at.visit();
    const Error error = error_of(
        [&] { client_handshake(socket, identity_of("secret"), Purpose::kMesh, 0, soon()); });
    EXPECT_THAT(error.what(), HasSubstr("another purpose"));
  });
  EXPECT_TRUE(at.arrivals.empty());
}

TEST(Door, TellsItsRankToItsOwnGenerationOnly) {
  OpenDoor at;
  at.door->set_place(7, 2);
  at.serve_while([&] {
    for (const std::uint32_t generation : {7u, 6u}) {
      Identity caller = identity_of("secret");
      caller.generation = generation;
      Socket socket = at.visit();
      const PeerIdentity peer = client_handshake(socket, caller, Purpose::kRendezvous, 0, soon());
      EXPECT_EQ(peer.rank, generation == 7 ? 2 : -1);
    }
  });
}

// Who turns us away tells why, and that is a stranger's text.
const Error kForgedRefusal(ErrorCode::kPeerLost, "no\nerror: rank 1 was killed\x1b[2J", 1);

TEST(Door, ARefusalAsTheFirstMessageForgesNoLineOfTheLog) {
  OpenDoor at;
  ::testing::internal::CaptureStderr();
  const Socket socket = at.visit();
  socket.send_all(frame(MessageKind::kRefusal, encode_wire_error(kForgedRefusal)), soon());
  at.serve_while([&] {
    pollfd entry{socket.fd(), POLLIN, 0};
    EXPECT_EQ(::poll(&entry, 1, 20000), 1);  // turned away
  });
  const std::string logged = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(logged, HasSubstr("warning: door: "));
  EXPECT_EQ(std::ranges::count(logged, '\n'), 1) << logged;
  EXPECT_THAT(logged, Not(HasSubstr("\x1b")));
}

TEST(Door, ARefusalFromWhoWasCalledForgesNoLineOfTheLog) {
  Socket listener = listen_tcp(SocketAddress::loopback_v4());
  auto caller = std::async(std::launch::async, [&] {
    Socket socket = connect_tcp(listener.local_address(), soon());
    return error_of(
        [&] { client_handshake(socket, identity_of("secret"), Purpose::kMesh, 0, soon()); });
  });
  const Socket server = accept(listener, soon());
  server.send_all(frame(MessageKind::kRefusal, encode_wire_error(kForgedRefusal)), soon());
  const Error error = caller.get();
  EXPECT_THAT(error.what(), HasSubstr("rank 1 was killed"));
  ::testing::internal::CaptureStderr();
  log_line(LogLevel::kError, error.what());  // as the command does
  const std::string logged = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::ranges::count(logged, '\n'), 1) << logged;
}

// The centre is gone, and the ranks of the last generation are asked: another member may have got
// the address of one of them.
TEST(Door, WhoLooksForTheCentreTalksOnlyToTheMemberThatWasMeant) {
  OpenDoor at;
  const auto call = [&](const std::optional<MemberId>& whom) {
    return call_centre(to_string(at.where), whom, identity_of("secret"), 10s, soon());
  };
  at.serve_while([&] {
    call(std::nullopt);
    call(at.own);
    const Error error = error_of([&] { call(random_member_id()); });
    EXPECT_EQ(error.code(), ErrorCode::kNoConnection);
    EXPECT_THAT(error.what(), HasSubstr("another process answered"));
  });
}

// Where records follow the handshake, nothing may stand between the two.
TEST(Door, BytesAheadOfTheRecordsAreRefused) {
  OpenDoor at;
  const Socket socket = at.visit();
  at.serve_while([&] {
    Handshake handshake(Handshake::Role::kClient, identity_of("secret"), Purpose::kRendezvous, 0,
                        Protection::kSealed);
    socket.send_all(handshake.opening(), soon());
    std::array<std::byte, kMessageHeaderBytes> bytes;
    socket.recv_all(bytes, soon());
    const MessageHeader header = parse_header(bytes, 4096, "the door");
    Message hello{header.kind, std::vector<std::byte>(header.length)};
    socket.recv_all(hello.body, soon());
    std::vector<std::byte> last = handshake.receive(hello).reply;
    last.push_back(std::byte{'x'});
    socket.send_all(last, soon());
    pollfd entry{socket.fd(), POLLIN, 0};
    EXPECT_EQ(::poll(&entry, 1, 20000), 1);  // the door's proof, or the end
  });
  EXPECT_TRUE(at.arrivals.empty());
}

TEST(Door, ForgetsTheSilentAfterTheirTime) {
  OpenDoor at;
  const Socket silent = at.visit();
  at.serve();
  EXPECT_FALSE(is_closed(silent));
  EXPECT_LE(at.door->wake_at(), Clock::now() + 5s);
  at.serve(5s);
  EXPECT_TRUE(is_closed(silent));
}

TEST(Door, OneAddressCannotCrowdOutTheRest) {
  OpenDoor at;
  const Socket other = [&] {  // 127.0.0.2 is another address of this host
    Socket socket(Descriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
    const SocketAddress from = *SocketAddress::parse("127.0.0.2:0");
    EXPECT_EQ(::bind(socket.fd(), from.data(), from.size()), 0);
    EXPECT_EQ(::connect(socket.fd(), at.where.data(), at.where.size()), 0);
    return socket;
  }();
  at.serve();
  std::vector<Socket> crowd;
  for (int i = 0; i < 600; ++i) {
    crowd.push_back(at.visit());
    at.serve();
  }
  EXPECT_TRUE(is_closed(crowd.front()));  // its own address's oldest made room
  EXPECT_FALSE(is_closed(crowd.back()));
  pollfd entry{other.fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, 0), 0);  // neither bytes nor an end
}

TEST(Door, LetsInAnOriginalPeerWithAllItHasSaid) {
  OpenDoor at({Purpose::kServer}, /*original=*/true, /*token=*/"");
  const Socket socket = at.visit();
  const auto request = encode(JoinRequest{"node-a", 2, "cuda"});
  for (const std::byte& byte : request) {
    EXPECT_TRUE(at.arrivals.empty());
    socket.send_all({&byte, 1}, soon());
    pollfd entry{at.door->fd(), POLLIN, 0};
    ASSERT_EQ(::poll(&entry, 1, 20000), 1);
    at.serve();
  }
  ASSERT_EQ(at.arrivals.size(), 1u);
  EXPECT_TRUE(at.arrivals[0].original);
  const auto said = at.arrivals[0].link.rest();
  EXPECT_TRUE(std::ranges::equal(said, request));
}

TEST(Door, AnOriginalPeerNeedsTheEntranceToBeInsecureWhereThereIsAToken) {
  for (const bool insecure : {false, true}) {
    OpenDoor at({Purpose::kServer}, /*original=*/true, "secret", insecure);
    const Socket socket = at.visit();
    socket.send_all(encode(JoinRequest{"node-a", 0, "cpu"}), soon());
    pollfd entry{at.door->fd(), POLLIN, 0};
    while (at.arrivals.empty() && !is_closed(socket)) {
      ASSERT_EQ(::poll(&entry, 1, 20000), 1);
      at.serve();
    }
    EXPECT_EQ(at.arrivals.size(), insecure ? 1u : 0u);
  }
}

TEST(Door, WhoHasLeftCostsNothingMore) {
  OpenDoor at({Purpose::kServer}, /*original=*/true, /*token=*/"");
  for (const std::string_view words : {"", "LSKP", "\0\0\0\x0e", "GET / HTTP/1.1\r\n\r\n"}) {
    const Socket socket = at.visit();
    socket.send_all(std::as_bytes(std::span(words)), soon());
  }
  pollfd entry{at.door->fd(), POLLIN, 0};
  int turns = 0;
  for (; ::poll(&entry, 1, 200) == 1 && turns < 100; ++turns) at.serve();
  EXPECT_LT(turns, 100);
  EXPECT_EQ(at.door->wake_at(), Clock::time_point::max());
}

// Work is done for those who speak alone: many silent visitors make nothing dearer.
TEST(Door, ManyVisitorsThatTrickleAreCheap) {
  OpenDoor at;
  std::vector<Socket> strangers;
  const auto hello =
      Handshake(Handshake::Role::kClient, identity_of("wrong"), Purpose::kRendezvous).opening();
  for (int i = 0; i < 400; ++i) {
    strangers.push_back(at.visit());
    at.serve();
  }
  rusage before{};
  rusage after{};
  ::getrusage(RUSAGE_THREAD, &before);
  constexpr int kRounds = 5;
  for (int round = 0; round < kRounds; ++round) {
    for (const Socket& stranger : strangers) {
      stranger.send_all({&hello[static_cast<std::size_t>(round)], 1}, soon());
      at.serve();
    }
  }
  ::getrusage(RUSAGE_THREAD, &after);
  const auto seconds = [](const rusage& usage) {
    return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
  };
  // 25 µs a byte would be 1 % of a core at 400 bytes a second; a sanitizer takes its share.
  EXPECT_LT((seconds(after) - seconds(before)) / (kRounds * 400), 500e-6);
}

// Too short to keep others out, and long enough.
constexpr const char* kGuessable = "fifteen letters";
constexpr const char* kSecret = "sixteen letters!";

// Where there is no token, users tell each other apart; --insecure lets all in.
TEST(Door, WithoutATokenOtherUsersOfTheHostStayOut) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can run a process as another user";
  for (const bool insecure : {false, true}) {
    for (const bool speaks_original : {false, true}) {
      testing::internal::CaptureStderr();
      OpenDoor at({Purpose::kServer}, /*original=*/true, /*token=*/"", insecure);
      Socket socket;
      const OtherUser other([&] {
        socket = at.visit();
        socket.send_all(
            speaks_original
                ? encode(JoinRequest{"stranger", 0, "cpu"})
                : Handshake(Handshake::Role::kClient, identity_of(""), Purpose::kServer).opening(),
            soon());
      });
      at.serve();
      const std::string log = testing::internal::GetCapturedStderr();
      if (insecure) {
        EXPECT_THAT(log, Not(HasSubstr("user 65534")));
        EXPECT_EQ(at.arrivals.size(), speaks_original ? 1u : 0u);  // who greets waits for an answer
      } else {
        EXPECT_THAT(log, HasSubstr("runs as user 65534"));
        EXPECT_TRUE(at.arrivals.empty());
      }
    }
  }
}

// A token that can be guessed is no better than none.
TEST(Door, AGuessableTokenKeepsOtherUsersOutAsNoneDoes) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can run a process as another user";
  for (const char* token : {kGuessable, kSecret}) {
    testing::internal::CaptureStderr();
    OpenDoor at({Purpose::kServer}, /*original=*/false, token);
    Socket socket;
    const OtherUser other([&] {
      socket = at.visit();
      socket.send_all(
          Handshake(Handshake::Role::kClient, identity_of(token), Purpose::kServer).opening(),
          soon());
    });
    at.serve();
    EXPECT_EQ(
        testing::internal::GetCapturedStderr().find("runs as user 65534") != std::string::npos,
        token == kGuessable);
  }
}

// Shared memory is for processes of one user, whatever token they prove.
TEST(Door, AtAUnixSocketOtherUsersAreNotHeard) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can run a process as another user";
  const std::string name = fmt::format("lockstep-door-test-{}", ::getpid());
  OpenDoor at({listen_unix(name), {Purpose::kShared}});
  const auto visit = [&] {
    Socket socket = connect_unix(name, soon());
    socket.send_all(
        Handshake(Handshake::Role::kClient, identity_of("secret"), Purpose::kShared).opening(),
        soon());
    return socket;
  };
  {
    Socket socket;
    const OtherUser other([&] { socket = visit(); });
    at.serve();
    EXPECT_EQ(at.door->wake_at(), Clock::time_point::max());  // nobody is waited for
  }
  const Socket own = visit();
  at.serve();
  EXPECT_LT(at.door->wake_at(), Clock::time_point::max());
}

// Whoever was first on the port is not the centre for that.
TEST(Handshake, ACentreOfAnotherUserIsNotTrustedUnlessItHasASecret) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can run a process as another user";
  for (const std::string token : {"", kGuessable, kSecret}) {
    const Socket listener = listen_tcp(SocketAddress::loopback_v4());
    Socket own = connect_tcp(listener.local_address(), soon());
    Socket accepted;
    const OtherUser other([&] {
      accepted = accept(listener, soon());
      accepted.send_all(
          Handshake(Handshake::Role::kClient, identity_of(token), Purpose::kRendezvous).opening(),
          soon());
      if (token != kSecret) return;
      accepted.send_all(frame(MessageKind::kProof, std::vector<std::byte>(32)), soon());
    });
    const Error error = error_of(
        [&] { client_handshake(own, identity_of(token), Purpose::kRendezvous, 0, soon()); });
    EXPECT_EQ(error.code(), ErrorCode::kAuthentication);
    EXPECT_THAT(error.what(), HasSubstr(token == kSecret ? "wrong token" : "runs as user 65534"));
  }
}

}  // namespace
}  // namespace lockstep::door_test
