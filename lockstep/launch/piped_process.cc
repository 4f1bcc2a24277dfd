#include "lockstep/launch/piped_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

#include "lockstep/base/error.h"

extern char** environ;

namespace lockstep {
namespace {

constexpr int kNoProgram = 127;  // as shells say it

struct Pipe {
  Descriptor reads;
  Descriptor writes;
};

Pipe make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw_io("pipe", errno);
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

void never_block(const Descriptor& descriptor) {
  ::fcntl(descriptor.get(), F_SETFL, ::fcntl(descriptor.get(), F_GETFL) | O_NONBLOCK);
}

// Between fork and exec: system calls only.
[[noreturn]] void become(const PipedProcess::Options& options, pid_t parent, int input, int output,
                         int messages, char* const* words, char* const* environment) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);  // it ended before we asked to end with it
  if (options.own_group) ::setpgid(0, 0);
  ::signal(SIGPIPE, SIG_DFL);
  ::sigprocmask(SIG_SETMASK, &options.signals, nullptr);
  ::dup2(input, STDIN_FILENO);
  ::dup2(output, STDOUT_FILENO);
  ::dup2(messages, STDERR_FILENO);
  for (const int kept : options.descriptors) ::fcntl(kept, F_SETFD, 0);
  environ = const_cast<char**>(environment);
  ::execvp(words[0], words);
  ::_exit(kNoProgram);
}

}  // namespace

std::vector<char*> pointers_to(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& string : strings) pointers.push_back(string.data());
  pointers.push_back(nullptr);
  return pointers;
}

PipedProcess::PipedProcess(Options options) {
  Pipe output = make_pipe();
  Pipe messages = make_pipe();
  Pipe input;
  if (options.reads) {
    input = make_pipe();
  } else {
    input.reads = Descriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  }
  std::vector<std::string> variables = std::move(options.variables);
  for (char** variable = environ; *variable != nullptr; ++variable) {
    variables.emplace_back(*variable);
  }
  const std::vector<char*> words = pointers_to(options.words);
  const std::vector<char*> environment = pointers_to(variables);
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0) throw_io("fork", errno);
  if (pid_ == 0) {
    become(options, parent, input.reads.get(), output.writes.get(), messages.writes.get(),
           words.data(), environment.data());
  }
  input_ = std::move(input.writes);
  output_ = std::move(output.reads);
  messages_ = std::move(messages.reads);
  for (const Descriptor* ours : {&input_, &output_, &messages_}) never_block(*ours);
}

PipedProcess::~PipedProcess() {
  if (end_) return;
  ::kill(pid_, SIGKILL);
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
}

void PipedProcess::signal(int number) const {
  if (!end_) ::kill(pid_, number);
}

std::optional<ProcessEnd> PipedProcess::end() {
  int status = 0;
  if (!end_ && ::waitpid(pid_, &status, WNOHANG) == pid_) end_ = ProcessEnd::of(status);
  return end_;
}

void PipedProcess::write(std::string_view bytes) {
  unsent_ += bytes;
  while (input_ && !unsent_.empty()) {
    const ssize_t count = ::write(input_.get(), unsent_.data(), unsent_.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return;
    if (count < 0) input_.reset();  // it reads no more
    unsent_.erase(0, count < 0 ? unsent_.size() : static_cast<std::size_t>(count));
  }
}

std::string PipedProcess::read(Descriptor& from) {
  std::string text;
  std::array<char, 4096> bytes{};
  while (from) {
    const ssize_t count = ::read(from.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) break;
    if (count <= 0) {
      from.reset();
      break;
    }
    text.append(bytes.data(), static_cast<std::size_t>(count));
  }
  return text;
}

}  // namespace lockstep
