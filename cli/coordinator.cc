#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
#include <string_view>
#include <utility>

#include "cli/options.h"
#include "cli/star.h"
#include "cli/stop_signals.h"
#include "lockstep/base/descriptor.h"
#include "lockstep/base/event.h"
#include "lockstep/base/exit_code.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/thread.h"
#include "lockstep/files/json.h"
#include "lockstep/server/gradient_server.h"
#include "lockstep/server/rank_server.h"

namespace lockstep::cli {
namespace {

constexpr const char* kCoordinatorExplanation =
    R"(The coordinator is the centre of a star: it waits for the workers, then collects what they send in
every step, checks it, adds it up or averages it, and sends the result back. In three terminals:

  lockstep coordinator --bind 127.0.0.1:4700 --workers 2
  lockstep train --coordinator 127.0.0.1:4700              twice

Workers that train are served in mode 'lanes': their sums over lanes are added up until they are done.
The other two modes are those of the original protocol, for its programs, for 'lockstep train --protocol
original' and for 'lockstep worker'. In mode 'vector' a worker first gets its share of the step's
samples, then sends one gradient vector with loss and counts; the coordinator ends the job after --steps.
In mode 'blocks' the workers send the blocks of their model from last to first, then lm_head, final_norm
and embedding, as long as they like; the job is done when all have left. Without --mode the first
worker decides between lanes and vector; blocks has to be said.

The average is taken in a fixed tree over the workers, so its bits do not depend on who came first.
'mean' treats all workers alike; 'weighted' counts a worker by the samples that it says it has had, in
mode vector. Blocks carry no counts: theirs is always the mean. Steps are counted from 1 in all that is
printed, and from 0 on the wire.

The first NaN or infinity, or a message that does not belong, halts the job: every worker is told
the same reason, which names the worker at fault, and the exit code is 3. A worker that dies, stops
or falls silent is noticed within --timeout. Workers of the original protocol may join, too; they take
messages of up to 100 MB only, so that nobody in their job may send more.

SIGUSR1 asks workers that train in mode lanes to save a checkpoint after the step under way.

Without a token only processes of the same user on this host may join: the coordinator reads in the
kernel's connection table which user owns the other end of a connection. Workers on other hosts and of
other users need a token (--token-file or LOCKSTEP_TOKEN), the same everywhere. It authenticates workers and
coordinator to each other, and what they send to other hosts is encrypted. The original protocol has
neither: with --insecure its workers need no token, and whoever reaches the port can join as one, read
the averages and send gradients. docs/security.md says what that means.)";

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
  bool plain_wire = false;
  bool insecure = false;
  Service service = Service::kAny;
  std::optional<std::uint64_t> steps;
  std::optional<Average> average;
  double timeout = 30;
  std::string token_file;
  bool local = false;
  SyntheticOptions synthetic;  // of the local workers
};

// Names in it are the workers' own words.
void print_notice(const std::string& text) { print_text(visible(text) + "\n"); }

std::string workers_of(std::size_t count) {
  return fmt::format("{} worker{}", count, count == 1 ? "" : "s");
}

// SIGUSR1 as a request, to be made before any other thread; until the first call of listen() it
// waits.
class SaveSignal {
 public:
  SaveSignal() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    ::pthread_sigmask(SIG_BLOCK, &set, &before_);
    signals_ = Descriptor(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!signals_) throw_io("signalfd", errno);
  }
  ~SaveSignal() {
    stop();
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SaveSignal(const SaveSignal&) = delete;
  SaveSignal& operator=(const SaveSignal&) = delete;

  // Calls `save` for every signal, on a thread of its own, until stop(). Once.
  void listen(std::function<void()> save) {
    const auto body = [this, save = std::move(save)] {
      pollfd entries[] = {{stop_.fd(), POLLIN, 0}, {signals_.get(), POLLIN, 0}};
      while (::poll(entries, std::size(entries), -1) >= 0 || errno == EINTR) {
        if (entries[0].revents != 0) return;
        signalfd_siginfo info{};
        if (::read(signals_.get(), &info, sizeof info) == sizeof info) save();
      }
    };
    thread_.start("the thread for SIGUSR1", body, [](const Error&) {});
  }
  void stop() {
    stop_.set();
    thread_.join();
  }

 private:
  sigset_t before_{};
  Descriptor signals_;
  const Event stop_;
  Thread thread_;
};

// Prints how far the job is, on standard output.
class Progress {
 public:
  void add(const RoundResult& result) {
    add(result.gradients.size(), result.reduce_time);
    if (result.key.kind == RoundKind::kVector) {
      text_ =
          fmt::format("  loss {:.6f}  {} of {} correct", result.loss, result.correct, result.total);
    }
  }
  void add(std::size_t elements, std::chrono::nanoseconds time) {
    all_elements_ += elements;
    elements_ += elements;
    reduce_time_ += time;
  }
  // Ends the step that rank 0 tells of with a line of its metrics.
  void end_told_step(const std::string& line) {
    const Json told = Json::parse(line, nullptr, false);
    if (!told.is_object() || !told.contains("loss")) return;  // an event, or nonsense
    const auto number = [&told](const char* name) -> std::optional<double> {
      const auto found = told.find(name);
      return found != told.end() && found->is_number() ? std::optional(found->get<double>())
                                                       : std::nullopt;
    };
    text_ =
        fmt::format("  loss {:.6f}  {:.0f} of {:.0f} tokens correct", number("loss").value_or(NAN),
                    number("correct").value_or(0), number("tokens").value_or(0));
    const auto validation = number("val_loss");
    if (validation) text_ += fmt::format("  validation loss {:.6f}", *validation);
    if (const auto accuracy = number("val_accuracy")) {
      text_ += fmt::format(", {:.1f} % of tokens correct", 100 * *accuracy);
    }
    end_step(static_cast<std::uint64_t>(std::clamp(number("step").value_or(1), 1.0, 1e15)),
             validation.has_value());
  }
  // `step` counts from 1.
  void end_step(std::uint64_t step, bool last) {
    first_ = std::min(first_, step);
    last_ = std::max(last_, step);
    ++told_;
    if (!clock_.due() && !last) return;
    std::string line = fmt::format("step {}{}", step, text_);
    if (const std::uint64_t elements = all_elements_ / told_; elements > 0) {
      line += fmt::format("  {} elements reduced in {:.1f} ms", elements,
                          milliseconds_each() * static_cast<double>(elements));
    }
    print_text(line + "\n");
  }
  // How many there were, however often some of them had to be made again.
  std::uint64_t steps() const { return last_ == 0 ? 0 : last_ - first_ + 1; }

 private:
  // Of one element, since the line before. What ranks tell comes by another way than their sums,
  // so that those of a step may have been counted with the one before: then as it was.
  double milliseconds_each() {
    if (elements_ > 0) {
      const std::chrono::duration<double, std::milli> time = std::exchange(reduce_time_, {});
      each_ = time.count() / static_cast<double>(std::exchange(elements_, 0));
    }
    return each_;
  }

  ProgressClock clock_;
  std::uint64_t first_ = UINT64_MAX;
  std::uint64_t last_ = 0;
  std::uint64_t told_ = 0;  // steps
  std::uint64_t all_elements_ = 0;
  // Since the line before.
  std::uint64_t elements_ = 0;
  std::chrono::nanoseconds reduce_time_{};
  double each_ = 0;
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

void run_vectors(GradientServer& server, std::uint64_t steps, Progress& progress) {
  for (std::uint64_t step = 0; step < steps; ++step) {
    server.send_shards(step);
    const RoundResult result = server.reduce({RoundKind::kVector, step, {}, 0});
    server.broadcast(result);
    progress.add(result);
    progress.end_step(step_number(step), step + 1 == steps);
  }
}

// Until the workers have left, or after so many steps.
void run_blocks(GradientServer& server, std::optional<std::uint64_t> steps, Progress& progress) {
  std::uint64_t step = 0;
  for (; !steps || step < *steps; ++step) {
    if (!server.await_step(step)) break;
    reduce_blocks(server, step, progress);
    progress.end_step(step_number(step), steps == step + 1);
  }
  if (steps && step < *steps) {
    throw Error(ErrorCode::kPeerLost,
                fmt::format("all workers have left after {} of {} steps", step, *steps));
  }
}

constexpr std::uint64_t kVectorSteps = 100;  // where the coordinator decides and nobody has said

void run_steps(GradientServer& server, const CoordinatorFlags& options) {
  server.wait_for_workers();
  const ServerSettings& settings = options.server.settings;
  const bool blocks = settings.mode == Mode::kBlocks;
  const bool endless = blocks && !options.steps && !options.local;
  const std::uint64_t wanted = options.steps.value_or(kVectorSteps);
  print_notice(fmt::format("all {} workers are here; {}, mode {}, average {}",
                           options.server.workers,
                           endless ? "as many steps as they make" : fmt::format("{} steps", wanted),
                           to_string(settings.mode), to_string(settings.average)));
  Progress progress;
  if (blocks) {
    run_blocks(server, endless ? std::nullopt : std::optional(wanted), progress);
  } else {
    run_vectors(server, wanted, progress);
  }
  server.shutdown();
  print_text(fmt::format("done: {} steps with {}\n", progress.steps(),
                         workers_of(static_cast<std::size_t>(options.server.workers))));
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
        while (job.step()) {
        }
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

void serve_ranks(ControlPlane& control, const CoordinatorFlags& options, SaveSignal& signal) {
  // Workers may remember the requests of a coordinator that was here before.
  std::uint32_t request = std::random_device{}() % kMostSaveRequest;
  signal.listen([&control, request]() mutable {
    request = request % kMostSaveRequest + 1;
    control.wish({.save = request});
    log(LogLevel::kInfo, "the workers are asked to save a checkpoint");
  });
  RankServer server(
      control, {.timeout = options.server.settings.timeout, .stop_fd = options.server.stop_fd});
  Progress progress;
  std::size_t workers = 0;  // of the last generation
  const auto tell_steps = [&] {
    for (const std::string& line : control.take_lines()) progress.end_told_step(line);
  };
  server.serve(
      {.formed =
           [&](const std::vector<std::string>& names) {
             workers = names.size();
             for (const std::string& name : names) print_notice(name + " joined");
             print_notice(fmt::format("all {} workers are here", names.size()));
           },
       .added = [&](const LaneSums::Piece& piece,
                    std::chrono::nanoseconds took) { progress.add(piece.head.count, took); },
       .turned = tell_steps});
  tell_steps();
  print_text(
      fmt::format("done: {} steps, and all {} workers have left\n", progress.steps(), workers));
}

// The door for workers of all kinds, and the centre of the job if they are ranks.
std::unique_ptr<ControlPlane> open_door(Socket listener, const CoordinatorFlags& options) {
  HostOptions job;
  job.world_size = options.server.workers;
  job.token = options.token;
  job.wire = wire_choice(options.plain_wire);
  job.timeout = options.server.settings.timeout;
  job.patience = 10 * options.server.settings.timeout;
  job.fixed_centre = true;
  return host_job(job, {std::move(listener),
                        {Purpose::kRendezvous, Purpose::kServer},
                        /*original=*/options.service != Service::kLanes,
                        options.insecure});
}

// Waits for the first worker that is let in. Whether it is a rank, which joins the centre first.
bool first_is_rank(ControlPlane& control, int stop_fd) {
  pollfd entries[] = {{stop_fd, POLLIN, 0},
                      {control.latch().fd(), POLLIN, 0},
                      {control.members_fd(), POLLIN, 0},
                      {control.arrivals().fd(), POLLIN, 0}};
  while (true) {
    // The centre ends the wait: it gives up on ranks in time.
    if (::poll(entries, std::size(entries), -1) < 0 && errno != EINTR) throw_io("polling", errno);
    if (entries[0].revents != 0) throw Error(ErrorCode::kAborted, "told to stop");
    control.latch().check();
    if (entries[2].revents != 0) {
      print_notice("the first worker is a rank of 'lockstep train': mode lanes");
      return true;
    }
    if (entries[3].revents != 0) return false;
  }
}

void run_served(CoordinatorFlags& options, SaveSignal& signal) {
  Socket listener = listen_for_workers(require_host_port("--bind", options.bind), options.token,
                                       Deadline::after(options.server.settings.timeout));
  print_text(fmt::format("listening on {}; {} expected\n", to_string(listener.local_address()),
                         workers_of(static_cast<std::size_t>(options.server.workers))));
  if (options.insecure) {
    log(LogLevel::kWarning,
        "--insecure: whoever reaches {}{} can join as a worker of the original protocol, which has "
        "no secret and no encryption; it can read the averages and send gradients",
        to_string(listener.local_address()),
        listener.local_address().is_loopback() ? ", any user of this host," : "");
  }
  const auto control = open_door(std::move(listener), options);
  if (options.service == Service::kAny) {
    options.service =
        first_is_rank(*control, options.server.stop_fd) ? Service::kLanes : Service::kVector;
  }
  // Its thread ends before the control plane does.
  const auto stop = [](SaveSignal* listening) { listening->stop(); };
  const std::unique_ptr<SaveSignal, decltype(stop)> until_here(&signal, stop);
  if (options.service == Service::kLanes) return serve_ranks(*control, options, signal);
  signal.listen([] {
    log(LogLevel::kWarning,
        "only workers of mode lanes can be asked to save; SIGUSR1 to a worker has it save");
  });
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
  if (settings.mode == Mode::kBlocks && options.average == Average::kWeighted) {
    throw Error(ErrorCode::kInvalidArgument,
                "--average weighted is for mode vector: blocks carry no counts to weigh them by");
  }
  settings.average = options.average.value_or(settings.mode == Mode::kBlocks ? Average::kMean
                                                                             : Average::kWeighted);
  if (options.local && options.service == Service::kLanes) {
    throw Error(ErrorCode::kInvalidArgument,
                "--local runs the synthetic job, which has no lanes; 'lockstep train --transport "
                "server --workers N' is the same with a model");
  }
  // Whoever reads its lines may go: the job goes on.
  ::signal(SIGPIPE, SIG_IGN);
  const StopSignals signals;
  SaveSignal save_signal;
  options.server.stop_fd = signals.fd();
  try {
    if (options.local) {
      run_local_workers(options);
    } else {
      run_served(options, save_signal);
    }
    return 0;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInvalidArgument) throw;
    log_line(LogLevel::kError, error.code() == ErrorCode::kIo ? error.message() : error.what());
    return is_defect(error.code()) ? kExitHalted : signals.exit_code(kExitFailed);
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
      ->transform(whole_number(1, 4096))
      ->option_text("N [1]");
  command
      .add_option("--steps", options->steps,
                  "How many steps to make (mode vector), or after how many to end (mode blocks)")
      ->transform(whole_number(0, std::int64_t{1} << 50))
      ->option_text("N [vector: 100; blocks: as many as the workers make]");
  command
      .add_option("--total-samples", settings.total_samples,
                  "Samples of a step, dealt out to the workers in mode vector")
      ->transform(whole_number(0, std::int64_t{1} << 48))
      ->option_text("N [1024]");
  add_choice(command, "--mode", options->service, "vector, blocks or lanes",
             {Service::kVector, Service::kBlocks, Service::kLanes})
      ->option_text("NAME [as the first worker needs]");
  add_choice(command, "--average", options->average,
             "How vectors are averaged: mean, or weighted by each worker's samples",
             {Average::kMean, Average::kWeighted})
      ->option_text("NAME [weighted; blocks: mean]");
  command.add_option("--token-file", options->token_file, "The job's secret, needed between hosts")
      ->option_text("FILE");
  command.add_flag("--plain-wire", options->plain_wire,
                   "Between hosts: checksums instead of encryption; all workers must agree");
  command.add_flag(
      "--insecure", options->insecure,
      "Accept workers that do not prove the token; a coordinator without a token then also "
      "accepts processes of other users");
  command
      .add_option("--timeout", options->timeout,
                  "A worker that is silent for S seconds counts as dead")
      ->transform(real_number(0.01, 1e7))
      ->option_text("S [30]");
  command
      .add_option("--max-frame", settings.largest_frame,
                  "The largest message that is accepted; 100MB is what original peers take")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
      ->option_text("SIZE [2GiB]");
  command.add_flag(
      "--local", options->local,
      "Run the workers as threads of this process, with the synthetic job and its options");
  add_synthetic_options(command, options->synthetic);
  command.callback([options, &command, &action] {
    action = [options, &command] {
      refuse_together(command, "--local", {"--bind", "--token-file", "--plain-wire", "--insecure"});
      return run_coordinator(*options);
    };
  });
}

}  // namespace lockstep::cli
