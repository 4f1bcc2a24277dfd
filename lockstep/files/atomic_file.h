#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "lockstep/base/descriptor.h"

namespace lockstep {

// A file that appears under its name complete or not at all: written as PATH.tmp, synced, renamed,
// and the folder synced. Without commit() the temporary is removed. Errors are Error{kIo}.
class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text);
  // Over bytes that were written before.
  void write_at(std::size_t position, std::span<const std::byte> bytes);
  void commit();

 private:
  std::string path_;
  std::string temporary_;
  Descriptor file_;
};

// A folder that appears under its name complete or not at all: written as PATH.tmp, every file and
// the folder synced, renamed, and the folder above synced. What an earlier one left at PATH.tmp is
// removed first. Without commit() the temporary is removed. One file at a time. Errors are
// Error{kIo}.
class AtomicFolder {
 public:
  explicit AtomicFolder(std::string path);
  AtomicFolder(const AtomicFolder&) = delete;
  AtomicFolder& operator=(const AtomicFolder&) = delete;
  ~AtomicFolder();

  void begin_file(const std::string& name);
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  void end_file();
  // Fails when there is something else at PATH.
  void commit();

 private:
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
