#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/files/json.h"

namespace lockstep {

// A change in who trains, or a way back: what people and metrics.jsonl are told of it.
struct RunEvent {
  enum class Kind : std::uint8_t {
    kLost,      // workers died or failed
    kExpelled,  // workers were silent, or their links were cut
    kJoined,
    kLeft,      // in good order
    kWentBack,  // no whole state was left: the run goes on from a checkpoint
  };
  Kind kind = Kind::kLost;
  std::int64_t step = 0;         // that was under way, or is the next; counted from 1
  std::vector<std::string> who;  // as messages name them: "rank 2 (node7, pid 4711)"
  std::string how;               // how it was noticed, or why; may be empty
  bool again = false;            // the step is computed again
  std::int64_t back_to = 0;      // with kWentBack: the steps of the checkpoint; 0: the start
  // The workers that go on: by rank, how many lanes each has, and its name.
  std::vector<std::uint32_t> lanes;
  std::vector<std::string> members;
  double seconds = 0;  // until all of them went on
};

std::string_view to_string(
    RunEvent::Kind kind);  // "lost", "expelled", "joined", "left", "went back"

// One line for people: who, how it was noticed, which step is computed again, who has the lanes,
// how long it took.
std::string describe(const RunEvent& event);
// The JSON object of an event, as docs/metrics.md specifies, without a line break.
std::string metrics_line(const RunEvent& event);

// Other lines that metrics.jsonl has beside those of steps and events, as docs/metrics.md
// specifies. People are told the same in other words.
struct RunStart {
  std::int64_t step = 0;   // the first to be made
  std::int64_t steps = 0;  // that the run has in all
  std::vector<std::string> members;
  std::vector<std::uint32_t> lanes;
  Json settings;
  Json machine;
};
std::string metrics_line(const RunStart& start);
std::string saved_line(std::int64_t step, const std::string& name, const std::string& hash);
std::string halted_line(std::int64_t step, const std::string& why);
struct RunFinish {
  std::int64_t step = 0;  // the last
  std::string how;        // "done", "stopped", "early"
  std::string hash;       // of the weights
  double seconds = 0;
};
std::string metrics_line(const RunFinish& end);

// The events of a run, to be listed at its end. One thread.
class RunEvents {
 public:
  void add(const RunEvent& event) { lines_.push_back(describe(event)); }
  bool empty() const { return lines_.empty(); }
  // "2 events:" and a line for each; of many, the last `most`.
  std::vector<std::string> summary(std::size_t most = 20) const;

 private:
  std::vector<std::string> lines_;
};

}  // namespace lockstep
