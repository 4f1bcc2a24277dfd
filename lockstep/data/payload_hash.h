#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/base/hash/blake3.h"
#include "lockstep/files/storage.h"

namespace lockstep {

// Whether it has the name of a file that keeps a hash, or of its temporary: no data.
bool is_hash_file(std::string_view path);

// The BLAKE3 of all tokens of a shard. That of a file is found by reading the file once; it is then
// kept beside the file, in NAME.blake3, and holds as long as the file system says that the file has
// not changed. Thread-safe.
class PayloadHash {
 public:
  // Of tokens in memory.
  explicit PayloadHash(const Blake3Hash& hash) : hash_(hash) {}
  // Of the bytes of a file from `offset` on. `written` is what the file itself says of them, if it
  // does. `status` is the file's when it was opened, with `offset` bytes or more; `storage`, where
  // the file is, must outlive this.
  PayloadHash(Storage& storage, std::shared_ptr<const File> file, const FileStatus& status,
              std::uint64_t offset, std::optional<Blake3Hash> written);

  // The bytes in the file.
  std::uint64_t bytes() const { return bytes_; }
  // Names the file and its state among all that processes of this host can see; empty in memory.
  std::string identity() const;

  // Whether the hash is known without reading the tokens: looks beside the file, if need be.
  bool known() const;
  // The hash; reads the tokens if it is not known, and tells `progress` the bytes of every part
  // that is read, on any thread. Throws Error{kIo} when the tokens are not those that were written,
  // or the file changes while it is read.
  Blake3Hash get(const std::function<void(std::uint64_t)>& progress = {}) const;
  // The same, but reads the tokens whatever is known, and keeps nothing beside the file.
  Blake3Hash read_all() const;
  // For a dry run: takes what the file says of its tokens, or nothing, without a look at them.
  void assume() const;
  // Another process has found it, for a file of the same identity.
  void set(const Blake3Hash& hash) const;

 private:
  std::optional<Blake3Hash> kept() const;
  void keep(const Blake3Hash& hash) const;
  Blake3Hash compute(const std::function<void(std::uint64_t)>& progress) const;

  Storage* const storage_ = nullptr;
  const std::shared_ptr<const File> file_;
  const std::uint64_t offset_ = 0;
  const std::uint64_t bytes_ = 0;
  const std::optional<Blake3Hash> written_ = {};
  const FileStatus status_ = {};  // of the file when it was opened
  mutable std::mutex mutex_;
  mutable std::optional<Blake3Hash> hash_;  // guarded by mutex_
};

}  // namespace lockstep
