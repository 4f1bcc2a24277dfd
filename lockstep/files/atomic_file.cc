#include "lockstep/files/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
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

void sync_folder(const std::string& folder) {
  const Descriptor descriptor(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!descriptor || ::fsync(descriptor.get()) != 0) throw_io("syncing " + folder, errno);
}

void sync_folder_of(const std::string& path) {
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  sync_folder(parent.empty() ? "." : parent.string());
}

// The disk may begin with so many bytes while the rest is still being made.
constexpr std::size_t kWriteBehind = 16 << 20;

}  // namespace

std::string WriteGuard::temporary(const std::string& path) const {
  return path + (tag.empty() ? "" : "." + tag) + ".tmp";
}

AtomicFile::AtomicFile(std::string path, WriteGuard guard)
    : guard_(std::move(guard)),
      path_(std::move(path)),
      temporary_(guard_.temporary(path_)),
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
  guard_.require(path_);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) throw_io("renaming " + temporary_, errno);
  file_.reset();
  sync_folder_of(path_);
}

AtomicFolder::AtomicFolder(std::string path, WriteGuard guard)
    : guard_(std::move(guard)), path_(std::move(path)), temporary_(guard_.temporary(path_)) {
  remove_flat_folder(temporary_);
  if (::mkdir(temporary_.c_str(), 0777) != 0) throw_io("creating the folder " + temporary_, errno);
}

AtomicFolder::~AtomicFolder() {
  if (committed_) return;
  try {
    remove_flat_folder(temporary_);
  } catch (const Error&) {  // it is only a temporary, and whoever writes next will try again
  }
}

void AtomicFolder::begin_file(const std::string& name) {
  file_path_ = temporary_ + "/" + name;
  file_ = Descriptor(::open(file_path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!file_) throw_io("creating " + file_path_, errno);
  unsynced_ = 0;
}

void AtomicFolder::write(std::span<const std::byte> bytes) {
  write_all(file_.get(), bytes, file_path_);
  unsynced_ += bytes.size();
  if (unsynced_ < kWriteBehind) return;
  // Only advice: end_file() finds out what went wrong.
  ::sync_file_range(file_.get(), 0, 0, SYNC_FILE_RANGE_WRITE);
  unsynced_ = 0;
}

void AtomicFolder::end_file() {
  if (::fsync(file_.get()) != 0) throw_io("syncing " + file_path_, errno);
  file_.reset();
}

void AtomicFolder::commit() {
  sync_folder(temporary_);
  guard_.require(path_);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) throw_io("renaming " + temporary_, errno);
  committed_ = true;
  sync_folder_of(path_);
}

void remove_flat_folder(const std::string& path) {
  std::error_code error;
  std::filesystem::directory_iterator entries(path, error);
  if (error == std::errc::no_such_file_or_directory) return;
  if (error) throw_io("reading the folder " + path, error.value());
  for (const auto& entry : entries) {
    if (::unlink(entry.path().c_str()) != 0) throw_io("removing " + entry.path().string(), errno);
  }
  if (::rmdir(path.c_str()) != 0) throw_io("removing the folder " + path, errno);
}

void rename_and_sync(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) throw_io("renaming " + from, errno);
  sync_folder_of(to);
}

void make_folder(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) throw_io("creating the folder " + path, error.value());
  if (!std::filesystem::is_directory(path)) throw_io("creating the folder " + path, ENOTDIR);
}

}  // namespace lockstep
