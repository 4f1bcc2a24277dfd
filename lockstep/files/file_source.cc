#include "lockstep/files/file_source.h"

#include <fmt/format.h>

#include <cerrno>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/files/mapped_file.h"

namespace lockstep {

std::uint64_t FileSource::size(const std::string& name) {
  const auto size = find_size(name);
  if (!size) throw_io("opening " + path(name), ENOENT);
  return *size;
}

std::string FileSource::text(const std::string& name, std::uint64_t most) {
  const std::uint64_t bytes = size(name);
  if (bytes > most) {
    throw_bad_file(path(name), fmt::format("has {} bytes, and {} at most are read", bytes, most));
  }
  std::string text(bytes, '\0');
  read(name, 0, std::as_writable_bytes(std::span(text)));
  return text;
}

std::optional<std::string> FileSource::find_text(const std::string& name, std::uint64_t most) {
  if (!find_size(name)) return std::nullopt;
  return text(name, most);
}

StoredFiles::StoredFiles(std::string folder, Storage& storage)
    : path_(std::move(folder)), folder_(storage.find_folder(path_)) {}

std::vector<std::string> StoredFiles::names() const {
  std::vector<std::string> names;
  if (!folder_) return names;
  for (Folder::Entry& entry : folder_->entries()) names.push_back(std::move(entry.name));
  return names;
}

const StoredFiles::OpenFile* StoredFiles::find(const std::string& name) {
  const std::lock_guard lock(mutex_);
  auto found = files_.find(name);
  if (found == files_.end()) {
    auto file = folder_ ? folder_->find(name) : nullptr;
    if (!file) return nullptr;
    const FileStatus status = file->status();
    if (!status.regular) throw_bad_file(path(name), "not a regular file");
    found = files_.emplace(name, OpenFile{std::move(file), status.size}).first;
  }
  return &found->second;
}

std::optional<std::uint64_t> StoredFiles::find_size(const std::string& name) {
  const OpenFile* found = find(name);
  if (found == nullptr) return std::nullopt;
  return found->size;
}

void StoredFiles::read(const std::string& name, std::uint64_t position, std::span<std::byte> into) {
  const OpenFile* found = find(name);
  if (found == nullptr) throw_io("opening " + path(name), ENOENT);
  found->file->read(position, into);
}

bool is_plain_name(std::string_view name) {
  return !name.empty() && name.size() <= 255 && name[0] != '.' &&
         name.find_first_of(std::string_view("/\0", 2)) == std::string_view::npos;
}

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace lockstep
