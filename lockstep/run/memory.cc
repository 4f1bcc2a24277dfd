#include "lockstep/run/memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "lockstep/model/gpu_memory.h"
#include "lockstep/train/gradient_tree.h"

namespace lockstep {
namespace {

constexpr std::size_t kProgram = std::size_t{64} << 20;  // code, threads, buffers of sockets

std::size_t count(int value) { return static_cast<std::size_t>(value); }

std::string gib(std::size_t bytes) {
  return fmt::format("{:.1f} GiB", static_cast<double>(bytes) / (1 << 30));
}

// Of the passes over one lane.
std::size_t activation_bytes(const ModelConfig& model, std::uint64_t rows, bool recompute) {
  const std::size_t tokens = rows * count(model.context);
  const std::size_t hidden = count(model.hidden);
  const std::size_t qkv = hidden + 2 * count(model.kv_hidden());
  const std::size_t intermediate = count(model.intermediate);
  // Of a block the input, and what may be computed once more.
  const std::size_t block = 4 * hidden + qkv + count(model.heads) + 2 * intermediate + 2;
  const std::size_t blocks =
      count(model.layers) * hidden + (recompute ? 1 : count(model.layers)) * block;
  const std::size_t shared = 6 * hidden + qkv + 2 * intermediate + 4;
  const std::size_t logits = std::max(std::size_t{4} << 20, 64 * count(model.vocab));
  return (tokens * (blocks + shared) + logits) * sizeof(float);
}

std::size_t host_bytes(const TrainerOptions& options, std::span<const int> ranks, int world_size,
                       bool saves) {
  std::size_t bytes = 0;
  for (const int rank : ranks) {
    bytes += cpu_bytes_needed(options, rank, world_size, saves && rank == 0);
  }
  return bytes;
}

std::string contents_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::optional<std::size_t> parse_count(std::string_view text) {
  std::size_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

// The number behind the first line that begins with `key`; 0: there is none.
std::size_t number_behind(std::string_view text, std::string_view key) {
  std::size_t at = text.find(key);
  while (at != std::string_view::npos && at > 0 && text[at - 1] != '\n') {
    at = text.find(key, at + 1);
  }
  if (at == std::string_view::npos) return 0;
  return parse_count(text.substr(at + key.size())).value_or(0);
}

// What is left below the limits of this process's control groups, the outer ones included.
std::optional<std::size_t> left_in_groups() {
  std::string own = contents_of("/proc/self/cgroup");  // 0::/path
  if (!own.starts_with("0::/")) return std::nullopt;
  own = own.substr(4, own.find('\n') - 4);
  std::optional<std::size_t> least;
  const std::filesystem::path root = "/sys/fs/cgroup";
  for (std::filesystem::path group = own;; group = group.parent_path()) {
    const auto limit = parse_count(contents_of(root / group / "memory.max"));
    const auto used = parse_count(contents_of(root / group / "memory.current"));
    if (limit && used) {
      // Pages of files count as used, but are given up when memory is needed.
      const std::string stat = contents_of(root / group / "memory.stat");
      const std::size_t files = std::min(
          *used, number_behind(stat, "active_file ") + number_behind(stat, "inactive_file "));
      const std::size_t taken = *used - files;
      const std::size_t left = *limit > taken ? *limit - taken : 0;
      least = std::min(least.value_or(left), left);
    }
    if (group.empty()) return least;
  }
}

}  // namespace

std::size_t cpu_bytes_needed(const TrainerOptions& options, int rank, int world_size,
                             bool snapshot) {
  const ReplicaOptions replica = replica_options(options, rank, world_size);
  const std::size_t parameters = ParameterLayout(options.model).size();
  const std::size_t accumulators = schedule_lanes(replica.partials).accumulators;
  const std::size_t floats =
      parameters * (1 + accumulators + (snapshot ? 3 : 0)) + 2 * replica.shard.size();
  return floats * sizeof(float) +
         activation_bytes(options.model, options.micro_batch, options.recompute) + kProgram;
}

std::size_t gpu_bytes_needed(const TrainerOptions& options, int rank, int world_size) {
  const ReplicaOptions replica = replica_options(options, rank, world_size);
  GpuModelOptions model;
  model.model = replica.model;
  model.precision = replica.precision;
  model.rows = replica.rows;
  model.context = replica.context;
  model.accumulators = std::max(replica.accumulators, accumulators_for(replica.partials));
  model.shard = replica.shard;
  model.recompute = replica.recompute;
  return gpu_bytes_needed(model);
}

std::optional<std::string> memory_refusal(const TrainerOptions& options, std::span<const int> ranks,
                                          int world_size, bool saves, std::size_t available) {
  const std::size_t needed = host_bytes(options, ranks, world_size, saves);
  if (needed <= available) return std::nullopt;
  std::string line =
      fmt::format("out of memory: {} {} {}, where {} are available", ranks.size(),
                  ranks.size() == 1 ? "worker needs" : "workers need", gib(needed), gib(available));
  const auto fits = [&](const TrainerOptions& other, bool saving) {
    return host_bytes(other, ranks, world_size, saving) <= available;
  };
  TrainerOptions thrifty = options;
  thrifty.recompute = true;
  if (fits(thrifty, saves)) return line + "; --recompute would fit, with the same result";
  for (std::uint64_t rows = options.micro_batch; rows-- > 1;) {
    TrainerOptions smaller = options;
    smaller.micro_batch = rows;
    if (options.global_batch % rows == 0 && fits(smaller, saves)) {
      return line + fmt::format("; --micro-batch {} would fit", rows);
    }
  }
  TrainerOptions sharded = options;
  sharded.reducer.shard = true;
  if (world_size > 1 && fits(sharded, saves)) return line + "; --shard-optimizer would fit";
  sharded.reducer.buddy = false;
  if (world_size > 1 && fits(sharded, saves)) {
    return line + "; --shard-optimizer with --no-buddy would fit";
  }
  if (saves && fits(options, false)) {
    return line + "; --save-every 0, without a copy for checkpoints, would fit";
  }
  return line +
         "; it takes a smaller model (--hidden, --layers), a shorter --context or fewer "
         "workers on this host";
}

std::optional<std::string> model_memory_refusal(const ModelConfig& model, int context,
                                                std::size_t available) {
  const std::size_t cache = 2 * count(model.layers) * count(model.kv_hidden()) * count(context);
  const std::size_t needed = (ParameterLayout(model).size() + cache) * sizeof(float) + kProgram;
  if (needed <= available) return std::nullopt;
  return fmt::format("out of memory: the model needs {}, where {} are available", gib(needed),
                     gib(available));
}

std::optional<std::size_t> parse_meminfo(std::string_view text, std::string_view key) {
  const std::string line = fmt::format("{}:", key);
  const std::size_t begin = text.find(line);
  if (begin == std::string_view::npos) return std::nullopt;
  text.remove_prefix(begin + line.size());
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  const auto kib = parse_count(text);
  if (!kib) return std::nullopt;
  return *kib * 1024;
}

std::optional<std::size_t> available_memory() {
  const auto host = parse_meminfo(contents_of("/proc/meminfo"), "MemAvailable");
  const auto group = left_in_groups();
  if (!host || !group) return host ? host : group;
  return std::min(*host, *group);
}

}  // namespace lockstep
