#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/doctor/finding.h"

namespace lockstep {

struct HostCheckOptions {
  std::string host;        // how findings call this one
  std::string folder;      // where a run would write; empty: the current one
  std::string interface;   // that a run would use; empty: any
  std::string token;       // of the job
  std::string token_file;  // where it comes from; empty: from elsewhere
  std::string no_token;    // why it could not be read; empty: it could
  std::uint16_t port = 0;  // that a run would listen on; 0: any
  int workers = 1;         // that this host would run
  bool several_hosts = false;
  bool over_ssh = false;  // we were started so: a run may have another environment
};

// Looks at this host: version, processor, cores, memory, shared memory, open files, disk, GPUs,
// clock, name, interfaces, port and token. Takes about a second, and leaves nothing behind.
std::vector<Finding> check_host(const HostCheckOptions& options);

}  // namespace lockstep
