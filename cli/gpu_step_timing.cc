#include "cli/step_timing.h"
#include "lockstep/base/thread_pool.h"
#include "lockstep/model/gpu_model.h"
#include "lockstep/model/init.h"

namespace lockstep::cli {
namespace {

class GpuStepBench final : public StepBench {
 public:
  explicit GpuStepBench(const StepOptions& options)
      : StepBench(options.model, options.batch),
        precision_(options.precision),
        model_(make_gpu_model({.model = options.model,
                               .precision = options.precision,
                               .adamw = {},
                               .rows = options.batch,
                               .context = options.model.context,
                               .accumulators = 1,
                               .shard = {0, ParameterLayout(options.model).size()},
                               .recompute = options.recompute})) {
    ThreadPool pool(options.threads);
    std::vector<float> values(layout().size());
    initialise(layout(), kBenchSeed, pool, values);
    model_->set_parameters(values);
  }

  using StepBench::step;
  double step() override {
    model_->gradient(batch(), 0, {});
    model_->update({.tokens = tokens(),
                    .clip = kBenchClip,
                    .learning_rate = learning_rate(),
                    .step = steps_++});
    const LossSum loss = model_->finish_lanes().front().sum;
    model_->finish_update();
    return loss.loss / static_cast<double>(loss.tokens);
  }

  std::vector<float> parameters() const override {
    std::vector<float> values(layout().size());
    model_->get_parameters(values);
    return values;
  }
  const ParameterLayout& layout() const override { return model_->layout(); }
  double matmul_gflops() override { return gpu_matmul_gflops(precision_); }
  double gpu_gib() const override { return static_cast<double>(model_->bytes()) / (1 << 30); }

 private:
  Precision precision_;
  std::unique_ptr<GpuModel> model_;
  std::int64_t steps_ = 0;
};

}  // namespace

std::unique_ptr<StepBench> make_gpu_step_bench(const StepOptions& options) {
  return std::make_unique<GpuStepBench>(options);
}

}  // namespace lockstep::cli
