#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
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
  // How ranks of the job that this process does not see are asked to write their files; tells
  // whether they could be. Must not wait.
  void set_ask(std::function<bool()> ask) {
    const std::lock_guard lock(mutex_);
    ask_ = std::move(ask);
  }
  void ask_others() {
    const std::lock_guard lock(mutex_);
    if (ask_) ask_();
  }
  // What they did until now: {"ranks": [...], "asked": [...]}, each of the ranks as its file would
  // be, and which others were asked to write theirs: not more often than every ten seconds, however
  // often somebody looks.
  std::string json() {
    std::string ranks;
    std::vector<bool> seen;
    std::ptrdiff_t starting =
        0;  // they have no rank yet, but will be one of those that are missing
    for (const auto& each : all()) {
      const FlightFile file = flight_file_of(each->snapshot(), "/api/flight asked for it");
      if (!ranks.empty()) ranks += ',';
      ranks += encode(file);
      if (file.rank < 0) {
        ++starting;
        continue;
      }
      const auto size = static_cast<std::size_t>(std::max(file.world_size, file.rank + 1));
      if (seen.size() < size) seen.resize(size);
      seen[static_cast<std::size_t>(file.rank)] = true;
    }
    std::string others;
    const bool elsewhere = std::ranges::count(seen, false) > starting;
    for (std::size_t rank = 0; elsewhere && rank < seen.size(); ++rank) {
      if (!seen[rank]) others += (others.empty() ? "" : ",") + std::to_string(rank);
    }
    const std::lock_guard lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    if (!others.empty() && ask_ && (asked_at_ == Time{} || now - asked_at_ >= kBetweenAsks)) {
      asked_at_ = now;
      asked_ = ask_();
    }
    return "{\"ranks\":[" + ranks + "],\"asked\":[" + (asked_ ? others : "") + "]}\n";
  }

 private:
  using Time = std::chrono::steady_clock::time_point;
  static constexpr std::chrono::seconds kBetweenAsks{10};

  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<FlightRecorder>> recorders_;  // guarded by mutex_
  std::function<bool()> ask_;                               // guarded by mutex_
  Time asked_at_{};                                         // guarded by mutex_
  bool asked_ = false;                                      // guarded by mutex_; it worked
};

}  // namespace lockstep
