#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "gpu_cases.h"
#include "lockstep/comm/collectives/plan_engine.h"
#include "lockstep/comm/nccl/nccl_transport.h"
#include "lockstep/comm/transport/local_group.h"
#include "reducer_cases.h"
#include "tests/support/ranks.h"

// NCCL takes one rank per GPU, so on one GPU it can be shown with one: what goes through it, and
// how its waits end. Sums among several ranks are shown over another transport (reducer_test.cc).

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using test::error_of;
using test::run_ranks;
using ::testing::HasSubstr;

std::vector<std::unique_ptr<Communicator>> make_communicators(int world_size) {
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (auto& transport : make_local_group(world_size)) {
    communicators.push_back(
        std::make_unique<Communicator>(std::make_unique<PlanEngine>(std::move(transport)), 10s));
  }
  return communicators;
}

NcclOptions alone() {
  return {.rank = 0, .world_size = 1, .patience = 30s, .check = {}, .fail = {}};
}

TEST(NcclTransport, MovesAndAddsFloats) {
  LOCKSTEP_NEEDS_GPU();
  NcclTransport transport(make_nccl_id(), alone());
  constexpr std::size_t kCount = 100003;
  const auto first = wild_numbers(kCount, 1);
  const auto second = wild_numbers(17, 2);
  const DeviceArray<float> from(kCount + 17, "a test");
  const DeviceArray<float> to(kCount + 17, "a test");
  upload(first, from.data());
  upload(second, from.data() + kCount);
  const CudaStream stream = make_stream();
  for (int turn = 0; turn < 3; ++turn) {
    upload(std::vector<float>(kCount + 17, 7.0F), to.data());
    // To itself, two at once: they match in their order.
    const std::vector<DeviceSend> sends{{0, from.data(), kCount}, {0, from.data() + kCount, 17}};
    const std::vector<DeviceRecv> recvs{{0, to.data() + 17, kCount}, {0, to.data(), 17}};
    transport.exchange(sends, recvs, stream.get());
    transport.all_reduce(to.data() + 17, kCount, stream.get());
    check_cuda(cudaStreamSynchronize(stream.get()), "waiting for a stream");
    transport.check();
    EXPECT_EQ(bits(download(to.data() + 17, kCount)), bits(first));
    EXPECT_EQ(bits(download(to.data(), 17)), bits(second));
  }
}

TEST(NcclTransport, AfterAnAbortEverythingThrows) {
  LOCKSTEP_NEEDS_GPU();
  NcclTransport transport(make_nccl_id(), alone());
  const DeviceArray<float> data(4, "a test");
  transport.abort();
  transport.abort();
  EXPECT_EQ(error_of([&] { transport.check(); }).code(), ErrorCode::kAborted);
  EXPECT_EQ(error_of([&] { transport.all_reduce(data.data(), 4, nullptr); }).code(),
            ErrorCode::kAborted);
  EXPECT_EQ(error_of([&] { transport.exchange({}, {}, nullptr); }).code(), ErrorCode::kAborted);
}

TEST(NcclTransport, DoesNotWaitForARankThatNeverComes) {
  LOCKSTEP_NEEDS_GPU();
  const NcclId id = make_nccl_id();
  std::vector<Error> told;
  const NcclOptions options{
      .rank = 0, .world_size = 2, .patience = 2s, .check = {}, .fail = [&](const Error& error) {
        told.push_back(error);
      }};
  const auto began = Deadline::Clock::now();
  const Error error = error_of([&] { NcclTransport(id, options); });
  const auto took = Deadline::Clock::now() - began;
  EXPECT_EQ(error.code(), ErrorCode::kTimeout) << error.what();
  EXPECT_THAT(error.what(), HasSubstr("rank 0 of 2 ranks has waited 2.0 s"));
  EXPECT_GE(took, 2s);
  EXPECT_LT(took, 20s);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_STREQ(told[0].what(), error.what());
}

TEST(NcclTransport, StopsWaitingWhenTheJobFails) {
  LOCKSTEP_NEEDS_GPU();
  const NcclId id = make_nccl_id();
  int asked = 0;
  int told = 0;
  const NcclOptions options{.rank = 0,
                            .world_size = 2,
                            .patience = 60s,
                            .check =
                                [&] {
                                  if (++asked == 5) throw Error(ErrorCode::kPeerLost, "gone", 1);
                                },
                            .fail = [&](const Error&) { ++told; }};
  const auto began = Deadline::Clock::now();
  const Error error = error_of([&] { NcclTransport(id, options); });
  EXPECT_EQ(error.code(), ErrorCode::kPeerLost) << error.what();
  EXPECT_LT(Deadline::Clock::now() - began, 20s);
  EXPECT_EQ(told, 0);  // the job knows
}

TEST(NcclReducer, OfOneRankKeepsItsSums) {
  LOCKSTEP_NEEDS_GPU();
  constexpr std::size_t kCount = 1003;
  const auto values = wild_numbers(kCount, 1);
  for (const bool native : {false, true}) {
    const auto communicators = make_communicators(1);
    const DeviceReducerOptions options{
        .owners = LeafOwners(5, 0), .native = native, .shards = {kCount}, .elements = kCount};
    const auto reducer = make_nccl_reducer(*communicators[0], options);
    const DeviceArray<float> data(kCount, "a test");
    upload(values, data.data());
    const std::vector<float*> partials{data.data()};
    const CudaStream stream = make_stream();
    reducer->reduce(partials, {0, kCount}, stream.get());
    reducer->all_gather(data.data(), stream.get());
    check_cuda(cudaStreamSynchronize(stream.get()), "waiting for a stream");
    reducer->check();
    EXPECT_EQ(bits(download(data.data(), kCount)), bits(values));

    reducer->abort();
    EXPECT_EQ(error_of([&] { reducer->check(); }).code(), ErrorCode::kAborted);
    EXPECT_EQ(error_of([&] {
                reducer->reduce(partials, {0, kCount}, stream.get());
              }).code(),
              ErrorCode::kAborted);
    EXPECT_NO_THROW(communicators[0]->check());  // an abort here is no failure of the job
  }
}

TEST(NcclReducer, ThrowsTheCauseWhenTheJobHasFailed) {
  LOCKSTEP_NEEDS_GPU();
  const auto communicators = make_communicators(1);
  const auto reducer = make_nccl_reducer(*communicators[0], {.owners = {0}});
  EXPECT_NO_THROW(reducer->check());
  communicators[0]->abort("enough");
  const std::vector<float*> partials{nullptr};
  for (const Error& error :
       {error_of([&] { reducer->check(); }), error_of([&] { reducer->check(); }), error_of([&] {
          reducer->reduce(partials, {0, 0}, nullptr);
        })}) {
    EXPECT_EQ(error.code(), ErrorCode::kAborted);
    EXPECT_THAT(error.what(), HasSubstr("enough"));
  }
}

TEST(NcclReducer, AFailureToMakeItEndsTheJob) {
  LOCKSTEP_NEEDS_GPU();
  const auto communicators = make_communicators(1);
  const Error error = error_of([&] {
    make_nccl_reducer(*communicators[0], {.owners = {0}, .shards = {1, 2}});
  });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(error_of([&] { communicators[0]->check(); }).what(),
              HasSubstr("2 shards for 1 ranks"));
}

TEST(NcclReducer, RefusalIsTheSameOnEveryRank) {
  LOCKSTEP_NEEDS_GPU();
  const auto refusals = [](const std::vector<int>& devices) {
    const auto communicators = make_communicators(static_cast<int>(devices.size()));
    std::vector<std::optional<std::string>> texts(devices.size());
    const auto errors = run_ranks(static_cast<int>(devices.size()), [&](int rank) {
      const auto index = static_cast<std::size_t>(rank);
      texts[index] = device_reducer_refusal(*communicators[index], devices[index]);
    });
    for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
    return texts;
  };
  EXPECT_EQ(refusals({0})[0], std::nullopt);
  for (const auto& text : refusals({0, 0})) EXPECT_EQ(text, "ranks 0 and 1 share a GPU");
  for (const auto& text : refusals({0, -1, 0})) {
    ASSERT_TRUE(text);
    EXPECT_THAT(*text, HasSubstr("rank 1 cannot tell its GPU: GPU -1: "));
  }
  int count = 0;  // they are counted round
  ASSERT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  for (const auto& text : refusals({1, 1 + count})) EXPECT_EQ(text, "ranks 0 and 1 share a GPU");
  // A refused question leaves no error behind for the next call.
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace lockstep
