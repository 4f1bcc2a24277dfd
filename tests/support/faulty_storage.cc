#include "tests/support/faulty_storage.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

namespace lockstep::test {

class FaultyStorage::MemoryFile final : public File {
 public:
  MemoryFile(std::string path, FaultyStorage& storage, NodePointer node, bool append)
      : File(std::move(path)), storage_(storage), node_(std::move(node)), append_(append) {}

 private:
  ssize_t do_read(std::uint64_t position, std::span<std::byte> into) const override {
    const std::lock_guard lock(storage_.mutex_);
    if (const int error = storage_.enter(Call::kRead, path())) return -error;
    const std::string& bytes = node_->bytes;
    if (position >= bytes.size()) return 0;
    const std::size_t count =
        std::min({into.size(), bytes.size() - position, storage_.most_at_once});
    std::memcpy(into.data(), bytes.data() + position, count);
    storage_.bytes_read_ += count;
    return static_cast<ssize_t>(count);
  }
  ssize_t do_write(std::span<const std::byte> bytes) override {
    const std::lock_guard lock(storage_.mutex_);
    const ssize_t count = put(append_ ? node_->bytes.size() : position_, bytes);
    if (count > 0) position_ += static_cast<std::size_t>(count);
    return count;
  }
  ssize_t do_write_at(std::uint64_t position, std::span<const std::byte> bytes) override {
    const std::lock_guard lock(storage_.mutex_);
    return put(position, bytes);
  }
  ssize_t put(std::size_t position, std::span<const std::byte> bytes) {
    bool half = false;
    if (const int error = storage_.enter(Call::kWrite, path(), &half)) {
      if (half) store(position, bytes.first(bytes.size() / 2));
      return -error;
    }
    std::size_t count = std::min(bytes.size(), storage_.most_at_once);
    const std::size_t has = node_->bytes.size();
    if (position + count > has) {
      const std::uint64_t used = storage_.used(*storage_.root_);
      const std::uint64_t room = storage_.capacity > used ? storage_.capacity - used : 0;
      count = std::min<std::uint64_t>(count, (has > position ? has - position : 0) + room);
      if (count == 0) return -ENOSPC;
    }
    store(position, bytes.first(count));
    return static_cast<ssize_t>(count);
  }
  void store(std::size_t position, std::span<const std::byte> bytes) {
    if (node_->bytes.size() < position + bytes.size()) {
      node_->bytes.resize(position + bytes.size());
    }
    std::memcpy(node_->bytes.data() + position, bytes.data(), bytes.size());
    node_->modified = node_->changed = storage_.clock_;
  }
  int do_truncate(std::uint64_t size) override {
    const std::lock_guard lock(storage_.mutex_);
    if (const int error = storage_.enter(Call::kTruncate, path())) return error;
    node_->bytes.resize(size);
    node_->modified = node_->changed = storage_.clock_;
    return 0;
  }
  int do_sync() override {
    const std::lock_guard lock(storage_.mutex_);
    if (const int error = storage_.enter(Call::kSync, path())) return error;
    node_->synced_bytes = node_->bytes;
    return 0;
  }
  int do_status(FileStatus& status) const override {
    const std::lock_guard lock(storage_.mutex_);
    status = {.size = node_->bytes.size(),
              .device = 1,
              .inode = node_->inode,
              .modified_ns = node_->modified,
              .changed_ns = node_->changed,
              .regular = !node_->folder};
    return 0;
  }

  FaultyStorage& storage_;
  const NodePointer node_;
  const bool append_;
  std::size_t position_ = 0;
};

class FaultyStorage::MemoryFolder final : public Folder {
 public:
  MemoryFolder(std::string path, FaultyStorage& storage, NodePointer node)
      : Folder(std::move(path)), storage_(storage), node_(std::move(node)) {}

 private:
  NodePointer find(const std::string& name) const {
    const auto found = node_->names.find(name);
    return found == node_->names.end() ? nullptr : found->second;
  }
  int do_open(const std::string& name, Mode mode, std::unique_ptr<File>& file) const override {
    const std::lock_guard lock(storage_.mutex_);
    NodePointer node = find(name);
    if (mode == Mode::kRead) {
      if (const int error = storage_.enter(Call::kRead, path_of(name))) return error;
      if (!node) return ENOENT;
    } else {
      if (node && mode == Mode::kCreate) return EEXIST;
      if (!node) {
        if (const int error = storage_.enter(Call::kCreate, path_of(name))) return error;
        node = storage_.make(false);
        storage_.change(*node_, {{name, node}});
      }
    }
    file = std::make_unique<MemoryFile>(path_of(name), storage_, node, mode == Mode::kAppend);
    return 0;
  }
  int do_open_folder(const std::string& name, std::unique_ptr<Folder>& folder) const override {
    const std::lock_guard lock(storage_.mutex_);
    if (const int error = storage_.enter(Call::kRead, path_of(name))) return error;
    const NodePointer node = find(name);
    if (!node) return ENOENT;
    if (!node->folder) return ENOTDIR;
    folder = std::make_unique<MemoryFolder>(path_of(name), storage_, node);
    return 0;
  }
  int do_make_folder(const std::string& name) override {
    const std::lock_guard lock(storage_.mutex_);
    if (find(name)) return EEXIST;
    if (const int error = storage_.enter(Call::kMakeFolder, path_of(name))) return error;
    storage_.change(*node_, {{name, storage_.make(true)}});
    return 0;
  }
  int do_rename(const std::string& from, const std::string& to) override {
    const std::lock_guard lock(storage_.mutex_);
    const NodePointer node = find(from);
    if (!node) return ENOENT;
    const NodePointer other = find(to);
    if (other && other->folder != node->folder) return other->folder ? EISDIR : ENOTDIR;
    if (other && other->folder && !other->names.empty()) return ENOTEMPTY;
    if (const int error = storage_.enter(Call::kRename, path_of(from))) return error;
    storage_.change(*node_, {{from, nullptr}, {to, node}});
    return 0;
  }
  int do_link(const std::string& from, const std::string& to) override {
    const std::lock_guard lock(storage_.mutex_);
    const NodePointer node = find(from);
    if (!node) return ENOENT;
    if (find(to)) return EEXIST;
    if (const int error = storage_.enter(Call::kLink, path_of(to))) return error;
    storage_.change(*node_, {{to, node}});
    return 0;
  }
  int do_remove(const std::string& name) override {
    const std::lock_guard lock(storage_.mutex_);
    const NodePointer node = find(name);
    if (!node) return ENOENT;
    if (node->folder) return EISDIR;
    if (const int error = storage_.enter(Call::kRemove, path_of(name))) return error;
    storage_.change(*node_, {{name, nullptr}});
    return 0;
  }
  int do_remove_folder(const std::string& name) override {
    const std::lock_guard lock(storage_.mutex_);
    const NodePointer node = find(name);
    if (!node) return ENOENT;
    if (!node->names.empty()) return ENOTEMPTY;
    if (const int error = storage_.enter(Call::kRemove, path_of(name))) return error;
    storage_.change(*node_, {{name, nullptr}});
    return 0;
  }
  int do_entries(std::vector<Entry>& entries) const override {
    const std::lock_guard lock(storage_.mutex_);
    if (const int error = storage_.enter(Call::kRead, path())) return error;
    for (const auto& [name, node] : node_->names) {
      entries.push_back({name, node->folder ? Kind::kFolder : Kind::kFile});
    }
    return 0;
  }
  int do_sync() override {
    const std::lock_guard lock(storage_.mutex_);
    if (const int error = storage_.enter(Call::kSync, path())) return error;
    node_->synced_names = node_->names;
    node_->changes.clear();
    return 0;
  }

  FaultyStorage& storage_;
  const NodePointer node_;
};

FaultyStorage::FaultyStorage() : root_(make(true)) {}

FaultyStorage::FaultyStorage(const FaultyStorage& other) : Storage() {
  const std::lock_guard lock(other.mutex_);
  Copies copies;
  root_ = copy(*other.root_, copies);
  inodes_ = other.inodes_;
  clock_ = other.clock_;
  crashed_ = other.crashed_.load();
}

FaultyStorage::NodePointer FaultyStorage::make(bool folder) {
  auto node = std::make_shared<Node>();
  node->folder = folder;
  node->inode = ++inodes_;
  node->modified = node->changed = clock_;
  return node;
}

FaultyStorage::NodePointer FaultyStorage::copy(const Node& node, Copies& copies) {
  NodePointer& made = copies[&node];
  if (made) return made;
  made = std::make_shared<Node>(node);
  for (Names_* names : {&made->names, &made->synced_names}) {
    for (auto& [name, below] : *names) below = copy(*below, copies);
  }
  for (Change& change : made->changes) {
    for (auto& [name, below] : change) {
      if (below) below = copy(*below, copies);
    }
  }
  return made;
}

int FaultyStorage::enter(Call call, const std::string& path, bool* half) {
  if (crashed_) return EIO;
  if (fault) {
    if (const int error = fault(call, path)) return error;
  }
  if (call == Call::kRead) return 0;
  clock_ += 1'000'000;
  if (++calls_ != crash_at_) return 0;
  crashed_ = true;
  if (half != nullptr) *half = true;
  return EIO;
}

void FaultyStorage::change(Node& folder, Change change) {
  for (const auto& [name, node] : change) {
    if (node) {
      folder.names[name] = node;
      node->changed = clock_;
    } else {
      folder.names.erase(name);
    }
  }
  folder.changes.push_back(std::move(change));
}

std::uint64_t FaultyStorage::used(const Node& node) const {
  std::uint64_t bytes = node.bytes.size();
  for (const auto& [name, below] : node.names) bytes += used(*below);
  return bytes;
}

void FaultyStorage::restart(Names names, Bytes bytes) {
  const std::lock_guard lock(mutex_);
  restart(*root_, names, bytes);
  crashed_ = false;
  crash_at_ = 0;
  calls_ = 0;
}

void FaultyStorage::restart(Node& node, Names names, Bytes bytes) {
  const std::size_t kept = names == Names::kLost   ? 0
                           : names == Names::kHalf ? node.changes.size() / 2
                                                   : node.changes.size();
  Names_ left = node.synced_names;
  for (std::size_t i = 0; i < kept; ++i) {
    for (const auto& [name, below] : node.changes[i]) {
      if (below) {
        left[name] = below;
      } else {
        left.erase(name);
      }
    }
  }
  node.names = node.synced_names = std::move(left);
  node.changes.clear();
  const std::size_t safe = std::min(node.synced_bytes.size(), node.bytes.size());
  switch (bytes) {
    case Bytes::kLost: node.bytes = node.synced_bytes; break;
    case Bytes::kHalf: node.bytes.resize(safe + (node.bytes.size() - safe) / 2); break;
    case Bytes::kZeros:
      std::fill(node.bytes.begin() + static_cast<long>(safe), node.bytes.end(), '\0');
      break;
    case Bytes::kKept: break;
  }
  node.synced_bytes = node.bytes;
  for (auto& [name, below] : node.names) restart(*below, names, bytes);
}

FaultyStorage::NodePointer FaultyStorage::find(const std::string& path) const {
  NodePointer node = root_;
  for (const auto& part : std::filesystem::path(path).relative_path()) {
    if (part.empty() || part == ".") continue;
    const auto found = node->names.find(part);
    if (found == node->names.end()) return nullptr;
    node = found->second;
  }
  return node;
}

int FaultyStorage::do_open_folder(const std::string& path, std::unique_ptr<Folder>& folder) {
  const std::lock_guard lock(mutex_);
  if (const int error = enter(Call::kRead, path)) return error;
  const NodePointer node = find(path);
  if (!node) return ENOENT;
  if (!node->folder) return ENOTDIR;
  folder = std::make_unique<MemoryFolder>(path, *this, node);
  return 0;
}

std::optional<std::string> FaultyStorage::contents(const std::string& path) const {
  const std::lock_guard lock(mutex_);
  const NodePointer node = find(path);
  if (!node || node->folder) return std::nullopt;
  return node->bytes;
}

void FaultyStorage::set_contents(const std::string& path, std::string contents) {
  const std::lock_guard lock(mutex_);
  NodePointer node = find(path);
  if (!node) {
    node = make(false);
    const std::filesystem::path whole(path);
    change(*find(whole.parent_path()), {{whole.filename(), node}});
  }
  clock_ += 1'000'000;
  node->modified = node->changed = clock_;
  node->bytes = node->synced_bytes = std::move(contents);
}

std::vector<std::string> FaultyStorage::names_in(const std::string& folder) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  if (const NodePointer node = find(folder)) {
    for (const auto& [name, below] : node->names) names.push_back(name);
  }
  return names;
}

}  // namespace lockstep::test
