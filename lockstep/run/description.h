#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/data/tokenizer.h"
#include "lockstep/train/checkpoint/run_state.h"

namespace lockstep {

class Job;

// What a worker that joins a job is told of its run: all that is not local to it. While the job
// forms there is nothing but the options. Pure.
struct RunDescription {
  std::string options;          // of the command, as run.json has them
  std::string out;              // the folder, as the first workers call it; may be empty
  std::string data;             // the data's hash
  bool on_device = false;       // ReducerOptions::on_device
  bool page = false;            // the centre's process shows the run: see Job::tell()
  std::optional<RunState> run;  // its settings, once it has begun; the step is that of the start
  std::shared_ptr<const Tokenizer> tokenizer;  // may be none
};

std::vector<std::byte> encode(const RunDescription& description);
// Nothing for bytes that are no description. Throws Error{kIo} for a tokenizer that is broken.
std::optional<RunDescription> decode_run_description(std::span<const std::byte> bytes);

// What a job tells this newcomer to it. Throws Error{kUnexpectedMessage} for bytes that are no
// description, and as decode_run_description() does.
RunDescription description_of(const Job& job);

}  // namespace lockstep
