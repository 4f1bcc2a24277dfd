#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

// The main function of the GoogleTest programs.
//
// Without LOCKSTEP_CASE_SECONDS in the environment: GoogleTest's own. With it, as ctest sets it,
// cases run in a child process, many in one, and each has that many seconds. A case that crashes or
// takes longer is printed as failed in GoogleTest's form, and a new child runs the cases that are
// left.
namespace {

using Clock = std::chrono::steady_clock;

// Tells the parent which case runs: "+name\n" when one starts, "-\n" when it ends.
class Reporter : public testing::EmptyTestEventListener {
 public:
  explicit Reporter(int pipe) : pipe_(pipe) {}

  void OnTestStart(const testing::TestInfo& test) override {
    tell(std::string("+") + test.test_suite_name() + "." + test.name() + "\n");
  }
  void OnTestEnd(const testing::TestInfo&) override { tell("-\n"); }

 private:
  void tell(const std::string& line) const {
    // Shorter than PIPE_BUF, so written as a whole.
    if (::write(pipe_, line.data(), line.size()) != static_cast<ssize_t>(line.size()))
      std::_Exit(2);
  }

  int pipe_;
};

// What became of a child: the case it ran when it ended, if it ran one, and how it ended.
struct Outcome {
  std::string running;
  std::string reason;  // empty: every case was run, and `status` says whether all passed
  int status = 0;
};

class Child {
 public:
  // Forks; the child never returns. `done` are cases that need not run again, as a filter has them:
  // "a.b:c.d".
  explicit Child(const std::string& done) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) std::exit(2);
    std::fflush(nullptr);
    pid_ = ::fork();
    if (pid_ < 0) std::exit(2);
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      // Out of the way of cases that look at the lowest descriptor that is free.
      const int pipe = ::fcntl(ends[1], F_DUPFD_CLOEXEC, 200);
      ::close(ends[0]);
      ::close(ends[1]);
      if (!done.empty()) {
        const std::string filter = GTEST_FLAG_GET(filter);
        GTEST_FLAG_SET(filter, filter + (filter.find('-') == filter.npos ? "-" : ":") + done);
      }
      testing::UnitTest::GetInstance()->listeners().Append(new Reporter(pipe));
      std::exit(RUN_ALL_TESTS());
    }
    ::close(ends[1]);
    pipe_ = ends[0];
  }

  // Returns when the child has ended. Cases that ended are appended to `done`.
  Outcome watch(std::chrono::seconds limit, std::string& done) {
    Outcome outcome;
    std::string unread;
    Clock::time_point started = Clock::now();
    for (bool open = true; open;) {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(started + limit - Clock::now()).count();
      pollfd readable{pipe_, POLLIN, 0};
      const int ready = ::poll(&readable, 1, left > 0 ? static_cast<int>(left) : 0);
      if (ready < 0 && errno == EINTR) continue;
      if (ready == 0) {
        ::kill(pid_, SIGKILL);
        outcome.reason = "took more than " + std::to_string(limit.count()) + " s";
        break;
      }
      char bytes[4096];
      const ssize_t count = ::read(pipe_, bytes, sizeof(bytes));
      open = count > 0;
      if (open) unread.append(bytes, static_cast<std::size_t>(count));
      for (std::size_t end; (end = unread.find('\n')) != std::string::npos;
           unread.erase(0, end + 1)) {
        started = Clock::now();
        if (unread[0] == '+') {
          outcome.running = unread.substr(1, end - 1);
        } else {
          done += (done.empty() ? "" : ":") + outcome.running;
          outcome.running.clear();
        }
      }
    }
    ::close(pipe_);
    int status = 0;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    if (!outcome.reason.empty()) return outcome;
    if (WIFSIGNALED(status)) {
      outcome.reason = std::string("killed by a signal: ") + ::strsignal(WTERMSIG(status));
    } else if (!outcome.running.empty() || outcome.status > 1) {
      outcome.reason = "ended the process with code " + std::to_string(outcome.status);
    }
    return outcome;
  }

 private:
  pid_t pid_ = -1;
  int pipe_ = -1;
};

int run_in_children(std::chrono::seconds limit) {
  std::string done;
  bool failed = false;
  while (true) {
    const Outcome outcome = Child(done).watch(limit, done);
    failed |= outcome.status != 0 || !outcome.reason.empty();
    if (!outcome.reason.empty()) {
      // After the last case: a leak that a sanitizer found, say.
      const std::string name = outcome.running.empty() ? "(after the last case)" : outcome.running;
      std::printf("\n[  FAILED  ] %s (%s)\n", name.c_str(), outcome.reason.c_str());
      std::fflush(stdout);
    }
    if (outcome.running.empty()) return failed ? 1 : 0;
    done += (done.empty() ? "" : ":") + outcome.running;
  }
}

}  // namespace

int main(int count, char** arguments) {
  testing::InitGoogleTest(&count, arguments);
  const char* seconds = std::getenv("LOCKSTEP_CASE_SECONDS");
  if (seconds == nullptr || GTEST_FLAG_GET(list_tests)) return RUN_ALL_TESTS();
  return run_in_children(std::chrono::seconds(std::atoi(seconds)));
}
