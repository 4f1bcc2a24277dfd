#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "lockstep/files/atomic_file.h"
#include "lockstep/files/storage.h"
#include "lockstep/report/metrics.h"

namespace lockstep {

// The lines of a run on their way into metrics.jsonl. Those that cannot be written now wait, in
// their order: while another process still holds the run's folder, and while its disk is full. That
// is no reason to stop training. One thread.
class MetricsQueue {
 public:
  struct Line {
    std::optional<std::int64_t> step = {};  // none: an event
    std::string text = {};
    std::function<void()> written = {};  // called when it is in the file
  };
  struct Options {
    std::string path = {};
    std::int64_t steps_done = 0;
    bool takes_over = false;  // what the file has of this run stays
    WriteGuard guard = {};
    std::function<bool()> held = [] { return true; };  // whether this process holds the folder
    // To open the file again reads all of it.
    std::chrono::nanoseconds between_openings = std::chrono::seconds(10);
    Storage* storage = &disk();
  };

  explicit MetricsQueue(Options options) : options_(std::move(options)) {}

  void add(Line line);
  // Lines that wait, each with its end: those that fit into `most_bytes`, the newest ones.
  std::string waiting(std::size_t most_bytes) const;
  // waiting() of the process that told of the run before this one: they come before this one's.
  void put_before(const std::string& lines);
  // Writes what waits. Tells people when lines begin to wait because they cannot be written, and
  // when they are written again.
  void write();
  // The same at the end of the run. Throws Error{kIo} where lines are left, also when another
  // process holds the folder.
  void write_last();

 private:
  void write_waiting();
  void open();

  Options options_;
  std::optional<MetricsFile> file_;
  std::optional<std::chrono::steady_clock::time_point> opened_;  // or tried to
  std::deque<Line> waiting_;
  bool fails_ = false;  // as people were told last
};

}  // namespace lockstep
