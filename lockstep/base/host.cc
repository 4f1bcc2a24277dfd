#include "lockstep/base/host.h"

#include <fmt/format.h>
#include <gnu/libc-version.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <fstream>

#include "lockstep/base/error.h"
#include "lockstep/base/utf8.h"

namespace lockstep {
namespace {

std::string instruction_set() {
#if defined(__x86_64__)
  std::string text = "x86-64";
  const auto add = [&text](bool supported, const char* name) {
    if (supported) text += fmt::format(" {}", name);
  };
  add(__builtin_cpu_supports("avx2"), "avx2");
  add(__builtin_cpu_supports("fma"), "fma");
  add(__builtin_cpu_supports("avx512f"), "avx512f");
  add(__builtin_cpu_supports("avx512bw"), "avx512bw");
  add(__builtin_cpu_supports("avx512vl"), "avx512vl");
  return text;
#elif defined(__aarch64__)
  return "aarch64";
#else
  return "unknown processor";
#endif
}

HostIdentity read_host() {
  HostIdentity host;
  char name[HOST_NAME_MAX + 1] = {};
  if (::gethostname(name, sizeof(name) - 1) != 0) throw_io("asking for the host's name", errno);
  host.hostname = repair_utf8(name, "?");  // the kernel takes any bytes, the protocol UTF-8

  std::ifstream boot_id("/proc/sys/kernel/random/boot_id");
  if (!std::getline(boot_id, host.boot_id)) throw_io("reading the boot id", EIO);

  struct stat status {};
  if (::stat("/proc/self/ns/net", &status) != 0) throw_io("reading the network namespace", errno);
  host.network_namespace = status.st_ino;
  return host;
}

}  // namespace

HostIdentity this_host() {
  // Once: who is out of descriptors later has to tell it, too.
  static const HostIdentity host = read_host();
  return host;
}

std::string own_process_space() {
  struct stat status {};
  const bool known = ::stat("/proc/self/ns/pid", &status) == 0;
  return fmt::format("{} {}", this_host().boot_id, known ? status.st_ino : 0);
}

bool same_host(const HostIdentity& a, const HostIdentity& b) {
  return a.boot_id == b.boot_id && a.network_namespace == b.network_namespace;
}

std::string host_fingerprint() {
  return fmt::format("{}; glibc {}", instruction_set(), ::gnu_get_libc_version());
}

}  // namespace lockstep
