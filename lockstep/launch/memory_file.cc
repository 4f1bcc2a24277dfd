#include "lockstep/launch/memory_file.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "lockstep/base/error.h"

namespace lockstep {

Descriptor memory_file(const std::string& name, const std::string& text) {
  if (text.empty()) return Descriptor();
  Descriptor file(::memfd_create(name.c_str(), MFD_CLOEXEC));
  if (!file) throw_io("memfd_create", errno);
  if (::write(file.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    throw_io(fmt::format("writing the memory file {}", name), errno);
  }
  return file;
}

}  // namespace lockstep
