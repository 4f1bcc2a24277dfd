#include <fmt/format.h>

#include "lockstep/base/host.h"
#include "lockstep/base/version.h"
#include "lockstep/train/trainer.h"

namespace lockstep {

// Everything that the bits of the result or the order of collectives depend on.
std::vector<Setting> Trainer::settings() const {
  std::vector<Setting> list;
  const auto add = [&](const char* name, const auto& value) {
    list.push_back({name, fmt::format("{}", value), true});
  };
  add("version", version());
  add("global batch", options_.global_batch);
  add("micro batch", options_.micro_batch);
  const ModelConfig& model = options_.model;
  add("vocab", model.vocab);
  add("hidden", model.hidden);
  add("layers", model.layers);
  add("heads", model.heads);
  add("kv heads", model.kv_heads);
  add("intermediate", model.intermediate);
  add("context", model.context);
  add("rope theta", model.rope_theta);
  add("norm eps", model.norm_eps);
  add("tied embeddings", model.tie_embeddings);
  add("precision", to_string(options_.precision));
  add("steps", options_.schedule.steps);
  add("steps done", step_);
  add("schedule", to_string(options_.schedule.decay));
  add("learning rate", options_.schedule.peak);
  add("final learning rate", options_.schedule.floor);
  add("warmup", options_.schedule.warmup);
  add("beta1", options_.adamw.beta1);
  add("beta2", options_.adamw.beta2);
  add("eps", options_.adamw.eps);
  add("weight decay", options_.adamw.weight_decay);
  add("clip", options_.clip);
  add("seed", options_.seed);
  add("training samples", training_.size());
  add("validation samples", validation_.size());
  add("eval every", options_.eval_every);
  add("verify every", options_.verify_every);
  add("reduction", to_string(options_.reducer.reduction));
  add("wire type", to_string(options_.reducer.wire));
  add("bucket bytes", options_.reducer.bucket_bytes);
  add("sharded optimizer", options_.reducer.shard);
  std::string skipped;
  for (const SkippedLane& lane : options_.skip_lanes) {
    skipped += fmt::format(" {}:{}", lane.step, lane.lane);
  }
  add("skipped lanes", skipped);
  list.push_back({"processor and C library", host_fingerprint(), false});
  return list;
}

}  // namespace lockstep
