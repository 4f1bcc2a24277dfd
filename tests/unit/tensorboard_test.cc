#include "lockstep/report/tensorboard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/hash/blake3.h"
#include "lockstep/train/run_checkpoints.h"
#include "tests/support/temporary_folder.h"

namespace lockstep::tensorboard_test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string hex(std::string_view bytes) { return to_hex(std::as_bytes(std::span(bytes))); }

// Made by TensorBoard's own writer: tensorboard.summary.writer.record_writer.RecordWriter.
TEST(TensorBoard, RecordsAsItsOwnWriterMakesThem) {
  EXPECT_EQ(hex(tfevents_record("")), "000000000000000029039807d8ea82a2");
  EXPECT_EQ(hex(tfevents_record("hello")), "0500000000000000eab2043e68656c6c6fbb1f1c19");
}

// Made by tensorboard.compat.proto.event_pb2.Event.SerializeToString().
TEST(TensorBoard, EventsAsProtocolBuffersHaveThem) {
  const std::vector<ScalarValue> values = {{"loss", 1.5}, {"b", -2}};
  EXPECT_EQ(hex(scalars_event(1.25, 300, values)),
            "09000000000000f43f10ac022a170a0b0a046c6f7373150000c03f0a080a016215000000c0");
  EXPECT_EQ(
      hex(text_event(1.25, 3, "settings", "hello")),
      "09000000000000f43f10032a290a270a0873657474696e6773420f0807120412020801420568656c6c6f4a0a0a06"
      "0a04746578742002");
}

std::string only_file_in(const std::string& folder) {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    paths.push_back(entry.path());
  }
  EXPECT_EQ(paths.size(), 1U);
  return paths.at(0);
}

TEST(TensorBoard, AFileOfTheRun) {
  TemporaryFolder folder;
  TensorBoardFile board(folder.path(), 7);
  StepReport report;
  report.step = 8;
  report.seconds = 1;
  report.phases.resize(2);
  board.add(report);
  const std::string path = only_file_in(folder.path() + "/" + kTensorBoardFolder);
  EXPECT_THAT(std::filesystem::path(path).filename().string(), StartsWith("events.out.tfevents."));
  const auto size = std::filesystem::file_size(path);
  board.add(report);  // the run went back: the first counts
  EXPECT_EQ(std::filesystem::file_size(path), size);
  report.step = 9;
  board.add(report);  // within the second: no phases
  std::ifstream file(path, std::ios::binary);
  const std::string bytes(std::istreambuf_iterator<char>(file), {});
  EXPECT_THAT(bytes, HasSubstr("brain.Event:2"));
  EXPECT_THAT(bytes, HasSubstr("phases/rank_1/hidden"));
  EXPECT_THAT(bytes.substr(size), HasSubstr("loss/train"));
  EXPECT_THAT(bytes.substr(size), ::testing::Not(HasSubstr("phases/")));
  EXPECT_THROW(TensorBoardFile("/proc/nowhere", 0), Error);
}

}  // namespace
}  // namespace lockstep::tensorboard_test
