#include "lockstep/launch/secret_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

constexpr std::string_view kPrefix = "lockstep-";
constexpr mode_t kForOthers = S_IRWXG | S_IRWXO;

std::string folder() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime != nullptr && *runtime != '\0') return runtime;
  return fmt::format("/tmp/lockstep-{}", ::getuid());
}

std::string path_of(const SocketAddress& address) {
  return fmt::format("{}/{}{}-{}", folder(), kPrefix, address.host(), address.port());
}

bool is_ours_alone(const struct stat& entry) {
  return entry.st_uid == ::getuid() && (entry.st_mode & kForOthers) == 0;
}

// Empty if there is none, or if it is not this user's alone.
std::string read_if_ours(const std::string& path) {
  // Who waited for a writer of a pipe could be held up by whoever has put it there.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC));
  struct stat entry {};
  if (!file || ::fstat(file.get(), &entry) != 0 || !S_ISREG(entry.st_mode) ||
      !is_ours_alone(entry)) {
    return {};
  }
  std::array<char, 256> text{};
  const ssize_t size = ::read(file.get(), text.data(), text.size());
  return size > 0 ? std::string(text.data(), static_cast<std::size_t>(size)) : "";
}

}  // namespace

SecretFile::SecretFile(const SocketAddress& bound, const std::string& secret)
    : path_(path_of(bound)) {
  const std::string where = folder();
  struct stat entry {};
  if (::mkdir(where.c_str(), S_IRWXU) != 0 && errno != EEXIST) throw_io("making " + where, errno);
  if (::lstat(where.c_str(), &entry) != 0) throw_io("looking at " + where, errno);
  if (!S_ISDIR(entry.st_mode) || !is_ours_alone(entry)) {
    throw Error(ErrorCode::kIo,
                where +
                    " is not this user's alone, so the job's secret cannot be kept there; give "
                    "the job a --token-file");
  }
  ::unlink(path_.c_str());  // of a job that was killed
  file_ = Descriptor(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                            S_IRUSR | S_IWUSR));
  if (!file_) throw_io("making " + path_, errno);
  const ssize_t written = ::write(file_.get(), secret.data(), secret.size());
  if (written != static_cast<ssize_t>(secret.size())) {
    const int error = written < 0 ? errno : ENOSPC;
    ::unlink(path_.c_str());  // a part of a secret helps nobody
    throw_io("writing " + path_, error);
  }
}

// Another job may have the address by now, and its own file there.
SecretFile::~SecretFile() {
  struct stat own {};
  struct stat there {};
  if (::fstat(file_.get(), &own) != 0 || ::lstat(path_.c_str(), &there) != 0) return;
  if (own.st_dev == there.st_dev && own.st_ino == there.st_ino) ::unlink(path_.c_str());
}

std::string read_secret_file(const SocketAddress& address) {
  for (const SocketAddress& bound : {address, SocketAddress::any(AF_INET, address.port()),
                                     SocketAddress::any(AF_INET6, address.port())}) {
    if (std::string secret = read_if_ours(path_of(bound)); !secret.empty()) return secret;
  }
  return {};
}

std::vector<std::string> read_secret_files() {
  std::vector<std::string> secrets;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder(), error), end; !error && entry != end;
       entry.increment(error)) {
    if (!entry->path().filename().string().starts_with(kPrefix)) continue;
    if (std::string secret = read_if_ours(entry->path()); !secret.empty()) {
      secrets.push_back(std::move(secret));
    }
  }
  return secrets;
}

}  // namespace lockstep
