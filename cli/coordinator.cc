#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <string_view>

#include "cli/options.h"
#include "cli/star.h"
#include "cli/stop_signals.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/thread.h"
#include "lockstep/server/gradient_server.h"
#include "lockstep/server/rank_server.h"

namespace lockstep::cli {
namespace {

constexpr const char* kCoordinatorExplanation =
    R"(The coordinator is the centre of a star: it waits for the workers, gives each its share of every
step's samples, then collects what they send, checks it, averages it and sends the average back.
Try it in three terminals:

  lockstep coordinator --bind 127.0.0.1:0 --workers 2      prints the address it listens on
  lockstep worker --coordinator 127.0.0.1:PORT             twice

The average is taken in a fixed tree over the workers, so its bits do not depend on who came first.
'mean' treats all workers alike; 'weighted' counts a worker by its samples. In mode 'vector' a step
is one gradient vector with loss and counts, in 'blocks' the blocks from last to first, then lm_head,
final_norm and embedding. Mode 'lanes' is for 'lockstep train --transport server': the workers' sums
over lanes are added up until the workers are done. Without --mode the first worker decides: workers
that train are served in mode lanes, others in mode vector.

The first NaN or infinity, or a message that does not belong, halts the job: every worker is told
the same reason, which names the worker at fault, and the exit code is 3. A worker that dies, stops
or falls silent is noticed within --timeout. Workers of the original protocol may join, too.

Other hosts can only be served with a token (--token-file or LOCKSTEP_TOKEN), the same everywhere.
It authenticates workers and coordinator to each other and encrypts nothing.)";

// What the coordinator does for its workers.
enum class Service : std::uint8_t { kAny, kVector, kBlocks, kLanes };

std::string_view to_string(Service service) {
  switch (service) {
    case Service::kAny: return "any";
    case Service::kVector: return "vector";
    case Service::kBlocks: return "blocks";
    case Service::kLanes: return "lanes";
  }
  return "?";
}

struct CoordinatorFlags {
  std::string bind = "127.0.0.1:0";
  ServerOptions server;
  std::string token;
  bool insecure = false;
  Service service = Service::kAny;
  std::uint64_t steps = 100;
  double timeout = 30;
  std::string token_file;
  bool local = false;
  SyntheticOptions synthetic;  // of the local workers
};

HostPort parse_bind(const std::string& text) {
  const auto where = parse_host_port(text);
  if (!where)
    throw Error(ErrorCode::kInvalidArgument, fmt::format("--bind {}: not HOST:PORT", text));
  return *where;
}

// Prints how far the job is, on standard output.
class Progress {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Progress(std::uint64_t steps) : steps_(steps) {}

  void add(const RoundResult& result) {
    elements_ += result.gradients.size();
    if (result.key.kind == RoundKind::kVector) {
      text_ =
          fmt::format("  loss {:.6f}  {} of {} correct", result.loss, result.correct, result.total);
    }
  }
  // Of ranks, whose sums are no steps.
  void add_sum(const LaneSums::Piece& piece) {
    elements_ += piece.head.count;
    if (!clock_.due()) return;
    fmt::print("sum {}  {} lanes  {} elements so far\n", piece.head.step + 1, piece.head.lanes,
               elements_);
    std::fflush(stdout);
  }
  void end_step(std::uint64_t step) {
    if (clock_.due() || step + 1 == steps_) {
      const std::chrono::duration<double, std::milli> time = Clock::now() - start_;
      fmt::print("step {}/{}{}  {} elements in {:.1f} ms\n", step + 1, steps_, text_, elements_,
                 time.count());
      std::fflush(stdout);
    }
    elements_ = 0;
    start_ = Clock::now();
  }

 private:
  const std::uint64_t steps_;
  ProgressClock clock_;
  std::uint64_t elements_ = 0;
  Clock::time_point start_ = Clock::now();
  std::string text_;
};

void reduce_blocks(GradientServer& server, std::uint64_t step, Progress& progress) {
  // The number of blocks is the workers' to tell; the first of them comes last.
  std::optional<std::uint32_t> next;
  do {
    const RoundResult result = server.reduce({RoundKind::kBlock, step, next, 0});
    server.broadcast(result);
    progress.add(result);
    next = *result.key.block - 1;
  } while (*next != UINT32_MAX);
  for (std::uint8_t component = 0; component < kComponents; ++component) {
    const RoundResult result = server.reduce({RoundKind::kComponent, step, {}, component});
    server.broadcast(result);
    progress.add(result);
  }
}

void run_step(GradientServer& server, Mode mode, std::uint64_t step, Progress& progress) {
  server.send_shards(step);
  if (mode == Mode::kVector) {
    const RoundResult result = server.reduce({RoundKind::kVector, step, {}, 0});
    server.broadcast(result);
    progress.add(result);
  } else {
    reduce_blocks(server, step, progress);
  }
  progress.end_step(step);
}

void run_steps(GradientServer& server, const CoordinatorFlags& options) {
  server.wait_for_workers();
  const Mode mode = options.server.settings.mode;
  const std::uint64_t steps = options.steps;
  fmt::print("all {} workers are here; {} steps, mode {}, average {}\n", options.server.workers,
             steps, to_string(mode), to_string(options.server.settings.average));
  std::fflush(stdout);
  Progress progress(steps);
  for (std::uint64_t step = 0; step < steps; ++step) run_step(server, mode, step, progress);
  server.shutdown();
  fmt::print("done: {} steps with {} workers\n", steps, options.server.workers);
}

void print_notice(const std::string& text) {
  fmt::print("{}\n", text);
  std::fflush(stdout);
}

// The workers as threads of this process. The server's error is the cause; theirs follow from it.
void run_local_workers(const CoordinatorFlags& options) {
  LocalStar star = make_local_star(options.server);
  std::vector<Thread> threads(star.ends.size());
  for (std::size_t i = 0; i < threads.size(); ++i) {
    const auto work = [&, i] {
      WorkerOptions worker;
      worker.node_id = fmt::format("thread-{}", i);
      worker.timeout = options.server.settings.timeout;
      WorkerClient client(std::move(star.ends[i]), worker);
      try {
        SyntheticJob job(client, options.synthetic);
        while (const auto shard = client.next_shard()) job.step(*shard);
      } catch (const Error& error) {
        client.abort(error);
        throw;
      }
    };
    const auto failed = [i](const Error& error) {
      log(LogLevel::kError, "worker {}: {}", i, error.what());
    };
    threads[i].start("a worker's thread", work, failed);
  }
  std::exception_ptr failure;
  try {
    star.server->set_notice(print_notice);
    run_steps(*star.server, options);
  } catch (const Error&) {
    failure = std::current_exception();
  }
  star.server.reset();
  for (Thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

void serve_ranks(ControlPlane& control, const CoordinatorFlags& options) {
  RankServer server(
      control, {.timeout = options.server.settings.timeout, .stop_fd = options.server.stop_fd});
  Progress progress(0);
  std::size_t workers = 0;  // of the last generation
  server.serve({[&](const std::vector<std::string>& names) {
                  workers = names.size();
                  for (const std::string& name : names) fmt::print("{} joined\n", name);
                  print_notice(fmt::format("all {} workers are here", names.size()));
                },
                [&](const LaneSums::Piece& piece) { progress.add_sum(piece); }});
  fmt::print("done: all {} workers have left\n", workers);
}

// The door for workers of all kinds, and the centre of the job if they are ranks.
std::unique_ptr<ControlPlane> open_door(Socket listener, const CoordinatorFlags& options) {
  HostOptions job;
  job.world_size = options.server.workers;
  job.token = options.token;
  job.timeout = options.server.settings.timeout;
  job.patience = 10 * options.server.settings.timeout;
  job.fixed_centre = true;
  return host_job(job, {std::move(listener),
                        {Purpose::kRendezvous, Purpose::kServer},
                        /*original=*/options.service != Service::kLanes,
                        options.insecure});
}

// Waits for the first worker that is let in. Whether it is a rank.
bool first_is_rank(ControlPlane& control, int stop_fd) {
  pollfd entries[] = {{stop_fd, POLLIN, 0},
                      {control.latch().fd(), POLLIN, 0},
                      {control.arrivals().fd(), POLLIN, 0}};
  while (true) {
    // The centre ends the wait: it gives up on ranks in time.
    if (::poll(entries, std::size(entries), -1) < 0 && errno != EINTR) throw_io("polling", errno);
    if (entries[0].revents != 0) throw Error(ErrorCode::kAborted, "told to stop");
    control.latch().check();
    if (auto first = control.arrivals().next()) {
      const bool rank = first->peer.rank >= 0;
      control.arrivals().deliver(std::move(*first));
      return rank;
    }
  }
}

void run_served(CoordinatorFlags& options) {
  Socket listener = listen_for_workers(parse_bind(options.bind), options.token,
                                       Deadline::after(options.server.settings.timeout));
  fmt::print("listening on {}; {} workers expected\n", to_string(listener.local_address()),
             options.server.workers);
  std::fflush(stdout);
  const auto control = open_door(std::move(listener), options);
  if (options.service == Service::kAny) {
    options.service =
        first_is_rank(*control, options.server.stop_fd) ? Service::kLanes : Service::kVector;
  }
  if (options.service == Service::kLanes) return serve_ranks(*control, options);
  // Ranks that come are told so.
  control->abort(fmt::format("this coordinator runs in mode {}; 'lockstep train' needs mode lanes",
                             to_string(options.service)));
  GradientServer server(&control->arrivals(), options.server);
  server.set_notice(print_notice);
  run_steps(server, options);
}

int run_coordinator(CoordinatorFlags& options) {
  ServerSettings& settings = options.server.settings;
  settings.timeout = duration_of(options.timeout);
  options.token = token_from(options.token_file);
  if (options.service == Service::kBlocks) settings.mode = Mode::kBlocks;
  if (options.local && options.service == Service::kLanes) {
    throw Error(ErrorCode::kInvalidArgument,
                "--local runs the synthetic job, which has no lanes; 'lockstep train --transport "
                "server --workers N' is the same with a model");
  }
  const StopSignals signals;
  options.server.stop_fd = signals.fd();
  try {
    if (options.local) {
      run_local_workers(options);
    } else {
      run_served(options);
    }
    return 0;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInvalidArgument) throw;
    log_line(LogLevel::kError, error.what());
    return is_defect(error.code()) ? kHaltedCode : signals.exit_code(1);
  }
}

}  // namespace

void add_coordinator(CLI::App& app, Action& action) {
  CLI::App& command =
      *app.add_subcommand("coordinator", "Average gradients for workers: the centre of a star.");
  command.footer(kCoordinatorExplanation);
  const auto options = std::make_shared<CoordinatorFlags>();
  ServerSettings& settings = options->server.settings;
  settings.total_samples = 1024;

  command.add_option("--bind", options->bind, "Where to listen; port 0: any, which is printed")
      ->option_text("HOST:PORT [127.0.0.1:0]");
  command.add_option("--workers", options->server.workers, "How many workers to wait for")
      ->check(CLI::Range(1, 4096))
      ->option_text("N [1]");
  command
      .add_option("--steps", options->steps,
                  "Steps to run, numbered from 0; in mode lanes the workers decide")
      ->option_text("N [100]");
  command
      .add_option("--total-samples", settings.total_samples,
                  "Samples of a step, dealt out to the workers")
      ->check(CLI::Range(std::uint64_t{0}, std::uint64_t{1} << 48))
      ->option_text("N [1024]");
  add_choice(command, "--mode", options->service, "vector, blocks or lanes",
             {Service::kVector, Service::kBlocks, Service::kLanes})
      ->option_text("NAME [as the first worker needs]");
  add_choice(command, "--average", settings.average, "mean or weighted",
             {Average::kMean, Average::kWeighted})
      ->option_text("NAME [weighted]");
  command.add_option("--token-file", options->token_file, "The job's secret, needed between hosts")
      ->option_text("FILE");
  command.add_flag("--insecure", options->insecure,
                   "With a token: let in workers that have none, such as the original protocol's");
  command
      .add_option("--timeout", options->timeout,
                  "A worker that is silent for so long is dead; in seconds")
      ->check(CLI::Range(0.01, 1e7))
      ->option_text("S [30]");
  command.add_option("--max-frame", settings.largest_frame, "The largest message that is accepted")
      ->transform(CLI::AsSizeValue(false))
      ->option_text("SIZE [2GiB]");
  command.add_flag(
      "--local", options->local,
      "Run the workers as threads of this process, with the synthetic job and its options");
  add_synthetic_options(command, options->synthetic);
  command.callback([options, &command, &action] {
    action = [options, &command] {
      refuse_together(command, "--local", {"--bind", "--token-file", "--insecure"});
      return run_coordinator(*options);
    };
  });
}

}  // namespace lockstep::cli
