#include "lockstep/flight/flight_story.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "lockstep/base/error.h"
#include "lockstep/files/json.h"
#include "lockstep/flight/flight_timeline.h"
#include "tests/support/temporary_folder.h"

namespace lockstep::flight_story_test {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr std::int64_t kMs = 1'000'000;

FlightFile::Collective call(std::uint64_t sequence, std::int64_t begin, std::int64_t end) {
  return {.name = "all_reduce",
          .call = "all_reduce sum f32 x 100 (direct)",
          .generation = 1,
          .group = 0,
          .sequence = sequence,
          .step = static_cast<std::int64_t>(sequence),
          .bucket = 0,
          .bytes = 400,
          .begin = begin,
          .end = end};
}

// Three ranks that have finished four collectives and stand in what follows, until 10 s.
std::vector<FlightFile> three_ranks() {
  std::vector<FlightFile> files(3);
  for (int rank = 0; rank < 3; ++rank) {
    FlightFile& file = files[static_cast<std::size_t>(rank)];
    file.version = "1";
    file.rank = rank;
    file.world_size = 3;
    file.generation = 1;
    file.tag = 0xabcdef;
    file.host = "a";
    file.boot_id = "boot-a";
    file.pid = 100 + rank;
    file.written_by = file.name();
    file.taken = 10'000 * kMs;
    file.unix_offset = 1'700'000'000'000'000'000;
    for (std::uint64_t i = 1; i <= 4; ++i) {
      const auto begin = static_cast<std::int64_t>(i) * 100 * kMs;
      file.collectives.push_back(call(i, begin, begin + 10 * kMs));
    }
  }
  return files;
}

void stands_in(FlightFile& file, std::uint64_t sequence, int waited_for) {
  FlightFile::Collective open = call(sequence, 600 * kMs, 0);
  open.waited_for = waited_for;
  open.waited = 9'000 * kMs;
  file.collectives.push_back(open);
}

std::string all_of(const FlightStory& story) {
  std::string text;
  for (const std::string& each : story.sentences) text += each + "\n";
  return text;
}

TEST(FlightStory, WhoWasKilledIsToBlameAndNotWhoWasStillAtWork) {
  std::vector<FlightFile> files = three_ranks();
  files[0].phases.push_back({"forward and backward", 5, 0, 1, 9'999 * kMs, 0});
  files[1].ended = "was killed by signal 9 (Killed)";
  stands_in(files[2], 5, -1);
  const FlightStory story = tell_flight(files);
  EXPECT_EQ(story.held_up_by, std::vector<int>{1}) << all_of(story);
  EXPECT_THAT(all_of(story), HasSubstr("Rank 2 waited for rank 1, which was killed"));
}

TEST(FlightStory, NamesARankThatIsBusyElsewhere) {
  std::vector<FlightFile> files = three_ranks();
  stands_in(files[0], 5, 2);
  stands_in(files[1], 5, 0);  // by way of rank 0
  files[2].phases.push_back({"forward and backward", 5, 3, 1, 590 * kMs, 0});
  const FlightStory story = tell_flight(files);
  EXPECT_THAT(story.held_up_by, ElementsAre(2));
  const std::string text = all_of(story);
  EXPECT_THAT(text, HasSubstr("rank 0 (a, pid 100) was in collective 5 (all_reduce sum f32 x 100 "
                              "(direct)) for 9.4 s, waiting for rank 2"));
  EXPECT_THAT(text, HasSubstr("rank 2 (a, pid 102) was in forward and backward of lane 3, step 5, "
                              "for 9.4 s"));
  EXPECT_THAT(text, HasSubstr("Ranks 0 and 1 waited for rank 2, which was in forward and backward "
                              "of lane 3, step 5."));
  EXPECT_THAT(text, HasSubstr("Look at rank 2 first."));
}

TEST(FlightStory, NamesARankThatIsACollectiveBehindAndOneThatLeftNoFile) {
  std::vector<FlightFile> files = three_ranks();
  stands_in(files[0], 6, -1);
  stands_in(files[1], 6, -1);
  stands_in(files[2], 5, -1);
  EXPECT_THAT(tell_flight(files).held_up_by, ElementsAre(2));
  files.pop_back();
  files[0].collectives.back().waited_for = 2;
  const FlightStory story = tell_flight(files);
  EXPECT_THAT(story.held_up_by, ElementsAre(2));
  EXPECT_THAT(all_of(story), HasSubstr("rank 2 left no file"));
}

TEST(FlightStory, WhoWasKilledOrFailedIsNamedEvenWhereAllWaitInACircle) {
  std::vector<FlightFile> files = three_ranks();
  stands_in(files[0], 5, 1);
  stands_in(files[1], 5, 2);
  stands_in(files[2], 5, 0);
  EXPECT_THAT(tell_flight(files).held_up_by, IsEmpty());
  files[1].ended = "was killed by signal 9";
  EXPECT_THAT(tell_flight(files).held_up_by, ElementsAre(1));
  files[1].ended.clear();
  files[2].last_words = "std::bad_alloc";
  const FlightStory story = tell_flight(files);
  EXPECT_THAT(story.held_up_by, ElementsAre(2));
  EXPECT_THAT(all_of(story), HasSubstr("The last words of rank 2: std::bad_alloc"));
}

TEST(FlightStory, TellsOfCallsThatDoNotMatch) {
  std::vector<FlightFile> files = three_ranks();
  files[1].collectives[2].call = "barrier";
  EXPECT_THAT(all_of(tell_flight(files)),
              HasSubstr("as collective 3 rank 0 called all_reduce sum f32 x 100 (direct), rank 1 "
                        "called barrier"));
}

TEST(FlightStory, TellsOfARankThatIsLateAgainAndAgain) {
  std::vector<FlightFile> files = three_ranks();
  for (FlightFile& file : files) {
    file.collectives.clear();
    for (std::uint64_t i = 1; i <= 20; ++i) {
      const auto begin = static_cast<std::int64_t>(i) * 100 * kMs;
      file.collectives.push_back(
          call(i, begin + (file.rank == 1 ? 30 * kMs : 0), begin + 40 * kMs));
    }
  }
  EXPECT_THAT(all_of(tell_flight(files)),
              HasSubstr("rank 1 entered 20 as the last one, 30 ms after the first on average"));
}

TEST(FlightStory, PutsHostsOnOneClock) {
  std::vector<FlightFile> files = three_ranks();
  EXPECT_EQ(align_clocks(files), 0);
  EXPECT_EQ(files[0].taken, 10'000 * kMs);
  // The other host was started later, and its clock is 250 ms ahead.
  constexpr std::int64_t kStarted = 5'000 * kMs;
  files[2].boot_id = "boot-b";
  files[2].taken += kStarted;
  files[2].unix_offset += 250 * kMs - kStarted;
  for (auto& each : files[2].collectives) {
    each.begin += kStarted;
    each.end += kStarted;
  }
  EXPECT_EQ(align_clocks(files), 250 * kMs);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(files[2].collectives[i].end, files[0].collectives[i].end);
  }
}

TEST(FlightTimeline, TheTraceIsWhatPerfettoReads) {
  std::vector<FlightFile> files = three_ranks();
  stands_in(files[0], 5, 2);
  files[2].phases.push_back({"data", 5, 3, 1, 590 * kMs, 0});
  const Json trace = parse_json(flight_trace(files));
  ASSERT_TRUE(trace.is_object());
  std::size_t complete = 0;
  std::size_t names = 0;
  for (const Json& event : trace["traceEvents"]) {
    for (const char* key : {"name", "ph", "pid", "tid"}) EXPECT_TRUE(event.contains(key)) << key;
    if (event["ph"] == "M") ++names;
    if (event["ph"] != "X") continue;
    ++complete;
    EXPECT_GE(event["ts"].get<double>(), 0);
    EXPECT_GE(event["dur"].get<double>(), 0);
  }
  EXPECT_EQ(complete, 3 * 4 + 2U);
  EXPECT_EQ(names, 3 * 3U);
  EXPECT_THAT(flight_trace(files), HasSubstr(R"("waited_for":2)"));
}

TEST(FlightTimeline, PhasesDifferWithoutColour) {
  std::vector<FlightFile> files = three_ranks();
  for (const char* phase : {"data", "forward and backward", "finishing lanes", "communication",
                            "optimizer", "validation", "verify", "save", "regroup", "levelling"}) {
    files[0].phases.push_back({phase, 5, -1, 1, 9'990 * kMs, 9'991 * kMs});
  }
  const std::string svg = flight_svg(files, fitting_window(files));
  std::set<std::string> hatchings;
  std::size_t phases = 0;
  for (std::size_t at = 0; (at = svg.find("<pattern id=\"phase", at)) != std::string::npos; ++at) {
    const std::size_t path = svg.find(" d=\"", at);
    hatchings.insert(svg.substr(path, svg.find('"', path + 4) - path));
    ++phases;
  }
  EXPECT_EQ(phases, 11U);
  EXPECT_EQ(hatchings.size(), phases);
  EXPECT_THAT(svg, HasSubstr("fill=\"url(#phase9)\"><title>levelling, step 5"));
}

TEST(FlightTimeline, DrawsEveryRankAndEscapesWhatItSays) {
  std::vector<FlightFile> files = three_ranks();
  files[1].phases.push_back({"<b>&", 5, -1, 1, 9'990 * kMs, 0});
  stands_in(files[0], 5, 2);
  const std::string svg = flight_svg(files, fitting_window(files));
  for (const char* text : {"rank 0, phases", "rank 1, phases", "rank 2, phases", "&lt;b&gt;&amp;",
                           "waited 9.0 s for rank 2", "url(#open)"}) {
    EXPECT_THAT(svg, HasSubstr(text));
  }
  EXPECT_THAT(svg, Not(HasSubstr("<b>")));
  const std::string page = flight_html(files, tell_flight(files), fitting_window(files));
  EXPECT_THAT(page, HasSubstr("<svg"));
  EXPECT_THAT(page, Not(HasSubstr("<script")));
  EXPECT_THAT(page, Not(HasSubstr("src=")));
}

class FlightFolder : public ::testing::Test {
 protected:
  TemporaryFolder folder_;
};

TEST_F(FlightFolder, FilesComeBackAsTheyWere) {
  FlightFile file = three_ranks()[1];
  file.why = "because";
  file.last_words = "\"no\"\n";
  file.ended = "was killed";
  stands_in(file, 5, 2);
  file.phases.push_back({"data", 5, 3, 1, 590 * kMs, 600 * kMs, true});
  std::string problem;
  const auto again = parse_flight_file(encode(file), problem);
  ASSERT_TRUE(again) << problem;
  EXPECT_EQ(encode(*again), encode(file));
  EXPECT_EQ(again->collectives.back().waited_for, 2);
  EXPECT_TRUE(again->phases.back().failed);
}

TEST_F(FlightFolder, WhatIsNoFileSaysWhy) {
  const std::string good = encode(three_ranks()[0]);
  std::string problem;
  for (const std::string& text :
       {std::string(), std::string("[]"), good.substr(0, good.size() / 2),
        std::string(R"({"lockstep_flight":2})"), std::string(R"({"lockstep_flight":1})")}) {
    problem.clear();
    EXPECT_FALSE(parse_flight_file(text, problem));
    EXPECT_FALSE(problem.empty()) << text;
  }
}

TEST_F(FlightFolder, TheNewestGenerationIsReadAndOldOnesGo) {
  FlightFile file = three_ranks()[0];
  for (std::uint32_t generation = 1; generation <= kKeptGenerations + 2; ++generation) {
    file.generation = generation;
    file.taken += kMs;
    write_flight_file(folder_.path() + "/flight", file);
  }
  std::size_t kept = 0;
  for ([[maybe_unused]] const auto& each :
       std::filesystem::directory_iterator(folder_.path() + "/flight")) {
    ++kept;
  }
  EXPECT_EQ(kept, kKeptGenerations);
  std::vector<std::string> notes;
  const auto read = read_flight({folder_.path()}, std::nullopt, notes);
  ASSERT_EQ(read.size(), 1U);
  EXPECT_EQ(read[0].generation, kKeptGenerations + 2);
  EXPECT_THAT(notes, Contains(HasSubstr("there are also files of generation")));
  const auto older = read_flight({folder_.path()}, kKeptGenerations, notes);
  EXPECT_EQ(older[0].generation, kKeptGenerations);
  EXPECT_THROW(read_flight({folder_.path()}, 1, notes), Error);
  EXPECT_THROW(read_flight({folder_.path() + "/none"}, std::nullopt, notes), Error);
}

TEST_F(FlightFolder, FilesOfSeveralHostsAreReadTogetherAndDamagedOnesLeftOut) {
  const std::vector<FlightFile> files = three_ranks();
  write_flight_file(folder_.path() + "/a", files[0]);
  write_flight_file(folder_.path() + "/b", files[1]);
  std::ofstream(write_flight_file(folder_.path() + "/b", files[2]), std::ios::trunc) << "{";
  std::vector<std::string> notes;
  const auto read =
      read_flight({folder_.path() + "/a", folder_.path() + "/b"}, std::nullopt, notes);
  EXPECT_EQ(read.size(), 2U);
  EXPECT_THAT(notes, Contains(HasSubstr("rank-2.json is left out")));
}

}  // namespace
}  // namespace lockstep::flight_story_test
