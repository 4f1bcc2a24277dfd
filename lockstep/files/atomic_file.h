#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "lockstep/base/descriptor.h"

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
// renamed, and the folder synced. Without commit() the temporary is removed. Errors are Error{kIo}.
class AtomicFile {
 public:
  explicit AtomicFile(std::string path, WriteGuard guard = {});
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text);
  // Over bytes that were written before.
  void write_at(std::size_t position, std::span<const std::byte> bytes);
  void commit();

 private:
  const WriteGuard guard_;
  std::string path_;
  std::string temporary_;
  Descriptor file_;
};

// A folder that appears under its name complete or not at all: written as a temporary, every file
// and the folder synced, renamed, and the folder above synced. What an earlier one left under the
// name of the temporary is removed first. Without commit() the temporary is removed. One file at a
// time. Errors are Error{kIo}.
class AtomicFolder {
 public:
  explicit AtomicFolder(std::string path, WriteGuard guard = {});
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
  const std::string& temporary() const { return temporary_; }

 private:
  const WriteGuard guard_;
  std::string path_;
  std::string temporary_;
  std::string file_path_;
  Descriptor file_;
  std::size_t unsynced_ = 0;
  bool committed_ = false;
};

// A folder of plain files and all in it. It must have a name that nobody takes for a complete one,
// because it goes bit by bit. One that is not there is no error.
void remove_flat_folder(const std::string& path);
// Both in the same folder, which is synced.
void rename_and_sync(const std::string& from, const std::string& to);

// Creates the folder and those above it where they are missing.
void make_folder(const std::string& path);

}  // namespace lockstep
