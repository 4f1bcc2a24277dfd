#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/files/mapped_file.h"

namespace lockstep {

// Files by name, wherever their bytes are. Bytes stay where they are as long as the source lives.
class FileSource {
 public:
  virtual ~FileSource() = default;

  // The file as messages name it.
  virtual std::string path(const std::string& name) const = 0;
  // Nothing when there is no such file. Throws Error{kIo} when it is there and cannot be read.
  virtual std::optional<std::span<const std::byte>> find(const std::string& name) = 0;
  // Throws Error{kIo} that names the file when there is none.
  std::span<const std::byte> get(const std::string& name);
};

// A folder; files are mapped when they are asked for.
class MappedFolder final : public FileSource {
 public:
  explicit MappedFolder(std::string folder) : folder_(std::move(folder)) {}

  std::string path(const std::string& name) const override { return folder_ + "/" + name; }
  std::optional<std::span<const std::byte>> find(const std::string& name) override;

 private:
  std::string folder_;
  std::map<std::string, MappedFile> files_;
};

// Bytes that the caller keeps; `where` stands for the folder in messages.
class FilesInMemory final : public FileSource {
 public:
  explicit FilesInMemory(std::string where) : where_(std::move(where)) {}

  // False when there is one of that name already.
  bool add(std::string name, std::span<const std::byte> bytes);
  std::string path(const std::string& name) const override { return where_ + "/" + name; }
  std::optional<std::span<const std::byte>> find(const std::string& name) override;

 private:
  std::string where_;
  std::map<std::string, std::span<const std::byte>> files_;
};

// Whether `name` can be that of a file in a folder: no path, not hidden.
bool is_plain_name(std::string_view name);

// Bytes as text.
std::string_view as_text(std::span<const std::byte> bytes);

}  // namespace lockstep
