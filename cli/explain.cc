#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/options.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/flight/flight_file.h"
#include "lockstep/flight/flight_story.h"
#include "lockstep/flight/flight_timeline.h"

namespace lockstep::cli {
namespace {

constexpr const char* kExplainExplanation =
    R"(Every worker of `lockstep train` keeps its last thousand collectives and phases in memory. They are
written to OUT/flight when a worker is lost, when the run fails, and when the launcher or a worker gets
SIGUSR2; without --out a failure and SIGUSR2 write to a temporary folder, and say which. The launcher
writes for its workers that were killed, crashed or stand still.

This command says where each rank was, who waited for whom in which collective and which rank to look
at first. It writes timeline.html, timeline.svg and trace.json; Perfetto (ui.perfetto.dev) and
chrome://tracing open the last one. Give several folders where the hosts have no folder in common.

  lockstep explain my-model
  lockstep explain /tmp/from-host-a /tmp/from-host-b --to report
  kill -USR2 PID                    writes what a run that hangs is doing, and does not end it)";

struct ExplainFlags {
  std::vector<std::string> folders;
  std::optional<std::uint32_t> generation;
  std::string to;
  double seconds = 0;
};

constexpr double kMostSeconds = 1e8;  // years; as nanoseconds they fit their type

int run_explain(const ExplainFlags& flags) {
  std::vector<std::string> notes;
  std::vector<FlightFile> files = read_flight(flags.folders, flags.generation, notes);
  const std::int64_t corrected = align_clocks(files);
  if (corrected > 0) {
    notes.push_back(fmt::format(
        "the clocks of the hosts differ by up to {}, by what collectives tell; that is corrected",
        short_time(corrected)));
  }
  const FlightStory story = tell_flight(files);
  for (const std::string& text : story.sentences) fmt::print("{}\n", visible(text));
  for (const std::string& text : notes) log(LogLevel::kInfo, "{}", text);
  const std::string to = flags.to.empty() ? flags.folders.front() : flags.to;
  const std::int64_t window =
      flags.seconds > 0 ? static_cast<std::int64_t>(std::min(flags.seconds, kMostSeconds) * 1e9)
                        : fitting_window(files);
  make_folder(to);
  write_file(to + "/timeline.svg", flight_svg(files, window));
  write_file(to + "/timeline.html", flight_html(files, story, window));
  write_file(to + "/trace.json", flight_trace(files));
  fmt::print("{}/timeline.html, timeline.svg and trace.json are written\n", to);
  return 0;
}

}  // namespace

void add_explain(CLI::App& app, Action& action) {
  CLI::App& command =
      *app.add_subcommand("explain", "Say what the workers of a failed run did last, and draw it.");
  command.footer(kExplainExplanation);
  const auto flags = std::make_shared<ExplainFlags>();
  command.add_option("folders", flags->folders, "The folder of a run, or of its flight recorder")
      ->required()
      ->option_text("DIR...");
  command
      .add_option("--generation", flags->generation,
                  "The generation to tell about, if several left files; without this "
                  "option the newest")
      ->option_text("N");
  command.add_option("--to", flags->to, "Where pictures and trace go; DIR if it is not given")
      ->option_text("DIR");
  command.add_option("--seconds", flags->seconds, "How much of the end the picture shows")
      ->check(CLI::PositiveNumber)
      ->option_text("S [four steps]");
  command.callback([flags, &action] { action = [flags] { return run_explain(*flags); }; });
}

}  // namespace lockstep::cli
