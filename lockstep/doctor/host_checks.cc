#include "lockstep/doctor/host_checks.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "lockstep/base/cores.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/descriptor.h"
#include "lockstep/base/error.h"
#include "lockstep/base/host.h"
#include "lockstep/base/version.h"
#include "lockstep/comm/mpi/mpi.h"
#include "lockstep/comm/nccl/device_reducer.h"
#include "lockstep/model/gpu_model.h"
#include "lockstep/net/socket/address.h"
#include "lockstep/net/socket/interface.h"
#include "lockstep/net/socket/socket.h"
#include "lockstep/run/memory.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr double kMB = 1e6;
constexpr std::size_t kMemoryPerWorker = std::size_t{1} << 30;
constexpr std::size_t kEnoughSharedMemory = std::size_t{64} << 20;
constexpr rlim_t kEnoughFiles = 1024;
constexpr std::size_t kDiskProbe = std::size_t{8} << 20;
constexpr double kSlowDisk = 30 * kMB;  // bytes per second
constexpr double kSlowSync = 0.1;       // seconds
constexpr double kFullDisk = 1000 * kMB;
constexpr std::size_t kShortToken = 16;
constexpr auto kLookUpPatience = 3s;

std::string size_text(double bytes) {
  if (bytes >= 1e9) return fmt::format("{:.1f} GB", bytes / 1e9);
  return fmt::format("{:.0f} MB", bytes / 1e6);
}

std::string first_line(const std::string& path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

// The findings of one host, in the order in which people read them.
class HostChecks {
 public:
  explicit HostChecks(const HostCheckOptions& options) : options_(options) {}

  std::vector<Finding> run() {
    version_and_processor();
    cores();
    memory();
    shared_memory();
    open_files();
    disk();
    gpus();
    clock();
    name();
    interfaces();
    port();
    token();
    return std::move(findings_);
  }

 private:
  void add(std::string check, Verdict verdict, std::string found, std::string advice = {}) {
    findings_.push_back(
        {options_.host, std::move(check), verdict, std::move(found), std::move(advice)});
  }

  void version_and_processor() {
    const std::string mpi = mpi_library();
    add("version", Verdict::kGood,
        fmt::format("lockstep {}, {}", version(), mpi.empty() ? "without MPI" : "with " + mpi));
    add("processor", Verdict::kGood, host_fingerprint());
  }

  void cores() {
    const int own = available_cores();
    const bool enough = own >= options_.workers;
    add("cores", enough ? Verdict::kGood : Verdict::kWarning,
        fmt::format("{} for {} worker{}", own, options_.workers, options_.workers == 1 ? "" : "s"),
        enough ? "" : "start fewer workers here, or give the process more cores (taskset, cgroup)");
  }

  void memory() {
    const auto available = available_memory();
    if (!available) {
      return add("memory", Verdict::kWarning, "the system does not tell",
                 "mount /proc; lockstep train --dry-run says what a model needs");
    }
    const bool enough = *available >= kMemoryPerWorker * static_cast<std::size_t>(options_.workers);
    add("memory", enough ? Verdict::kGood : Verdict::kWarning,
        size_text(static_cast<double>(*available)) + " available",
        enough ? "" : "lockstep train --dry-run says what a model needs; end what else runs here");
  }

  // Our own shared memory is in memfds; MPI and NCCL use this folder.
  void shared_memory() {
    struct statvfs shm {};
    if (::statvfs("/dev/shm", &shm) != 0) {
      return add("/dev/shm", Verdict::kWarning, "is not there",
                 "mount a tmpfs there if you use MPI or NCCL");
    }
    const std::size_t free = shm.f_bavail * shm.f_frsize;
    const bool enough = free >= kEnoughSharedMemory;
    add("/dev/shm", enough ? Verdict::kGood : Verdict::kWarning,
        size_text(static_cast<double>(free)) + " free",
        enough ? "" : "MPI and NCCL need more; containers: --shm-size=1g");
  }

  void open_files() {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    const bool enough = limit.rlim_cur >= kEnoughFiles;
    add("open files", enough ? Verdict::kGood : Verdict::kWarning,
        limit.rlim_cur == RLIM_INFINITY ? "no limit" : fmt::format("up to {}", limit.rlim_cur),
        enough ? "" : "ulimit -n 4096, or LimitNOFILE= of the service");
  }

  // A file is written and synced as a checkpoint is.
  void disk() {
    namespace fs = std::filesystem;
    fs::path folder = options_.folder.empty() ? fs::path(".") : fs::path(options_.folder);
    while (!fs::exists(folder) && folder.has_parent_path()) folder = folder.parent_path();
    if (!fs::exists(folder)) folder = ".";
    const std::string where = fs::canonical(folder).string();
    const Descriptor file(
        ::open(folder.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, S_IRUSR | S_IWUSR));
    std::string named;
    Descriptor other;
    if (!file) {  // not all file systems have files without names
      named = (folder / "lockstep-doctor-XXXXXX").string();
      other = Descriptor(::mkstemp(named.data()));
      if (!other) {
        return add("disk", Verdict::kBad, fmt::format("{}: {}", where, std::strerror(errno)),
                   "give --out a folder that can be written to");
      }
      ::unlink(named.c_str());
    }
    const int target = file ? file.get() : other.get();
    const std::vector<char> bytes(kDiskProbe, 'x');
    const auto begin = Clock::now();
    std::size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t count = ::write(target, bytes.data() + done, bytes.size() - done);
      if (count <= 0) {
        return add("disk", Verdict::kBad, fmt::format("{}: {}", where, std::strerror(errno)),
                   "free some space, or give --out another folder");
      }
      done += static_cast<std::size_t>(count);
    }
    ::fsync(target);
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    const auto again = Clock::now();
    [[maybe_unused]] const ssize_t count = ::pwrite(target, "y", 1, 0);
    ::fsync(target);
    const double sync = std::chrono::duration<double>(Clock::now() - again).count();
    struct statvfs system {};
    ::statvfs(where.c_str(), &system);
    const double free = static_cast<double>(system.f_bavail) * static_cast<double>(system.f_frsize);
    const double rate = static_cast<double>(kDiskProbe) / seconds;
    const std::string found =
        fmt::format("{}: {} free, {:.0f} MB/s with sync, a sync takes {:.1f} ms", where,
                    size_text(free), rate / kMB, sync * 1e3);
    if (free < kFullDisk) return add("disk", Verdict::kWarning, found, "free some space");
    const bool slow = rate < kSlowDisk || sync > kSlowSync;
    add("disk", slow ? Verdict::kWarning : Verdict::kGood, found,
        slow ? "checkpoints take long: save seldom (--save-every), or to a faster disk" : "");
  }

  void gpus() {
    int count = 0;
    std::string name;
    try {
      count = gpu_count();
      if (count > 0) name = gpu_name();
    } catch (const Error& error) {
      return add("GPU", Verdict::kWarning, std::string(error.message()),
                 "look at nvidia-smi; --device cpu works without");
    }
    const std::string driver = first_line("/proc/driver/nvidia/version");
    if (count > 0) {
      const std::string nccl = nccl_version();
      return add("GPU", Verdict::kGood,
                 fmt::format("{} x {}; {}; {}", count, name, driver.empty() ? "no driver" : driver,
                             nccl.empty() ? "built without NCCL" : "NCCL " + nccl));
    }
    if (driver.empty()) return add("GPU", Verdict::kGood, "none");
    add("GPU", Verdict::kWarning, "none that this program can use, but there is " + driver,
        "build with CUDA (the preset cuda), or look at CUDA_VISIBLE_DEVICES");
  }

  void clock() {
    timex state{};
    const int status = ::adjtimex(&state);
    const bool synchronised = status != TIME_ERROR && (state.status & STA_UNSYNC) == 0;
    const auto now = std::chrono::system_clock::now();
    const auto seconds = std::chrono::time_point_cast<std::chrono::seconds>(now);
    // 2024: a clock that has never been set is before it.
    if (seconds.time_since_epoch() < 1'704'067'200s) {
      return add("clock", Verdict::kBad, "is years behind", "set it (timedatectl set-ntp true)");
    }
    add("clock", synchronised || !options_.several_hosts ? Verdict::kGood : Verdict::kWarning,
        synchronised ? "synchronised" : "nobody keeps it synchronised",
        synchronised || !options_.several_hosts
            ? ""
            : "times of hosts will differ (timedatectl set-ntp true, chrony)");
  }

  void name() {
    const std::string own = this_host().hostname;
    try {
      const auto addresses = resolve({own, 1}, Deadline::after(kLookUpPatience));
      std::vector<std::string> hosts;
      for (const SocketAddress& each : addresses) {
        if (std::ranges::find(hosts, each.host()) == hosts.end()) hosts.push_back(each.host());
      }
      const bool only_loopback = std::ranges::all_of(addresses, &SocketAddress::is_loopback);
      const bool warn = only_loopback && options_.several_hosts;
      add("name", warn ? Verdict::kWarning : Verdict::kGood,
          fmt::format("{} is {}", own, fmt::join(hosts, ", ")),
          warn ? "others cannot reach it by this name: use an address as MASTER_ADDR" : "");
    } catch (const Error& error) {
      add("name", options_.several_hosts ? Verdict::kWarning : Verdict::kGood,
          fmt::format("{} has no address: {}", own, error.message()),
          options_.several_hosts ? "use an address as MASTER_ADDR, or add it to /etc/hosts" : "");
    }
  }

  void interfaces() {
    ifaddrs* list = nullptr;
    if (::getifaddrs(&list) != 0) return;
    const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, ::freeifaddrs);
    std::map<std::string, std::vector<std::string>> up;
    for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
      const bool usable = (each->ifa_flags & IFF_UP) != 0 && (each->ifa_flags & IFF_LOOPBACK) == 0;
      if (!usable || each->ifa_addr == nullptr) continue;
      const int family = each->ifa_addr->sa_family;
      if (family != AF_INET && family != AF_INET6) continue;
      const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
      up[each->ifa_name].push_back(SocketAddress(each->ifa_addr, size).host());
    }
    std::vector<std::string> texts;
    for (const auto& [interface, addresses] : up) {
      texts.push_back(fmt::format("{} {} (mtu {})", interface, fmt::join(addresses, " "),
                                  first_line("/sys/class/net/" + interface + "/mtu")));
    }
    const std::string found =
        texts.empty() ? "only loopback" : fmt::format("{}", fmt::join(texts, ", "));
    if (!options_.interface.empty() && !up.contains(options_.interface)) {
      return add("interfaces", Verdict::kBad, found,
                 fmt::format("--interface {} is not one of them", options_.interface));
    }
    const bool missing = up.empty() && options_.several_hosts;
    add("interfaces", missing ? Verdict::kBad : Verdict::kGood, found,
        missing ? "no other host can be reached: bring an interface up" : "");
  }

  void port() {
    try {
      const SocketAddress any = options_.several_hosts ? SocketAddress::any(AF_INET, options_.port)
                                                       : SocketAddress::loopback_v4(options_.port);
      const Socket listener = listen_tcp(any);
      add("port", Verdict::kGood,
          options_.port == 0 ? fmt::format("any; workers take theirs from {}", port_range())
                             : fmt::format("{} is free; workers take others from {}", options_.port,
                                           port_range()));
    } catch (const Error& error) {
      add("port", Verdict::kBad, std::string(error.message()),
          fmt::format("take another port, or end the process that has it (ss -ltnp 'sport = "
                      ":{}')",
                      options_.port));
    }
  }

  static std::string port_range() {
    std::string range = first_line("/proc/sys/net/ipv4/ip_local_port_range");
    std::ranges::replace(range, '\t', '-');
    return range;
  }

  void token() {
    if (!options_.no_token.empty()) {
      return add("token", Verdict::kBad, options_.no_token,
                 "the same file on all hosts, readable by its owner only");
    }
    if (options_.token.empty() && options_.over_ssh) {
      return add("token", Verdict::kWarning, "there is none where ssh starts commands",
                 "a run needs the same one on all hosts: --token-file, or LOCKSTEP_TOKEN there");
    }
    if (options_.token.empty()) {
      const bool needed = options_.several_hosts;
      return add("token", needed ? Verdict::kBad : Verdict::kGood,
                 needed ? "there is none" : "none, and on one host none is needed",
                 needed ? "the same one on all hosts: LOCKSTEP_TOKEN=$(openssl rand -hex 16), or "
                          "--token-file"
                        : "");
    }
    struct stat file {};
    if (!options_.token_file.empty() && ::stat(options_.token_file.c_str(), &file) == 0 &&
        (file.st_mode & (S_IRGRP | S_IROTH)) != 0) {
      return add("token", Verdict::kWarning, options_.token_file + " can be read by others",
                 "chmod 600 " + options_.token_file);
    }
    const bool enough = options_.token.size() >= kShortToken;
    const Verdict verdict = options_.several_hosts ? Verdict::kBad : Verdict::kWarning;
    add("token", enough ? Verdict::kGood : verdict,
        fmt::format("{} characters", options_.token.size()),
        enough ? "" : "between hosts it needs 16: openssl rand -hex 16 makes one");
  }

  const HostCheckOptions& options_;
  std::vector<Finding> findings_;
};

}  // namespace

std::vector<Finding> check_host(const HostCheckOptions& options) {
  return HostChecks(options).run();
}

}  // namespace lockstep
