#include "lockstep/files/storage.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <string_view>

#include "lockstep/base/descriptor.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

// Repeats a call that may be interrupted, or do only a part, until all bytes are done, or it does
// nothing any more, or it fails: then returns its errno value, otherwise 0.
template <typename Call>
int in_parts(std::size_t bytes, std::size_t& done, Call&& call) {
  for (done = 0; done < bytes;) {
    const ssize_t count = call(done);
    if (count == -EINTR) continue;
    if (count < 0) return static_cast<int>(-count);
    if (count == 0) return 0;
    done += static_cast<std::size_t>(count);
  }
  return 0;
}

ssize_t failed() { return -errno; }

class DiskFile final : public File {
 public:
  DiskFile(std::string path, Descriptor file) : File(std::move(path)), file_(std::move(file)) {}

  void begin_writing_out() override { ::sync_file_range(file_.get(), 0, 0, SYNC_FILE_RANGE_WRITE); }
  // Closing any descriptor of a file has network file systems send what was written.
  void send() override { Descriptor(::fcntl(file_.get(), F_DUPFD_CLOEXEC, 0)).reset(); }

 private:
  ssize_t do_read(std::uint64_t position, std::span<std::byte> into) const override {
    const ssize_t count =
        ::pread(file_.get(), into.data(), into.size(), static_cast<off_t>(position));
    return count < 0 ? failed() : count;
  }
  ssize_t do_write(std::span<const std::byte> bytes) override {
    const ssize_t count = ::write(file_.get(), bytes.data(), bytes.size());
    return count < 0 ? failed() : count;
  }
  ssize_t do_write_at(std::uint64_t position, std::span<const std::byte> bytes) override {
    const ssize_t count =
        ::pwrite(file_.get(), bytes.data(), bytes.size(), static_cast<off_t>(position));
    return count < 0 ? failed() : count;
  }
  int do_truncate(std::uint64_t size) override {
    return ::ftruncate(file_.get(), static_cast<off_t>(size)) != 0 ? errno : 0;
  }
  int do_sync() override { return ::fsync(file_.get()) != 0 ? errno : 0; }
  int do_status(FileStatus& status) const override {
    struct stat found {};
    if (::fstat(file_.get(), &found) != 0) return errno;
    const auto nanoseconds = [](const timespec& time) {
      return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
    };
    status = {.size = static_cast<std::uint64_t>(found.st_size),
              .device = found.st_dev,
              .inode = found.st_ino,
              .modified_ns = nanoseconds(found.st_mtim),
              .changed_ns = nanoseconds(found.st_ctim),
              .regular = S_ISREG(found.st_mode)};
    return 0;
  }

  const Descriptor file_;
};

Folder::Kind kind_of_mode(mode_t mode) {
  if (S_ISREG(mode)) return Folder::Kind::kFile;
  return S_ISDIR(mode) ? Folder::Kind::kFolder : Folder::Kind::kOther;
}

class DiskFolder final : public Folder {
 public:
  DiskFolder(std::string path, Descriptor folder)
      : Folder(std::move(path)), folder_(std::move(folder)) {}

 private:
  int do_open(const std::string& name, Mode mode, std::unique_ptr<File>& file) const override {
    const auto flags = [&] {
      switch (mode) {
        case Mode::kRead: return O_RDONLY | O_NONBLOCK;  // a pipe has no writer to wait for
        case Mode::kCreate: return O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW;
        case Mode::kAppend: return O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW;
        case Mode::kUpdate: break;
      }
      return O_RDWR | O_CREAT | O_NOFOLLOW;
    };
    Descriptor found(::openat(folder_.get(), name.c_str(), flags() | O_CLOEXEC, 0666));
    if (!found) return errno;
    file = std::make_unique<DiskFile>(path_of(name), std::move(found));
    return 0;
  }
  int do_open_folder(const std::string& name, std::unique_ptr<Folder>& folder) const override {
    Descriptor found(
        ::openat(folder_.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!found) return errno;
    folder = std::make_unique<DiskFolder>(path_of(name), std::move(found));
    return 0;
  }
  int do_make_folder(const std::string& name) override {
    return ::mkdirat(folder_.get(), name.c_str(), 0777) != 0 ? errno : 0;
  }
  int do_rename(const std::string& from, const std::string& to) override {
    return ::renameat(folder_.get(), from.c_str(), folder_.get(), to.c_str()) != 0 ? errno : 0;
  }
  int do_link(const std::string& from, const std::string& to) override {
    return ::linkat(folder_.get(), from.c_str(), folder_.get(), to.c_str(), 0) != 0 ? errno : 0;
  }
  int do_remove(const std::string& name) override {
    return ::unlinkat(folder_.get(), name.c_str(), 0) != 0 ? errno : 0;
  }
  int do_remove_folder(const std::string& name) override {
    return ::unlinkat(folder_.get(), name.c_str(), AT_REMOVEDIR) != 0 ? errno : 0;
  }
  int do_sync() override { return ::fsync(folder_.get()) != 0 ? errno : 0; }

  int do_entries(std::vector<Entry>& entries) const override {
    // A descriptor of its own: reading moves a position that duplicates would share.
    Descriptor again(::openat(folder_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!again) return errno;
    const std::unique_ptr<DIR, int (*)(DIR*)> list(::fdopendir(again.get()), ::closedir);
    if (!list) return errno;
    again.release();
    for (;;) {
      errno = 0;
      const dirent* entry = ::readdir(list.get());
      if (entry == nullptr) return errno;
      const std::string_view name = entry->d_name;
      if (name == "." || name == "..") continue;
      struct stat status {};
      if (::fstatat(folder_.get(), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT) continue;  // gone meanwhile
        return errno;
      }
      entries.push_back({std::string(name), kind_of_mode(status.st_mode)});
    }
  }

  const Descriptor folder_;
};

class Disk final : public Storage {
  int do_open_folder(const std::string& path, std::unique_ptr<Folder>& folder) override {
    Descriptor found(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!found) return errno;
    folder = std::make_unique<DiskFolder>(path, std::move(found));
    return 0;
  }
};

}  // namespace

Storage& disk() {
  static Disk the_disk;  // it has no state
  return the_disk;
}

FileStatus File::status() const {
  FileStatus status;
  if (const int error = do_status(status); error != 0) throw_io("reading " + path_, error);
  return status;
}

void File::read(std::uint64_t position, std::span<std::byte> into) const {
  std::size_t done = 0;
  const int error = in_parts(
      into.size(), done, [&](std::size_t at) { return do_read(position + at, into.subspan(at)); });
  if (error != 0) throw_io(fmt::format("reading {} at byte {}", path_, position + done), error);
  if (done < into.size()) {
    throw Error(ErrorCode::kIo,
                fmt::format("{}: the file ends at byte {}, but bytes up to {} were there", path_,
                            std::min(size(), position + done), position + into.size()));
  }
}

std::string File::text(std::size_t most) const {
  std::string text(std::min<std::uint64_t>(size(), most), '\0');
  read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

void File::write(std::span<const std::byte> bytes) {
  std::size_t done = 0;
  const int error =
      in_parts(bytes.size(), done, [&](std::size_t at) { return do_write(bytes.subspan(at)); });
  if (done < bytes.size()) throw_io("writing " + path_, error == 0 ? ENOSPC : error);
}

void File::write_at(std::uint64_t position, std::span<const std::byte> bytes) {
  std::size_t done = 0;
  const int error = in_parts(bytes.size(), done, [&](std::size_t at) {
    return do_write_at(position + at, bytes.subspan(at));
  });
  if (done < bytes.size()) throw_io("writing " + path_, error == 0 ? ENOSPC : error);
}

void File::truncate(std::uint64_t size) {
  if (const int error = do_truncate(size); error != 0) throw_io("shortening " + path_, error);
}

void File::sync() {
  if (const int error = do_sync(); error != 0) throw_io("syncing " + path_, error);
}

std::unique_ptr<File> Folder::open(const std::string& name, Mode mode) const {
  std::unique_ptr<File> file;
  if (const int error = do_open(name, mode, file); error != 0) {
    throw_io((mode == Mode::kRead ? "opening " : "creating ") + path_of(name), error);
  }
  return file;
}

std::unique_ptr<File> Folder::find(const std::string& name) const {
  std::unique_ptr<File> file;
  const int error = do_open(name, Mode::kRead, file);
  if (error != 0 && error != ENOENT) throw_io("opening " + path_of(name), error);
  return file;
}

std::unique_ptr<Folder> Folder::find_folder(const std::string& name) const {
  std::unique_ptr<Folder> folder;
  const int error = do_open_folder(name, folder);
  // A symbolic link is something else, too.
  if (error != 0 && error != ENOENT && error != ENOTDIR && error != ELOOP) {
    throw_io("opening the folder " + path_of(name), error);
  }
  return folder;
}

bool Folder::make_folder(const std::string& name) {
  const int error = do_make_folder(name);
  if (error != 0 && error != EEXIST) throw_io("creating the folder " + path_of(name), error);
  return error == 0;
}

void Folder::rename(const std::string& from, const std::string& to) {
  if (const int error = do_rename(from, to); error != 0) {
    throw_io(fmt::format("renaming {} to {}", path_of(from), to), error);
  }
}

bool Folder::link(const std::string& from, const std::string& to) {
  const int error = do_link(from, to);
  if (error != 0 && error != EEXIST) throw_io("creating " + path_of(to), error);
  return error == 0;
}

bool Folder::remove(const std::string& name) {
  const int error = do_remove(name);
  if (error != 0 && error != ENOENT) throw_io("removing " + path_of(name), error);
  return error == 0;
}

void Folder::remove_folder(const std::string& name) {
  if (const int error = do_remove_folder(name); error != 0) {
    throw_io("removing the folder " + path_of(name), error);
  }
}

std::vector<Folder::Entry> Folder::entries() const {
  std::vector<Entry> entries;
  if (const int error = do_entries(entries); error != 0) {
    throw_io("reading the folder " + path_, error);
  }
  std::ranges::sort(entries, {}, &Entry::name);
  return entries;
}

bool Folder::has(const std::string& name) const {
  return std::ranges::any_of(entries(), [&](const Entry& entry) { return entry.name == name; });
}

void Folder::sync() {
  if (const int error = do_sync(); error != 0) throw_io("syncing " + path_, error);
}

std::unique_ptr<Folder> Storage::open_folder(const std::string& path) {
  std::unique_ptr<Folder> folder;
  if (const int error = do_open_folder(path, folder); error != 0) {
    throw_io("opening the folder " + path, error);
  }
  return folder;
}

std::unique_ptr<Folder> Storage::find_folder(const std::string& path) {
  std::unique_ptr<Folder> folder;
  const int error = do_open_folder(path, folder);
  if (error != 0 && error != ENOENT) throw_io("opening the folder " + path, error);
  return folder;
}

std::unique_ptr<File> Storage::open(const std::string& path) {
  const FilePlace place = place_of(path, *this);
  return place.folder->open(place.name, Folder::Mode::kRead);
}

FilePlace place_of(const std::string& path, Storage& storage) {
  const std::filesystem::path whole(path);
  const std::string above = whole.parent_path();
  return {storage.open_folder(above.empty() ? "." : above), whole.filename()};
}

void make_folder(const std::string& path, Storage& storage) {
  if (storage.find_folder(path)) return;
  std::filesystem::path whole(path);
  if (!whole.has_filename()) whole = whole.parent_path();  // a slash at the end
  const std::string above = whole.parent_path();
  if (!above.empty()) make_folder(above, storage);
  const FilePlace place = place_of(whole, storage);
  place.folder->make_folder(place.name);  // another process may have been faster
  place.folder->sync();
}

std::unique_ptr<Folder> own_folder(Folder& above, const std::string& name) {
  if (auto folder = above.find_folder(name)) return folder;
  if (above.make_folder(name)) above.sync();
  auto folder = above.find_folder(name);
  if (!folder) {
    throw Error(ErrorCode::kIo, fmt::format("{} is not a folder of its own (symbolic links are not "
                                            "followed): move it away",
                                            above.path_of(name)));
  }
  return folder;
}

void append_whole(File& file, std::string_view text) {
  const std::uint64_t before = file.size();
  try {
    file.write(std::as_bytes(std::span(text)));
  } catch (const Error&) {
    try {
      file.truncate(before);
    } catch (const Error&) {  // why the text is not there counts more
    }
    throw;
  }
}

void remove_flat_folder(Folder& above, const std::string& name) {
  const auto folder = above.find_folder(name);
  if (!folder) {
    above.remove(name);
    return;
  }
  for (const Folder::Entry& entry : folder->entries()) folder->remove(entry.name);
  above.remove_folder(name);
}

}  // namespace lockstep
