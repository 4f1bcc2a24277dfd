#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/files/atomic_file.h"
#include "lockstep/train/step_report.h"

namespace lockstep {

// The JSON object of a step, as docs/metrics.md specifies, without a line break. `bytes_per_token`
// is 0 where it is unknown.
std::string metrics_line(const StepReport& report, double bytes_per_token);

// Bits per byte of text for a loss in nats per token; nothing when `bytes_per_token` is 0.
std::optional<double> bits_per_byte(double loss, double bytes_per_token);

// metrics.jsonl. A line is complete in the file when a call returns. A step has one line, however
// often it was computed. Throws Error{kIo} when the file cannot be written; then the line is not
// there, not even a part of it, unless the disk refuses that as well.
class MetricsFile {
 public:
  // A run that is resumed after `steps_done` steps keeps the lines of those steps; a new run starts
  // with an empty file.
  explicit MetricsFile(std::string path, std::int64_t steps_done = 0, WriteGuard guard = {},
                       Storage& storage = disk());
  // The file of the run that is under way, which another process has written so far: goes on after
  // its last complete line.
  static MetricsFile go_on(std::string path, WriteGuard guard = {}, Storage& storage = disk());

  // The line of a step; nothing if the file has that step, or a later one.
  void write_step(std::int64_t step, const std::string& line);
  // The line of an event.
  void write_event(const std::string& line);
  // After a line that could not be written: whether another one may follow. Otherwise the file must
  // be opened again: a part of the line may be there, or lines of another process.
  bool intact() const { return intact_; }

 private:
  struct GoOn {};
  MetricsFile(std::string path, WriteGuard guard, Storage& storage, GoOn);
  void write(const std::string& line);

  WriteGuard guard_;
  std::string path_;
  std::int64_t last_step_ = 0;  // that has a line
  std::unique_ptr<File> file_;
  bool intact_ = true;
};

}  // namespace lockstep
