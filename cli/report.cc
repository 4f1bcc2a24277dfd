#include "lockstep/page/report.h"

#include <fmt/format.h>

#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/options.h"

namespace lockstep::cli {
namespace {

constexpr const char* kReportExplanation =
    R"(DIR is the --out of a run, finished, broken off or under way, or a folder of several. report.html has all
in one file: curves, the phases of the ranks, events, checkpoints, machine, settings and hash; of several runs
the curves over each other, and what they differ by. Beside it every plot is an SVG file.

  lockstep report my-model
  lockstep report runs/a runs/b --out comparison)";

struct ReportFlags {
  std::vector<std::string> folders;
  std::string out = "lockstep-report";
};

}  // namespace

void add_report(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand("report", "Show runs in one HTML file.");
  command.footer(kReportExplanation);
  const auto options = std::make_shared<ReportFlags>();
  command.add_option("folders", options->folders, "Folders of runs")
      ->required()
      ->option_text("DIR ...");
  command.add_option("--out", options->out, "Folder for report.html and the plots")
      ->option_text("DIR [lockstep-report]");
  command.callback([options, &action] {
    action = [options] {
      fmt::print("{}\n", write_report(find_runs(options->folders), options->out));
      return 0;
    };
  });
}

}  // namespace lockstep::cli
