#pragma once

#include <cstdio>
#include <memory>
#include <string>

#include "lockstep/train/trainer.h"

namespace lockstep {

// One JSON object per step, as docs/metrics.md specifies; no line break.
// `bytes_per_token` is 0 where it is not known.
std::string metrics_line(const StepReport& report, double bytes_per_token);

// Bits per byte of text for a loss in nats per token; nothing when `bytes_per_token` is 0.
std::optional<double> bits_per_byte(double loss, double bytes_per_token);

// metrics.jsonl: every line complete on disk or in the system when written.
class MetricsFile {
 public:
  // A run that goes on after `steps_done` steps keeps the lines of those; a new one starts afresh.
  // Throws Error{kIo} when it cannot be written.
  explicit MetricsFile(std::string path, std::int64_t steps_done = 0);
  void write(const std::string& line);

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace lockstep
