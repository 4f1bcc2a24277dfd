#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <thread>

#include "cli/commands.h"
#include "cli/launch.h"
#include "cli/options_file.h"
#include "cli/star.h"
#include "cli/train_options.h"
#include "cli/train_replay.h"
#include "cli/train_worker.h"
#include "lockstep/base/error.h"
#include "lockstep/base/host.h"
#include "lockstep/comm/collectives/plan_engine.h"
#include "lockstep/comm/mpi/mpi.h"
#include "lockstep/comm/transport/local_group.h"
#include "lockstep/server/server_engine.h"
#include "lockstep/server/server_run.h"

namespace lockstep::cli {
namespace {

void require(bool condition, const std::string& message) {
  if (!condition) throw Error(ErrorCode::kInvalidArgument, message);
}

std::unique_ptr<Communicator> communicator_over(std::unique_ptr<Transport> transport,
                                                const TrainOptions& options) {
  return std::make_unique<Communicator>(std::make_unique<PlanEngine>(std::move(transport)),
                                        options.world.timeout);
}

// The workers as threads of this process. The group fails as one; who failed by itself, and not
// because of another, knows why.
int run_threads(const TrainOptions& options, int workers) {
  stop_on_signals();
  auto group = make_local_group(workers);
  std::vector<int> codes(group.size());
  std::vector<std::exception_ptr> causes(group.size());
  std::vector<std::exception_ptr> echoes(group.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < group.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto communicator = communicator_over(std::move(group[rank]), options);
        codes[rank] = train_worker(options, *communicator);
      } catch (const Error& error) {
        auto& kind = is_echo(error, static_cast<int>(rank)) ? echoes : causes;
        kind[rank] = std::current_exception();
      } catch (...) {
        causes[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& errors : {causes, echoes}) {
    for (const std::exception_ptr& error : errors) {
      if (error) std::rethrow_exception(error);
    }
  }
  return codes[0];
}

int run_mpi(const TrainOptions& options, const std::vector<std::string>& arguments) {
  if (!started_by_mpi()) become_mpirun(options.workers.value_or(1), arguments);
  stop_on_signals();
  const bool native = options.reducer.reduction == Reduction::kNative;
  return train_worker(options, *join_mpi_world(options.world, native));
}

// Ranks as processes of this machine; with `server`, a gradient server in this one.
int start_workers(const TrainOptions& options, int workers,
                  const std::vector<std::string>& arguments) {
  LaunchOptions launch;
  launch.ranks = workers;
  launch.arguments = arguments;
  launch.prefix_lines = true;
  // They finish their step and save first.
  launch.stop_grace = std::chrono::ceil<std::chrono::milliseconds>(
      std::max<std::chrono::nanoseconds>(std::chrono::minutes(10), 10 * options.world.timeout));
  if (options.world.transport != TransportKind::kServer) return launch_ranks(launch);

  ServerOptions server;
  server.workers = workers;
  server.settings.mode = Mode::kLanes;
  server.settings.total_samples = static_cast<std::uint64_t>(workers);
  server.settings.timeout = options.world.timeout;
  server.token = options.world.token;
  ServerRun run(
      listen_for_workers({"127.0.0.1", 0}, server.token, Deadline::after(options.world.timeout)),
      server);
  launch.arguments.insert(launch.arguments.end(), {"--coordinator", to_string(run.address())});
  launch.finish_companion = [&](bool succeeded) -> std::optional<std::string> {
    const auto patience = succeeded ? options.world.timeout : std::chrono::nanoseconds(0);
    const auto error = run.finish(Deadline::after(patience));
    if (!error) return std::nullopt;
    return fmt::format("the gradient server: {}", error->what());
  };
  return launch_ranks(launch);
}

std::unique_ptr<Communicator> join_coordinator(const TrainOptions& options,
                                               const std::optional<RankEnvironment>& environment) {
  StarOptions star;
  const auto where = parse_host_port(options.coordinator);
  require(where.has_value(), fmt::format("--coordinator {}: not HOST:PORT", options.coordinator));
  star.worker.coordinator = *where;
  star.worker.node_id = this_host().hostname;
  if (environment)
    star.worker.node_id = fmt::format("rank {} on {}", environment->rank, star.worker.node_id);
  star.worker.token = options.world.token;
  star.worker.timeout = options.world.timeout;
  if (environment) {
    star.rank = environment->rank;
    star.world_size = environment->world_size;
  }
  return join_star(star);
}

// What would fail on every worker alike is told once, before any is started.
void check_options(const TrainOptions& options) {
  const TransportKind transport = options.world.transport;
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
  require(options.coordinator.empty() || transport == TransportKind::kServer,
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

int run(TrainOptions& options, const std::vector<std::string>& arguments) {
  options.world.timeout = duration_of(options.timeout);
  options.world.token = token_from(options.token_file);
  check_options(options);
  if (!options.replay.empty()) return replay_lane(options);
  if (options.world.transport == TransportKind::kMpi) return run_mpi(options, arguments);
  const auto environment = rank_environment();
  const int workers = options.workers.value_or(environment ? environment->world_size : 1);
  if (options.world.transport == TransportKind::kLocal) return run_threads(options, workers);
  if (!options.coordinator.empty()) {
    require(!options.workers || environment, "--workers starts workers, --coordinator is for one");
    stop_on_signals();
    return train_worker(options, *join_coordinator(options, environment));
  }
  const bool server = options.world.transport == TransportKind::kServer;
  if (!environment && workers == 1 && !server) return run_threads(options, 1);
  if (!environment) return start_workers(options, workers, arguments);
  require(!server, "--transport server under a launcher needs --coordinator HOST:PORT");
  require(
      workers == environment->world_size,
      fmt::format("--workers {}, but the environment says {}", workers, environment->world_size));
  stop_on_signals();
  return train_worker(options, *join_world(options.world, *environment));
}

}  // namespace

void add_train(CLI::App& app, const std::vector<std::string>& arguments, Action& action) {
  CLI::App& command = *app.add_subcommand("train", "Train a language model.");
  const auto options = std::make_shared<TrainOptions>();
  add_train_options(command, *options);
  command.callback([options, &command, &arguments, &action] {
    apply_options_file(command, options->config);
    action = [options, &arguments] { return run(*options, arguments); };
  });
}

}  // namespace lockstep::cli
