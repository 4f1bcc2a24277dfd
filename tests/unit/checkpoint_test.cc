#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "lockstep/base/error.h"
#include "lockstep/base/hash/blake3.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/flight/flight_file.h"
#include "lockstep/model/weights_hash.h"
#include "lockstep/report/tensorboard.h"
#include "lockstep/train/checkpoint/folders.h"
#include "lockstep/train/checkpoint/manifest.h"
#include "lockstep/train/run_checkpoints.h"
#include "tests/support/error_text.h"
#include "tests/support/faulty_storage.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/training_states.h"

namespace lockstep::checkpoint_test {
namespace {

using test::io_error_of;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename());
  }
  std::ranges::sort(names);
  return names;
}

TEST(Checkpoint, ComesBackBitForBit) {
  for (const bool tied : {false, true}) {
    TemporaryFolder out;
    const TrainingState state = some_state(12, tied);
    EXPECT_GT(save_checkpoint(out.path(), state), 3 * 4 * state.parameters.size());
    EXPECT_THAT(names_in(out.path()), ElementsAre("checkpoint-12"));
    const std::string folder = checkpoint_path(out.path(), 12);
    EXPECT_THAT(names_in(folder), ElementsAre("config.json", "manifest.json", "model.safetensors",
                                              "optimizer.safetensors", "trainer_state.json"));
    const TrainingState back = load_checkpoint(folder);
    EXPECT_TRUE(same_bits(back, state));
    EXPECT_EQ(back.tokenizer->kind(), TokenizerKind::kBytes);
    // It is a model's folder as well.
    const SavedModel model = load_model(folder);
    EXPECT_TRUE(same_bits(model.parameters, state.parameters));
    EXPECT_EQ(model.config, state.run.settings.model);
  }
}

TEST(Checkpoint, TheSameStateGivesTheSameFiles) {
  TemporaryFolder one;
  TemporaryFolder two;
  save_checkpoint(one.path(), some_state(3));
  save_checkpoint(two.path(), some_state(3));
  for (const std::string& name : names_in(one.path() + "/checkpoint-3")) {
    EXPECT_EQ(contents(one.path() + "/checkpoint-3/" + name),
              contents(two.path() + "/checkpoint-3/" + name))
        << name;
  }
}

// A checkpoint with one thing wrong, and what is said of it.
class DamagedCheckpoint : public ::testing::Test {
 protected:
  void SetUp() override { save_checkpoint(out_.path(), some_state(4)); }

  std::string path(const std::string& name) const { return out_.path() + "/checkpoint-4/" + name; }
  void change(const std::string& name, std::size_t at, char bit) {
    std::string text = contents(path(name));
    text[at] = static_cast<char>(text[at] ^ bit);
    write(path(name), text);
  }
  std::vector<std::string> damage(bool tensors = true) const {
    StoredFiles files(out_.path() + "/checkpoint-4");
    std::vector<std::string> lines;
    for (const Damage& each : find_damage(files, tensors)) {
      lines.push_back(std::filesystem::path(each.path).filename().string() + ": " + each.what);
    }
    return lines;
  }
  std::string load_error() const {
    return io_error_of([&] { load_checkpoint(out_.path() + "/checkpoint-4"); });
  }

  TemporaryFolder out_;
};

TEST_F(DamagedCheckpoint, IntactOnesHaveNone) { EXPECT_THAT(damage(), IsEmpty()); }

TEST_F(DamagedCheckpoint, AFlippedBitNamesTheTensor) {
  const std::size_t size = contents(path("model.safetensors")).size();
  change("model.safetensors", size - 1, 1);
  EXPECT_THAT(damage(), ElementsAre("model.safetensors: tensor 'lm_head.weight' is damaged"));
  EXPECT_EQ(damage(false), damage());
  EXPECT_THAT(load_error(), HasSubstr("model.safetensors: tensor 'lm_head.weight' is damaged"));
  EXPECT_THAT(io_error_of([&] { load_model(out_.path() + "/checkpoint-4"); }),
              HasSubstr("'lm_head.weight' is damaged"));
  change("optimizer.safetensors", contents(path("optimizer.safetensors")).size() - 1, 2);
  EXPECT_THAT(damage(),
              ElementsAre("model.safetensors: tensor 'lm_head.weight' is damaged",
                          "optimizer.safetensors: tensor 'exp_avg_sq.lm_head.weight' is damaged"));
}

TEST_F(DamagedCheckpoint, EveryByteOfEveryFileIsLookedAfter) {
  for (const std::string& name : names_in(out_.path() + "/checkpoint-4")) {
    const std::string before = contents(path(name));
    for (std::size_t at = 0; at < before.size(); at += 1 + before.size() / 29) {
      if (name == "manifest.json" && std::isspace(static_cast<unsigned char>(before[at]))) continue;
      change(name, at, 4);
      EXPECT_FALSE(damage(false).empty()) << name << " byte " << at;
      write(path(name), before);
    }
  }
  EXPECT_THAT(damage(), IsEmpty());
}

TEST_F(DamagedCheckpoint, MissingTruncatedAndGrownFiles) {
  const std::string weights = contents(path("model.safetensors"));
  write(path("model.safetensors"), weights.substr(0, weights.size() - 4));
  EXPECT_THAT(damage(), ElementsAre(HasSubstr("bytes instead of")));
  write(path("model.safetensors"), weights + "x");
  EXPECT_THAT(load_error(), HasSubstr("bytes instead of"));
  std::filesystem::remove(path("model.safetensors"));
  EXPECT_THAT(damage(), ElementsAre("model.safetensors: is missing"));
  std::filesystem::remove(path("trainer_state.json"));
  EXPECT_THAT(damage(),
              ElementsAre("trainer_state.json: is missing", "model.safetensors: is missing"));
  std::filesystem::remove(path("manifest.json"));
  EXPECT_THAT(damage(), ElementsAre("manifest.json: is missing"));
}

// A manifest whose own hash holds, but which is not about these files.
TEST_F(DamagedCheckpoint, AManifestThatIsNotOfThisCheckpoint) {
  Manifest manifest = std::get<Manifest>(parse_manifest(contents(path("manifest.json"))));
  const Manifest good = manifest;
  manifest.step = 5;
  write(path("manifest.json"), to_json(manifest));
  EXPECT_THAT(load_error(), HasSubstr("step 4, but the manifest says 5"));
  manifest = good;
  manifest.files.pop_back();
  write(path("manifest.json"), to_json(manifest));
  EXPECT_THAT(damage(),
              ElementsAre("manifest.json: says nothing of optimizer.safetensors",
                          HasSubstr("optimizer.safetensors: does not belong to the checkpoint")));
  manifest = good;
  manifest.weights.back() = manifest.weights.back() == '0' ? '1' : '0';
  write(path("manifest.json"), to_json(manifest));
  EXPECT_THAT(damage(), ElementsAre(HasSubstr("not that of their tensors")));
  // Of other weights, though it has the hash of the file that is there.
  manifest = good;
  for (ManifestFile& file : manifest.files) {
    if (file.name != "model.safetensors") continue;
    file.tensors[1].hash = file.tensors[0].hash;
    manifest.weights = combine_tensor_hashes(file.tensors);
  }
  write(path("manifest.json"), to_json(manifest));
  EXPECT_THAT(damage(), ElementsAre(HasSubstr("is damaged")));
}

// The header of a safetensors file says something else, and the manifest vouches for it.
TEST_F(DamagedCheckpoint, AHeaderThatLiesIsRefused) {
  std::string weights = contents(path("model.safetensors"));
  const auto at = weights.find("\"data_offsets\":[0,");
  weights.replace(at, 18, "\"data_offsets\":[8,");
  write(path("model.safetensors"), weights);
  Manifest manifest = std::get<Manifest>(parse_manifest(contents(path("manifest.json"))));
  for (ManifestFile& file : manifest.files) {
    if (file.name == "model.safetensors") {
      file.hash = to_hex(blake3(std::as_bytes(std::span(weights))));
    }
  }
  write(path("manifest.json"), to_json(manifest));
  EXPECT_THAT(damage(true), ElementsAre(HasSubstr("tensor 'model.embed_tokens.weight'")));
  EXPECT_THAT(load_error(), HasSubstr("tensor 'model.embed_tokens.weight'"));
}

// What a reader of models would take for a part of it.
TEST_F(DamagedCheckpoint, AFileThatIsNotListedIsRefused) {
  for (const char* name : {"tokenizer.model", "tokenizer.json", "model.safetensors.index.json"}) {
    write(path(name), "x");
    const std::string what = std::string(name) + ": does not belong to the checkpoint";
    EXPECT_THAT(damage(), ElementsAre(HasSubstr(what)));
    EXPECT_THAT(load_error(), HasSubstr(what));
    EXPECT_THAT(io_error_of([&] { load_model(out_.path() + "/checkpoint-4"); }), HasSubstr(what));
    std::filesystem::remove(path(name));
  }
  write(path(".nfs0001"), "x");  // a file system's own
  EXPECT_THAT(damage(), IsEmpty());
  EXPECT_EQ(load_error(), "no error");
}

// A place that the disk cannot read is an error with file and position, and the checkpoint before
// is taken.
TEST(Checkpoints, ABadSectorIsNamedAndTheOneBeforeIsTaken) {
  test::FaultyStorage storage;
  make_folder("/out", storage);
  for (const std::int64_t step : {1, 2}) save_checkpoint("/out", some_state(step), {}, storage);
  for (const char* name : {"config.json", "manifest.json", "trainer_state.json",
                           "model.safetensors", "optimizer.safetensors"}) {
    const std::string bad = std::string("/out/checkpoint-2/") + name;
    storage.fault = [&](test::FaultyStorage::Call call, const std::string& path) {
      return call == test::FaultyStorage::Call::kRead && path == bad ? EIO : 0;
    };
    EXPECT_THAT(io_error_of([&] { load_checkpoint("/out/checkpoint-2", storage); }),
                HasSubstr(bad + ": Input/output error"));
    EXPECT_EQ(load_newest_checkpoint("/out", storage)->state.run.step, 1) << name;
  }
  // In the middle of a large file.
  const std::string bad = "/out/checkpoint-2/optimizer.safetensors";
  std::uint64_t reads = 0;
  storage.most_at_once = 1000;
  storage.fault = [&](test::FaultyStorage::Call call, const std::string& path) {
    return call == test::FaultyStorage::Call::kRead && path == bad && ++reads > 50 ? EIO : 0;
  };
  EXPECT_THAT(io_error_of([&] { load_checkpoint("/out/checkpoint-2", storage); }),
              ::testing::ContainsRegex("reading " + bad + " at byte [1-9][0-9]*: Input/output"));
  reads = 0;
  StoredFiles files("/out/checkpoint-2", storage);
  const auto damage = find_damage(files, true);
  ASSERT_EQ(damage.size(), 1u);
  EXPECT_EQ(damage[0].path, bad);
  EXPECT_THAT(damage[0].what, HasSubstr("cannot be read: reading " + bad + " at byte"));
}

TEST(Checkpoints, AManifestThatCannotBeReadIsDamage) {
  test::FaultyStorage storage;
  make_folder("/out", storage);
  save_checkpoint("/out", some_state(1), {}, storage);
  const std::string bad = "/out/checkpoint-1/manifest.json";
  storage.fault = [&](test::FaultyStorage::Call call, const std::string& path) {
    return call == test::FaultyStorage::Call::kRead && path == bad ? EIO : 0;
  };
  StoredFiles files("/out/checkpoint-1", storage);
  const auto damage = find_damage(files, true);
  ASSERT_EQ(damage.size(), 1u);
  EXPECT_EQ(damage[0].path, bad);
  EXPECT_THAT(damage[0].what, HasSubstr("Input/output error"));
}

// It is none of ours, and no reason not to go on.
TEST(Checkpoints, AFolderInALeftoverStaysAndTheOthersGo) {
  TemporaryFolder out;
  for (const char* name : {"checkpoint-8.tmp/folder", "checkpoint-9.tmp"}) {
    std::filesystem::create_directories(out.path() + "/" + name);
  }
  ::testing::internal::CaptureStderr();
  remove_temporaries(out.path());
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("checkpoint-8.tmp stays: "));
  EXPECT_TRUE(std::filesystem::exists(out.path() + "/checkpoint-8.tmp/folder"));
  EXPECT_FALSE(std::filesystem::exists(out.path() + "/checkpoint-9.tmp"));
}

TEST(Checkpoints, TheNewestIntactOneIsTaken) {
  TemporaryFolder out;
  EXPECT_FALSE(load_newest_checkpoint(out.path()));
  EXPECT_FALSE(load_newest_checkpoint(out.path() + "/none"));
  for (const std::int64_t step : {9, 10, 100}) save_checkpoint(out.path(), some_state(step));
  std::filesystem::create_directory(out.path() + "/checkpoint-200.tmp");
  EXPECT_THAT(list_checkpoints(out.path()), ElementsAre(100, 10, 9));
  EXPECT_EQ(load_newest_checkpoint(out.path())->state.run.step, 100);
  std::filesystem::remove(out.path() + "/checkpoint-100/config.json");
  const auto newest = load_newest_checkpoint(out.path());
  EXPECT_TRUE(same_bits(newest->state, some_state(10)));
  EXPECT_THAT(newest->damaged, ElementsAre(100));
  for (const char* step : {"9", "10"}) {
    std::filesystem::remove(out.path() + "/checkpoint-" + step + "/manifest.json");
  }
  EXPECT_THAT(io_error_of([&] { load_newest_checkpoint(out.path()); }),
              HasSubstr("none of its 3 checkpoints is intact"));
  std::filesystem::rename(out.path() + "/checkpoint-100", out.path() + "/old");
  save_checkpoint(out.path(), some_state(100));
  std::filesystem::rename(out.path() + "/checkpoint-100", out.path() + "/checkpoint-101");
  EXPECT_THAT(io_error_of([&] { load_checkpoint(out.path() + "/checkpoint-101"); }),
              HasSubstr("step 100 under a wrong name"));
}

TEST(Checkpoints, OldOnesGoAndDamagedOnesAreKeptAside) {
  TemporaryFolder out;
  for (const std::int64_t step : {1, 2, 3}) save_checkpoint(out.path(), some_state(step));
  std::filesystem::create_directory(out.path() + "/checkpoint-1.tmp");  // left by a deletion
  write(out.path() + "/checkpoint-1.tmp/rest", "x");
  delete_old_checkpoints(out.path(), 3, 2, {});
  EXPECT_THAT(names_in(out.path()), ElementsAre("checkpoint-2", "checkpoint-3"));
  for (int i = 0; i < 2; ++i) {
    std::filesystem::remove(out.path() + "/checkpoint-3/config.json");
    save_checkpoint(out.path(), some_state(3));
  }
  EXPECT_THAT(names_in(out.path()), ElementsAre("checkpoint-2", "checkpoint-3",
                                                "checkpoint-3.damaged", "checkpoint-3.damaged2"));
  EXPECT_THAT(list_checkpoints(out.path()), ElementsAre(3, 2));
  std::filesystem::create_directory(out.path() + "/checkpoint-7.tmp");
  write(out.path() + "/checkpoint-7.tmp/half", "x");
  std::filesystem::create_directory(out.path() + "/mine.tmp");
  remove_temporaries(out.path());
  EXPECT_THAT(names_in(out.path()),
              ElementsAre("checkpoint-2", "checkpoint-3", "checkpoint-3.damaged",
                          "checkpoint-3.damaged2", "mine.tmp"));
}

// Names that anybody could have put there, to have what they lead to emptied or overwritten.
// Who takes a run over writes while the holder before tidies up, and waits for its lease.
TEST(Checkpoints, OneThatIsTakenForALeftoverIsWrittenAgain) {
  TemporaryFolder out;
  save_checkpoint(out.path(), some_state(4));
  int asked = 0;
  const auto tidies_up = [&](const std::string&) {
    if (++asked > 1) return;
    remove_temporaries(out.path());
    save_checkpoint(out.path(), some_state(5));  // by the one before
  };
  save_checkpoint(out.path(), some_state(5), {tidies_up, "me"});
  EXPECT_THAT(names_in(out.path()), ElementsAre("checkpoint-4", "checkpoint-5"));
  asked = 0;
  const auto tidies_up_only = [&](const std::string&) {
    if (++asked == 1) remove_temporaries(out.path());
  };
  save_checkpoint(out.path(), some_state(6), {tidies_up_only, "me"});
  EXPECT_THAT(names_in(out.path()), ElementsAre("checkpoint-4", "checkpoint-5", "checkpoint-6"));
  EXPECT_GE(asked, 2);
}

TEST(Checkpoints, SymbolicLinksAreNotFollowed) {
  TemporaryFolder out;
  TemporaryFolder precious;
  write(precious.path() + "/letter", "dear");
  const auto link = [&](const std::string& name, const std::string& to) {
    std::filesystem::create_symlink(precious.path() + to, out.path() + "/" + name);
  };
  link("checkpoint-5.tmp", "");
  remove_temporaries(out.path());
  EXPECT_THAT(names_in(out.path()), IsEmpty());
  link("checkpoint-5.tmp", "");
  link("metrics.jsonl.tmp", "/letter");
  save_checkpoint(out.path(), some_state(5));
  AtomicFile file(out.path() + "/metrics.jsonl");
  file.write("mine");
  file.commit();
  EXPECT_EQ(contents(out.path() + "/metrics.jsonl"), "mine");
  EXPECT_FALSE(std::filesystem::is_symlink(out.path() + "/metrics.jsonl"));
  link("checkpoint-5.me.tmp", "");
  save_checkpoint(out.path(), some_state(6));
  delete_old_checkpoints(out.path(), 6, 1, {}, {{}, "me"});
  EXPECT_THAT(names_in(out.path()), ElementsAre("checkpoint-6", "metrics.jsonl"));
  EXPECT_EQ(contents(precious.path() + "/letter"), "dear");
  EXPECT_THAT(names_in(precious.path()), ElementsAre("letter"));
}

// Nor where a run keeps what its workers did last, and what it tells TensorBoard.
TEST(Checkpoints, SymbolicLinksInPlaceOfARunsFoldersAreNotFollowed) {
  TemporaryFolder out;
  TemporaryFolder precious;
  std::vector<std::string> theirs;
  for (std::size_t i = 0; i <= kKeptGenerations; ++i) {
    theirs.push_back(fmt::format("generation-{}", i));
    std::filesystem::create_directory(precious.path() + "/" + theirs.back());
    write(precious.path() + "/" + theirs.back() + "/letter", "dear");
  }
  const std::string flight = out.path() + "/" + kFlightFolderOfRun;
  FlightFile file;
  file.rank = 0;
  std::filesystem::create_directory_symlink(precious.path(), flight);
  EXPECT_THAT(io_error_of([&] { write_flight_file(flight, file); }), HasSubstr("flight is not a"));
  std::filesystem::remove(flight);
  const std::string own = write_flight_file(flight, file);
  const auto generation = std::filesystem::path(own).parent_path();
  std::filesystem::remove_all(generation);
  std::filesystem::create_directory_symlink(precious.path(), generation);
  EXPECT_THAT(io_error_of([&] { write_flight_file(flight, file); }), HasSubstr("is not a folder"));
  std::filesystem::create_directory_symlink(precious.path(), out.path() + "/" + kTensorBoardFolder);
  EXPECT_THAT(io_error_of([&] { TensorBoardFile(out.path(), 0); }), HasSubstr("is not a folder"));
  EXPECT_THAT(names_in(precious.path()), ElementsAreArray(theirs));
  for (const std::string& name : theirs) {
    EXPECT_THAT(names_in(precious.path() + "/" + name), ElementsAre("letter"));
  }
}

TEST(Checkpoints, OneThatIsThereIntactAndTheSameStays) {
  TemporaryFolder out;
  const std::string path = out.path() + "/checkpoint-3";
  save_checkpoint(out.path(), some_state(3));
  const auto made = std::filesystem::last_write_time(path + "/manifest.json");
  int asked = 0;
  save_checkpoint(out.path(), some_state(3), {[&](const std::string&) { ++asked; }, "me"});
  EXPECT_EQ(asked, 0);
  EXPECT_EQ(std::filesystem::last_write_time(path + "/manifest.json"), made);
  EXPECT_THAT(names_in(out.path()), ElementsAre("checkpoint-3"));
  // Another one of the same step: of another run, or changed.
  TrainingState other = some_state(3);
  other.parameters.span()[0] += 1;
  save_checkpoint(out.path(), other);
  EXPECT_THAT(names_in(out.path()), ElementsAre("checkpoint-3", "checkpoint-3.damaged"));
}

TEST(Checkpoints, NothingChangesWithoutTheLease) {
  TemporaryFolder out;
  for (const std::int64_t step : {1, 2, 3}) save_checkpoint(out.path(), some_state(step));
  std::filesystem::remove(out.path() + "/checkpoint-3/config.json");
  const WriteGuard lost = {
      [](const std::string& path) { throw Error(ErrorCode::kIo, "not " + path); }, "me"};
  EXPECT_THAT(io_error_of([&] { save_checkpoint(out.path(), some_state(4), lost); }),
              HasSubstr("not " + out.path() + "/checkpoint-4"));
  EXPECT_THAT(io_error_of([&] { save_checkpoint(out.path(), some_state(3), lost); }),
              HasSubstr("not " + out.path() + "/checkpoint-3"));
  EXPECT_THAT(io_error_of([&] { delete_old_checkpoints(out.path(), 3, 1, {}, lost); }),
              HasSubstr("not " + out.path() + "/checkpoint-2"));
  EXPECT_THAT(names_in(out.path()), ElementsAre("checkpoint-1", "checkpoint-2", "checkpoint-3"));
}

TEST(Checkpoints, TwoThatWriteAtOnceDoNotMeet) {
  TemporaryFolder out;
  AtomicFolder stopped(out.path() + "/checkpoint-3", {{}, "one"});
  stopped.begin_file("half");
  save_checkpoint(out.path(), some_state(3), {{}, "two"});
  EXPECT_THAT(names_in(out.path()), ElementsAre("checkpoint-3", "checkpoint-3.one.tmp"));
  EXPECT_THAT(names_in(out.path() + "/checkpoint-3.one.tmp"), ElementsAre("half"));
}

}  // namespace
}  // namespace lockstep::checkpoint_test
