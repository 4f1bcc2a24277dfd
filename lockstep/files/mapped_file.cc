#include "lockstep/files/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
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

}  // namespace

MappedFile::MappedFile(std::string path) : path_(std::move(path)) {
  const Descriptor file(::open(path_.c_str(), O_RDONLY | O_CLOEXEC));
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
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

std::string_view text_of(const MappedFile& file) {
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()),
                              file.bytes().size());
  if (text.empty()) throw_bad_file(file.path(), "the file is empty");
  if (const auto position = find_not_utf8(text)) {
    throw_bad_file(
        file.path(), *position,
        fmt::format("0x{:02x} is not UTF-8 here", static_cast<unsigned char>(text[*position])));
  }
  if (const auto position = text.find('\0'); position != std::string_view::npos) {
    throw_bad_file(file.path(), position, "a zero byte, which ends documents, is not text");
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
