#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

// The secret of a job that listens without a token, where commands of the same user on the same
// host find it: a file that only that user can read, named after the job's port. It goes with this
// object. Errors are Error{kIo}.
class SecretFile {
 public:
  SecretFile(std::uint16_t port, const std::string& secret);
  ~SecretFile();
  SecretFile(const SecretFile&) = delete;
  SecretFile& operator=(const SecretFile&) = delete;

 private:
  const std::string path_;
};

// Empty if there is none, or if it is not this user's alone.
std::string read_secret_file(std::uint16_t port);

}  // namespace lockstep
