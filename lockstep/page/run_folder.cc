#include "lockstep/page/run_folder.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <system_error>
#include <utility>

#include "lockstep/train/run_checkpoints.h"

namespace lockstep {

namespace fs = std::filesystem;

std::uint64_t metrics_bytes(const std::string& folder) {
  std::error_code gone;
  const std::uint64_t size = fs::file_size(folder + "/" + kMetricsFile, gone);
  return gone ? 0 : size;
}

void RunFolder::read(std::size_t most) {
  if (metrics_bytes(folder_) < read_) {
    read_ = 0;
    record_ = {};
  }
  std::ifstream file(folder_ + "/" + kMetricsFile, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(read_));
  const std::uint64_t begin = read_;
  for (std::string line; read_ - begin < most && std::getline(file, line) && !file.eof();) {
    read_ += line.size() + 1;
    record_.add(line);
  }
}

std::vector<std::string> runs_beside(const std::string& folder, std::size_t most) {
  const fs::path own = fs::path(folder).lexically_normal() / "";
  const fs::path parent = own.parent_path().parent_path();
  std::vector<std::pair<fs::file_time_type, std::string>> found;
  std::error_code failed;
  for (fs::directory_iterator entry(parent.empty() ? "." : parent, failed), end;
       !failed && entry != end; entry.increment(failed)) {
    const std::string name = entry->path().filename();
    std::error_code none;
    const auto written = fs::last_write_time(entry->path() / kMetricsFile, none);
    if (!none && name != own.parent_path().filename()) found.emplace_back(written, name);
  }
  std::ranges::sort(found, std::greater());
  if (found.size() > most) found.resize(most);
  std::vector<std::string> names;
  for (auto& [written, name] : found) names.push_back(std::move(name));
  return names;
}

}  // namespace lockstep
