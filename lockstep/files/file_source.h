#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/files/storage.h"

namespace lockstep {

// Files by name, wherever their bytes are. Any thread may read.
class FileSource {
 public:
  virtual ~FileSource() = default;

  // The file as messages name it.
  virtual std::string path(const std::string& name) const = 0;
  // Of all files.
  virtual std::vector<std::string> names() const = 0;
  // Nothing when there is no such file. Throws Error{kIo} when it is there and cannot be read.
  virtual std::optional<std::uint64_t> find_size(const std::string& name) = 0;
  // Bytes of a file that is there, from `position` on. Throws Error{kIo} with file and position
  // when one of them cannot be read or is not there.
  virtual void read(const std::string& name, std::uint64_t position, std::span<std::byte> into) = 0;

  // Throws Error{kIo} that names the file when there is none.
  std::uint64_t size(const std::string& name);
  // The whole file. Throws Error{kIo} when it has more than `most` bytes.
  std::string text(const std::string& name, std::uint64_t most = UINT64_MAX);
  std::optional<std::string> find_text(const std::string& name, std::uint64_t most = UINT64_MAX);
};

// The files of a folder, opened when they are asked for and read where they are: nothing is mapped.
// A folder that is not there has none.
class StoredFiles final : public FileSource {
 public:
  explicit StoredFiles(std::string folder, Storage& storage = disk());

  std::string path(const std::string& name) const override { return path_ + "/" + name; }
  std::vector<std::string> names() const override;
  std::optional<std::uint64_t> find_size(const std::string& name) override;
  void read(const std::string& name, std::uint64_t position, std::span<std::byte> into) override;

 private:
  struct OpenFile {
    std::unique_ptr<File> file;
    std::uint64_t size = 0;
  };
  const OpenFile* find(const std::string& name);

  const std::string path_;
  const std::unique_ptr<Folder> folder_;
  std::mutex mutex_;
  std::map<std::string, OpenFile> files_;  // guarded by mutex_; entries stay as they are
};

// Whether `name` can be that of a file in a folder: no path, not hidden.
bool is_plain_name(std::string_view name);

// Bytes as text.
std::string_view as_text(std::span<const std::byte> bytes);

}  // namespace lockstep
