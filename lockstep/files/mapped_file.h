#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace lockstep {

// A file's bytes, read-only in memory. Move-only. Empty files map to no bytes. The file is read
// once before it is mapped, so that a bad sector is found; who cuts it short later ends the
// process. Errors are Error{kIo} that name the file, and the position where it cannot be read.
class MappedFile {
 public:
  explicit MappedFile(std::string path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::string path_;
  std::span<const std::byte> bytes_;
};

// The text of a file. Throws Error{kIo} with the position where it is empty, not UTF-8, or has a
// zero byte, which ends documents.
std::string_view text_of(const MappedFile& file);

// For broken input: throws Error{kIo} "PATH: WHAT", or "PATH: byte POSITION: WHAT".
[[noreturn]] void throw_bad_file(const std::string& path, const std::string& what);
[[noreturn]] void throw_bad_file(const std::string& path, std::size_t position,
                                 const std::string& what);

}  // namespace lockstep
