#pragma once

#include <atomic>
#include <chrono>
#include <csignal>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/event.h"
#include "lockstep/base/thread.h"
#include "lockstep/flight/flight_board.h"
#include "lockstep/flight/flight_file.h"

namespace lockstep {

// Where a run writes what its ranks did last.
struct FlightPlace {
  std::string folder;
  // Losses that the run survives are written, too: its folder is kept. Otherwise the folder is a
  // temporary one that nobody asked for, and only a failure or a signal makes it.
  bool keeps = false;

  // OUT/flight; without OUT what LOCKSTEP_FLIGHT_DIR says, or a new name in the folder for
  // temporaries. Makes nothing.
  static FlightPlace of(const std::string& out);
};

// Of the live page: what the ranks that its process sees do, FlightBoard::json().
inline constexpr const char* kFlightEndpoint = "/api/flight";

// Writes what the ranks of this process did last, on a thread of its own, so that a rank which is
// blocked need not do it: when told to, on SIGUSR2, and when the process crashes. One per process
// at a time. Thread-safe.
class FlightWatch {
 public:
  FlightWatch();
  // Writes what is still to be written; gives the signals back.
  ~FlightWatch();
  FlightWatch(const FlightWatch&) = delete;
  FlightWatch& operator=(const FlightWatch&) = delete;

  // A rank of this process, watched until remove(). Its files go to FlightPlace::of(out), the same
  // for all ranks of a run, within half of `timeout`, that of the job: a process that stands still
  // for longer may wake when the job is over, and then `out` is another job's.
  void add(const std::shared_ptr<FlightRecorder>& recorder, const std::string& out,
           std::chrono::nanoseconds timeout);
  void remove(const std::shared_ptr<FlightRecorder>& recorder);

  // What the rank did until now; written soon. Errors of writing are told on stderr.
  void write(const std::shared_ptr<FlightRecorder>& recorder, const std::string& why);
  // The generation is over, and the rank survives it: what it did in `file`, or until now.
  void write_loss(const std::shared_ptr<FlightRecorder>& recorder, FlightFile file);
  // Of a rank that stood still, and that the job may have ended without: not to the job's outputs,
  // but as if there were none. Says where.
  void write_apart(const std::shared_ptr<FlightRecorder>& recorder, const std::string& why);
  // All that are watched, soon; the job asks for it. Any thread; never waits.
  void ask();

  // All that are watched. SIGUSR2 has it ask others, too.
  const std::shared_ptr<FlightBoard>& board() const { return board_; }

  // Waits, for some seconds at most, until all is written. The folder if anything ever was.
  std::string finish();

 private:
  struct Watched {
    std::shared_ptr<FlightRecorder> recorder;
    FlightPlace place;
    std::chrono::nanoseconds timeout;
  };
  struct Pending {
    std::shared_ptr<FlightRecorder> recorder;
    std::string folder;
    FlightFile file;
    Deadline deadline = Deadline::at(Deadline::Clock::time_point::max());
  };

  void serve();
  bool write_next();
  void write_all(const std::string& why);
  // Null if it is not watched; call with mutex_ held.
  const Watched* find(const FlightRecorder& recorder) const;
  void put_off(const Watched& watched, FlightFile file);

  Event bell_;
  const std::shared_ptr<FlightBoard> board_ = std::make_shared<FlightBoard>();
  mutable std::mutex mutex_;
  std::vector<Watched> watched_;    // guarded by mutex_
  std::string out_;                 // guarded by mutex_: that of the last rank
  FlightPlace place_;               // guarded by mutex_: for it
  std::deque<Pending> pending_;     // guarded by mutex_
  std::atomic<bool> asked_{false};  // by the job
  bool writing_ = false;            // guarded by mutex_
  bool closing_ = false;            // guarded by mutex_
  std::string written_;             // guarded by mutex_: the last folder
  std::vector<std::pair<int, struct sigaction>> before_;
  Thread thread_;
};

}  // namespace lockstep
