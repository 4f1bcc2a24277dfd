// A model of your own, trained data-parallel: a small MLP learns the product of two numbers.
// Any number of workers gives the same weights, bit for bit, also when some are lost on the way:
//
//   RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ./mlp &
//   RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ./mlp
//
// or with torchrun, mpirun or srun, which set such variables themselves.
#include <lockstep/lockstep.h>

#include <cmath>
#include <cstdio>

using namespace lockstep;

constexpr std::size_t kHidden = 16;
constexpr std::size_t kWeights = 4 * kHidden;  // two inputs, a bias and an output per hidden unit
constexpr std::uint32_t kLanes = 12;           // of a step; the workers share them
constexpr int kSamples = 8;                    // of a lane
constexpr int kSteps = 2000;

// Adds up the gradient of a lane's losses and returns their sum. A lane's samples depend on step
// and lane alone, not on who computes them.
double backward(std::span<const float> w, std::span<float> gradient, std::int64_t step,
                std::uint32_t lane) {
  const std::uint64_t stream = static_cast<std::uint64_t>(step) * kLanes + lane;
  double loss = 0;
  for (std::uint64_t i = 0; i < kSamples; ++i) {
    const float a = 2 * random_f32(1, stream, 2 * i) - 1;
    const float b = 2 * random_f32(1, stream, 2 * i + 1) - 1;
    float h[kHidden];
    float y = 0;
    for (std::size_t k = 0; k < kHidden; ++k) {
      h[k] = std::tanh(w[4 * k] * a + w[4 * k + 1] * b + w[4 * k + 2]);
      y += w[4 * k + 3] * h[k];
    }
    const float error = y - a * b;
    loss += static_cast<double>(error) * error;
    for (std::size_t k = 0; k < kHidden; ++k) {
      const float back = 2 * error * w[4 * k + 3] * (1 - h[k] * h[k]);
      gradient[4 * k] += back * a;
      gradient[4 * k + 1] += back * b;
      gradient[4 * k + 2] += back;
      gradient[4 * k + 3] += 2 * error * h[k];
    }
  }
  return loss;
}

int main() try {
  // As the environment says; alone if it says nothing.
  Job job = join(JoinOptions::from_environment({.survive = true}));
  LaneSum lanes(job, kLanes, kWeights, 1);

  std::vector<float> weights(kWeights);
  for (std::size_t i = 0; i < kWeights; ++i) weights[i] = random_f32(2, 0, i) - 0.5F;
  run_steps(job, kSteps, {weights}, [&](std::int64_t step) {
    // Over all lanes of all workers: the gradient, and the losses beside it.
    const auto [gradient, losses] =
        lanes.sum(step, [&](std::uint32_t lane, std::span<float> out, std::span<double> loss) {
          loss[0] = backward(weights, out, step, lane);
        });
    constexpr float kRate = 0.3F / (kLanes * kSamples);
    for (std::size_t i = 0; i < kWeights; ++i) weights[i] -= kRate * gradient[i];
    if (job.rank() == 0 && step % 500 == 0) {
      std::printf("step %d  loss %.6f\n", static_cast<int>(step), losses[0] / (kLanes * kSamples));
      std::fflush(stdout);
    }
  });
  std::printf("weights %s\n", to_hex(blake3(std::as_bytes(std::span(weights)))).c_str());
  job.leave();
} catch (const Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
