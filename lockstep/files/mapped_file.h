#pragma once

#include <signal.h>

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace lockstep {

// A file's bytes, read-only in memory. Move-only. Empty files map to no bytes. The file is read
// once before it is mapped, so that a bad sector is found. If it cannot be read any more later on,
// because somebody has cut it short, its bytes become zeros from there on instead of SIGBUS: who
// has made something of them calls require_whole(). Errors are Error{kIo} that name the file, and
// the position where it cannot be read.
class MappedFile {
 public:
  explicit MappedFile(std::string path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return bytes_; }
  // Throws if not all bytes that were asked for were there.
  void require_whole() const;

 private:
  struct Guard;  // what the handler of SIGBUS knows of a mapping

  static Guard* take_guard(std::span<const std::byte> bytes);
  static void on_bus_error(int signal, siginfo_t* info, void* context);

  std::string path_;
  std::span<const std::byte> bytes_;
  Guard* guard_ = nullptr;
};

// The text of a file. Throws Error{kIo} with the position where it is empty, not UTF-8, or has a
// zero byte, which ends documents.
std::string_view text_of(const MappedFile& file);

// For broken input: throws Error{kIo} "PATH: WHAT", or "PATH: byte POSITION: WHAT".
[[noreturn]] void throw_bad_file(const std::string& path, const std::string& what);
[[noreturn]] void throw_bad_file(const std::string& path, std::size_t position,
                                 const std::string& what);

}  // namespace lockstep
