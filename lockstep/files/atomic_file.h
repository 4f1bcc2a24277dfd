#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/files/storage.h"

namespace lockstep {

// For a folder that several processes may take for theirs; see Lease.
struct WriteGuard {
  // Called before a file or folder there gets its name, is renamed, removed or appended to. Throws
  // if this process may not do that now. Null: it may.
  std::function<void(const std::string& path)> check = {};
  // In the names of temporaries, so that no two processes have the same one; may be empty.
  std::string tag = {};

  void require(const std::string& path) const {
    if (check) check(path);
  }
  // PATH.tmp or PATH.TAG.tmp
  std::string temporary(const std::string& path) const;
};

// A file that appears under its name complete or not at all: written as a temporary, synced,
// renamed, and the folder synced. What an earlier one left under the name of the temporary is
// removed first. Without commit() the temporary is removed. Errors are Error{kIo}.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path, WriteGuard guard = {}, Storage& storage = disk());
  AtomicFile(FilePlace place, WriteGuard guard);
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();

  void write(std::span<const std::byte> bytes) { file_->write(bytes); }
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  // Over bytes that were written before.
  void write_at(std::size_t position, std::span<const std::byte> bytes) {
    file_->write_at(position, bytes);
  }
  void commit();

 private:
  const WriteGuard guard_;
  const FilePlace place_;
  const std::string temporary_;
  std::unique_ptr<File> file_;
};

// A whole text as such a file.
void write_file(const std::string& path, std::string_view text, const WriteGuard& guard = {},
                Storage& storage = disk());

// A folder that appears under its name complete or not at all: written as a temporary, every file
// and the folder synced, renamed, and the folder above synced. What an earlier one left under the
// name of the temporary is removed first. Without commit() the temporary is removed. One file at a
// time; all are synced in commit(), so that the disk works while later ones are written. Errors are
// Error{kIo}.
class AtomicFolder {
 public:
  explicit AtomicFolder(const std::string& path, WriteGuard guard = {}, Storage& storage = disk());
  AtomicFolder(const AtomicFolder&) = delete;
  AtomicFolder& operator=(const AtomicFolder&) = delete;
  ~AtomicFolder();

  void begin_file(const std::string& name);
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  void end_file();
  // Fails when there is something else at PATH.
  void commit();
  // Where the files are until then.
  std::string temporary() const { return place_.folder->path_of(temporary_); }
  // Whether nobody has removed it.
  bool temporary_is_there() const { return place_.folder->find_folder(temporary_) != nullptr; }

 private:
  const WriteGuard guard_;
  const FilePlace place_;
  const std::string temporary_;
  std::unique_ptr<Folder> folder_;              // the temporary one
  std::unique_ptr<File> file_;                  // the one that is being written
  std::vector<std::unique_ptr<File>> written_;  // to be synced
  std::size_t unsynced_ = 0;
  bool committed_ = false;
};

}  // namespace lockstep
