#include "lockstep/files/atomic_file.h"

#include <cerrno>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

// The disk may begin with so many bytes while the rest is still being made.
constexpr std::size_t kWriteBehind = 16 << 20;

}  // namespace

std::string WriteGuard::temporary(const std::string& path) const {
  return path + (tag.empty() ? "" : "." + tag) + ".tmp";
}

AtomicFile::AtomicFile(const std::string& path, WriteGuard guard, Storage& storage)
    : AtomicFile(place_of(path, storage), std::move(guard)) {}

AtomicFile::AtomicFile(FilePlace place, WriteGuard guard)
    : guard_(std::move(guard)),
      place_(std::move(place)),
      temporary_(guard_.temporary(place_.name)) {
  place_.folder->remove(temporary_);
  file_ = place_.folder->open(temporary_, Folder::Mode::kCreate);
}

AtomicFile::~AtomicFile() {
  if (!file_) return;
  try {
    place_.folder->remove(temporary_);
  } catch (const Error&) {  // it is only a temporary, and whoever writes next will try again
  }
}

void AtomicFile::commit() {
  file_->sync();
  guard_.require(place_.folder->path_of(place_.name));
  place_.folder->rename(temporary_, place_.name);
  file_.reset();
  place_.folder->sync();
}

void write_file(const std::string& path, std::string_view text, const WriteGuard& guard,
                Storage& storage) {
  AtomicFile file(path, guard, storage);
  file.write(text);
  file.commit();
}

AtomicFolder::AtomicFolder(const std::string& path, WriteGuard guard, Storage& storage)
    : guard_(std::move(guard)),
      place_(place_of(path, storage)),
      temporary_(guard_.temporary(place_.name)) {
  remove_flat_folder(*place_.folder, temporary_);
  if (!place_.folder->make_folder(temporary_)) {
    throw_io("creating the folder " + temporary(), EEXIST);
  }
  folder_ = place_.folder->find_folder(temporary_);
  if (!folder_) throw_io("opening the folder " + temporary(), ENOENT);
}

AtomicFolder::~AtomicFolder() {
  if (committed_) return;
  try {
    remove_flat_folder(*place_.folder, temporary_);
  } catch (const Error&) {  // it is only a temporary, and whoever writes next will try again
  }
}

void AtomicFolder::begin_file(const std::string& name) {
  file_ = folder_->open(name, Folder::Mode::kCreate);
  unsynced_ = 0;
}

void AtomicFolder::write(std::span<const std::byte> bytes) {
  file_->write(bytes);
  unsynced_ += bytes.size();
  if (unsynced_ < kWriteBehind) return;
  file_->begin_writing_out();  // commit() finds out what went wrong
  unsynced_ = 0;
}

void AtomicFolder::end_file() {
  file_->begin_writing_out();
  written_.push_back(std::move(file_));
}

void AtomicFolder::commit() {
  for (const auto& file : written_) file->sync();
  written_.clear();
  folder_->sync();
  guard_.require(place_.folder->path_of(place_.name));
  place_.folder->rename(temporary_, place_.name);
  committed_ = true;
  place_.folder->sync();
}

}  // namespace lockstep
