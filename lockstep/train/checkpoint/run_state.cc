#include "lockstep/train/checkpoint/run_state.h"

#include <fmt/format.h>

#include <span>
#include <utility>

#include "lockstep/files/json.h"

namespace lockstep {
namespace {

constexpr std::string_view kStateFormat = "lockstep trainer state";
constexpr std::uint64_t kStateVersion = 2;
// Its fingerprint was over some of the data only.
constexpr std::uint64_t kVersionWithoutFingerprint = 1;
constexpr std::uint64_t kMostSize = 1 << 30;
constexpr auto kMostStep = static_cast<std::uint64_t>(INT64_MAX);

Json json_of(const ModelConfig& model) {
  return {{"vocab", model.vocab},       {"hidden", model.hidden},
          {"layers", model.layers},     {"heads", model.heads},
          {"kv_heads", model.kv_heads}, {"intermediate", model.intermediate},
          {"context", model.context},   {"rope_theta", model.rope_theta},
          {"norm_eps", model.norm_eps}, {"tie_embeddings", model.tie_embeddings}};
}

Json json_of(const AdamWOptions& adamw) {
  return {{"name", "adamw"},
          {"beta1", adamw.beta1},
          {"beta2", adamw.beta2},
          {"eps", adamw.eps},
          {"weight_decay", adamw.weight_decay}};
}

Json json_of(const Schedule& schedule) {
  return {{"name", to_string(schedule.decay)},
          {"peak", schedule.peak},
          {"floor", schedule.floor},
          {"warmup", schedule.warmup},
          {"steps", schedule.steps}};
}

Json json_of(const Versions& versions) {
  Json json = {{"lockstep", versions.lockstep},
               {"c_library", versions.c_library},
               {"instruction_set", versions.instruction_set}};
  if (versions.gpu == GpuVersions{}) return json;
  json["gpu"] = versions.gpu.name;
  json["cuda"] = versions.gpu.cuda;
  json["cublas_lt"] = versions.gpu.cublas_lt;
  json["cudnn"] = versions.gpu.cudnn;
  return json;
}

Json json_of(const RunState& state) {
  const RunSettings& settings = state.settings;
  Json skipped = Json::array();
  for (const SkippedLane& lane : state.skipped_lanes) skipped.push_back({lane.step, lane.lane});
  Json data = {{"samples", state.data.samples},
               {"fingerprint", state.data.fingerprint},
               {"validation", state.data.validation},
               {"position", static_cast<std::uint64_t>(state.step) * settings.global_batch}};
  for (const MixPart& part : state.data.mix) data["mix"].push_back({part.samples, part.share});
  return {
      {"format", kStateFormat},
      {"version", kStateVersion},
      {"versions", json_of(state.versions)},
      {"step", state.step},
      {"seed", settings.seed},
      {"data", std::move(data)},
      {"validation",
       {{"best_step", state.validation.best_step},
        {"best_loss", state.validation.best_loss},
        {"since_best", state.validation.since_best}}},
      {"skipped_lanes", skipped},
      {"global_batch", settings.global_batch},
      {"micro_batch", settings.micro_batch},
      {"precision", to_string(settings.precision)},
      {"clip", settings.clip},
      {"reduction", settings.reduction},
      {"wire_dtype", settings.wire_dtype},
      {"model", json_of(settings.model)},
      {"optimizer", json_of(settings.adamw)},
      {"schedule", json_of(settings.schedule)},
  };
}

// Reads the object under `key` with `read`, whose problem becomes that of `reader`.
template <typename Read>
void read_object(JsonReader& reader, const char* key, Read&& read) {
  const Json* json = reader.value(key);
  if (json == nullptr) return;
  JsonReader inner(*json);
  read(inner);
  if (inner.problem()) reader.fail(fmt::format("{}: {}", key, *inner.problem()));
}

void read_model(JsonReader& reader, ModelConfig& model) {
  const auto size = [&](const char* key) { return static_cast<int>(reader.whole(key, kMostSize)); };
  model.vocab = size("vocab");
  model.hidden = size("hidden");
  model.layers = size("layers");
  model.heads = size("heads");
  model.kv_heads = size("kv_heads");
  model.intermediate = size("intermediate");
  model.context = size("context");
  model.rope_theta = reader.number_f32("rope_theta");
  model.norm_eps = reader.number_f32("norm_eps");
  model.tie_embeddings = reader.flag("tie_embeddings");
}

void read_schedule(JsonReader& reader, Schedule& schedule) {
  const std::string name = reader.text("name");
  if (const auto decay = parse_decay(name)) {
    schedule.decay = *decay;
  } else {
    reader.fail(fmt::format("'{}' is no schedule", name));
  }
  schedule.peak = reader.number("peak");
  schedule.floor = reader.number("floor");
  schedule.warmup = static_cast<std::int64_t>(reader.whole("warmup", kMostStep));
  schedule.steps = static_cast<std::int64_t>(reader.whole("steps", kMostStep));
}

void read_skipped(JsonReader& reader, std::vector<SkippedLane>& lanes) {
  for (const Json& entry : reader.list("skipped_lanes")) {
    if (!entry.is_array() || entry.size() != 2 || !entry[0].is_number_unsigned() ||
        !entry[1].is_number_unsigned() || entry[0].get<std::uint64_t>() > kMostStep ||
        entry[1].get<std::uint64_t>() > UINT32_MAX) {
      reader.fail("a skipped lane is not [step, lane]");
      return;
    }
    lanes.push_back({entry[0].get<std::int64_t>(), entry[1].get<std::uint32_t>()});
  }
}

void read_mix(JsonReader& reader, std::vector<MixPart>& mix) {
  for (const Json& entry : reader.list("mix")) {
    if (!entry.is_array() || entry.size() != 2 || !entry[0].is_number_unsigned() ||
        !entry[1].is_number_unsigned()) {
      reader.fail("a part of the mix is not [samples, share]");
      return;
    }
    mix.push_back({entry[0].get<std::uint64_t>(), entry[1].get<std::uint64_t>()});
  }
}

void read_settings(JsonReader& reader, RunSettings& settings) {
  settings.seed = reader.whole("seed");
  settings.global_batch = reader.whole("global_batch", kMostSize);
  settings.micro_batch = reader.whole("micro_batch", kMostSize);
  const std::string precision = reader.text("precision");
  settings.precision = precision == "bf16" ? Precision::kBf16 : Precision::kF32;
  if (precision != to_string(settings.precision)) {
    reader.fail(fmt::format("'{}' is no precision", precision));
  }
  settings.clip = reader.number("clip");
  settings.reduction = reader.text("reduction");
  settings.wire_dtype = reader.text("wire_dtype");
  read_object(reader, "model", [&](JsonReader& inner) { read_model(inner, settings.model); });
  read_object(reader, "optimizer", [&](JsonReader& inner) {
    if (inner.text("name") != "adamw") inner.fail("not adamw");
    settings.adamw.beta1 = inner.number("beta1");
    settings.adamw.beta2 = inner.number("beta2");
    settings.adamw.eps = inner.number("eps");
    settings.adamw.weight_decay = inner.number("weight_decay");
  });
  read_object(reader, "schedule",
              [&](JsonReader& inner) { read_schedule(inner, settings.schedule); });
}

}  // namespace

std::string to_json(const RunState& state) { return to_text(json_of(state), 1) + "\n"; }

std::variant<RunState, FormatProblem> parse_run_state(std::string_view text) {
  const Json json = parse_json(text);
  JsonReader reader(json);
  if (reader.problem()) return FormatProblem{*reader.problem()};
  if (reader.text("format") != kStateFormat) return FormatProblem{"not a trainer's state"};
  const std::uint64_t version = reader.whole("version");
  if (version != kStateVersion && version != kVersionWithoutFingerprint) {
    return FormatProblem{fmt::format("another version, and this program reads {} and {}",
                                     kVersionWithoutFingerprint, kStateVersion)};
  }
  RunState state;
  state.step = static_cast<std::int64_t>(reader.whole("step", kMostStep));
  read_settings(reader, state.settings);
  if (state.step > state.settings.schedule.steps) reader.fail("'step' is after the schedule's end");
  read_skipped(reader, state.skipped_lanes);
  read_object(reader, "versions", [&](JsonReader& inner) {
    state.versions = {.lockstep = inner.text("lockstep"),
                      .c_library = inner.text("c_library"),
                      .instruction_set = inner.text("instruction_set")};
    if (!json["versions"].contains("gpu")) return;
    state.versions.gpu = {.name = inner.text("gpu"),
                          .cuda = inner.text("cuda"),
                          .cublas_lt = inner.text("cublas_lt"),
                          .cudnn = inner.text("cudnn")};
  });
  if (json.contains("validation")) {
    read_object(reader, "validation", [&](JsonReader& inner) {
      state.validation = {static_cast<std::int64_t>(inner.whole("best_step", kMostStep)),
                          inner.number("best_loss"),
                          static_cast<std::int64_t>(inner.whole("since_best", kMostStep))};
    });
  }
  read_object(reader, "data", [&](JsonReader& inner) {
    state.data = {inner.whole("samples"), inner.text("fingerprint")};
    if (version == kVersionWithoutFingerprint) state.data.fingerprint.clear();
    if (json["data"].contains("validation")) state.data.validation = inner.text("validation");
    if (json["data"].contains("mix")) read_mix(inner, state.data.mix);
    const auto position = static_cast<std::uint64_t>(state.step) * state.settings.global_batch;
    if (inner.whole("position") != position) inner.fail("'position' is not step x global_batch");
  });
  if (reader.problem()) return FormatProblem{*reader.problem()};
  return state;
}

Differences compare(const RunState& saved, const RunState& now) {
  Differences differences;
  const auto check = [](std::vector<std::string>& into, std::string_view name, const auto& before,
                        const auto& after) {
    if (before != after) into.push_back(fmt::format("{} is {}, and was {}", name, after, before));
  };
  auto& no = differences.forbidden;
  const Json model_before = json_of(saved.settings.model);
  const Json model_after = json_of(now.settings.model);
  for (const auto& [key, value] : model_before.items()) {
    check(no, key, to_text(value), to_text(model_after[key]));
  }
  check(no, "seed", saved.settings.seed, now.settings.seed);
  check(no, "global-batch", saved.settings.global_batch, now.settings.global_batch);
  check(no, "micro-batch", saved.settings.micro_batch, now.settings.micro_batch);
  check(no, "precision", to_string(saved.settings.precision), to_string(now.settings.precision));
  check(no, "the number of samples", saved.data.samples, now.data.samples);
  check(no, "the mix", to_string(std::span(saved.data.mix)), to_string(std::span(now.data.mix)));
  const bool recorded = !saved.data.fingerprint.empty();
  if (recorded && saved.data.samples == now.data.samples &&
      saved.data.fingerprint != now.data.fingerprint) {
    no.emplace_back("the data are not the same");
  }
  if (!saved.data.validation.empty() && saved.data.validation != now.data.validation) {
    no.emplace_back("the validation data are not the same");
  }

  if (now.settings.schedule.steps < saved.step) {
    no.push_back(
        fmt::format("steps is {}, but {} are done", now.settings.schedule.steps, saved.step));
  }

  auto& yes = differences.noted;
  if (!recorded) {
    yes.emplace_back("whether the data are the same is not known: an earlier version saved this");
  }
  const Schedule& before = saved.settings.schedule;
  const Schedule& after = now.settings.schedule;
  check(yes, "steps", before.steps, after.steps);
  check(yes, "schedule", to_string(before.decay), to_string(after.decay));
  check(yes, "lr", before.peak, after.peak);
  check(yes, "warmup", before.warmup, after.warmup);
  check(yes, "clip", saved.settings.clip, now.settings.clip);
  check(yes, "weight-decay", saved.settings.adamw.weight_decay, now.settings.adamw.weight_decay);
  check(yes, "reduction", saved.settings.reduction, now.settings.reduction);
  check(yes, "wire-dtype", saved.settings.wire_dtype, now.settings.wire_dtype);
  check(yes, "the version", saved.versions.lockstep, now.versions.lockstep);
  check(yes, "the C library", saved.versions.c_library, now.versions.c_library);
  check(yes, "the instruction set", saved.versions.instruction_set, now.versions.instruction_set);
  const GpuVersions& gpu_before = saved.versions.gpu;
  const GpuVersions& gpu_after = now.versions.gpu;
  const auto or_none = [](const std::string& text) { return text.empty() ? "none" : text; };
  check(yes, "the GPU", or_none(gpu_before.name), or_none(gpu_after.name));
  check(yes, "CUDA", or_none(gpu_before.cuda), or_none(gpu_after.cuda));
  check(yes, "cuBLASLt", or_none(gpu_before.cublas_lt), or_none(gpu_after.cublas_lt));
  check(yes, "cuDNN", or_none(gpu_before.cudnn), or_none(gpu_after.cudnn));
  return differences;
}

}  // namespace lockstep
