#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/files/storage.h"

namespace lockstep::test {

// A file system in memory that fails where a test wants it to. It keeps apart what was synced and
// what was not: a crash loses the rest, or a part of it. Thread-safe.
class FaultyStorage final : public Storage {
 public:
  enum class Call {
    kRead,
    kWrite,
    kSync,
    kCreate,
    kTruncate,
    kRename,
    kLink,
    kRemove,
    kMakeFolder
  };
  // What becomes in a crash of names that were given and taken, in the order in which they were.
  enum class Names { kLost, kHalf, kKept };
  // What becomes of bytes that were written.
  enum class Bytes { kLost, kHalf, kZeros, kKept };

  FaultyStorage();
  // All that is there, synced or not, after the same crash if there was one; no faults.
  FaultyStorage(const FaultyStorage& other);
  FaultyStorage& operator=(const FaultyStorage&) = delete;

  // The errno value with which a call fails, or 0; is asked before every call.
  std::function<int(Call call, const std::string& path)> fault = {};
  // Bytes that all files together may have: what is beyond fails with ENOSPC.
  std::uint64_t capacity = UINT64_MAX;
  // Reads and writes do at most so many bytes.
  std::size_t most_at_once = SIZE_MAX;

  // Calls that change something.
  std::uint64_t calls() const { return calls_; }
  std::uint64_t bytes_read() const { return bytes_read_; }
  // In this call, counted from 1, the machine crashes: half of a write is done, of other calls
  // nothing. From then on every call fails.
  void crash_at(std::uint64_t call) { crash_at_ = call; }
  bool crashed() const { return crashed_; }
  // After the crash.
  void restart(Names names, Bytes bytes);

  // For tests to look and meddle: no faults here. Nothing: no such file.
  std::optional<std::string> contents(const std::string& path) const;
  void set_contents(const std::string& path, std::string contents);
  std::vector<std::string> names_in(const std::string& folder) const;
  // The clock of the file system, which otherwise goes on by a millisecond with every change.
  void pass(std::int64_t nanoseconds) { clock_ += nanoseconds; }

 private:
  class MemoryFile;
  class MemoryFolder;
  struct Node;
  using NodePointer = std::shared_ptr<Node>;
  using Names_ = std::map<std::string, NodePointer>;
  using Change = std::vector<std::pair<std::string, NodePointer>>;  // null: the name goes
  struct Node {
    bool folder = false;
    std::uint64_t inode = 0;
    std::int64_t modified = 0;
    std::int64_t changed = 0;
    std::string bytes, synced_bytes;
    Names_ names, synced_names;
    std::vector<Change> changes;  // of the names since they were synced
  };

  int do_open_folder(const std::string& path, std::unique_ptr<Folder>& folder) override;

  // With the mutex held. 0, or why the call fails.
  int enter(Call call, const std::string& path, bool* half = nullptr);
  NodePointer find(const std::string& path) const;
  NodePointer make(bool folder);
  void change(Node& folder, Change change);
  std::uint64_t used(const Node& node) const;
  static void restart(Node& node, Names names, Bytes bytes);
  // Nodes that were copied are in `copies`, because a node may have several names.
  using Copies = std::map<const Node*, NodePointer>;
  static NodePointer copy(const Node& node, Copies& copies);

  mutable std::mutex mutex_;
  NodePointer root_;
  std::uint64_t inodes_ = 0;
  std::int64_t clock_ = 1'000'000'000'000;
  std::uint64_t crash_at_ = 0;
  std::atomic<bool> crashed_ = false;
  std::atomic<std::uint64_t> calls_ = 0;
  std::atomic<std::uint64_t> bytes_read_ = 0;
};

}  // namespace lockstep::test
