#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <latch>

#include "lockstep/net/job/job.h"
#include "lockstep/net/socket/unix_socket.h"
#include "lockstep/wire/bytes.h"
#include "tests/support/ranks.h"

namespace lockstep::rendezvous_test {
namespace {

using ::testing::HasSubstr;
using namespace test;

class Families : public ::testing::TestWithParam<int> {
 protected:
  SocketAddress loopback() const {
    return GetParam() == AF_INET ? SocketAddress::loopback_v4() : SocketAddress::loopback_v6();
  }
};
INSTANTIATE_TEST_SUITE_P(Rendezvous, Families, ::testing::Values(AF_INET, AF_INET6),
                         [](const auto& family) { return family.param == AF_INET ? "v4" : "v6"; });

TEST_P(Families, GivesAllTheSameRosterWithAddressesThatAnswer) {
  LoopbackJob setup(4, 10s, loopback());
  const std::vector<JoinedJob> jobs = setup.join_all();
  for (const JoinedJob& job : jobs) {
    EXPECT_EQ(job.roster, jobs[0].roster);
    EXPECT_EQ(job.world_size(), 4);
  }
  for (int rank = 0; rank < 4; ++rank) {
    const Card& card = jobs[0].roster[rank];
    EXPECT_EQ(card.rank, rank);
    EXPECT_EQ(card.id, jobs[rank].identity.id);
    // Anybody on the host can list the names of unix sockets.
    EXPECT_THAT(card.unix_name, ::testing::Not(HasSubstr(to_string(card.id))));
    const auto address = SocketAddress::parse(card.mesh_address);
    ASSERT_TRUE(address && address->family() == GetParam());
    // Any other member comes in there, over TCP and over the unix socket.
    const JoinedJob& caller = jobs[(rank + 1) % 4];
    for (const Purpose purpose : {Purpose::kMesh, Purpose::kShared}) {
      Socket socket = purpose == Purpose::kMesh ? connect_tcp(*address, soon())
                                                : connect_unix(card.unix_name, soon());
      client_handshake(socket, caller.identity, purpose, 7, soon());
      const Arrivals::Awaited awaited{
          caller.identity.id, caller.identity.generation, 7, "the caller", caller.rank(), purpose};
      const Arrival arrival =
          jobs[rank].control->arrivals().wait_for(awaited, soon(), jobs[rank].control->latch());
      EXPECT_EQ(arrival.purpose, purpose);
      EXPECT_EQ(arrival.peer.rank, caller.rank());
    }
  }
}

TEST_P(Families, AnyStartOrderWorks) {
  // The port is known but nobody listens yet: rank 0 comes last, once all others are on their way.
  const SocketAddress where = listen_tcp(loopback()).local_address();
  LoopbackJob setup(3, 20s, loopback());
  std::latch others(2);
  const auto errors = run_ranks(3, [&](int rank) {
    JobOptions options = setup.options(rank);
    options.master_port = where.port();
    if (rank == 0) {
      others.wait();
    } else {
      others.count_down();
    }
    EXPECT_EQ(join_job(options).world_size(), 3);
  });
  for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
}

TEST(Rendezvous, WorldOfOneOpensNoSocket) {
  JobOptions options;
  JoinedJob job = join_job(options);
  EXPECT_EQ(job.world_size(), 1);
  EXPECT_TRUE(job.roster[0].mesh_address.empty());
  EXPECT_TRUE(job.roster[0].unix_name.empty());
  EXPECT_EQ(error_of([&] { job.control->fail(Error(ErrorCode::kIo, "disk full")); }).message(),
            "disk full");
}

TEST(Rendezvous, RefusesImpossibleOptions) {
  JobOptions options;
  options.world_size = 0;
  EXPECT_EQ(error_of([&] { join_job(options); }).code(), ErrorCode::kInvalidWorldSize);
  options.world_size = 2;
  options.rank = 2;
  EXPECT_EQ(error_of([&] { join_job(options); }).code(), ErrorCode::kInvalidRank);
  options.rank = -1;
  EXPECT_EQ(error_of([&] { join_job(options); }).code(), ErrorCode::kInvalidRank);
}

TEST(Rendezvous, MayBeServedByAProcessThatIsNoRank) {
  LoopbackJob setup(3);
  const auto server = setup.serve();
  const auto errors = run_ranks(3, [&](int rank) {
    JobOptions options = setup.options(rank);
    options.hosted = true;
    EXPECT_EQ(join_job(options).world_size(), 3);
  });
  for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
}

// All ranks must end with the same error.
void expect_all(const std::vector<std::optional<Error>>& errors, ErrorCode code,
                const std::string& text) {
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), code) << error->what();
    EXPECT_THAT(error->what(), HasSubstr(text));
  }
}

TEST(Rendezvous, NamesTheMissingToAllAtTheDeadline) {
  LoopbackJob setup(4, 3s);  // a tenth of it is the time to hear who is missing
  const auto start = Deadline::Clock::now();
  const auto errors = run_ranks(2, [&](int rank) { setup.join(rank == 0 ? 0 : 2); });
  EXPECT_LT(Deadline::Clock::now() - start, 10s);
  expect_all(errors, ErrorCode::kTimeout, "2 of 4 ranks did not come");
  expect_all(errors, ErrorCode::kTimeout, "rank 1, rank 3");
}

TEST(Rendezvous, NamesBothOfARankStartedTwice) {
  LoopbackJob setup(3);
  const auto errors = run_ranks(3, [&](int rank) { setup.join(rank == 0 ? 0 : 1); });
  expect_all(errors, ErrorCode::kInvalidRank, "rank 1 was started twice");
}

TEST(Rendezvous, TellsALatecomerWhyTheJobDidNotForm) {
  LoopbackJob setup(3);
  const auto server = setup.serve();
  expect_all(run_ranks(2, [&](int) { setup.join(1); }), ErrorCode::kInvalidRank, "twice");
  expect_all({error_of([&] { setup.join(2); })}, ErrorCode::kInvalidRank,
             "rank 1 was started twice");
}

TEST(Rendezvous, TellsAllOfAnotherWorldSize) {
  LoopbackJob setup(3);
  const auto errors = run_ranks(2, [&](int rank) {
    if (rank == 0) {
      setup.join(0);
      return;
    }
    JobOptions options = setup.options(rank);
    options.world_size = 4;
    join_job(options);
  });
  expect_all(errors, ErrorCode::kInvalidWorldSize, "a world of 4, the rendezvous for 3");
}

TEST(Rendezvous, TellsAllOfAnotherVersion) {
  LoopbackJob setup(3);
  const auto errors = run_ranks(2, [&](int rank) {
    if (rank == 0) {
      setup.join(0);
      return;
    }
    JobOptions options = setup.options(rank);
    options.version = "2.0";
    join_job(options);
  });
  expect_all(errors, ErrorCode::kVersionMismatch, "runs lockstep 2.0, the rendezvous 1.0");
}

TEST(Rendezvous, TurnsAWrongTokenAwayAndGoesOn) {
  LoopbackJob setup(2);
  std::vector<JoinedJob> jobs(2);
  const auto errors = run_ranks(4, [&](int rank) {
    if (rank < 2) {
      jobs[rank] = setup.join(rank);
      return;
    }
    JobOptions options = setup.options(1);
    options.token = rank == 2 ? "wrong" : "";
    join_job(options);
  });
  EXPECT_FALSE(errors[0]) << errors[0]->what();
  EXPECT_FALSE(errors[1]) << errors[1]->what();
  ASSERT_TRUE(errors[2] && errors[3]);
  EXPECT_EQ(errors[2]->code(), ErrorCode::kAuthentication);
  EXPECT_THAT(errors[2]->what(), HasSubstr("wrong token"));
  EXPECT_EQ(errors[3]->code(), ErrorCode::kAuthentication);
  EXPECT_THAT(errors[3]->what(), HasSubstr("token missing"));
}

TEST(Rendezvous, TurnsAnotherJobAway) {
  LoopbackJob setup(2);
  std::vector<JoinedJob> jobs(3);
  const auto errors = run_ranks(3, [&](int rank) {
    JobOptions options = setup.options(rank < 2 ? rank : 1);
    if (rank == 2) options.job = "another";
    JoinedJob job = rank == 0 ? join_job(options, std::move(setup.listener)) : join_job(options);
    jobs[rank] = std::move(job);
  });
  EXPECT_FALSE(errors[0]) << errors[0]->what();
  EXPECT_FALSE(errors[1]) << errors[1]->what();
  ASSERT_TRUE(errors[2]);
  EXPECT_THAT(errors[2]->what(), HasSubstr("another job"));
}

TEST(Rendezvous, AConnectionOfAnotherGenerationIsNotTaken) {
  LoopbackJob setup(2);
  const std::vector<JoinedJob> jobs = setup.join_all();
  const auto address = SocketAddress::parse(jobs[0].roster[0].mesh_address);
  Identity stale = jobs[1].identity;
  stale.generation ^= 1;
  Socket first = connect_tcp(*address, soon());
  client_handshake(first, stale, Purpose::kMesh, 7, soon());
  Socket second = connect_tcp(*address, soon());
  client_handshake(second, jobs[1].identity, Purpose::kMesh, 7, soon());
  const Arrivals::Awaited awaited{jobs[1].identity.id, jobs[1].identity.generation, 7, "rank 1", 1};
  const Arrival arrival =
      jobs[0].control->arrivals().wait_for(awaited, soon(), jobs[0].control->latch());
  EXPECT_EQ(arrival.peer.generation, jobs[1].identity.generation);
  const Error error = error_of([&] {
    jobs[0].control->arrivals().wait_for(awaited, Deadline::after(50ms), jobs[0].control->latch());
  });
  EXPECT_EQ(error.code(), ErrorCode::kTimeout);
}

TEST(Rendezvous, TellsALatecomerThatTheJobIsComplete) {
  LoopbackJob setup(2);
  const std::vector<JoinedJob> jobs = setup.join_all();
  const Error error = error_of([&] { join_job(setup.options(1)); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidRank);
  EXPECT_THAT(error.what(), HasSubstr("runs already with all its 2 ranks"));
  for (const JoinedJob& job : jobs) EXPECT_FALSE(job.control->latch().tripped());
}

TEST(Rendezvous, SilentAndGarbageConnectionsDisturbNobody) {
  LoopbackJob setup(3);
  std::vector<Socket> strangers;
  for (int i = 0; i < 200; ++i) strangers.push_back(connect_tcp(setup.where, soon()));
  const auto send = [&](std::string_view text) {
    strangers.push_back(connect_tcp(setup.where, soon()));
    strangers.back().send_all(std::as_bytes(std::span(text)), soon());
  };
  send("GET / HTTP/1.1\r\n\r\n");
  send(std::string(100000, '\0'));
  send("LSKP");  // half a header
  const auto hello = Handshake(Handshake::Role::kClient, {}, Purpose::kRendezvous).opening();
  auto huge = hello;
  store_little_endian<std::uint32_t>(huge.data() + 8, 0xfffffff0);
  auto wrong_proof = hello;
  const auto proof = frame(MessageKind::kProof, std::vector<std::byte>(32));
  wrong_proof.insert(wrong_proof.end(), proof.begin(), proof.end());
  for (const auto& bytes : {huge, wrong_proof, frame(MessageKind::kJoin, {}),
                            frame(MessageKind::kVerdict, {}), frame(MessageKind::kGoodbye, {})}) {
    strangers.push_back(connect_tcp(setup.where, soon()));
    strangers.back().send_all(bytes, soon());
  }
  strangers.push_back(connect_tcp(setup.where, soon()));
  strangers.pop_back();  // closes at once
  const auto jobs = setup.join_all();
  EXPECT_EQ(jobs[2].roster.size(), 3u);
}

TEST(Rendezvous, ASlowStrangerIsDroppedAfterItsTime) {
  LoopbackJob setup(2, 300ms);
  const Socket stranger = connect_tcp(setup.where, soon());
  const auto jobs = setup.join_all();
  std::byte byte;
  EXPECT_EQ(error_of([&] { stranger.recv_all(std::span(&byte, 1), soon()); }).code(),
            ErrorCode::kChannelClosed);
}

TEST(Rendezvous, ARankThatLeavesWhileWaitingMakesRoomForAnother) {
  LoopbackJob setup(3);
  std::vector<JoinedJob> jobs(3);
  std::latch gone(1);
  const auto errors = run_ranks(4, [&](int rank) {
    if (rank < 3) {
      if (rank > 0) gone.wait();
      jobs[rank] = setup.join(rank);
      return;
    }
    RankByHand(setup, 1).send_join(10s);
    gone.count_down();
  });
  for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
}

TEST(Rendezvous, ACardThatIsNotTheHandshakesIsRefused) {
  LoopbackJob setup(2);
  std::vector<JoinedJob> jobs(2);
  const auto errors = run_ranks(3, [&](int rank) {
    if (rank < 2) {
      jobs[rank] = setup.join(rank);
      return;
    }
    RankByHand impostor(setup, 1);
    impostor.card.rank = 0;
    impostor.join();
  });
  EXPECT_FALSE(errors[0]);
  EXPECT_FALSE(errors[1]);
  ASSERT_TRUE(errors[2]);
  EXPECT_EQ(errors[2]->code(), ErrorCode::kAuthentication);
}

TEST(Rendezvous, NeedsATokenBeyondLoopback) {
  JobOptions options;
  options.world_size = 2;
  options.master_host = "0.0.0.0";
  EXPECT_EQ(error_of([&] { join_job(options); }).code(), ErrorCode::kAuthentication);
  EXPECT_EQ(error_of([&] { join_job(options, listen_tcp(SocketAddress::any(AF_INET6))); }).code(),
            ErrorCode::kAuthentication);
}

TEST(Rendezvous, WorksWithoutATokenOnLoopback) {
  LoopbackJob setup(2);
  setup.token.clear();
  setup.join_all();
}

TEST(Rendezvous, OnAllInterfacesWithAToken) {
  LoopbackJob setup(3, 10s, SocketAddress::any(AF_INET6));
  setup.token = "sixteen letters!";
  const auto errors = run_ranks(3, [&](int rank) {
    JobOptions options = setup.options(rank);
    options.master_host = "localhost";
    if (rank == 0) {
      join_job(options, std::move(setup.listener));
    } else {
      join_job(options);
    }
  });
  for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
}

}  // namespace
}  // namespace lockstep::rendezvous_test
