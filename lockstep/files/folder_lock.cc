#include "lockstep/files/folder_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>
#include <fstream>
#include <sstream>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/files/atomic_file.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

constexpr auto kPause = 20ms;  // the system cannot wait for a lock with a deadline

// " (process 4711)", or nothing where the system does not tell.
std::string holder_of(int folder) {
  struct stat status {};
  if (::fstat(folder, &status) != 0) return "";
  // 1: FLOCK  ADVISORY  WRITE 4711 fe:00:1835 0 EOF
  std::ifstream locks("/proc/locks");
  for (std::string line; std::getline(locks, line);) {
    std::istringstream words(line);
    std::string number, kind, advisory, mode, process, place;
    words >> number >> kind >> advisory >> mode >> process >> place;
    const std::string inode = place.substr(place.rfind(':') + 1);
    if (kind == "FLOCK" && inode == std::to_string(status.st_ino)) {
      return fmt::format(" (process {})", process);
    }
  }
  return "";
}

}  // namespace

FolderLock::FolderLock(const std::string& folder, Deadline deadline) {
  make_folder(folder);
  folder_ = Descriptor(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder_) throw_io("opening " + folder, errno);
  while (::flock(folder_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return;
    if (deadline.expired()) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("another run{} is writing to {}: wait for it or choose another folder",
                      holder_of(folder_.get()), folder));
    }
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace lockstep
