#include "lockstep/files/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "lockstep/base/descriptor.h"
#include "lockstep/base/error.h"
#include "lockstep/base/utf8.h"

namespace lockstep {
namespace {

// A place that cannot be read is an error here, and SIGBUS once the file is mapped.
void read_through(int file, std::size_t size, const std::string& path) {
  std::vector<std::byte> piece(std::min<std::size_t>(size, std::size_t{1} << 20));
  for (std::size_t at = 0; at < size;) {
    const ssize_t count = ::pread(file, piece.data(), piece.size(), static_cast<off_t>(at));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_io(fmt::format("reading {} at byte {}", path, at), errno);
    if (count == 0) throw_bad_file(path, at, "the file ends here, and was longer");
    at += static_cast<std::size_t>(count);
  }
}

std::uintptr_t number_of(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }

constexpr std::size_t kWhole = SIZE_MAX;

struct sigaction before_us;  // of SIGBUS

}  // namespace

// Guards are used again and never freed, so that the handler can walk through them at any time.
struct MappedFile::Guard {
  std::atomic<std::uintptr_t> begin = 0;  // 0: of no mapping
  std::atomic<std::uintptr_t> end = 0;
  std::atomic<std::size_t> broken = kWhole;  // the first byte that could not be read
  Guard* next = nullptr;

  static inline std::atomic<Guard*> first = nullptr;
  static inline std::mutex mutex;  // of those who take guards
};

void MappedFile::on_bus_error(int, siginfo_t* info, void*) {
  const int error = errno;
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const std::uintptr_t address = number_of(info->si_addr);
  for (Guard* guard = Guard::first.load(); guard != nullptr; guard = guard->next) {
    const std::uintptr_t begin = guard->begin.load();
    const std::uintptr_t end = guard->end.load();
    if (begin == 0 || address < begin || address >= (end + page - 1) / page * page) continue;
    const std::uintptr_t from = address / page * page;
    if (::mmap(reinterpret_cast<void*>(from), end - from, PROT_READ,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) {
      break;
    }
    std::size_t known = guard->broken.load();
    while (from - begin < known && !guard->broken.compare_exchange_weak(known, from - begin)) {
    }
    errno = error;
    return;
  }
  // None of ours: it comes again, for whoever had it before.
  ::sigaction(SIGBUS, &before_us, nullptr);
}

MappedFile::Guard* MappedFile::take_guard(std::span<const std::byte> bytes) {
  const std::lock_guard lock(Guard::mutex);
  if (Guard::first.load() == nullptr) {
    struct sigaction ours {};
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO;
    ::sigemptyset(&ours.sa_mask);
    if (::sigaction(SIGBUS, &ours, &before_us) != 0) throw_io("sigaction", errno);
  }
  Guard* guard = Guard::first.load();
  while (guard != nullptr && guard->begin.load() != 0) guard = guard->next;
  if (guard == nullptr) {
    guard = new Guard;
    guard->next = Guard::first.load();
    Guard::first.store(guard);
  }
  guard->broken.store(kWhole);
  guard->end.store(number_of(bytes.data()) + bytes.size());
  guard->begin.store(number_of(bytes.data()));
  return guard;
}

MappedFile::MappedFile(std::string path) : path_(std::move(path)) {
  // A pipe has no writer to wait for.
  const Descriptor file(::open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (!file) throw_io("opening " + path_, errno);
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw_io("reading " + path_, errno);
  if (S_ISDIR(status.st_mode)) throw_io("reading " + path_, EISDIR);
  if (!S_ISREG(status.st_mode)) throw_bad_file(path_, "not a regular file");
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size == 0) return;
  read_through(file.get(), size, path_);
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (data == MAP_FAILED) throw_io("mapping " + path_, errno);
  bytes_ = {static_cast<const std::byte*>(data), size};
  guard_ = take_guard(bytes_);
}

void MappedFile::require_whole() const {
  if (guard_ == nullptr || guard_->broken.load() == kWhole) return;
  throw_bad_file(path_, guard_->broken.load(),
                 "cannot be read any more: the file was cut short, or its disk fails");
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      bytes_(std::exchange(other.bytes_, {})),
      guard_(std::exchange(other.guard_, nullptr)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(bytes_, other.bytes_);
  std::swap(guard_, other.guard_);
  return *this;
}

MappedFile::~MappedFile() {
  if (bytes_.empty()) return;
  if (guard_ != nullptr) guard_->begin.store(0);
  ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

namespace {

// What people take for text that is not UTF-8, by its first bytes, and what they can do.
std::string_view what_it_may_be(std::string_view bytes) {
  constexpr std::string_view kPacked[] = {"\x1f\x8b", "PK\x03\x04", "\x28\xb5\x2f\xfd",
                                          "\xfd"
                                          "7zXZ",
                                          "BZh"};
  for (const std::string_view packed : kPacked) {
    if (bytes.starts_with(packed)) return ": the file is compressed, unpack it first";
  }
  if (bytes.starts_with("\xff\xfe") || bytes.starts_with("\xfe\xff")) {
    return ": the file is UTF-16, which iconv -f UTF-16 -t UTF-8 turns into UTF-8";
  }
  return "";
}

}  // namespace

std::string_view text_of(const MappedFile& file) {
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()),
                              file.bytes().size());
  if (text.empty()) throw_bad_file(file.path(), "the file is empty");
  const auto not_utf8 = find_not_utf8(text);
  const auto zero = text.find('\0');
  file.require_whole();
  if (not_utf8) {
    throw_bad_file(file.path(), *not_utf8,
                   fmt::format("0x{:02x} is not UTF-8 here{}",
                               static_cast<unsigned char>(text[*not_utf8]), what_it_may_be(text)));
  }
  if (zero != std::string_view::npos) {
    throw_bad_file(file.path(), zero, "a zero byte, which ends documents, is not text");
  }
  return text;
}

void throw_bad_file(const std::string& path, const std::string& what) {
  throw Error(ErrorCode::kIo, fmt::format("{}: {}", path, what));
}

void throw_bad_file(const std::string& path, std::size_t position, const std::string& what) {
  throw Error(ErrorCode::kIo, fmt::format("{}: byte {}: {}", path, position, what));
}

}  // namespace lockstep
