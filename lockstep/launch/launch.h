#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/flight/flight_board.h"
#include "lockstep/net/job/job.h"
#include "lockstep/net/socket/address.h"

namespace lockstep {

struct LaunchOptions {
  int ranks = 1;
  // For every rank; without the program's name.
  std::vector<std::string> arguments;
  // What every rank runs, by its path or found in PATH; empty: this program. Another one is told to
  // stop by signals: it need not know of links.
  std::string program = {};
  // "NAME=value" for every rank, before what is inherited.
  std::vector<std::string> environment = {};
  // The job that the ranks form, if they form one among themselves: this process is its centre,
  // whatever is given as title and size.
  std::optional<HostOptions> job = std::nullopt;
  // The job goes on without ranks that are lost. Those are started anew and join it, as
  // RestartPolicy says; a rank that the job has lost is killed first. The centre of the job is that
  // of `job`, or `centre`, which goes when the job has ended. With `joins` the
  // centre is in another process. The launcher then kills a rank that stands still only at the end
  // of the run, and reads each rank's progress from its flight recorder.
  bool survive = false;
  std::weak_ptr<ControlPlane> centre = {};
  // Others may join the job here; it forms with so many ranks, those of other launchers included.
  std::optional<SocketAddress> listen = std::nullopt;
  int expect = 0;  // 0: the ranks of this launcher
  // The ranks are newcomers to a job that somebody else has started, at this address.
  std::optional<HostPort> joins = std::nullopt;
  // Where the centre is elsewhere, with `joins` or because this process stood still and lost it:
  // how long a rank may still run when another one has come to the end of the run, and may stand
  // still when all others have ended.
  std::chrono::milliseconds end_grace{600};
  // Handed down to the ranks by a file that only they can read; may be empty. With `listen` it is
  // kept in a SecretFile, too.
  std::string secret = {};
  // "[rank 2] " ahead of every line that a rank writes to stderr, progress bars aside.
  bool prefix_lines = false;
  // How long the others may take to report what they saw when one has failed.
  std::chrono::milliseconds grace{600};
  // How long the ranks may take to stop when we are told to; a second signal ends them at once. The
  // same signal within a second is one.
  std::chrono::milliseconds stop_grace{600};
  // Ends what runs beside the ranks in this process, such as their gradient server, and tells what
  // went wrong there. Called once, when all ranks have ended; `succeeded` if all did.
  std::function<std::optional<Error>(bool succeeded)> finish_companion = {};
  std::string companion = "the gradient server";  // how messages call it
  // Told the lines of metrics that rank 0 tells (Job::tell), a tenth of a second late at most.
  std::function<void(std::string line)> heard = {};
  // Where what the ranks did last is written, for those that cannot write it themselves: they were
  // killed, or stand still when SIGUSR2 asks for it. Empty: nowhere. `flight_keeps`: also when the
  // job survives their loss. Handed down to the ranks.
  std::string flight_folder = {};
  bool flight_keeps = false;
  // Where the ranks can be looked at while they run; may be null.
  std::shared_ptr<FlightBoard> flight_board = nullptr;
  // Called ahead of the last line when a rank has failed or the ranks were ended before they had
  // stopped, with the exit code to come.
  std::function<void(int code)> before_failure = {};
};

// Runs a program once for every rank, as child processes that find their rank in the environment
// (rank_environment.h), each on its share of the cores if there are enough, and waits for all of
// them. Rank 0 has our standard input; what the ranks print is passed on as it is. SIGINT, SIGTERM
// and SIGHUP are passed on to the ranks; SIGUSR1 is passed on to one of them; on SIGUSR2 what all
// of them did last is written.
//
// With `survive` a rank that is lost ends nobody: the last line is about the job as a whole, and
// the ranks that are left when it ends decide. Those of this program are told to stop over their
// links to the centre, not by signals. Until the job has formed the first loss ends it all the
// same.
//
// Otherwise: returns 0 if all succeeded. When one fails the rest are ended and reaped, the last
// line on stderr tells which rank or companion is to blame (blame.h) and how it ended, and its exit
// code is returned (1 if a signal killed it, or if it is the companion). After a signal to
// ourselves: 128 + its number. No rank outlives this process, however it ends.
int launch_ranks(const LaunchOptions& options);

// Whether this process is a rank of launch_ranks().
bool is_launched();

// Whether the error of this process tells of another rank's failure, or that a newcomer finds
// nobody, and the process is a rank of launch_ranks(), whose launcher knows it by the exit code
// kExitEcho.
bool is_launched_echo(const Error& error);

}  // namespace lockstep
