#include "lockstep/comm/transport/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

constexpr std::size_t kPage = 4096;
// Large buffers start at the boundary of a huge page.
constexpr std::size_t kHugePage = 2 * 1024 * 1024;

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

// Of an arena: as large as the machine's memory.
std::size_t arena_size() {
  const auto pages = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES));
  return round_up(pages * kPage, std::size_t{1} << 30);
}

// A peer on this host may have seen more memory, if not much more.
constexpr std::size_t kMostArenas = 4;

}  // namespace

std::shared_ptr<Mapping> Mapping::of(const Descriptor& fd, std::size_t least) {
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) throw_io("fstat of shared memory", errno);
  const auto size = static_cast<std::size_t>(info.st_size);
  if (size < least) throw Error(ErrorCode::kUnexpectedMessage, "the shared segment is too small");
  if (size / kMostArenas > arena_size()) {
    throw Error(ErrorCode::kUnexpectedMessage, "the shared segment is too large");
  }
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw Error(ErrorCode::kUnexpectedMessage,
                "the shared segment is not sealed against shrinking");
  }
  void* data =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd.get(), 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    if (error == EACCES || error == EPERM) {
      throw Error(ErrorCode::kUnexpectedMessage, "the shared segment cannot be written");
    }
    throw_io("mapping shared memory", error);
  }
  return std::shared_ptr<Mapping>(new Mapping(static_cast<std::byte*>(data), size));
}

Mapping::~Mapping() { ::munmap(data_, size_); }

Descriptor make_memfd(const char* name, std::size_t size) {
  Descriptor file(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) throw_io("memfd_create", errno);
  if (::ftruncate(file.get(), static_cast<off_t>(size)) != 0) throw_io("ftruncate", errno);
  // A peer must not be able to cut it under our feet.
  if (::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw_io("sealing shared memory", errno);
  }
  return file;
}

std::shared_ptr<Arena> Arena::create() {
  const std::size_t size = arena_size();
  Descriptor file = make_memfd("lockstep", size);
  auto mapping = Mapping::of(file, size);
  return std::shared_ptr<Arena>(new Arena(std::move(file), std::move(mapping)));
}

Arena::Arena(Descriptor file, std::shared_ptr<Mapping> mapping)
    : file_(std::move(file)), mapping_(std::move(mapping)) {
  free_[0] = mapping_->size();
}

Buffer Arena::allocate(std::size_t bytes) {
  const std::size_t size = round_up(std::max<std::size_t>(bytes, 1), kPage);
  const std::size_t unit = size >= kHugePage ? kHugePage : kPage;
  const std::lock_guard lock(mutex_);
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto [begin, length] = *it;
    const std::size_t at = round_up(begin, unit);
    if (at + size > begin + length) continue;
    free_.erase(it);
    if (at > begin) free_[begin] = at - begin;
    if (at + size < begin + length) free_[at + size] = begin + length - at - size;
    used_[at] = size;
    return Buffer(mapping_->data() + at, bytes,
                  [self = shared_from_this()](std::byte* data) { self->release(data); });
  }
  throw std::bad_alloc();
}

void Arena::release(std::byte* data) {
  const auto at = static_cast<std::size_t>(data - mapping_->data());
  const std::lock_guard lock(mutex_);
  const auto used = used_.find(at);
  LOCKSTEP_CHECK(used != used_.end());
  std::size_t begin = at;
  std::size_t size = used->second;
  used_.erase(used);
  // Gives the memory back; what is allocated here next is zero again.
  const int punched = ::fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                  static_cast<off_t>(begin), static_cast<off_t>(size));
  LOCKSTEP_CHECK(punched == 0);
  auto after = free_.lower_bound(begin);
  if (after != free_.end() && begin + size == after->first) {
    size += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == begin) {
      begin = before->first;
      size += before->second;
    }
  }
  free_[begin] = size;
}

std::optional<std::uint64_t> Arena::offset_of(const std::byte* data, std::size_t bytes) const {
  const std::byte* begin = mapping_->data();
  if (data < begin || data + bytes > begin + mapping_->size()) return std::nullopt;
  return static_cast<std::uint64_t>(data - begin);
}

}  // namespace lockstep
