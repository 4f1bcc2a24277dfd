#include "lockstep/launch/mpirun.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "lockstep/base/error.h"
#include "lockstep/launch/piped_process.h"

namespace lockstep {

void become_mpirun(const std::string& library, int ranks,
                   const std::vector<std::string>& arguments) {
  if (library.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "this program was built without MPI");
  }
  const bool open_mpi = library.starts_with("Open MPI");
  std::vector<std::string> words = {open_mpi ? "mpirun.openmpi" : "mpirun.mpich", "-n",
                                    std::to_string(ranks)};
  if (open_mpi) {
    words.emplace_back("--oversubscribe");
    if (::geteuid() == 0) words.emplace_back("--allow-run-as-root");
  }
  words.push_back(std::filesystem::read_symlink("/proc/self/exe"));
  words.insert(words.end(), arguments.begin(), arguments.end());
  ::execvp(words[0].c_str(), pointers_to(words).data());
  words[0] = "mpirun";  // where only one MPI is installed
  ::execvp(words[0].c_str(), pointers_to(words).data());
  throw_io(fmt::format("starting mpirun of {}", library), errno);
}

}  // namespace lockstep
