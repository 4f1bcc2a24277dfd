#include "lockstep/page/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <system_error>

#include "lockstep/base/error.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/page/document.h"
#include "lockstep/page/run_folder.h"
#include "lockstep/page/svg_plots.h"

namespace lockstep {
namespace {

// The last `count` parts of a path.
std::filesystem::path end_of_path(const std::filesystem::path& path, std::ptrdiff_t count) {
  const std::ptrdiff_t all = std::distance(path.begin(), path.end());
  std::filesystem::path end;
  for (auto part = std::next(path.begin(), std::max<std::ptrdiff_t>(0, all - count));
       part != path.end(); ++part) {
    end /= *part;
  }
  return end;
}

// The shortest ends of the paths by which they differ: "a", or "tries/a" and "others/a".
std::vector<std::string> short_names(const std::vector<std::string>& folders) {
  std::vector<std::filesystem::path> paths;
  for (const std::string& folder : folders) {
    paths.push_back((std::filesystem::absolute(folder).lexically_normal() / "").parent_path());
  }
  std::vector<std::string> names;
  for (const auto& path : paths) {
    std::ptrdiff_t count = 1;
    const auto another_has = [&](const auto& other) {
      return other != path && end_of_path(other, count) == end_of_path(path, count);
    };
    while (std::ranges::any_of(paths, another_has)) ++count;
    names.push_back(end_of_path(path, count));
  }
  return names;
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
