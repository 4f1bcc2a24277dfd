#pragma once

#include <string>
#include <vector>

#include "lockstep/base/descriptor.h"
#include "lockstep/net/socket/address.h"

namespace lockstep {

// The secret of a job that listens without a token, where commands of the same user on the same
// host find it: a file that only that user can read, named after the address where the job listens.
// It goes with this object. Errors are Error{kIo}.
class SecretFile {
 public:
  // `bound` is where a listener of this process is bound: a file of that name is left over from a
  // job that was killed, and goes.
  SecretFile(const SocketAddress& bound, const std::string& secret);
  ~SecretFile();
  SecretFile(const SecretFile&) = delete;
  SecretFile& operator=(const SecretFile&) = delete;

 private:
  const std::string path_;
  Descriptor file_;  // stays open: the number of a file that is gone may be another's
};

// Of the job that listens at this address, or at all addresses with its port. Empty if there is
// none, or if it is not this user's alone.
std::string read_secret_file(const SocketAddress& address);
// Of all jobs of this user on this host; some of them may have been killed.
std::vector<std::string> read_secret_files();

}  // namespace lockstep
