// Preloaded into a program, counts its calls that change what is on disk under a name with
// KILL_AT_MATCH in it, and kills it with SIGKILL in the one numbered KILL_AT_CALL (from 1): before
// the call is made, and for a write when half of it is done. At the end the number of calls goes
// to the file KILL_AT_COUNT. With SLOW_SYNC_MS every fsync among them takes so much longer.

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

std::atomic<long> g_calls{0};

const char* setting(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool matches(const char* path) {
  const char* match = setting("KILL_AT_MATCH");
  return match[0] != 0 && path != nullptr && std::strstr(path, match) != nullptr;
}

bool matches(int file) {
  char link[64];
  char path[4096];
  std::snprintf(link, sizeof(link), "/proc/self/fd/%d", file);
  const ssize_t size = ::readlink(link, path, sizeof(path) - 1);
  if (size <= 0) return false;
  path[size] = 0;
  return matches(path);
}

// A name in an open folder.
bool matches(int folder, const char* name) { return matches(name) || matches(folder); }

// Whether the call now made is the last.
bool last_call() { return ++g_calls == std::atol(setting("KILL_AT_CALL")); }

void die() {
  ::kill(::getpid(), SIGKILL);
  for (;;) ::pause();
}

template <typename Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

struct Report {
  ~Report() {
    const char* path = setting("KILL_AT_COUNT");
    if (path[0] == 0) return;
    std::FILE* file = std::fopen(path, "w");
    if (file == nullptr) return;
    std::fprintf(file, "%ld\n", g_calls.load());
    std::fclose(file);
  }
} g_report;

}  // namespace

extern "C" {

ssize_t write(int file, const void* bytes, size_t size) {
  static const auto real = next<ssize_t (*)(int, const void*, size_t)>("write");
  if (matches(file) && last_call()) {
    (void)!real(file, bytes, size / 2);
    die();
  }
  return real(file, bytes, size);
}

int fsync(int file) {
  static const auto real = next<int (*)(int)>("fsync");
  if (matches(file)) {
    if (last_call()) die();
    ::usleep(static_cast<useconds_t>(std::atol(setting("SLOW_SYNC_MS")) * 1000));
  }
  return real(file);
}

int sync_file_range(int file, off64_t offset, off64_t size, unsigned flags) {
  static const auto real = next<int (*)(int, off64_t, off64_t, unsigned)>("sync_file_range");
  if (matches(file) && last_call()) die();
  return real(file, offset, size, flags);
}

ssize_t pwrite(int file, const void* bytes, size_t size, off_t position) {
  static const auto real = next<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite");
  if (matches(file) && last_call()) {
    (void)!real(file, bytes, size / 2, position);
    die();
  }
  return real(file, bytes, size, position);
}

int ftruncate(int file, off_t size) {
  static const auto real = next<int (*)(int, off_t)>("ftruncate");
  if (matches(file) && last_call()) die();
  return real(file, size);
}

int renameat(int from_folder, const char* from, int to_folder, const char* to) {
  static const auto real = next<int (*)(int, const char*, int, const char*)>("renameat");
  if ((matches(from_folder, from) || matches(to_folder, to)) && last_call()) die();
  return real(from_folder, from, to_folder, to);
}

int linkat(int from_folder, const char* from, int to_folder, const char* to, int flags) {
  static const auto real = next<int (*)(int, const char*, int, const char*, int)>("linkat");
  if ((matches(from_folder, from) || matches(to_folder, to)) && last_call()) die();
  return real(from_folder, from, to_folder, to, flags);
}

int mkdirat(int folder, const char* name, mode_t mode) {
  static const auto real = next<int (*)(int, const char*, mode_t)>("mkdirat");
  if (matches(folder, name) && last_call()) die();
  return real(folder, name, mode);
}

int unlinkat(int folder, const char* name, int flags) {
  static const auto real = next<int (*)(int, const char*, int)>("unlinkat");
  if (matches(folder, name) && last_call()) die();
  return real(folder, name, flags);
}

int openat(int folder, const char* name, int flags, ...) {
  static const auto real = next<int (*)(int, const char*, int, ...)>("openat");
  va_list arguments;
  va_start(arguments, flags);
  const auto mode = static_cast<mode_t>((flags & O_CREAT) != 0 ? va_arg(arguments, int) : 0);
  va_end(arguments);
  if ((flags & O_CREAT) != 0 && matches(folder, name) && last_call()) die();
  return real(folder, name, flags, mode);
}

}  // extern "C"
