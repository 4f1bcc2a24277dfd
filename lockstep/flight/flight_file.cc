#include "lockstep/flight/flight_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/host.h"
#include "lockstep/base/version.h"
#include "lockstep/comm/call.h"
#include "lockstep/comm/call_check.h"
#include "lockstep/comm/types.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/files/json.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr int kFormat = 1;
constexpr const char* kFormatKey = "lockstep_flight";
constexpr std::string_view kGenerationPrefix = "generation-";

Json or_null(std::int64_t value, std::int64_t none) {
  return value == none ? Json(nullptr) : Json(value);
}

// Of a value that may be null.
std::int64_t number_or(JsonReader& reader, const char* key, std::int64_t none) {
  const Json* value = reader.value(key);
  if (value == nullptr || value->is_null()) return none;
  if (value->is_number_integer()) return value->get<std::int64_t>();
  reader.fail(fmt::format("{} is no number", key));
  return none;
}

std::string generation_folder(const FlightFile& file) {
  return fmt::format("{}{}-{:08x}", kGenerationPrefix, file.generation, file.tag);
}

std::string file_name(const FlightFile& file) {
  return file.rank >= 0 ? fmt::format("rank-{}.json", file.rank)
                        : fmt::format("newcomer-{}.json", file.pid);
}

bool is_flight_file(const fs::path& path) {
  const std::string name = path.filename().string();
  return name.ends_with(".json") && (name.starts_with("rank-") || name.starts_with("newcomer-"));
}

std::vector<fs::path> generation_folders(const std::string& folder) {
  std::vector<fs::path> found;
  std::error_code ignored;
  for (const auto& each : fs::directory_iterator(folder, ignored)) {
    if (each.path().filename().string().starts_with(kGenerationPrefix)) {
      found.push_back(each.path());
    }
  }
  return found;
}

// When the newest file in it was written; nothing while there is none.
std::optional<std::int64_t> newest_in(const Folder& folder) {
  std::optional<std::int64_t> newest;
  for (const Folder::Entry& entry : folder.entries()) {
    const auto file = entry.kind == Folder::Kind::kFile ? folder.find(entry.name) : nullptr;
    if (file) newest = std::max(newest.value_or(0), file->status().modified_ns);
  }
  return newest;
}

// Others may be doing the same, and what one cannot remove another can.
void remove_old_generations(Folder& folder) {
  std::vector<std::pair<std::int64_t, std::string>> by_age;
  for (const Folder::Entry& entry : folder.entries()) {
    if (!entry.name.starts_with(kGenerationPrefix)) continue;
    const auto generation = folder.find_folder(entry.name);
    const auto written = generation ? newest_in(*generation) : std::nullopt;
    if (written) by_age.emplace_back(*written, entry.name);
  }
  if (by_age.size() <= kKeptGenerations) return;
  std::ranges::sort(by_age);
  by_age.resize(by_age.size() - kKeptGenerations);
  for (const auto& [age, name] : by_age) remove_flat_folder(folder, name);
}

// FOLDER, whose name alone is ours: what it lies in is the user's.
std::unique_ptr<Folder> flight_folder(const std::string& path, Storage& storage) {
  fs::path whole(path);
  if (!whole.has_filename()) whole = whole.parent_path();  // a slash at the end
  const std::string above = whole.parent_path();
  if (!above.empty()) make_folder(above, storage);
  const FilePlace place = place_of(whole, storage);
  return own_folder(*place.folder, place.name);
}

void read_folder(const fs::path& folder, std::vector<FlightFile>& files,
                 std::vector<std::string>& notes) {
  std::error_code ignored;
  for (const auto& each : fs::directory_iterator(folder, ignored)) {
    if (!is_flight_file(each.path())) continue;
    std::ifstream stream(each.path(), std::ios::binary);
    const std::string text(std::istreambuf_iterator<char>(stream), {});
    std::string problem;
    if (auto file = parse_flight_file(text, problem)) {
      files.push_back(std::move(*file));
    } else {
      notes.push_back(fmt::format("{} is left out: {}", each.path().string(), problem));
    }
  }
}

}  // namespace

std::string FlightFile::name() const {
  return rank >= 0 ? fmt::format("rank {}", rank) : fmt::format("a newcomer (pid {})", pid);
}

FlightFile flight_file_of(const FlightSnapshot& snapshot, std::string why, std::string written_by) {
  FlightFile file;
  const HostIdentity host = this_host();
  file.version = version();
  file.rank = snapshot.rank;
  file.world_size = snapshot.world_size;
  file.generation = snapshot.generation;
  file.tag = snapshot.tag;
  file.host = host.hostname;
  file.boot_id = host.boot_id;
  file.pid = snapshot.pid;
  file.written_by = written_by.empty() ? file.name() : std::move(written_by);
  file.why = std::move(why);
  file.last_words = snapshot.last_words;
  file.taken = snapshot.taken;
  file.unix_offset = snapshot.unix_offset;
  file.phases = snapshot.phases;
  for (const FlightSnapshot::Collective& each : snapshot.collectives) {
    const MeshFrame& call = each.call;
    file.collectives.push_back({.name = std::string(to_string(static_cast<Collective>(call.kind))),
                                .call = describe(call),
                                .generation = call.generation,
                                .group = call.group,
                                .sequence = call.sequence,
                                .step = call.step,
                                .bucket = call.bucket,
                                .bytes = call.count * size_of(static_cast<DataType>(call.type)),
                                .begin = each.begin,
                                .end = each.end,
                                .failed = each.failed,
                                .waited_for = each.waited_for,
                                .waited = each.waited});
  }
  return file;
}

std::string encode(const FlightFile& file) {
  Json phases = Json::array();
  for (const FlightSnapshot::Phase& each : file.phases) {
    phases.push_back({{"phase", each.name},
                      {"generation", each.generation},
                      {"step", each.step},
                      {"lane", or_null(each.lane, -1)},
                      {"begin_ns", each.begin},
                      {"end_ns", or_null(each.end, 0)},
                      {"failed", each.failed}});
  }
  Json collectives = Json::array();
  for (const FlightFile::Collective& each : file.collectives) {
    collectives.push_back({{"collective", each.name},
                           {"call", each.call},
                           {"generation", each.generation},
                           {"group", each.group},
                           {"sequence", each.sequence},
                           {"step", each.step},
                           {"bucket", each.bucket},
                           {"bytes", each.bytes},
                           {"begin_ns", each.begin},
                           {"end_ns", or_null(each.end, 0)},
                           {"failed", each.failed},
                           {"waited_for", or_null(each.waited_for, -1)},
                           {"waited_ns", each.waited}});
  }
  const Json json = {{kFormatKey, kFormat},
                     {"version", file.version},
                     {"rank", or_null(file.rank, -1)},
                     {"world_size", file.world_size},
                     {"generation", file.generation},
                     {"tag", file.tag},
                     {"host", file.host},
                     {"boot_id", file.boot_id},
                     {"pid", file.pid},
                     {"written_by", file.written_by},
                     {"why", file.why},
                     {"last_words", file.last_words},
                     {"ended", file.ended},
                     {"taken_ns", file.taken},
                     {"unix_offset_ns", file.unix_offset},
                     {"phases", std::move(phases)},
                     {"collectives", std::move(collectives)}};
  return to_text(json) + "\n";
}

std::optional<FlightFile> parse_flight_file(std::string_view text, std::string& problem) {
  const Json json = parse_json(text);
  JsonReader reader(json);
  FlightFile file;
  if (reader.whole(kFormatKey) != kFormat) reader.fail("it is of another format");
  file.version = reader.text("version");
  file.rank = static_cast<int>(number_or(reader, "rank", -1));
  file.world_size = static_cast<int>(reader.whole("world_size", INT32_MAX));
  file.generation = static_cast<std::uint32_t>(reader.whole("generation", UINT32_MAX));
  file.tag = static_cast<std::uint32_t>(reader.whole("tag", UINT32_MAX));
  file.host = reader.text("host");
  file.boot_id = reader.text("boot_id");
  file.pid = static_cast<std::int64_t>(reader.whole("pid", INT64_MAX));
  file.written_by = reader.text("written_by");
  file.why = reader.text("why");
  file.last_words = reader.text("last_words");
  file.ended = reader.text("ended");
  file.taken = static_cast<std::int64_t>(reader.whole("taken_ns", INT64_MAX));
  file.unix_offset = number_or(reader, "unix_offset_ns", 0);
  for (const Json& each : reader.list("phases")) {
    JsonReader phase(each);
    file.phases.push_back(
        {.name = phase.text("phase"),
         .step = static_cast<std::int64_t>(phase.whole("step", INT64_MAX)),
         .lane = static_cast<int>(number_or(phase, "lane", -1)),
         .generation = static_cast<std::uint32_t>(phase.whole("generation", UINT32_MAX)),
         .begin = static_cast<std::int64_t>(phase.whole("begin_ns", INT64_MAX)),
         .end = number_or(phase, "end_ns", 0),
         .failed = phase.flag("failed")});
    if (phase.problem()) reader.fail(*phase.problem());
  }
  for (const Json& each : reader.list("collectives")) {
    JsonReader call(each);
    file.collectives.push_back(
        {.name = call.text("collective"),
         .call = call.text("call"),
         .generation = static_cast<std::uint32_t>(call.whole("generation", UINT32_MAX)),
         .group = static_cast<std::uint32_t>(call.whole("group", UINT32_MAX)),
         .sequence = call.whole("sequence"),
         .step = static_cast<std::int64_t>(call.whole("step", INT64_MAX)),
         .bucket = static_cast<std::int64_t>(call.whole("bucket", INT64_MAX)),
         .bytes = call.whole("bytes"),
         .begin = static_cast<std::int64_t>(call.whole("begin_ns", INT64_MAX)),
         .end = number_or(call, "end_ns", 0),
         .failed = call.flag("failed"),
         .waited_for = static_cast<int>(number_or(call, "waited_for", -1)),
         .waited = static_cast<std::int64_t>(call.whole("waited_ns", INT64_MAX))});
    if (call.problem()) reader.fail(*call.problem());
  }
  if (!reader.problem()) return file;
  problem = *reader.problem();
  return std::nullopt;
}

std::string write_flight_file(const std::string& folder, const FlightFile& file, Storage& storage,
                              const std::function<void(const std::string& path)>& check) {
  const std::string path =
      fmt::format("{}/{}/{}", folder, generation_folder(file), file_name(file));
  // The launcher may write about the same rank at the same time.
  const WriteGuard guard{check, std::to_string(::getpid())};
  guard.require(path);
  const auto all = flight_folder(folder, storage);
  AtomicFile written({own_folder(*all, generation_folder(file)), file_name(file)}, guard);
  written.write(encode(file));
  written.commit();
  try {
    remove_old_generations(*all);
  } catch (const Error&) {  // one too many does no harm
  }
  return path;
}

std::vector<FlightFile> read_flight(const std::vector<std::string>& folders,
                                    std::optional<std::uint32_t> number,
                                    std::vector<std::string>& notes) {
  std::vector<FlightFile> all;
  for (const std::string& folder : folders) {
    if (!fs::is_directory(folder)) {
      throw Error(ErrorCode::kIo,
                  fmt::format("{}: {}", folder,
                              fs::exists(folder) ? "this is a file; explain takes folders"
                                                 : "there is no such folder"));
    }
    read_folder(folder, all, notes);
    for (const std::string& above : {folder, folder + "/" + kFlightFolder}) {
      for (const fs::path& each : generation_folders(above)) read_folder(each, all, notes);
    }
  }
  const FlightFile* newest = nullptr;
  for (const FlightFile& file : all) {
    if (number && file.generation != *number) continue;
    if (newest == nullptr || file.written_at() > newest->written_at()) newest = &file;
  }
  if (newest == nullptr) {
    throw Error(
        ErrorCode::kIo,
        fmt::format("{}: there is nothing of a flight recorder{}; a run writes it when a "
                    "worker is lost, when it fails and on SIGUSR2",
                    folders.front(), number ? fmt::format(" of generation {}", *number) : ""));
  }
  const std::pair chosen(newest->generation, newest->tag);
  std::map<std::pair<int, std::int64_t>, FlightFile> by_rank;  // and by pid where there is no rank
  std::set<std::uint32_t> others;
  for (FlightFile& file : all) {
    if (std::pair(file.generation, file.tag) != chosen) {
      others.insert(file.generation);
      continue;
    }
    const std::pair key(file.rank, file.rank < 0 ? file.pid : 0);
    const auto [found, added] = by_rank.try_emplace(key, file);
    if (!added && file.written_at() > found->second.written_at()) found->second = std::move(file);
  }
  if (!others.empty() && !number) {
    notes.push_back(
        fmt::format("this is generation {}; there are also files of generation {} "
                    "(--generation)",
                    chosen.first, fmt::join(others, ", ")));
  }
  std::vector<FlightFile> files;
  for (auto& [key, file] : by_rank) files.push_back(std::move(file));
  return files;
}

}  // namespace lockstep
