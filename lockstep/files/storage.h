#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep {

// What the library asks of a file system. disk() is the real one; tests have one that fails and
// crashes where they want. Names in a folder are names, never paths. What is written, renamed or
// removed is reached from the descriptor of its folder, and symbolic links in its place are not
// followed. All failures are Error{kIo} with the path, and for reads the position.

// What the file system says of a file.
struct FileStatus {
  std::uint64_t size = 0;
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::int64_t modified_ns = 0;  // the contents
  std::int64_t changed_ns = 0;   // contents, name or rights; nobody can set it back
  bool regular = true;

  bool operator==(const FileStatus&) const = default;
};

// An open file. One thread writes; any may read.
class File {
 public:
  explicit File(std::string path) : path_(std::move(path)) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  virtual ~File() = default;

  const std::string& path() const { return path_; }

  FileStatus status() const;
  std::uint64_t size() const { return status().size; }
  // All of `into`; it is an error when the file ends earlier.
  void read(std::uint64_t position, std::span<std::byte> into) const;
  // At most so many bytes, from the beginning on.
  std::string text(std::size_t most) const;

  // After what was written before; in a file that is open to append, at its end.
  void write(std::span<const std::byte> bytes);
  // Over what is there. The place where write() goes on stays.
  void write_at(std::uint64_t position, std::span<const std::byte> bytes);
  void truncate(std::uint64_t size);
  void sync();
  // Advice: the disk may begin with what was written.
  virtual void begin_writing_out() {}
  // Others see what was written, also on a network file system, though it may be lost in a crash.
  virtual void send() {}

 protected:
  // The first three return the bytes done, which may be fewer than asked, or a negative errno
  // value; the others 0 or an errno value.
  virtual ssize_t do_read(std::uint64_t position, std::span<std::byte> into) const = 0;
  virtual ssize_t do_write(std::span<const std::byte> bytes) = 0;
  virtual ssize_t do_write_at(std::uint64_t position, std::span<const std::byte> bytes) = 0;
  virtual int do_truncate(std::uint64_t size) = 0;
  virtual int do_sync() = 0;
  virtual int do_status(FileStatus& status) const = 0;

 private:
  const std::string path_;
};

// An open folder.
class Folder {
 public:
  enum class Kind : std::uint8_t { kFile, kFolder, kOther };  // a symbolic link is something else
  struct Entry {
    std::string name;
    Kind kind = Kind::kFile;
  };
  enum class Mode : std::uint8_t {
    kRead,    // follows a symbolic link
    kCreate,  // to write; only where nothing has the name
    kAppend,  // to write at the end; creates it
    kUpdate,  // to read and write; creates it
  };

  explicit Folder(std::string path) : path_(std::move(path)) {}
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  virtual ~Folder() = default;

  const std::string& path() const { return path_; }
  std::string path_of(const std::string& name) const {
    if (path_ == ".") return name;  // as it was given
    return path_ + (path_.ends_with('/') ? "" : "/") + name;
  }

  std::unique_ptr<File> open(const std::string& name, Mode mode) const;
  // To read; nothing when there is no such file.
  std::unique_ptr<File> find(const std::string& name) const;
  // A folder in this one; nothing when there is none of that name, or something else has it.
  std::unique_ptr<Folder> find_folder(const std::string& name) const;
  // False when something has the name.
  bool make_folder(const std::string& name);
  // Replaces a file, or an empty folder, that has the new name.
  void rename(const std::string& from, const std::string& to);
  // Gives a file a second name. False when something has that name.
  bool link(const std::string& from, const std::string& to);
  // Of anything but a folder; a symbolic link goes itself. False when nothing had the name.
  bool remove(const std::string& name);
  // An empty one.
  void remove_folder(const std::string& name);
  // By name.
  std::vector<Entry> entries() const;
  bool has(const std::string& name) const;  // anything of that name
  // Makes names that were given and taken last.
  void sync();

 protected:
  // Each returns 0, or an errno value when it fails.
  virtual int do_open(const std::string& name, Mode mode, std::unique_ptr<File>& file) const = 0;
  virtual int do_open_folder(const std::string& name, std::unique_ptr<Folder>& folder) const = 0;
  virtual int do_make_folder(const std::string& name) = 0;
  virtual int do_rename(const std::string& from, const std::string& to) = 0;
  virtual int do_link(const std::string& from, const std::string& to) = 0;
  virtual int do_remove(const std::string& name) = 0;
  virtual int do_remove_folder(const std::string& name) = 0;
  virtual int do_entries(std::vector<Entry>& entries) const = 0;
  virtual int do_sync() = 0;

 private:
  const std::string path_;
};

class Storage {
 public:
  virtual ~Storage() = default;

  // Follows symbolic links: the path is the user's.
  std::unique_ptr<Folder> open_folder(const std::string& path);
  // Nothing when there is no such folder.
  std::unique_ptr<Folder> find_folder(const std::string& path);
  // To read.
  std::unique_ptr<File> open(const std::string& path);

 protected:
  virtual int do_open_folder(const std::string& path, std::unique_ptr<Folder>& folder) = 0;
};

// The file systems of this machine. Any thread.
Storage& disk();

// The folder that something lies in, and its name there.
struct FilePlace {
  std::shared_ptr<Folder> folder;
  std::string name;
};
FilePlace place_of(const std::string& path, Storage& storage);

// Creates the folder and those above it where they are missing; each is synced into the one above.
void make_folder(const std::string& path, Storage& storage = disk());

// A folder below one that is ours: made where it is missing, and opened. Error{kIo} where anything
// else has the name, such as a symbolic link, which would lead away from there.
std::unique_ptr<Folder> own_folder(Folder& above, const std::string& name);

// Writes all of it at the file's end, or throws and leaves nothing of it, unless the disk refuses
// that as well. The file must be open to append.
void append_whole(File& file, std::string_view text);

// A folder of plain files and all in it. It must have a name that nobody takes for a complete one,
// because it goes bit by bit. In place of a folder anything else of that name goes; nothing there
// is no error.
void remove_flat_folder(Folder& above, const std::string& name);

}  // namespace lockstep
