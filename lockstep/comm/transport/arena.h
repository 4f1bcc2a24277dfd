#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "lockstep/base/descriptor.h"
#include "lockstep/comm/buffer.h"

namespace lockstep {

// A mapping of a memfd. The memory goes when the last process that maps it does, however it ends.
class Mapping {
 public:
  // All of `fd`, which is at least `least` bytes large and no larger than arenas are, can be
  // written and is sealed against shrinking, as those of make_memfd() are; otherwise
  // Error{kUnexpectedMessage}: what a peer could cut would end us with SIGBUS. Error{kIo} where
  // this process may map no more.
  static std::shared_ptr<Mapping> of(const Descriptor& fd, std::size_t least);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  Mapping(std::byte* data, std::size_t size) : data_(data), size_(size) {}

  std::byte* data_;
  std::size_t size_;
};

// An anonymous file of this size, all zero, sealed against resizing. Throws Error{kIo}.
Descriptor make_memfd(const char* name, std::size_t size);

// Memory of this process that others can map as a whole: one sparse file as large as the machine's
// memory, of which only what is in use takes space. Thread-safe. Outlives its buffers.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  static std::shared_ptr<Arena> create();

  const Descriptor& file() const { return file_; }
  std::byte* data() const { return mapping_->data(); }
  std::size_t size() const { return mapping_->size(); }
  // Zero-filled and page-aligned. Throws std::bad_alloc.
  Buffer allocate(std::size_t bytes);
  // Its place in the file, if [data, data + bytes) lies in the arena.
  std::optional<std::uint64_t> offset_of(const std::byte* data, std::size_t bytes) const;

 private:
  Arena(Descriptor file, std::shared_ptr<Mapping> mapping);
  void release(std::byte* data);

  const Descriptor file_;
  const std::shared_ptr<Mapping> mapping_;
  std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_;  // guarded by mutex_: begin -> size
  std::map<std::size_t, std::size_t> used_;  // guarded by mutex_
};

}  // namespace lockstep
