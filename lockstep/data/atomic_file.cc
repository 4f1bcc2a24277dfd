#include "lockstep/data/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

void write_all(int file, std::span<const std::byte> bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(file, bytes.data(), bytes.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      throw_io("writing " + path, errno);
    }
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void sync_folder_of(const std::string& path) {
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  const std::string folder = parent.empty() ? "." : parent.string();
  const Descriptor descriptor(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!descriptor || ::fsync(descriptor.get()) != 0) throw_io("syncing " + folder, errno);
}

}  // namespace

AtomicFile::AtomicFile(std::string path)
    : path_(std::move(path)),
      temporary_(path_ + ".tmp"),
      file_(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) {
  if (!file_) throw_io("creating " + temporary_, errno);
}

AtomicFile::~AtomicFile() {
  if (file_) ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  write_all(file_.get(), bytes, temporary_);
}

void AtomicFile::write(std::string_view text) { write(std::as_bytes(std::span(text))); }

void AtomicFile::write_at(std::size_t position, std::span<const std::byte> bytes) {
  if (::lseek(file_.get(), static_cast<off_t>(position), SEEK_SET) < 0) {
    throw_io("writing " + temporary_, errno);
  }
  write(bytes);
  if (::lseek(file_.get(), 0, SEEK_END) < 0) throw_io("writing " + temporary_, errno);
}

void AtomicFile::commit() {
  if (::fsync(file_.get()) != 0) throw_io("syncing " + temporary_, errno);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) throw_io("renaming " + temporary_, errno);
  file_.reset();
  sync_folder_of(path_);
}

void make_folder(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) throw_io("creating the folder " + path, error.value());
  if (!std::filesystem::is_directory(path)) throw_io("creating the folder " + path, ENOTDIR);
}

}  // namespace lockstep
