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

// Creates the folder and those above it where they are missing.
void make_folder(const std::string& path);

}  // namespace lockstep
