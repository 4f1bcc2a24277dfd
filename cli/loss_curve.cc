#include "cli/loss_curve.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <iterator>

#include "lockstep/base/error.h"
#include "lockstep/model/weights_hash.h"

namespace lockstep::cli {

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

}  // namespace lockstep::cli
