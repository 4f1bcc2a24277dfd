#include "lockstep/run/train.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/exit_code.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/mpi/mpi.h"
#include "lockstep/launch/launch.h"
#include "lockstep/launch/mpirun.h"
#include "lockstep/launch/rank_environment.h"
#include "lockstep/launch/secret_file.h"
#include "lockstep/net/job/handshake.h"
#include "lockstep/net/socket/interface.h"
#include "lockstep/net/socket/socket.h"
#include "lockstep/page/page.h"
#include "lockstep/run/defaults.h"
#include "lockstep/run/description.h"
#include "lockstep/run/flight_watch.h"
#include "lockstep/run/signals.h"
#include "lockstep/run/threads.h"
#include "lockstep/run/worker.h"
#include "lockstep/server/server_run.h"
#include "lockstep/train/checkpoint/folders.h"
#include "lockstep/train/run_checkpoints.h"

namespace lockstep {
namespace {

constexpr std::chrono::seconds kSecretPatience{3};  // for the file of a job that has just begun

void require(bool condition, const std::string& message) {
  if (!condition) throw Error(ErrorCode::kInvalidArgument, message);
}

// What the folder of a run has of it. A run that did not begin leaves it as it was.
struct Traces {
  std::vector<std::int64_t> checkpoints;  // the newest first
  std::filesystem::file_time_type metrics;

  bool operator==(const Traces&) const = default;
};

std::optional<Traces> traces_in(const std::string& folder) {
  if (folder.empty()) return std::nullopt;
  std::error_code none;
  try {
    return Traces{list_checkpoints(folder),
                  std::filesystem::last_write_time(folder + "/" + kMetricsFile, none)};
  } catch (const Error&) {  // the run's own error says more
    return std::nullopt;
  }
}

// What a run that failed has left, if it had begun.
void tell_saved(const TrainOptions& options, const std::optional<Traces>& before) {
  const std::optional<Traces> left = traces_in(options.out);
  if (!left || left == before) return;
  if (left->checkpoints.empty()) {
    log(LogLevel::kInfo, "no checkpoint was saved in {}", options.out);
    return;
  }
  log(LogLevel::kInfo, "the newest checkpoint is {}; lockstep train --resume {} goes on from it",
      checkpoint_path(options.out, left->checkpoints[0]), shell_word(options.out));
}

// Runs `work`; when that fails, says what is saved and what was written of the failure.
template <typename Work>
int telling_saved(const TrainOptions& options, FlightWatch& watch, bool tells, Work&& work) {
  const std::optional<Traces> before = traces_in(options.out);
  const auto tell = [&] {
    if (!tells) return;
    tell_saved(options, before);
    if (const std::string folder = watch.finish(); !folder.empty()) {
      log(LogLevel::kInfo, "lockstep explain {} says what every rank did last", shell_word(folder));
    }
  };
  try {
    const int code = work();
    if (code == kExitHalted) tell();
    return code;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument) tell();
    throw;
  } catch (const std::exception&) {
    tell();
    throw;
  }
}

int run_as_threads(const TrainOptions& options, int workers) {
  listen_to_signals(true);
  note_run_begins();
  FlightWatch watch;
  return telling_saved(options, watch, true, [&] {
    return run_threads(workers, options.job.timeout, !options.fail_fast,
                       [&](Job& job) { return train_worker(options, job, watch); });
  });
}

// Options of this process that joins a job: what is not local to it is the job's.
TrainOptions adopted(const TrainOptions& options, const Job& job) {
  const RunDescription told = description_of(job);
  TrainOptions own = options.adopt(told.options);
  own.out = told.out;
  own.page_elsewhere = told.page;
  own.local_rank = options.local_rank;
  return own;
}

bool survives_losses(const TrainOptions& options) {
  return !options.fail_fast && !options.dry_run && options.job.transport != TransportKind::kMpi;
}

// This process as one worker.
int run_worker(const TrainOptions& options, JoinOptions place) {
  place.survive = survives_losses(options);
  const bool alone = place.world_size == 1;
  listen_to_signals(!is_launched(),
                    place.survive && !alone ? TermMeaning::kLeave : TermMeaning::kStop);
  place.min_workers = options.min_workers;
  place.patience = options.worker_patience;
  FlightWatch watch;
  Job job = join(place);
  if (job.newcomer()) {
    note_waits_to_enter(code_of_leaving());
  } else {
    note_run_begins();
  }
  if (!options.join.empty()) {
    const TrainOptions own = adopted(options, job);
    job.set_transport(own.job.transport);
    return train_worker(own, job, watch);
  }
  return telling_saved(options, watch, !job.newcomer() && job.rank() == 0 && !is_launched(),
                       [&] { return train_worker(options, job, watch); });
}

int run_mpi(const TrainOptions& options, const std::vector<std::string>& arguments) {
  if (!started_by_mpi()) become_mpirun(mpi_library(), options.workers.value_or(1), arguments);
  JoinOptions world = options.job;
  world.mpi_collectives = options.reducer.reduction == Reduction::kNative;
  return run_worker(options, world);
}

// Workers finish their step and save first.
std::chrono::milliseconds stop_grace(const TrainOptions& options) {
  return std::chrono::ceil<std::chrono::milliseconds>(
      std::max<std::chrono::nanoseconds>(std::chrono::minutes(10), 10 * options.job.timeout));
}

// Who is not stopped comes to its end sooner.
std::chrono::milliseconds end_grace(const TrainOptions& options) {
  return std::chrono::ceil<std::chrono::milliseconds>(10 * options.job.timeout);
}

// Whether who listens there holds this secret of the job.
bool is_secret_of(const SocketAddress& address, const JoinOptions& job, const std::string& secret) {
  const Deadline soon = Deadline::after(kSecretPatience);
  try {
    Socket socket = connect_tcp(address, soon);
    client_handshake(socket,
                     {.job = job_name(job.name, job.attempt),
                      .id = random_member_id(),
                      .token = secret,
                      .wire = wire_choice(job.plain_wire)},
                     Purpose::kRendezvous, 0, soon);
    return true;
  } catch (const Error&) {  // another job's, or nobody is there any more
    return false;
  }
}

bool is_of_this_host(const SocketAddress& address) {
  try {
    return address.is_loopback() || local_address_toward(address) == address.with_port(0);
  } catch (const Error&) {  // there is no way to it
    return false;
  }
}

// Of a job of this user on this host; empty if there is none.
std::string find_secret(const HostPort& where, const JoinOptions& job) {
  // The job may be started at the same time, and its secret be there in a moment.
  const Deadline moment = Deadline::after(kSecretPatience);
  std::vector<SocketAddress> addresses;
  try {
    addresses = resolve(where, moment);
  } catch (const Error&) {  // who joins will say that the name has no address
  }
  while (!addresses.empty() && !moment.expired()) {
    for (const SocketAddress& address : addresses) {
      if (std::string secret = read_secret_file(address); !secret.empty()) return secret;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  // A worker's address has no file of its own: the one of its job is there.
  for (const SocketAddress& address : addresses) {
    if (!is_of_this_host(address)) continue;
    for (std::string& secret : read_secret_files()) {
      if (is_secret_of(address, job, secret)) return std::move(secret);
    }
  }
  return {};
}

// Workers of this machine for a job that somebody else has started.
int join_others(const TrainOptions& options, const std::vector<std::string>& arguments) {
  const HostPort where = *parse_host_port(options.join);
  const std::string secret =
      options.job.token.empty() ? find_secret(where, options.job) : options.job.token;
  const int workers = options.workers.value_or(1);
  if (workers == 1) {
    JoinOptions place = options.job;
    place.rank = -1;
    place.world_size = 0;
    place.hosted = true;
    place.master_host = where.host;
    place.master_port = where.port;
    place.token = secret;
    return run_worker(options, place);
  }
  LaunchOptions launch;
  launch.ranks = workers;
  launch.arguments = arguments;
  launch.prefix_lines = true;
  launch.survive = true;
  launch.flight_folder = FlightPlace::of("").folder;
  launch.joins = where;
  launch.stop_grace = stop_grace(options);
  launch.end_grace = end_grace(options);
  launch.secret = secret;
  return launch_ranks(launch);
}

// Workers as processes of this machine; with kServer, a gradient server in this one.
int start_workers(const TrainOptions& options, int workers,
                  const std::vector<std::string>& arguments) {
  LaunchOptions launch;
  launch.ranks = workers;
  launch.arguments = arguments;
  launch.prefix_lines = true;
  launch.survive = survives_losses(options);
  const FlightPlace flight = FlightPlace::of(options.dry_run ? "" : options.out);
  launch.flight_folder = flight.folder;
  launch.flight_keeps = flight.keeps;
  launch.stop_grace = stop_grace(options);
  launch.end_grace = end_grace(options);
  launch.before_failure = [&options, before = traces_in(options.out)](int code) {
    if (code != kExitUsage) tell_saved(options, before);  // otherwise no worker began
  };
  // Their stderr is a pipe, ours may be a terminal.
  if (!options.log) {
    launch.arguments.insert(launch.arguments.end(),
                            {"--log", std::string(to_string(default_log_style()))});
  }
  // Nobody but these workers joins their job, whoever else is on this host.
  if (options.job.token.empty()) launch.secret = random_secret();
  std::optional<Page> page;
  if (!options.page.empty() && !options.dry_run) {
    page.emplace(PageOptions{.address = parse_page_address(options.page, options.job.token),
                             .out = options.out,
                             .goes_on = options.folder == FolderUse::kResume,
                             .token = options.job.token});
    log(LogLevel::kInfo, "page: {}", page->link());
    launch.heard = [&page](std::string line) { page->tell(std::move(line)); };
    launch.flight_board = std::make_shared<FlightBoard>();
    page->offer(kFlightEndpoint, [board = launch.flight_board] { return board->json(); });
  }
  HostOptions job;
  job.world_size = workers;
  job.job = options.job.name;
  job.token = options.job.token.empty() ? launch.secret : options.job.token;
  job.wire = wire_choice(options.job.plain_wire);
  job.timeout = options.job.timeout;
  if (!options.listen.empty()) {
    const HostPort where = *parse_host_port(options.listen);
    launch.listen = resolve(where, Deadline::after(options.job.timeout)).front();
    launch.expect = options.expect.value_or(workers);
    job.patience = options.worker_patience;
    job.invitation = encode(RunDescription{.options = options.remembered,
                                           .out = options.out,
                                           .data = {},
                                           .page = page.has_value(),
                                           .run = {},
                                           .tokenizer = {}});
  }
  const auto launch_all = [&] {
    const int code = launch_ranks(launch);
    if (page) page->see_out();
    return code;
  };
  if (options.job.transport != TransportKind::kServer) {
    launch.job = job;
    return launch_all();
  }

  ServerRun run(listen_tcp(SocketAddress::loopback_v4()), job);
  launch.arguments.insert(launch.arguments.end(), {"--coordinator", to_string(run.address())});
  if (launch.survive || launch.heard) launch.centre = run.control();
  launch.finish_companion = [&](bool succeeded) {
    return run.finish(
        Deadline::after(succeeded ? options.job.timeout : std::chrono::nanoseconds(0)));
  };
  return launch_all();
}

// A run that goes on may have sizes of its own, which are known later.
void check_lanes(const TrainOptions& options, int workers) {
  if (options.folder == FolderUse::kResume) return;
  TrainerOptions sizes;
  sizes.global_batch = options.global_batch != 0 ? options.global_batch : kGlobalBatch;
  sizes.micro_batch =
      options.micro_batch != 0 ? options.micro_batch : fitting_micro_batch(sizes.global_batch);
  lane_owners(sizes, workers);
}

}  // namespace

int train(const TrainOptions& options, const std::vector<std::string>& arguments) {
  // Whoever reads what it says may go: that ends neither this process nor a worker.
  std::signal(SIGPIPE, SIG_IGN);
  check_options(options);
  if (!options.replay.empty()) return replay_lane(options);
  if (options.job.transport == TransportKind::kMpi) return run_mpi(options, arguments);
  // Its coordinator knows the other workers; the process itself is a job of one.
  if (options.protocol != StarProtocol::kLanes) return run_as_threads(options, 1);
  const auto environment = rank_environment();
  const bool newcomer = environment && environment->newcomer();
  const int workers =
      options.workers.value_or(environment && !newcomer ? environment->world_size : 1);
  const bool joins = !options.join.empty();
  if (joins && !newcomer) return join_others(options, arguments);
  if (!joins) check_lanes(options, workers);
  if (options.job.transport == TransportKind::kLocal) return run_as_threads(options, workers);
  const bool server = options.job.transport == TransportKind::kServer;
  const bool joins_server = !options.job.coordinator.empty();
  require(!joins_server || !options.workers || environment,
          "--workers does not go with --coordinator: start each worker with a command of its own");
  if (!environment && !joins_server) {
    return workers == 1 && !server && options.listen.empty()
               ? run_as_threads(options, 1)
               : start_workers(options, workers, arguments);
  }
  if (!joins_server) {
    require(!server, "--transport server under a launcher needs --coordinator HOST:PORT");
    require(
        newcomer || !options.listen.empty() || workers == environment->world_size,
        fmt::format("--workers {}, but the environment says {}", workers, environment->world_size));
  }
  TrainOptions own = options;
  own.page_elsewhere = is_launched() && !options.page.empty();
  if (newcomer) own.local_rank = environment->local_rank.value_or(0);
  return run_worker(own, JoinOptions::from_environment(options.job));
}

}  // namespace lockstep
