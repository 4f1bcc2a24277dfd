#include "lockstep/data/payload_hash.h"

#include <fmt/format.h>
#include <unistd.h>

#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/files/hashed_read.h"
#include "lockstep/files/json.h"
#include "lockstep/files/mapped_file.h"

namespace lockstep {
namespace {

constexpr const char* kHashFormat = "lockstep payload hash";
constexpr const char* kHashSuffix = ".blake3";
constexpr std::size_t kLongestHashFile = 4096;
// File systems tell times no finer than this. A file that changed so shortly before its hash was
// written may have changed once more with the same times.
constexpr std::int64_t kFinestTime = 1'000'000'000;

std::string hash_file_text(const FileStatus& status, std::uint64_t offset,
                           const std::string& hash) {
  const Json json = {{"format", kHashFormat},
                     {"size", status.size},
                     {"inode", status.inode},
                     {"modified_ns", status.modified_ns},
                     {"changed_ns", status.changed_ns},
                     {"offset", offset},
                     {"blake3", hash}};
  return to_text(json) + "\n";
}

}  // namespace

bool is_hash_file(std::string_view path) {
  return path.ends_with(kHashSuffix) ||
         (path.ends_with(".tmp") && path.find(std::string(kHashSuffix) + ".") != path.npos);
}

PayloadHash::PayloadHash(Storage& storage, std::shared_ptr<const File> file,
                         const FileStatus& status, std::uint64_t offset,
                         std::optional<Blake3Hash> written)
    : storage_(&storage),
      file_(std::move(file)),
      offset_(offset),
      bytes_(status.size - offset),
      written_(written),
      status_(status) {}

std::string PayloadHash::identity() const {
  if (!file_) return {};
  return fmt::format("{} {} {} {} {} {}", status_.device, status_.inode, status_.size,
                     status_.modified_ns, status_.changed_ns, offset_);
}

// The file has to say exactly what we would write: a hash, and the file that it belongs to.
std::optional<Blake3Hash> PayloadHash::kept() const {
  try {
    // The folder is opened each time: a descriptor for every shard would soon be too many.
    const FilePlace place = place_of(file_->path() + kHashSuffix, *storage_);
    const auto beside = place.folder->find(place.name);
    if (!beside || beside->status().modified_ns < status_.changed_ns + kFinestTime) {
      return std::nullopt;
    }
    const std::string text = beside->text(kLongestHashFile);
    const Json json = parse_json(text);
    JsonReader reader(json);
    const auto hash = parse_hash(reader.text("blake3"));
    if (!hash || text != hash_file_text(status_, offset_, to_hex(*hash))) return std::nullopt;
    return hash;
  } catch (const Error&) {
    return std::nullopt;
  }
}

void PayloadHash::keep(const Blake3Hash& hash) const {
  try {
    // The tag keeps processes that do so at once from each other's temporaries.
    write_file(file_->path() + kHashSuffix, hash_file_text(status_, offset_, to_hex(hash)),
               {.tag = std::to_string(::getpid())}, *storage_);
  } catch (const Error&) {  // a folder that cannot be written: the next run reads the file again
  }
}

Blake3Hash PayloadHash::compute(const std::function<void(std::uint64_t)>& progress) const {
  const Blake3Hash hash = read_and_hash(
      bytes_,
      [&](std::uint64_t position, std::span<std::byte> into) {
        file_->read(offset_ + position, into);
      },
      [&](BlockReader& block) {
        const std::uint64_t size = block.end() - block.at();
        block.skip_to(block.end());
        if (progress) progress(size);
      });
  if (file_->status() != status_) {
    throw_bad_file(file_->path(), "changes while it is read");
  }
  return hash;
}

bool PayloadHash::known() const {
  const std::lock_guard lock(mutex_);
  if (!hash_) hash_ = kept();
  return hash_.has_value();
}

Blake3Hash PayloadHash::get(const std::function<void(std::uint64_t)>& progress) const {
  const bool was_known = known();
  const std::lock_guard lock(mutex_);
  if (!hash_) hash_ = compute(progress);
  if (written_ && *hash_ != *written_) {
    throw_bad_file(file_->path(),
                   "is damaged: the hash of its tokens is not the one in its header");
  }
  if (!was_known) keep(*hash_);
  return *hash_;
}

Blake3Hash PayloadHash::read_all() const {
  if (file_) {
    const std::lock_guard lock(mutex_);
    hash_ = compute({});
  }
  return get();
}

void PayloadHash::assume() const {
  const std::lock_guard lock(mutex_);
  if (file_) hash_ = written_.value_or(Blake3Hash{});
}

void PayloadHash::set(const Blake3Hash& hash) const {
  const std::lock_guard lock(mutex_);
  hash_ = hash;
}

}  // namespace lockstep
