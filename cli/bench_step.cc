#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "cli/commands.h"
#include "cli/options.h"
#include "cli/step_bench.h"
#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"
#include "lockstep/model/weights_hash.h"
#include "lockstep/run/device.h"

namespace lockstep::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kStepBenchExplanation =
    R"(A step is forward, backward, clipping by the global norm and AdamW on one fixed batch. The FLOPs of a
token are 6 (parameters - vocab x hidden) + 6 x layers x hidden x context; the share divides by the
rate of a product of three equal sizes measured just before: 2048 of ours on the same threads, 8192 of
cuBLASLt on a GPU. loss is that of the first step, loss_third that of the third: another program with
the same weights must agree.)";

// The shapes that have a name, and the batch each is measured with on a CPU and on a GPU.
struct Batches {
  int cpu, gpu;
};
const std::map<std::string, Batches> kBatches = {{"tiny", {8, 64}}, {"small", {4, 64}},
                                                 {"124m", {1, 64}}, {"350m", {1, 32}},
                                                 {"774m", {1, 16}}, {"1.5b", {1, 8}}};

struct StepBenchFlags {
  std::string model = "tiny";
  std::string device = "cpu";
  Precision precision = Precision::kF32;
  int threads = available_cores();
  int batch = 0;  // that of kBatches
  bool recompute = false;
  std::string tokens;
  int steps = 200;
  int warmup = 0;
  double seconds = 5;
  std::string weights_out;
  bool json = false;
  bool serve = false;
};

struct Measured {
  double least_ms = 0, median_ms = 0, p99_ms = 0;
};

// At least three steps.
Measured measure(StepBench& bench, double seconds) {
  std::vector<double> times;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (times.size() < 3 || Clock::now() < end) {
    const auto start = Clock::now();
    bench.step();
    times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }
  std::ranges::sort(times);
  const std::size_t last = times.size() - 1;
  return {times.front(), times[last / 2], times[last - last / 100]};
}

// Trains on the tokens of a file (16 bits each, little-endian), `tokens()` of the bench a step and
// one after the other, and prints a JSON object with the loss of each step, and one with the hash
// of the weights at the end. The learning rate grows over the first `warmup` steps. Throws
// Error{kIo} when the file has too few tokens.
void print_loss_curve(StepBench& bench, const std::string& path, int steps, int warmup) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw_io("reading " + path, errno);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  const auto count = static_cast<std::size_t>(bench.tokens());
  if (bytes.size() / 2 < count * static_cast<std::size_t>(steps) + 1) {
    throw Error(ErrorCode::kIo, fmt::format("{}: {} tokens are too few for {} steps of {}", path,
                                            bytes.size() / 2, steps, count));
  }
  const auto token = [&](std::size_t place) {
    return static_cast<std::int32_t>(static_cast<unsigned char>(bytes[2 * place])) |
           static_cast<std::int32_t>(static_cast<unsigned char>(bytes[2 * place + 1])) << 8;
  };
  for (int step = 0; step < steps; ++step) {
    const std::size_t first = static_cast<std::size_t>(step) * count;
    bench.set_learning_rate(kBenchLearningRate *
                            std::min(1.0, static_cast<double>(step + 1) / std::max(1, warmup)));
    const double loss = bench.step([&](std::size_t i) { return token(first + i); });
    fmt::print("{{\"step\": {}, \"loss\": {}}}\n", step + 1, loss);
    std::fflush(stdout);
  }
  fmt::print("{{\"weights\": \"{}\"}}\n", weights_hash(bench.layout(), bench.parameters()));
}

int run_bench_step(const StepBenchFlags& options) {
  const auto config = named_model(options.model);
  if (!config) throw Error(ErrorCode::kInvalidArgument, "--model " + options.model);
  const std::string device = choose_device(options.device);
  const bool gpu = device == "cuda";
  const Batches& batches = kBatches.at(options.model);
  const int batch = options.batch > 0 ? options.batch : gpu ? batches.gpu : batches.cpu;
  const StepOptions how = {.model = *config,
                           .precision = options.precision,
                           .batch = batch,
                           .threads = options.threads,
                           .recompute = options.recompute};
  const auto made = gpu ? make_gpu_step_bench(how) : make_cpu_step_bench(how);
  StepBench& bench = *made;
  if (!options.weights_out.empty()) bench.write_weights(options.weights_out);
  if (!options.tokens.empty()) {
    print_loss_curve(bench, options.tokens, options.steps, options.warmup);
    return 0;
  }
  const double gemm = bench.matmul_gflops();
  const double loss = bench.step();
  bench.step();
  const double loss_third = bench.step();

  const auto report = [&](double seconds) {
    const Measured time = measure(bench, seconds);
    const double tokens_per_s = 1e3 * bench.tokens() / time.median_ms;
    const double gflops = bench.flops() / time.median_ms / 1e6;
    if (options.json || options.serve) {
      nlohmann::ordered_json line = {{"model", options.model},
                                     {"device", device},
                                     {"precision", to_string(options.precision)},
                                     {"threads", options.threads},
                                     {"batch", batch},
                                     {"context", config->context},
                                     {"min_ms", time.least_ms},
                                     {"median_ms", time.median_ms},
                                     {"p99_ms", time.p99_ms},
                                     {"tokens_per_s", tokens_per_s},
                                     {"model_gflops", gflops},
                                     {"gemm_gflops", gemm},
                                     {"share_of_gemm", gflops / gemm},
                                     {"loss", loss},
                                     {"loss_third", loss_third}};
      if (gpu) line["gpu_gib"] = bench.gpu_gib();
      fmt::print("{}\n", line.dump());
    } else {
      fmt::print(
          "{}, {}, {}, batch {} x {} tokens: {:.1f} ms a step (least {:.1f}, p99 {:.1f})\n"
          "{:.0f} tokens/s, {:.1f} model GFLOP/s, {:.0f} % of a large product ({:.1f} GFLOP/s)\n"
          "loss {:.6f}, in the third step {:.6f}\n",
          options.model,
          gpu ? fmt::format("GPU, {:.1f} GiB", bench.gpu_gib())
              : fmt::format("{} threads", options.threads),
          to_string(options.precision), batch, config->context, time.median_ms, time.least_ms,
          time.p99_ms, tokens_per_s, gflops, 100 * gflops / gemm, gemm, loss, loss_third);
    }
    std::fflush(stdout);
  };
  if (!options.serve) {
    report(options.seconds);
    return 0;
  }
  for (double seconds = 0; std::cin >> seconds;) report(seconds);
  return 0;
}

}  // namespace

void add_bench_step(CLI::App& bench, Action& action) {
  CLI::App& command =
      *bench.add_subcommand("step", "Time a training step of one worker, without communication.");
  command.footer(kStepBenchExplanation);
  const auto options = std::make_shared<StepBenchFlags>();
  command
      .add_option("--model", options->model,
                  fmt::format("One of {}", fmt::join(model_names(), ", ")))
      ->check(one_of(model_names()))
      ->option_text("NAME [tiny]");
  add_device_option(command, options->device);
  command
      .add_option_function<std::string>(
          "--precision",
          [options](const std::string& name) {
            options->precision = name == "bf16" ? Precision::kBf16 : Precision::kF32;
          },
          "fp32, or bf16: products of bf16 with sums in fp32, where the processor can")
      ->check(one_of({"fp32", "bf16"}))
      ->option_text("NAME [fp32]");
  command.add_option("--threads", options->threads, "Compute threads")
      ->transform(whole_number(1, 1024))
      ->option_text("N [all cores]");
  command.add_option("--batch", options->batch, "Sequences in a step")
      ->transform(whole_number(1, 1 << 30))
      ->option_text("N [8 for tiny, 4 for small, else 1; on a GPU 64, from 350m on 32, 16, 8]");
  command.add_flag("--recompute", options->recompute,
                   "Compute activations once more instead of keeping them");
  command.add_option("--seconds", options->seconds, "Time to measure; at least three steps")
      ->transform(real_number(0.001, 1e7))
      ->option_text("S [5]");
  command
      .add_option("--weights-out", options->weights_out,
                  "Write the first weights, for another program to start from: f32, tensors in "
                  "Hugging Face's order")
      ->option_text("FILE");
  command
      .add_option("--tokens", options->tokens,
                  "Instead of timing, train on the 16-bit tokens of this file and print every loss")
      ->option_text("FILE");
  command.add_option("--steps", options->steps, "With --tokens: how many steps")
      ->transform(whole_number(1, 1 << 30))
      ->option_text("N [200]");
  command
      .add_option("--warmup", options->warmup,
                  "With --tokens: steps until the learning rate is full")
      ->transform(whole_number(0, 1 << 30))
      ->option_text("N [0]");
  command.add_flag("--json", options->json, "A JSON object instead of text");
  command.add_flag("--serve", options->serve,
                   "Measure what standard input asks for, a number of seconds a line");
  command.callback([options, &action] { action = [options] { return run_bench_step(*options); }; });
}

}  // namespace lockstep::cli
