#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/flight/flight_file.h"

namespace lockstep {

// The recorders of the ranks that this process can see: its own, or those of the processes that it
// has started. For whoever wants to look at a run while it goes on. Thread-safe.
class FlightBoard {
 public:
  void add(std::shared_ptr<FlightRecorder> recorder) {
    const std::lock_guard lock(mutex_);
    recorders_.push_back(std::move(recorder));
  }
  void remove(const FlightRecorder& recorder) {
    const std::lock_guard lock(mutex_);
    std::erase_if(recorders_, [&](const auto& each) { return each.get() == &recorder; });
  }
  std::vector<std::shared_ptr<FlightRecorder>> all() const {
    const std::lock_guard lock(mutex_);
    return recorders_;
  }
  // What they did until now: {"ranks": [...]}, each as its file would be.
  std::string json() const {
    std::string text = "{\"ranks\":[";
    for (const auto& each : all()) {
      if (text.back() != '[') text += ',';
      text += encode(flight_file_of(each->snapshot(), "/api/flight asked for it"));
    }
    return text + "]}\n";
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<FlightRecorder>> recorders_;  // guarded by mutex_
};

}  // namespace lockstep
