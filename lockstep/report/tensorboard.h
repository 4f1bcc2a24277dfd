#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "lockstep/files/atomic_file.h"
#include "lockstep/train/step_report.h"

namespace lockstep {

// What an event file of TensorBoard is made of. Pure.

// A record: length, data, and a masked CRC-32C of each.
std::string tfevents_record(std::string_view data);
struct ScalarValue {
  std::string tag;
  double value = 0;
};
// An event with scalars, as protocol buffers have it. `time` is in seconds since 1970.
std::string scalars_event(double time, std::int64_t step, std::span<const ScalarValue> values);
std::string text_event(double time, std::int64_t step, std::string_view tag, std::string_view text);

// One event file, for TensorBoard. A process writes one of its own; TensorBoard reads all that are
// in the folder. Throws Error{kIo} when the file cannot be written; then the event is not there,
// not even a part of it, unless the disk refuses that as well. One thread.
class TensorBoardFile {
 public:
  // In OUT/tensorboard. What earlier files tell of steps after `steps_done` does not count.
  TensorBoardFile(const std::string& out, std::int64_t steps_done, WriteGuard guard = {},
                  Storage& storage = disk());

  // Scalars of a step; the phases of the ranks at most once a second. Of a step that comes twice,
  // because the run went back, the first counts.
  void add(const StepReport& report);
  void add_text(std::string_view tag, std::string_view text, std::int64_t step);

 private:
  void write(const std::string& record);

  const WriteGuard guard_;
  std::int64_t last_step_;
  std::unique_ptr<File> file_;
  std::optional<std::chrono::steady_clock::time_point> told_phases_;
};

}  // namespace lockstep
