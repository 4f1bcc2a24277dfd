#include "lockstep/comm/transport/mesh_transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <deque>

namespace lockstep::mesh_transport_test {
namespace {

using namespace std::chrono_literals;

class PlainSupervisor final : public Supervisor {
 public:
  FailureLatch& latch() override { return latch_; }
  void fail(const Error& seen) override { throw seen; }
  void abort(const std::string&) override {}
  ProgressBook& progress_book() override { return book_; }
  void look_around() override {}

 private:
  FailureLatch latch_;
  ProgressBook book_;
};

// Always has one byte more.
class TricklingStream final : public Stream {
 public:
  explicit TricklingStream(const MeshFrameBytes& head) : head_(head) {}

  std::size_t write_some(std::span<const std::byte>, std::span<const std::byte>) override {
    return 1;
  }
  std::size_t read_some(std::span<std::byte> head, std::span<std::byte>) override {
    if (!head.empty()) head.front() = head_[head_.size() - head.size()];
    return 1;
  }
  bool prepare_wait(Direction, std::vector<pollfd>&) override { return false; }
  void finish_wait(Direction) override {}

 private:
  const MeshFrameBytes head_;
};

// Brings back what is sent, a few bytes at a time.
class EchoStream final : public Stream {
 public:
  std::size_t write_some(std::span<const std::byte> head,
                         std::span<const std::byte> body) override {
    const std::span<const std::byte> some = (head.empty() ? body : head);
    const std::size_t count = std::min<std::size_t>(some.size(), 7);
    bytes_.insert(bytes_.end(), some.begin(), some.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
  }
  std::size_t read_some(std::span<std::byte> head, std::span<std::byte> body) override {
    const std::span<std::byte> some = head.empty() ? body : head;
    const std::size_t count = std::min({some.size(), bytes_.size(), std::size_t{5}});
    std::copy_n(bytes_.begin(), count, some.begin());
    bytes_.erase(bytes_.begin(), bytes_.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
  }
  bool prepare_wait(Direction, std::vector<pollfd>&) override { return false; }
  void finish_wait(Direction) override {}

 private:
  std::deque<std::byte> bytes_;
};

class OneStream final : public Streams {
 public:
  OneStream(Stream& stream, Supervisor& supervisor) : stream_(stream), supervisor_(supervisor) {}

  Stream& to(int, Deadline) override { return stream_; }
  std::string name_of(int rank) const override { return "rank " + std::to_string(rank); }
  int job_rank(int rank) const override { return rank; }
  Supervisor& supervisor() override { return supervisor_; }
  std::unique_ptr<Streams> split(const std::vector<int>&, int, std::uint32_t) override {
    return {};
  }
  SharedSpace* shared_space() override { return nullptr; }
  bool oversubscribed() const override { return false; }
  bool spare_cores() const override { return false; }

 private:
  Stream& stream_;
  Supervisor& supervisor_;
};

// A peer that sends a byte now and then must not keep anybody beyond the deadline.
TEST(MeshTransport, ATransferThatTricklesEndsAtItsDeadline) {
  for (const Direction direction : {Direction::kRecv, Direction::kSend}) {
    std::vector<std::byte> data(1 << 26);  // at a byte a turn, no end in sight
    std::byte* row = data.data();
    Transfer transfer;
    transfer.peer = 1;
    transfer.direction = direction;
    transfer.layout.rows = {&row, 1};
    transfer.layout.row_bytes = data.size();
    transfer.limit = data.size();

    MeshFrame frame;
    frame.payload = data.size();
    TricklingStream stream(encode(frame));
    PlainSupervisor supervisor;
    MeshTransport transport(0, 2, 0, 0, std::make_unique<OneStream>(stream, supervisor));
    try {
      transport.run({&transfer, 1}, MeshFrame{}, nullptr, Deadline::after(20ms));
      ADD_FAILURE() << "it ended";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kTimeout);
      EXPECT_EQ(error.rank(), 1);
      EXPECT_THAT(error.what(), testing::HasSubstr("rank 1"));
    }
  }
}

TEST(MeshTransport, MessagesToTheSamePeerFollowEachOther) {
  constexpr std::array<std::size_t, 3> kSizes{1000, 3, 500};
  std::array<std::vector<std::byte>, 6> data;
  std::array<std::byte*, 6> rows;
  std::array<Transfer, 6> transfers;
  for (std::size_t i = 0; i < data.size(); ++i) {
    const bool sends = i < kSizes.size();
    data[i].assign(kSizes[i % kSizes.size()], sends ? static_cast<std::byte>(i + 1) : std::byte{});
    rows[i] = data[i].data();
    transfers[i].peer = 1;
    transfers[i].direction = sends ? Direction::kSend : Direction::kRecv;
    transfers[i].layout.rows = {&rows[i], 1};
    transfers[i].layout.row_bytes = transfers[i].limit = data[i].size();
  }
  EchoStream stream;
  PlainSupervisor supervisor;
  MeshTransport transport(0, 2, 0, 0, std::make_unique<OneStream>(stream, supervisor));
  for (int round = 0; round < 2; ++round) {
    for (Transfer& transfer : transfers) transfer.done = 0;
    transport.run(transfers, MeshFrame{}, nullptr, Deadline::after(10s));
    for (std::size_t i = 0; i < kSizes.size(); ++i) EXPECT_EQ(data[i], data[kSizes.size() + i]);
  }
}

}  // namespace
}  // namespace lockstep::mesh_transport_test
