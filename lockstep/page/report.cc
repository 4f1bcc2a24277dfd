#include "lockstep/page/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <system_error>

#include "lockstep/base/error.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/page/document.h"
#include "lockstep/page/run_folder.h"
#include "lockstep/page/svg_plots.h"

namespace lockstep {
namespace {

// The shortest ends of the paths by which they differ: "a", or "tries/a" and "others/a".
std::vector<std::string> short_names(const std::vector<std::string>& folders) {
  std::vector<std::string> names(folders.size());
  for (std::size_t i = 0; i < folders.size(); ++i) {
    auto path = (std::filesystem::absolute(folders[i]).lexically_normal() / "").parent_path();
    names[i] = path.filename();
    const auto same = [&](const std::string& other) {
      return (std::filesystem::absolute(other).lexically_normal() / "").parent_path().filename() ==
             path.filename();
    };
    if (std::ranges::count_if(folders, same) > 1) names[i] = path;
  }
  return names;
}

void write_file(const std::string& path, const std::string& text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

}  // namespace

std::vector<std::string> find_runs(const std::vector<std::string>& folders) {
  std::vector<std::string> runs;
  for (const std::string& folder : folders) {
    if (metrics_bytes(folder) > 0) {
      runs.push_back(folder);
      continue;
    }
    const std::size_t before = runs.size();
    std::error_code failed;
    for (std::filesystem::directory_iterator entry(folder, failed), end; !failed && entry != end;
         entry.increment(failed)) {
      if (metrics_bytes(entry->path()) > 0) runs.push_back(entry->path());
    }
    if (runs.size() == before) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}: there is no run in it (no metrics.jsonl, which `lockstep train "
                              "--out` writes)",
                              folder));
    }
    std::sort(runs.begin() + static_cast<std::ptrdiff_t>(before), runs.end());
  }
  return runs;
}

std::string write_report(const std::vector<std::string>& runs, const std::string& out) {
  std::vector<RunFolder> folders;
  for (const std::string& run : runs) folders.emplace_back(run).read(SIZE_MAX);
  const std::vector<std::string> names = short_names(runs);
  std::vector<ReportedRun> reported;
  for (std::size_t i = 0; i < runs.size(); ++i)
    reported.push_back({names[i], &folders[i].record()});
  make_folder(out);
  for (const auto& [name, svg] : svg_plots(reported)) {
    write_file(fmt::format("{}/{}.svg", out, name), svg);
  }
  const std::string path = out + "/report.html";
  write_file(path, report_document(reported));
  return path;
}

}  // namespace lockstep
