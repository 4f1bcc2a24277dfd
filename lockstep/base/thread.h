#pragma once

#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <thread>

#include "lockstep/base/error.h"

namespace lockstep {

// A thread of the library, as all of them are. Signals stay blocked in it: they are for the
// program's own threads. Nothing that its body throws ends the process.
class Thread {
 public:
  Thread() = default;
  // Waits for the body, which the owner has told to end.
  ~Thread() { join(); }
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;

  // Once. `name` is how messages call the thread: "the communication thread". What `body` throws,
  // whatever its type, goes to `failed` as an Error, on the thread. Throws Error{kIo} where the
  // system has no thread to give.
  void start(std::string name, std::function<void()> body,
             std::function<void(const Error&)> failed);
  bool started() const { return thread_.joinable(); }
  void join();
  // Leaves a thread behind that waits in a call without a deadline. Its body and `failed` own all
  // that they use.
  void detach() { thread_.detach(); }

 private:
  std::thread thread_;
};

// The exception that is being handled, as an Error: itself if it is one, otherwise Error{kIo} with
// its text behind `who`.
Error caught_error(std::string_view who);

}  // namespace lockstep
