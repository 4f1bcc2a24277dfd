#include "lockstep/train/checkpoint/state_file.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "lockstep/base/hash/blake3.h"
#include "lockstep/base/thread_pool.h"
#include "lockstep/files/mapped_file.h"

namespace lockstep {
namespace {

// What is hashed twice while it is in the cache.
constexpr std::size_t kHashedAtOnce = 256 << 10;
// What is written at once: up to a multiple of it in the file, so that it fills whole pages.
constexpr std::size_t kWrittenAtOnce = 1 << 20;

// The file's entry of the manifest.
ManifestFile hash_file(const StateFile& file) {
  ManifestFile entry = {.name = file.name, .bytes = file.bytes()};
  Blake3 all;
  all.update(std::as_bytes(std::span(file.head)));
  for (const TensorToStore& tensor : file.tensors) {
    Blake3 own;
    for (auto rest = tensor.bytes; !rest.empty();) {
      const auto piece = rest.first(std::min(rest.size(), kHashedAtOnce));
      own.update(piece);
      all.update(piece);
      rest = rest.subspan(piece.size());
    }
    entry.tensors.push_back({tensor.name, to_hex(own.finish())});
  }
  entry.hash = to_hex(all.finish());
  return entry;
}

void write_file(const StateFile& file, const ByteSink& sink) {
  std::uint64_t position = 0;
  const auto write = [&](std::span<const std::byte> rest) {
    while (!rest.empty()) {
      const auto piece = rest.first(
          std::min<std::uint64_t>(rest.size(), kWrittenAtOnce - position % kWrittenAtOnce));
      sink(piece);
      position += piece.size();
      rest = rest.subspan(piece.size());
    }
  };
  write(std::as_bytes(std::span(file.head)));
  for (const TensorToStore& tensor : file.tensors) write(tensor.bytes);
}

}  // namespace

std::uint64_t StateFile::bytes() const {
  std::uint64_t count = head.size();
  for (const TensorToStore& tensor : tensors) count += tensor.bytes.size();
  return count;
}

StateFile tensors_file(const char* name, std::vector<TensorToStore> tensors) {
  std::string head = safetensors_head(tensors, {{"format", "pt"}});
  return {name, std::move(head), std::move(tensors)};
}

ManifestFile emit_file(const StateFile& file, const ByteSink& sink) {
  constexpr std::size_t kWrites = 0, kTasks = 2;
  ManifestFile entry;
  ThreadPool pool(kTasks);
  pool.run(kTasks, [&](std::size_t task) {
    if (task == kWrites) {
      write_file(file, sink);
    } else {
      entry = hash_file(file);
    }
  });
  return entry;
}

std::optional<std::string> find_manifest_text(FileSource& files) {
  constexpr std::uint64_t kMostManifest = 64 << 20;
  return files.find_text(kManifestFile, kMostManifest);
}

Manifest read_manifest(FileSource& files) {
  const auto text = find_manifest_text(files);
  if (!text) throw_bad_file(files.path(kManifestFile), "is missing");
  auto parsed = parse_manifest(*text);
  if (const auto* problem = std::get_if<FormatProblem>(&parsed)) {
    throw_bad_file(files.path(kManifestFile), problem->what);
  }
  return std::get<Manifest>(std::move(parsed));
}

std::vector<std::string> unlisted_files(const FileSource& files, const Manifest& manifest) {
  std::vector<std::string> names = files.names();
  std::erase_if(names, [&](const std::string& name) {
    return name == kManifestFile || !is_plain_name(name) || manifest.find(name) != nullptr;
  });
  return names;
}

}  // namespace lockstep
