#pragma once

#include <signal.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/descriptor.h"
#include "lockstep/launch/restart_policy.h"

namespace lockstep {

// A child process whose standard streams are pipes to us, which never block. It is killed when this
// process ends, and when the object goes.
class PipedProcess {
 public:
  struct Options {
    std::vector<std::string> words;           // the program, looked up in PATH, and its arguments
    std::vector<std::string> variables = {};  // "NAME=value", before what is inherited
    std::vector<int> descriptors = {};        // that it inherits under their numbers
    sigset_t signals{};                       // the mask that it starts with
    bool reads = true;                        // otherwise its input is empty
    // Signals of our terminal are not for it.
    bool own_group = false;
  };

  // Throws Error{kIo} if there can be no process; a program that is not there ends with code 127.
  explicit PipedProcess(Options options);
  ~PipedProcess();
  PipedProcess(const PipedProcess&) = delete;
  PipedProcess& operator=(const PipedProcess&) = delete;

  pid_t pid() const { return pid_; }
  // Only while it runs.
  void signal(int number) const;
  // How it has ended; nothing while it runs.
  std::optional<ProcessEnd> end();

  // Queues bytes for its input, and writes what the pipe takes.
  void write(std::string_view bytes);
  void close_input() { input_.reset(); }
  // For poll(): the descriptor of its input while something is queued, else -1.
  int waiting_input() const { return unsent_.empty() ? -1 : input_.get(); }

  // -1 once it is closed.
  int output() const { return output_.get(); }
  int messages() const { return messages_.get(); }
  // All that is there now.
  std::string read_output() { return read(output_); }
  std::string read_messages() { return read(messages_); }

 private:
  static std::string read(Descriptor& from);

  pid_t pid_ = -1;
  std::optional<ProcessEnd> end_;
  Descriptor input_;
  Descriptor output_;
  Descriptor messages_;
  std::string unsent_;
};

// Strings as execve wants them; they must outlive the pointers.
std::vector<char*> pointers_to(std::vector<std::string>& strings);

}  // namespace lockstep
