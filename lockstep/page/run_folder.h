#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/report/run_record.h"

namespace lockstep {

// The record of a run in a folder, read from its metrics.jsonl bit by bit. One thread.
class RunFolder {
 public:
  explicit RunFolder(std::string folder) : folder_(std::move(folder)) {}

  // Reads on, up to so many bytes. A file that has become shorter is another run's, and read from
  // its beginning. What cannot be read is not there yet.
  void read(std::size_t most);
  const RunRecord& record() const { return record_; }
  const std::string& folder() const { return folder_; }

 private:
  std::string folder_;
  std::uint64_t read_ = 0;  // bytes of whole lines
  RunRecord record_;
};

// The size of the metrics.jsonl of a folder; 0 where there is none.
std::uint64_t metrics_bytes(const std::string& folder);

// The names of the folders beside `folder` that have runs in them, itself not among them, newest
// first; at most `most`.
std::vector<std::string> runs_beside(const std::string& folder, std::size_t most);

}  // namespace lockstep
