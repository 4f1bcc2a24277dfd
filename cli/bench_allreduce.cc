#include <fmt/format.h>

#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "cli/allreduce_timing.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/collectives/algorithm_table.h"
#include "lockstep/comm/mpi/mpi.h"
#include "lockstep/launch/launch.h"
#include "lockstep/launch/mpirun.h"
#include "lockstep/launch/rank_environment.h"
#include "lockstep/lockstep.h"
#include "lockstep/net/job/roster.h"
#include "lockstep/run/threads.h"

namespace lockstep::cli {
namespace {

constexpr std::size_t kKiB = 1024;
constexpr std::size_t kMiB = 1024 * kKiB;

constexpr const char* kAllReduceBenchExplanation =
    R"(Started by hand, the command runs the ranks itself, on this machine. Under torchrun or mpirun it is
one rank of their world (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); rank 0 prints.

Every element of the result is checked on every rank, before and after timing; a wrong one makes the
exit code 1. Each iteration starts from freshly written input, which is not timed. Its time is that
of the slowest rank. algbw is bytes / median; busbw is that times 2(n-1)/n, what each rank sends.)";

struct AllReduceBenchFlags {
  JoinOptions job;
  TimingOptions timing;
  int ranks = 2;
  std::vector<std::size_t> bytes = {8, kKiB, 64 * kKiB, kMiB, 4 * kMiB, 25 * kMiB, 64 * kMiB};
  double seconds = 0.5;
  double timeout = 30;
  std::string token_file;
  bool json = false;
  bool serve = false;
  CLI::Option* ranks_given = nullptr;
};

class Printer {
 public:
  explicit Printer(const AllReduceBenchFlags& options) : options_(options) {}

  void print(int ranks, std::size_t bytes, const Timing& timing) {
    const double algbw = static_cast<double>(bytes) / timing.median.count() / 1e3;
    const double busbw = algbw * 2 * (ranks - 1) / ranks;
    if (options_.json) {
      const nlohmann::ordered_json line = {
          {"op", "all_reduce"},
          {"transport", to_string(options_.job.transport)},
          {"algorithm", to_string(timing.algorithm)},
          {"ranks", ranks},
          {"bytes", bytes},
          {"min_us", timing.least.count()},
          {"median_us", timing.median.count()},
          {"p99_us", timing.p99.count()},
          {"algbw_gbs", algbw},
          {"busbw_gbs", busbw},
          {"correct", timing.correct},
      };
      fmt::print("{}\n", line.dump());
    } else {
      if (!std::exchange(header_printed_, true)) print_header(ranks);
      fmt::print("{:>12} {:>17} {:>11.2f} {:>11.2f} {:>11.2f} {:>11.3f} {:>11.3f}  {}\n", bytes,
                 to_string(timing.algorithm), timing.least.count(), timing.median.count(),
                 timing.p99.count(), algbw, busbw, timing.correct ? "yes" : "NO");
    }
    std::fflush(stdout);
  }

 private:
  void print_header(int ranks) const {
    fmt::print(
        "all_reduce sum {}, {} ranks, {}\n{:>12} {:>17} {:>11} {:>11} {:>11} {:>11} {:>11}  {}\n",
        to_string(options_.timing.type), ranks, to_string(options_.job.transport), "bytes",
        "algorithm", "min us", "median us", "p99 us", "algbw GB/s", "busbw GB/s", "correct");
  }

  const AllReduceBenchFlags& options_;
  bool header_printed_ = false;
};

// One request of a driver on standard input: "BYTES SECONDS". Nothing at the end of the input.
struct Request {
  std::size_t bytes = 0;
  double seconds = 0;
};

std::optional<Request> next_request(std::size_t element_size) {
  std::string line;
  if (!std::getline(std::cin, line)) return std::nullopt;
  Request request;
  if (!(std::istringstream(line) >> request.bytes >> request.seconds) || request.bytes == 0 ||
      request.bytes % element_size != 0 || !(request.seconds > 0)) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("'{}' is not BYTES SECONDS", line));
  }
  return request;
}

// The ranks that wait for the next request sleep: they are in a broadcast.
std::optional<Request> agree_on_request(Communicator& communicator, std::size_t element_size) {
  std::vector<double> message(2);
  if (communicator.rank() == 0) {
    if (const auto request = next_request(element_size)) {
      message = {static_cast<double>(request->bytes), request->seconds};
    }
  }
  communicator.broadcast(std::span(message), 0);
  if (message[0] == 0) return std::nullopt;
  return Request{static_cast<std::size_t>(message[0]), message[1]};
}

int run_rank(Communicator& communicator, const AllReduceBenchFlags& options) {
  Printer printer(options);
  bool all_correct = true;
  const auto measure = [&](std::size_t bytes, const TimingOptions& how) {
    const Timing timing = time_all_reduce(communicator, bytes, how);
    all_correct = all_correct && timing.correct;
    if (communicator.rank() == 0) printer.print(communicator.world_size(), bytes, timing);
  };
  if (options.serve) {
    while (const auto request = agree_on_request(communicator, size_of(options.timing.type))) {
      TimingOptions how = options.timing;
      how.duration = duration_of(request->seconds);
      measure(request->bytes, how);
    }
  } else {
    for (const std::size_t bytes : options.bytes) measure(bytes, options.timing);
  }
  communicator.barrier();  // nobody leaves while another still measures
  return all_correct ? 0 : 1;
}

int run_local_ranks(const AllReduceBenchFlags& options) {
  return run_threads(options.ranks, options.job.timeout, /*survive=*/false, [&](Job& job) {
    try {
      return run_rank(job.communicator(), options);
    } catch (const std::exception& error) {
      job.communicator().abort(error.what());  // the others may be waiting for this rank
      throw;
    }
  });
}

void require(bool condition, const std::string& message) {
  if (!condition) throw Error(ErrorCode::kInvalidArgument, message);
}

// What would fail on every rank alike is told once, before any is started.
void check_options(const AllReduceBenchFlags& options) {
  for (const std::size_t bytes : options.bytes) {
    require(bytes > 0 && bytes % size_of(options.timing.type) == 0,
            fmt::format("--bytes {}: not a multiple of the size of {}", bytes,
                        to_string(options.timing.type)));
  }
  const TransportKind transport = options.job.transport;
  const bool shared = transport != TransportKind::kTcp && transport != TransportKind::kMpi;
  const Algorithm algorithm = options.timing.algorithm;
  const bool native = algorithm == Algorithm::kNative && transport == TransportKind::kMpi;
  // Where the ranks are is known when they have met.
  const bool by_host = transport == TransportKind::kAuto &&
                       offers(Collective::kAllReduce, algorithm, Sharing::kHosts);
  require(native || by_host ||
              offers(Collective::kAllReduce, algorithm, shared ? Sharing::kAll : Sharing::kNone),
          fmt::format("--transport {} does not offer --algorithm {}", to_string(transport),
                      to_string(algorithm)));
}

int run_bench_allreduce(AllReduceBenchFlags& options, const std::vector<std::string>& arguments) {
  options.job.timeout = duration_of(options.timeout);
  options.timing.duration = duration_of(options.seconds);
  check_options(options);
  options.job.token = token_from(options.token_file);

  if (options.job.transport == TransportKind::kLocal) return run_local_ranks(options);
  if (options.job.transport == TransportKind::kMpi) {
    if (!started_by_mpi()) become_mpirun(mpi_library(), options.ranks, arguments);
    options.job.mpi_collectives = options.timing.algorithm == Algorithm::kNative;
    return run_rank(join(options.job).communicator(), options);
  }
  const auto environment = rank_environment();
  if (!environment) {
    LaunchOptions launch{options.ranks, arguments};
    launch.secret = random_secret();
    launch.job.emplace();
    launch.job->token = options.job.token.empty() ? launch.secret : options.job.token;
    launch.job->wire = wire_choice(options.job.plain_wire);
    launch.job->timeout = options.job.timeout;
    return launch_ranks(launch);
  }
  require(options.ranks_given->count() == 0 || options.ranks == environment->world_size,
          fmt::format("--ranks {}, but the environment says {}", options.ranks,
                      environment->world_size));
  const Job job = join(JoinOptions::from_environment(options.job));
  return run_rank(job.communicator(), options);
}

}  // namespace

void add_bench_allreduce(CLI::App& bench, const std::vector<std::string>& arguments,
                         Action& action) {
  CLI::App& command = *bench.add_subcommand("allreduce", "Time an all-reduce (sum) between ranks.");
  command.footer(kAllReduceBenchExplanation);
  const auto options = std::make_shared<AllReduceBenchFlags>();

  add_choice(command, "--transport", options->job.transport,
             "local (threads), tcp, shm, mpi, or auto: shared memory where ranks share a host",
             {TransportKind::kLocal, TransportKind::kTcp, TransportKind::kShm, TransportKind::kAuto,
              TransportKind::kMpi})
      ->option_text("NAME [auto]");
  options->ranks_given = command.add_option("--ranks", options->ranks, "How many ranks to start")
                             ->transform(whole_number(1, kMaxWorldSize))
                             ->option_text("N [2]");
  command.add_option("--bytes", options->bytes, "Sizes of the buffer, e.g. 8,64KiB,25MiB")
      ->delimiter(',')
      ->transform(CLI::AsSizeValue(true))
      ->option_text("SIZES [8 to 64MiB]");
  add_choice(command, "--algorithm", options->timing.algorithm,
             "auto, pair, ring, halving_doubling, direct, tree, shared (not tcp), two_level "
             "(auto, several hosts), native (mpi)",
             {Algorithm::kAuto, Algorithm::kPair, Algorithm::kRing, Algorithm::kHalvingDoubling,
              Algorithm::kDirect, Algorithm::kTree, Algorithm::kShared, Algorithm::kTwoLevel,
              Algorithm::kNative})
      ->option_text("NAME [auto]");
  add_choice(command, "--type", options->timing.type, "f32, f64, f16, bf16, i32, i64 or u8",
             {DataType::kF32, DataType::kF64, DataType::kF16, DataType::kBf16, DataType::kI32,
              DataType::kI64, DataType::kU8})
      ->option_text("NAME [f32]");
  command.add_flag("--plain", options->timing.plain_memory,
                   "Use ordinary memory, not memory that the other ranks can read");
  command.add_option("--iterations", options->timing.iterations, "Iterations per size")
      ->transform(whole_number(1, 1 << 30))
      ->option_text("N");
  command.add_option("--seconds", options->seconds, "Time per size, instead of --iterations")
      ->transform(real_number(0.001, 1e7))
      ->option_text("S [0.5]");
  command
      .add_option("--timeout", options->timeout,
                  "A rank that is silent for S seconds counts as dead")
      ->transform(real_number(0.01, 1e7))
      ->option_text("S [30]");
  command.add_option("--token-file", options->token_file, "The job's secret, needed between hosts")
      ->option_text("FILE");
  command.add_flag("--plain-wire", options->job.plain_wire,
                   "Between hosts: checksums instead of encryption; all ranks must agree. "
                   "Connections of MPI are never encrypted");
  add_wire_compression(command, options->job.wire_compression);
  command.add_option("--interface", options->job.interface, "Network interface to use")
      ->option_text("NAME");
  command.add_flag("--json", options->json, "One JSON object per line instead of a table");
  command.add_flag("--serve", options->serve,
                   "Measure what standard input asks for, one \"BYTES SECONDS\" a line; the ranks "
                   "sleep in between");
  command.callback([options, &command, &arguments, &action] {
    action = [options, &command, &arguments] {
      refuse_together(command, "--iterations", {"--seconds"});
      return run_bench_allreduce(*options, arguments);
    };
  });
}

}  // namespace lockstep::cli
