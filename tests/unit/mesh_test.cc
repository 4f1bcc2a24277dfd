#include "lockstep/comm/transport/mesh.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <filesystem>
#include <functional>
#include <future>
#include <mutex>
#include <string>
#include <utility>

#include "lockstep/base/index.h"
#include "lockstep/comm/collectives/plan_engine.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/transport/arena.h"
#include "lockstep/comm/transport/ring_stream.h"
#include "lockstep/comm/transport/shared_space.h"
#include "lockstep/net/job/handshake.h"
#include "lockstep/net/socket/unix_socket.h"
#include "tests/support/ranks.h"

namespace lockstep::mesh_test {
namespace {

using ::testing::HasSubstr;
using namespace test;

using Roster = std::vector<Card>;

// Three ranks; the last one has a roster that was `changed`, and waits for a word of rank 0.
std::vector<std::optional<Error>> receive_with(Medium medium,
                                               const std::function<void(Roster&)>& changed) {
  JobOptions options;
  options.world_size = 3;
  options.timeout = 20s;
  Socket listener = listen_for_rendezvous(options);
  options.master_port = listener.local_address().port();
  // Nobody leaves, and tells of a rank that closed, before the last rank has failed.
  std::promise<void> failed;
  const std::shared_future<void> seen(failed.get_future());
  return run_ranks(3, [&](int rank) {
    JobOptions own = options;
    own.rank = rank;
    std::optional<Socket> mine;
    if (rank == 0) mine = std::move(listener);
    JoinedJob job = join_job(own, std::move(mine));
    if (rank == 2) changed(job.roster);
    const auto mesh = make_mesh(std::move(job), medium, 20s);
    std::array<std::byte, 4> word{static_cast<std::byte>(rank)};
    if (rank < 2) {
      mesh->send(2, word, soon());
      seen.wait_for(20s);
      return;
    }
    try {
      mesh->recv(0, word, soon());
    } catch (const Error&) {
      failed.set_value();
      throw;
    }
  });
}

void expect_another_answers(Medium medium, const std::function<void(Roster&)>& changed,
                            const std::string& who) {
  const auto errors = receive_with(medium, changed);
  ASSERT_TRUE(errors[2]) << "the bytes of another were taken for those of rank 0";
  EXPECT_EQ(errors[2]->code(), ErrorCode::kPeerLost) << errors[2]->what();
  EXPECT_EQ(errors[2]->rank(), 0);
  EXPECT_THAT(errors[2]->what(), HasSubstr("another process answered at its address: " + who));
}

TEST(Mesh, WhoAnswersIsWhoWasMeant) {
  for (const Medium medium : {Medium::kTcp, Medium::kShared}) {
    const auto swap_addresses = [](Roster& roster) {
      std::swap(roster[0].mesh_address, roster[1].mesh_address);
      std::swap(roster[0].unix_name, roster[1].unix_name);
    };
    expect_another_answers(medium, swap_addresses, "rank 1");
  }
}

TEST(Mesh, TheRightRankOfAnotherMemberIsNotMeant) {
  const auto change_id = [](Roster& roster) { roster[0].id[0] ^= std::byte{1}; };
  expect_another_answers(Medium::kTcp, change_id, "rank 0");
}

TEST(Mesh, TheRightMemberWithAnotherRankIsNotMeant) {
  const auto swap_cards = [](Roster& roster) { std::swap(roster[0], roster[1]); };
  expect_another_answers(Medium::kTcp, swap_cards, "rank 1");
}

// What rank 1 gives rank 0 to share.
struct Given {
  Descriptor rings = make_memfd("rings", sizeof(RingPair));
  Descriptor bell{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  Descriptor board = make_memfd("board", sizeof(Board));
  Descriptor arena = make_memfd("arena", 4096);
};

// Rank 1 connects to rank 0 and gives something that rank 0 cannot use.
void expect_rank_1_is_named(const Given& given, const std::string& why) {
  SCOPED_TRACE(why);
  LoopbackJob job(2, 20s);
  std::promise<void> failed;
  const std::shared_future<void> seen(failed.get_future());
  const auto errors = run_ranks(2, [&](int rank) {
    JoinedJob joined = job.join(rank);
    if (rank == 0) {
      const auto mesh = make_mesh(std::move(joined), Medium::kShared, 20s);
      std::array<std::byte, 4> word{};
      try {
        mesh->recv(1, word, Deadline::after(5s));
      } catch (const Error&) {
        failed.set_value();
        throw;
      }
      return;
    }
    Socket socket = connect_unix(joined.roster[0].unix_name, soon());
    client_handshake(socket, joined.identity, Purpose::kShared, 0, soon());
    const int bell = given.bell.get();
    send_descriptors(socket, std::array<int, 5>{given.rings.get(), bell, bell, bell, bell}, soon());
    send_descriptors(socket, std::array<int, 2>{given.board.get(), given.arena.get()}, soon());
    seen.wait_for(20s);
  });
  ASSERT_TRUE(errors[0]);
  EXPECT_EQ(errors[0]->code(), ErrorCode::kUnexpectedMessage) << errors[0]->what();
  EXPECT_EQ(errors[0]->rank(), 1);
  EXPECT_THAT(errors[0]->what(), HasSubstr("rank 1"));
  EXPECT_THAT(errors[0]->what(), HasSubstr(why));
}

TEST(Mesh, ARankThatSendsNoBellsIsNamed) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK), 0);
  const Descriptor other(ends[1]);
  expect_rank_1_is_named({.bell = Descriptor(ends[0])},
                         "where an eventfd that does not block belongs");
}

Descriptor not_sealed() {
  Descriptor file(::memfd_create("cuttable", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::ftruncate(file.get(), sizeof(RingPair) + sizeof(Board)), 0);  // either fits
  return file;
}

Descriptor sealed_for_writing() {
  Descriptor file = not_sealed();
  EXPECT_EQ(::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE), 0);
  return file;
}

TEST(Mesh, ARankWhoseMemoryCannotBeSharedIsNamed) {
  constexpr std::size_t kHuge = std::size_t{1} << 62;
  const std::string cut = "the shared segment is not sealed against shrinking";
  expect_rank_1_is_named({.rings = not_sealed()}, cut);
  expect_rank_1_is_named({.board = not_sealed()}, cut);
  expect_rank_1_is_named({.arena = not_sealed()}, cut);
  const std::string small = "the shared segment is too small";
  expect_rank_1_is_named({.rings = make_memfd("short", 4096)}, small);
  expect_rank_1_is_named({.board = make_memfd("short", 8)}, small);
  expect_rank_1_is_named({.arena = make_memfd("empty", 0)}, small);
  const std::string large = "the shared segment is too large";
  expect_rank_1_is_named({.rings = make_memfd("huge", kHuge)}, large);
  expect_rank_1_is_named({.board = make_memfd("huge", kHuge)}, large);
  expect_rank_1_is_named({.arena = make_memfd("huge", kHuge)}, large);
  expect_rank_1_is_named({.arena = sealed_for_writing()}, "the shared segment cannot be written");
}

// The rank has gone, and its address was given anew.
TEST(Mesh, WhereAStrangerAnswersTheRankIsOutOfReach) {
  LoopbackJob other(2);
  other.token = "another";
  const auto host = other.serve();
  const Socket listener = listen_tcp(SocketAddress::loopback_v4());
  auto web_server = std::async(std::launch::async, [&] {
    const Socket visitor = accept(listener, soon());
    constexpr std::string_view kWords = "HTTP/1.1 400 Bad Request\r\n\r\n";
    visitor.send_all(std::as_bytes(std::span(kWords)), soon());
    std::array<std::byte, 4096> heard{};
    error_of([&] { visitor.recv_all(heard, soon()); });  // until the caller has gone
  });
  for (const SocketAddress& stranger : {other.where, listener.local_address()}) {
    const auto errors = receive_with(
        Medium::kTcp, [&](Roster& roster) { roster[0].mesh_address = to_string(stranger); });
    ASSERT_TRUE(errors[2]);
    EXPECT_EQ(errors[2]->code(), ErrorCode::kPeerLost) << errors[2]->what();
    EXPECT_EQ(errors[2]->rank(), 0);
    EXPECT_THAT(errors[2]->what(), HasSubstr("is out of reach"));
  }
}

// A host is a boot and a network namespace; a rank without a door for neighbours is alone.
TEST(Mesh, TellsWhichRanksShareAHost) {
  JobOptions options;
  options.world_size = 6;
  options.timeout = 20s;
  Socket listener = listen_for_rendezvous(options);
  options.master_port = listener.local_address().port();
  const auto errors = run_ranks(6, [&](int rank) {
    JobOptions own = options;
    own.rank = rank;
    std::optional<Socket> mine;
    if (rank == 0) mine = std::move(listener);
    JoinedJob job = join_job(own, std::move(mine));
    job.roster[1].host.network_namespace += 1;
    job.roster[2].host.boot_id += "x";
    job.roster[0].unix_name.clear();
    job.roster[5].unix_name.clear();
    const Medium medium = rank == 3 ? Medium::kTcp : Medium::kAuto;
    const auto mesh = make_mesh(std::move(job), medium, 20s);
    EXPECT_EQ(mesh->hosts(), rank == 3 ? (std::vector<int>{0, 1, 2, 3, 4, 5})
                                       : (std::vector<int>{0, 1, 2, 3, 3, 5}));
  });
  for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
}

int open_sockets() {
  int sockets = 0;
  for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    sockets += std::filesystem::read_symlink(file, gone).string().starts_with("socket:") ? 1 : 0;
  }
  return sockets;
}

struct RailsCase {
  std::vector<std::string> cores;  // per rank
  std::vector<std::uint64_t> hosts;
  Medium medium = Medium::kTcp;
  int offered = 1;  // by the transport
  int used = 1;
};

// Between two ranks a rail is a connection, which has two ends in this process.
void expect_rails(const RailsCase& expected) {
  const int ranks = static_cast<int>(expected.cores.size());
  LoopbackJob job(ranks, 20s);
  std::barrier all(ranks);
  const auto errors = run_ranks(ranks, [&](int rank) {
    JoinedJob joined = job.join(rank);
    for (int r = 0; r < ranks; ++r) {
      joined.roster[index_of(r)].cores = expected.cores[index_of(r)];
      joined.roster[index_of(r)].host.network_namespace = expected.hosts[index_of(r)];
    }
    auto mesh = make_mesh(std::move(joined), expected.medium, 20s);
    EXPECT_EQ(mesh->rails(), expected.offered);
    Communicator communicator(std::make_unique<PlanEngine>(std::move(mesh)), 20s);
    CallOptions options;
    options.algorithm = Algorithm::kDirect;
    std::vector<float> data(512 * 1024, 1.0F);  // 2 MiB
    communicator.all_reduce(std::span(data).first(1024), ReduceOp::kSum, options);
    all.arrive_and_wait();
    const int before = open_sockets();
    all.arrive_and_wait();
    communicator.all_reduce(std::span(data), ReduceOp::kSum, options);
    all.arrive_and_wait();
    EXPECT_EQ(open_sockets() - before, ranks * (ranks - 1) * (expected.used - 1));
    EXPECT_EQ(std::count(data.begin() + 1024, data.end(), static_cast<float>(ranks)),
              static_cast<long>(data.size() - 1024));
    all.arrive_and_wait();
  });
  for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
}

TEST(Mesh, HasAsManyRailsAsTheHostWithTheFewestCoresHasForEachRank) {
  const std::vector<std::uint64_t> apart{1, 2};
  expect_rails({.cores = {"0-15", "0-2"}, .hosts = apart, .offered = 3, .used = 3});
  expect_rails({.cores = {"0", "0-15"}, .hosts = apart, .offered = 1, .used = 1});
  expect_rails({.cores = {"0-5", "0-5"}, .hosts = {1, 1}, .offered = 3, .used = 3});
  expect_rails({.cores = {"0", "0"}, .hosts = {1, 1}, .offered = 1, .used = 1});
}

TEST(Mesh, HasFourRailsAtMost) {
  expect_rails({.cores = {"0-15", "0-15"}, .hosts = {1, 2}, .offered = 4, .used = 4});
}

TEST(Mesh, TakesOneRailWhereSomeRanksShareMemory) {
  expect_rails({.cores = {"0-15", "0-15", "0-15"},
                .hosts = {1, 1, 2},
                .medium = Medium::kAuto,
                .offered = 4,
                .used = 1});
}

}  // namespace
}  // namespace lockstep::mesh_test
