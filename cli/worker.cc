#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <optional>

#include "cli/options.h"
#include "cli/star.h"
#include "cli/stop_signals.h"
#include "lockstep/base/exit_code.h"
#include "lockstep/base/host.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/model/gpu_model.h"
#include "lockstep/server/worker_client.h"

namespace lockstep::cli {
namespace {

constexpr const char* kWorkerExplanation =
    R"(A worker joins a coordinator, and at every step sends its gradients and receives the averages. In
mode vector it gets its share of the samples first; in mode blocks the workers decide how many steps
there are. It may be started before the coordinator; it tries to connect for --timeout. From then on
the coordinator's own timeout counts, and its mode.

The synthetic job computes nothing: its gradients come from a counter-based generator of seed, step,
worker and block. So every worker can compute what all others sent, and with --check does, and
compares each average bit for bit with the tree sum; all workers must have the same seed and shape.

--original speaks to a server of the original protocol, which tells no mode. Such a server takes
messages of 100 MB at most, and says nothing when a job in mode blocks is done: give --steps.
'lockstep train --protocol original' is the same with a model.)";

struct WorkerFlags {
  std::string coordinator;
  std::string job = "synthetic";
  WorkerOptions worker;
  SyntheticOptions synthetic;
  std::optional<std::uint64_t> steps;
  double timeout = 30;
  std::string token_file;
  bool plain_wire = false;
};

int work(const WorkerFlags& options, const StopSignals& signals, WorkerClient& client) {
  client.set_stop(signals.fd());
  fmt::print("joined as worker {} of {}\n", client.worker_id(), client.total_workers());
  std::fflush(stdout);
  SyntheticJob job(client, options.synthetic);
  ProgressClock clock;
  std::uint64_t steps = 0;
  std::size_t compared = 0;
  for (; !options.steps || steps < *options.steps; ++steps) {
    const auto report = job.step();
    if (!report) break;
    compared += report->compared;
    if (!clock.due()) continue;
    const auto& shard = report->shard;
    fmt::print("step {}{}{}  {} elements{}\n", step_number(report->step),
               shard ? fmt::format("  samples [{}, {})", shard->begin, shard->end) : "",
               report->loss ? fmt::format("  loss {:.6f}", *report->loss) : "", report->elements,
               options.synthetic.check ? ", all as they should be" : "");
    std::fflush(stdout);
  }
  fmt::print("done: {} steps{}\n", steps,
             options.synthetic.check ? fmt::format(", {} elements checked", compared) : "");
  return 0;
}

// Before it joins: what is refused later would end the job of others.
void check_flags(const WorkerFlags& options) {
  if (options.worker.original && options.synthetic.check) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "--check does not go with --original: a server of the original protocol does not say "
        "which average it computes");
  }
}

int run_worker(WorkerFlags& options) {
  check_flags(options);
  options.worker.coordinator = require_host_port("--coordinator", options.coordinator);
  options.worker.timeout = duration_of(options.timeout);
  options.worker.token = token_from(options.token_file);
  options.worker.wire = wire_choice(options.plain_wire);
  if (options.worker.node_id.empty()) {
    options.worker.node_id = fmt::format("{}-{}", this_host().hostname, ::getpid());
  }
  options.worker.gpu_count = static_cast<std::uint32_t>(gpu_count());
  // Until it has joined, a signal may end it as any program. Threads of the library leave signals
  // alone.
  WorkerClient client(options.worker);
  const StopSignals signals;
  try {
    return work(options, signals, client);
  } catch (const Error& error) {
    client.abort(error);
    if (error.code() == ErrorCode::kInvalidArgument) throw;
    log_line(LogLevel::kError, error.what());
    return is_defect(error.code()) ? kExitHalted : signals.exit_code(kExitFailed);
  }
}

}  // namespace

void add_worker(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand("worker", "Work for a coordinator.");
  command.footer(kWorkerExplanation);
  const auto options = std::make_shared<WorkerFlags>();
  options->worker.node_id.clear();

  command.add_option("--coordinator", options->coordinator, "Where the coordinator listens")
      ->required()
      ->option_text("HOST:PORT");
  command.add_option("--job", options->job, "What to work on: synthetic")
      ->check(one_of({"synthetic"}))
      ->option_text("NAME [synthetic]");
  command.add_option("--node-id", options->worker.node_id, "How messages call this worker")
      ->check([](const std::string& text) { return text.size() <= 100 ? "" : "at most 100 bytes"; })
      ->option_text("NAME [host-pid]");
  command
      .add_option("--steps", options->steps,
                  "Leave after so many steps; for mode blocks, where the workers decide")
      ->option_text("N [until the coordinator ends]");
  command
      .add_option("--timeout", options->timeout, "How long to try to connect and join; in seconds")
      ->transform(real_number(0.01, 1e7))
      ->option_text("S [30]");
  command.add_option("--token-file", options->token_file, "The job's secret, needed between hosts")
      ->option_text("FILE");
  command.add_flag("--plain-wire", options->plain_wire,
                   "Between hosts: checksums instead of encryption, as the coordinator does");
  CLI::Option* original =
      command.add_flag("--original,--seed-protocol", options->worker.original,
                       "Speak the original protocol: no token, no heartbeats, no extensions");
  add_choice(command, "--mode", options->synthetic.mode, "vector or blocks, with --original",
             {Mode::kVector, Mode::kBlocks})
      ->needs(original)
      ->option_text("NAME [vector]");
  add_synthetic_options(command, options->synthetic);
  command.callback([options, &action] { action = [options] { return run_worker(*options); }; });
}

}  // namespace lockstep::cli
