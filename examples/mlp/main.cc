// A model of your own, trained data-parallel: a small MLP learns the product of two numbers.
// Any number of workers gives the same weights, bit for bit:
//
//   RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ./mlp &
//   RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ./mlp
#include <lockstep/base/hash/blake3.h>
#include <lockstep/base/random.h>
#include <lockstep/comm/collectives/plan_engine.h>
#include <lockstep/comm/transport/mesh.h>
#include <lockstep/train/gradient_tree.h>
#include <lockstep/train/reducer.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

using namespace lockstep;

constexpr std::size_t kHidden = 16;
constexpr std::size_t kWeights = 4 * kHidden;  // two inputs, a bias and an output per hidden unit
constexpr std::uint32_t kLanes = 12;           // of a step; the workers share them
constexpr int kSamples = 8;                    // of a lane
constexpr int kSteps = 2000;

// The gradient of the sum of a lane's losses, and that sum. A lane's samples depend on step and
// lane alone, not on who computes them.
double backward(std::span<const float> w, std::span<float> gradient, int step, std::uint32_t lane) {
  const std::uint64_t stream = static_cast<std::uint64_t>(step) * kLanes + lane;
  double loss = 0;
  std::fill(gradient.begin(), gradient.end(), 0.0F);
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

std::string variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

int main() try {
  JobOptions job;
  job.rank = std::stoi(variable("RANK", "0"));
  job.world_size = std::stoi(variable("WORLD_SIZE", "1"));
  job.master_host = variable("MASTER_ADDR", "127.0.0.1");
  job.master_port = static_cast<std::uint16_t>(std::stoi(variable("MASTER_PORT", "0")));
  auto mesh = make_mesh(join_job(job), Medium::kAuto, job.timeout);
  Communicator comm(std::make_unique<PlanEngine>(std::move(mesh)), job.timeout);

  // Every worker adds up its lanes in the one tree; the reducer brings the workers' sums together.
  ThreadPool pool(1);
  const LeafOwners owners = even_owners(kLanes, comm.world_size());
  const auto allocate = [&](std::size_t bytes) { return comm.allocate(bytes); };
  const LaneSchedule schedule = schedule_lanes(owned_nodes(owners, comm.rank()));
  GradientTree tree(schedule, kWeights, allocate, pool);
  std::vector<std::span<float>> partials;
  for (std::size_t i = 0; i < schedule.partials.size(); ++i) partials.push_back(tree.partial(i));
  GradientReducer reducer(comm, owners, partials, {});

  std::vector<float> weights(kWeights);
  for (std::size_t i = 0; i < kWeights; ++i) weights[i] = random_f32(2, 0, i) - 0.5F;
  for (int step = 1; step <= kSteps; ++step) {
    reducer.begin(step);
    std::vector<std::vector<double>> losses;
    for (std::size_t i = 0; i < schedule.lanes.size(); ++i) {
      losses.push_back({backward(weights, tree.lane_gradient(i), step, schedule.lanes[i].lane)});
      tree.ready(i, {0, kWeights});
    }
    const ReducedStep sum = reducer.finish(losses);  // over all lanes of all workers
    constexpr float kRate = 0.3F / (kLanes * kSamples);
    for (std::size_t i = 0; i < kWeights; ++i) weights[i] -= kRate * sum.gradient[i];
    if (comm.rank() == 0 && step % 500 == 0) {
      std::printf("step %d  loss %.6f\n", step, sum.tail[0] / (kLanes * kSamples));
    }
  }
  std::printf("weights %s\n", to_hex(blake3(std::as_bytes(std::span(weights)))).c_str());
  comm.leave();
} catch (const Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
