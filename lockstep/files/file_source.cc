#include "lockstep/files/file_source.h"

#include <cerrno>
#include <filesystem>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep {

std::span<const std::byte> FileSource::get(const std::string& name) {
  const auto bytes = find(name);
  if (!bytes) throw_io("opening " + path(name), ENOENT);
  return *bytes;
}

std::optional<std::span<const std::byte>> MappedFolder::find(const std::string& name) {
  auto found = files_.find(name);
  if (found == files_.end()) {
    std::error_code error;
    if (!std::filesystem::exists(path(name), error) && !error) return std::nullopt;
    found = files_.emplace(name, MappedFile(path(name))).first;
  }
  return found->second.bytes();
}

bool FilesInMemory::add(std::string name, std::span<const std::byte> bytes) {
  return files_.emplace(std::move(name), bytes).second;
}

std::optional<std::span<const std::byte>> FilesInMemory::find(const std::string& name) {
  const auto found = files_.find(name);
  if (found == files_.end()) return std::nullopt;
  return found->second;
}

bool is_plain_name(std::string_view name) {
  return !name.empty() && name.size() <= 255 && name[0] != '.' &&
         name.find_first_of(std::string_view("/\0", 2)) == std::string_view::npos;
}

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace lockstep
