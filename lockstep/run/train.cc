#include "lockstep/run/train.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/mpi/mpi.h"
#include "lockstep/launch/launch.h"
#include "lockstep/launch/rank_environment.h"
#include "lockstep/run/threads.h"
#include "lockstep/run/worker.h"
#include "lockstep/server/server_run.h"

namespace lockstep {
namespace {

void require(bool condition, const std::string& message) {
  if (!condition) throw Error(ErrorCode::kInvalidArgument, message);
}

int run_as_threads(const TrainOptions& options, int workers) {
  stop_on_signals();
  return run_threads(workers, options.job.timeout,
                     [&](Job& job) { return train_worker(options, job); });
}

// This process as one worker.
int run_worker(const TrainOptions& options, const JoinOptions& place) {
  stop_on_signals();
  Job job = join(place);
  return train_worker(options, job);
}

int run_mpi(const TrainOptions& options, const std::vector<std::string>& arguments) {
  if (!started_by_mpi()) become_mpirun(mpi_library(), options.workers.value_or(1), arguments);
  JoinOptions world = options.job;
  world.mpi_collectives = options.reducer.reduction == Reduction::kNative;
  return run_worker(options, world);
}

// Workers as processes of this machine; with kServer, a gradient server in this one.
int start_workers(const TrainOptions& options, int workers,
                  const std::vector<std::string>& arguments) {
  LaunchOptions launch;
  launch.ranks = workers;
  launch.arguments = arguments;
  launch.prefix_lines = true;
  // They finish their step and save first.
  launch.stop_grace = std::chrono::ceil<std::chrono::milliseconds>(
      std::max<std::chrono::nanoseconds>(std::chrono::minutes(10), 10 * options.job.timeout));
  if (options.job.transport != TransportKind::kServer) return launch_ranks(launch);

  ServerOptions server;
  server.workers = workers;
  server.settings.timeout = options.job.timeout;
  server.token = options.job.token;
  ServerRun run(
      listen_for_workers({"127.0.0.1", 0}, server.token, Deadline::after(options.job.timeout)),
      server);
  launch.arguments.insert(launch.arguments.end(), {"--coordinator", to_string(run.address())});
  launch.finish_companion = [&](bool succeeded) -> std::optional<std::string> {
    const auto patience = succeeded ? options.job.timeout : std::chrono::nanoseconds(0);
    const auto error = run.finish(Deadline::after(patience));
    if (!error) return std::nullopt;
    return fmt::format("the gradient server: {}", error->what());
  };
  return launch_ranks(launch);
}

// What would fail on every worker alike is told once, before any is started.
void check_options(const TrainOptions& options) {
  const TransportKind transport = options.job.transport;
  const std::uint64_t micro = options.micro_batch == 0 ? 1 : options.micro_batch;
  require(options.global_batch % micro == 0,
          fmt::format("--global-batch {} is not a multiple of --micro-batch {}",
                      options.global_batch, micro));
  require(options.reducer.reduction != Reduction::kNative || transport == TransportKind::kMpi,
          "--reduction native is MPI's own: it needs --transport mpi");
  const bool native = options.reducer.reduction == Reduction::kNccl;
  require(options.device != "cpu" || (!native && options.exchange != ExchangeChoice::kNccl),
          fmt::format("{} needs --device cuda", native ? "--reduction nccl" : "--exchange nccl"));
  require(!native || options.exchange != ExchangeChoice::kHost,
          "--reduction nccl goes from GPU to GPU, not through --exchange host");
  require(options.job.coordinator.empty() || transport == TransportKind::kServer,
          "--coordinator needs --transport server");
  require(options.save_every == 0 || !options.out.empty(), "--save-every needs --out");
  require(!options.resume || !options.out.empty(), "--resume needs --out");
  require(!options.resume || options.init.empty(),
          "--resume has weights of its own: it does not go with --init");
  if (transport == TransportKind::kServer) {
    require(!options.reducer.shard, "--shard-optimizer does not work with --transport server");
    require(options.reducer.reduction == Reduction::kTree && options.reducer.wire == DataType::kF32,
            "--transport server adds in the tree, in f32: no --reduction, no --wire-dtype");
  }
}

}  // namespace

int train(const TrainOptions& options, const std::vector<std::string>& arguments) {
  check_options(options);
  if (!options.replay.empty()) return replay_lane(options);
  if (options.job.transport == TransportKind::kMpi) return run_mpi(options, arguments);
  const auto environment = rank_environment();
  const int workers = options.workers.value_or(environment ? environment->world_size : 1);
  if (options.job.transport == TransportKind::kLocal) return run_as_threads(options, workers);
  const bool server = options.job.transport == TransportKind::kServer;
  const bool joins_server = !options.job.coordinator.empty();
  require(!joins_server || !options.workers || environment,
          "--workers starts workers, --coordinator is for one");
  if (!environment && !joins_server) {
    return workers == 1 && !server ? run_as_threads(options, 1)
                                   : start_workers(options, workers, arguments);
  }
  if (!joins_server) {
    require(!server, "--transport server under a launcher needs --coordinator HOST:PORT");
    require(
        workers == environment->world_size,
        fmt::format("--workers {}, but the environment says {}", workers, environment->world_size));
  }
  return run_worker(options, JoinOptions::from_environment(options.job));
}

}  // namespace lockstep
