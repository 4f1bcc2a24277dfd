#include "lockstep/run/options.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <filesystem>

#include "lockstep/base/error.h"
#include "lockstep/launch/launch.h"
#include "lockstep/net/socket/address.h"
#include "lockstep/page/page.h"
#include "lockstep/run/defaults.h"

namespace lockstep {
namespace {

void require_option(bool condition, const std::string& message) {
  if (!condition) throw Error(ErrorCode::kInvalidArgument, message);
}

bool is_file(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error);
}

// Options of workers that come and go.
void check_membership(const TrainOptions& options) {
  const TransportKind transport = options.job.transport;
  const bool fixed = transport == TransportKind::kLocal || transport == TransportKind::kMpi ||
                     transport == TransportKind::kServer;
  const bool resumes = options.folder == FolderUse::kResume;
  if (!options.listen.empty()) require_host_port("--listen", options.listen);
  if (!options.join.empty()) require_host_port("--join", options.join);
  require_option(options.listen.empty() || options.join.empty(),
                 "--listen starts a job, --join joins one: give one of them");
  require_option(options.listen.empty() || !fixed,
                 fmt::format("--listen is for --transport tcp, shm or auto, not for {}",
                             to_string(transport)));
  const auto where = parse_host_port(options.listen);
  const bool only_here = !where || where->host == "localhost" || where->host == "::1" ||
                         where->host.starts_with("127.");
  require_option(transport != TransportKind::kShm || only_here,
                 "--transport shm is for workers of one host: --listen at 127.0.0.1, or use auto");
  require_option(!options.expect || !options.listen.empty(),
                 "--expect counts workers that come over --listen HOST:PORT");
  const int workers = options.workers.value_or(1);
  require_option(
      !options.expect || *options.expect >= workers,
      fmt::format("--expect {} is fewer than --workers {}", options.expect.value_or(0), workers));
  require_option(!options.fail_fast || options.listen.empty(),
                 "--fail-fast ends the job at the first change: it does not go with --listen");
  require_option(!options.fail_fast || options.min_workers == 1,
                 "--fail-fast ends the job at the first loss: it does not go with --min-workers");
  // Ranks of a launcher's world are as many as that says.
  const int most = options.expect.value_or(workers);
  require_option(
      !options.workers || options.min_workers <= most || !options.listen.empty(),
      fmt::format("--min-workers {}, but there are only {} workers", options.min_workers, most));
  require_option(options.reducer.buddy || options.reducer.shard || resumes,
                 "--no-buddy is for --shard-optimizer");
}

// Options of a worker of the original protocol, which knows of no other but by their average.
void check_original(const TrainOptions& options) {
  if (options.protocol == StarProtocol::kLanes) return;
  const std::string flag = fmt::format("--protocol {}", to_string(options.protocol));
  require_option(!options.job.coordinator.empty(),
                 flag + " is for a worker of --coordinator HOST:PORT");
  require_option(!options.workers, flag + " is for one worker: start each by itself");
  const auto refuse_with = [&](bool given, const char* other) {
    require_option(!given, fmt::format("{} does not go with {}", flag, other));
  };
  refuse_with(!options.listen.empty(), "--listen");
  refuse_with(!options.join.empty(), "--join");
  refuse_with(options.dry_run, "--dry-run");
  refuse_with(!options.skip_lanes.empty(), "--skip-lanes");
  refuse_with(options.min_workers > 1, "--min-workers");
  refuse_with(options.exchange == ExchangeChoice::kNccl, "--exchange nccl");
}

}  // namespace

std::string_view to_string(StarProtocol protocol) {
  switch (protocol) {
    case StarProtocol::kLanes: return "lanes";
    case StarProtocol::kOriginal: return "original";
    case StarProtocol::kOriginalVector: return "original-vector";
  }
  return "?";
}

std::optional<SaveEvery> parse_save_every(std::string_view text) {
  constexpr std::int64_t kMost = std::int64_t{1} << 50;
  const char* const last = text.data() + text.size();
  double real = 0;  // such as 1e3
  if (const auto [end, error] = std::from_chars(text.data(), last, real);
      error == std::errc() && end == last && real >= 0 && real <= static_cast<double>(kMost) &&
      std::floor(real) == real) {
    return SaveEvery{static_cast<std::int64_t>(real), {}};
  }
  std::int64_t count = 0;
  const auto [end, error] = std::from_chars(text.data(), last, count);
  if (error != std::errc() || count < 0 || count > kMost) return std::nullopt;
  const std::string_view unit = text.substr(static_cast<std::size_t>(end - text.data()));
  if (count == 0 || count > 1'000'000) return std::nullopt;
  if (unit == "s") return SaveEvery{0, std::chrono::seconds(count)};
  if (unit == "m") return SaveEvery{0, std::chrono::minutes(count)};
  if (unit == "h") return SaveEvery{0, std::chrono::hours(count)};
  return std::nullopt;
}

std::string to_string(const SaveEvery& every) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(every.interval).count();
  if (seconds == 0) return fmt::format("{}", every.steps);
  if (seconds % 3600 == 0) return fmt::format("{}h", seconds / 3600);
  if (seconds % 60 == 0) return fmt::format("{}m", seconds / 60);
  return fmt::format("{}s", seconds);
}

void check_options(const TrainOptions& options) {
  check_membership(options);
  check_original(options);
  const TransportKind transport = options.job.transport;
  const std::uint64_t batch = options.global_batch != 0 ? options.global_batch : kGlobalBatch;
  const std::uint64_t micro = options.micro_batch == 0 ? 1 : options.micro_batch;
  const bool resumes = options.folder == FolderUse::kResume;
  require_option(
      resumes || batch % micro == 0,
      fmt::format("--global-batch {} is not a multiple of --micro-batch {}", batch, micro));
  require_option(
      options.reducer.reduction != Reduction::kNative || transport == TransportKind::kMpi,
      "--reduction native is MPI's own: it needs --transport mpi");
  const bool native = options.reducer.reduction == Reduction::kNccl;
  require_option(
      options.device != "cpu" || (!native && options.exchange != ExchangeChoice::kNccl),
      fmt::format("{} needs --device cuda", native ? "--reduction nccl" : "--exchange nccl"));
  require_option(!native || options.exchange != ExchangeChoice::kHost,
                 "--reduction nccl goes from GPU to GPU, not through --exchange host");
  require_option(options.job.coordinator.empty() || transport == TransportKind::kServer,
                 "--coordinator needs --transport server");
  require_option(!options.save_every || *options.save_every == SaveEvery{} || !options.out.empty(),
                 "--save-every needs --out");
  require_option(!resumes || !options.out.empty(),
                 "--resume needs a folder: --resume DIR, or --out DIR");
  require_option(!is_file(options.out),
                 fmt::format("--out {}: this is a file, and a run needs a folder", options.out));
  require_option(!resumes || !options.dry_run,
                 "--dry-run is for a new run: it does not go with --resume");
  require_option(!options.tensorboard || !options.out.empty(), "--tensorboard needs --out");
  if (!options.page.empty() && !is_launched()) parse_page_address(options.page, options.job.token);
  std::error_code error;
  require_option(options.init.empty() || options.out.empty() ||
                     !std::filesystem::equivalent(options.init, options.out, error),
                 "--init and --out are the same folder: the new model needs another one");
  require_option(options.early_stop == 0 || !options.eval_every || *options.eval_every > 0,
                 "--early-stop counts validations: it does not go with --eval-every 0");
  require_option(options.early_stop == 0 || options.save_every != SaveEvery{},
                 "--early-stop leaves the best model in a checkpoint: it does not go with "
                 "--save-every 0");
  if (transport == TransportKind::kServer) {
    require_option(!options.reducer.shard,
                   "--shard-optimizer does not work with --transport server");
    require_option(
        options.reducer.reduction == Reduction::kTree && options.reducer.wire == DataType::kF32,
        "--transport server adds in the tree, in f32: no --reduction, no --wire-dtype");
  }
}

}  // namespace lockstep
