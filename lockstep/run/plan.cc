#include "lockstep/run/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>

#include "lockstep/base/error.h"
#include "lockstep/files/file_source.h"
#include "lockstep/model/cpu/matmul.h"
#include "lockstep/run/defaults.h"
#include "lockstep/run/device.h"
#include "lockstep/run/memory.h"
#include "lockstep/train/checkpoint/folders.h"

namespace lockstep {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

// The sizes of fresh weights: what the user gave, else what goes by the name, else what fits the
// data.
ModelConfig fresh_model(const TrainOptions& options, const DataSource& data) {
  const ModelConfig& given = options.model;
  ModelConfig model = fitting_model(tokens_in(data.training));
  if (!options.preset.empty()) {
    const auto named = named_model(options.preset);
    if (!named) refuse(fmt::format("--model {}: there is no such name", options.preset));
    model = *named;
  }
  const auto set = [](int& value, int wanted) {
    if (wanted != 0) value = wanted;
  };
  set(model.hidden, given.hidden);
  set(model.layers, given.layers);
  set(model.heads, given.heads);
  set(model.kv_heads, given.kv_heads);
  set(model.intermediate, given.intermediate);
  set(model.context, given.context);
  if (given.hidden != 0) {  // the rest follows the width
    if (given.heads == 0) model.heads = std::max(1, model.hidden / 32);
    if (given.kv_heads == 0) model.kv_heads = model.heads;
    if (given.intermediate == 0) model.intermediate = model.hidden * 3;
  } else if (given.heads != 0 && given.kv_heads == 0) {
    model.kv_heads = model.heads;
  }
  model.vocab = static_cast<int>(std::max(data.vocab, options.vocab));
  model.tie_embeddings = given.tie_embeddings || !options.preset.empty();
  return model;
}

// The sizes of weights that are there already. What the user gave must not say otherwise.
ModelConfig same_model(const TrainOptions& options, const DataSource& data, ModelConfig model) {
  const auto check = [](int value, int given, const std::string& flag) {
    if (given == 0 || given == value) return;
    refuse(fmt::format("{} {}, but the model it starts from has {}", flag, given, value));
  };
  ModelConfig given = options.model;
  std::string name;
  if (!options.preset.empty()) {
    given = fresh_model(options, data);
    name = fmt::format("--model {}: ", options.preset);
  }
  check(model.hidden, given.hidden, name + "--hidden");
  check(model.layers, given.layers, name + "--layers");
  check(model.heads, given.heads, name + "--heads");
  check(model.kv_heads, given.kv_heads, name + "--kv-heads");
  check(model.intermediate, given.intermediate, name + "--intermediate");
  check(model.vocab, static_cast<int>(options.vocab), "--vocab");
  if (given.tie_embeddings && !model.tie_embeddings) {
    refuse(fmt::format("{}, but the embeddings of the model it starts from are not tied",
                       name.empty() ? "--tie-embeddings" : name + "tied embeddings"));
  }
  if (options.model.context != 0) model.context = options.model.context;
  return model;
}

ModelConfig choose_model(const TrainOptions& options, const DataSource& data,
                         const std::optional<SavedModel>& init) {
  const ModelConfig model =
      init ? same_model(options, data, init->config) : fresh_model(options, data);
  if (static_cast<std::uint32_t>(model.vocab) < data.vocab) {
    refuse(fmt::format("the data has a vocabulary of {}, the model one of {}", data.vocab,
                       model.vocab));
  }
  validate(model);
  return model;
}

struct SplitSamples {
  Samples training;
  Samples validation;
  Mix mix = {};
};

// What one source gives: files for validation, or a part of the others.
SplitSamples split_source(const std::string& name, std::span<const TokenShard> training,
                          std::span<const TokenShard> validation, const ModelConfig& model) {
  const auto samples_of = [&](std::span<const TokenShard> shards) {
    return Samples({shards.begin(), shards.end()}, static_cast<std::uint32_t>(model.vocab),
                   model.context);
  };
  const Samples all = samples_of(training);
  if (!validation.empty() && all.size() > 0) return {all, samples_of(validation)};
  if (all.size() < 2) {
    throw Error(ErrorCode::kIo,
                fmt::format("{}: {} tokens are too few for a context of {}; a shorter --context "
                            "takes fewer",
                            name, tokens_in(training), model.context));
  }
  const std::uint64_t kept = validation_samples(all.size());
  return {all.slice(0, all.size() - kept), all.slice(all.size() - kept, kept)};
}

SplitSamples split_samples(const DataSource& data, const ModelConfig& model) {
  if (data.mix.empty()) return split_source(data.name, data.training, data.validation, model);
  std::vector<double> weights;
  for (const DataSource::Part& part : data.mix) weights.push_back(part.weight);
  const std::vector<std::uint64_t> shares = apportion(weights, kMixBlock);
  const auto vocab = static_cast<std::uint32_t>(model.vocab);
  SplitSamples samples = {Samples({}, vocab, model.context), Samples({}, vocab, model.context)};
  std::span<const TokenShard> training = data.training;
  std::span<const TokenShard> validation = data.validation;
  for (std::size_t i = 0; i < data.mix.size(); ++i) {
    const DataSource::Part& part = data.mix[i];
    const SplitSamples own = split_source(part.name, training.first(part.training),
                                          validation.first(part.validation), model);
    training = training.subspan(part.training);
    validation = validation.subspan(part.validation);
    samples.training.append(own.training);
    samples.validation.append(own.validation);
    samples.mix.training.push_back({own.training.size(), shares[i]});
    samples.mix.validation.push_back({own.validation.size(), shares[i]});
  }
  return samples;
}

// Samples that may be drawn before those of some source come again.
std::uint64_t samples_of_a_pass(const SplitSamples& samples) {
  std::uint64_t fewest = samples.training.size();
  if (!samples.mix.training.empty()) fewest = UINT64_MAX;
  for (const MixPart& part : samples.mix.training) {
    fewest = std::min(fewest, static_cast<std::uint64_t>(1 / passes(part, 1)));
  }
  return fewest;
}

std::vector<SkippedLane> skipped_lanes(const std::vector<std::string>& given) {
  std::vector<SkippedLane> lanes;
  for (const std::string& text : given) {
    if (const auto lane = parse_skipped_lane(text)) {
      lanes.push_back(*lane);
    } else if (text.find(':') == std::string::npos) {
      const HaltReport report = read_halt_report(text);
      for (const HaltReport::Lane& named : report.lanes()) {
        lanes.push_back({report.step, named.lane});
      }
    } else {
      refuse(fmt::format("--skip-lanes {}: neither STEP:LANE nor a halt.json", text));
    }
  }
  std::ranges::sort(lanes);
  return lanes;
}

void add_skipped_lanes(std::vector<SkippedLane>& lanes, const std::vector<SkippedLane>& more) {
  lanes.insert(lanes.end(), more.begin(), more.end());
  std::ranges::sort(lanes);
  lanes.erase(std::unique(lanes.begin(), lanes.end()), lanes.end());
}

// A lane that is not there would be left out without a word.
void require_lanes(const TrainerOptions& how) {
  const std::uint64_t lanes = how.global_batch / how.micro_batch;
  for (const SkippedLane& each : how.skip_lanes) {
    if (static_cast<std::uint64_t>(each.lane) < lanes) continue;
    refuse(fmt::format("--skip-lanes {}:{}: a step has {} lanes, 0 to {}", each.step, each.lane,
                       lanes, lanes - 1));
  }
}

// Of options that are not given, those that follow from others.
struct Sizes {
  std::uint64_t global_batch;
  std::uint64_t micro_batch;
  Schedule schedule;
};

Sizes fitting_sizes(const TrainOptions& options, const ModelConfig& model, std::uint64_t samples) {
  Sizes sizes;
  sizes.global_batch = options.global_batch != 0 ? options.global_batch : kGlobalBatch;
  sizes.micro_batch = fitting_micro_batch(sizes.global_batch);
  const auto context = static_cast<std::uint64_t>(model.context);
  sizes.schedule.steps =
      fitting_steps(ParameterLayout(model).size(), sizes.global_batch * context, samples * context);
  const bool trained = !options.init.empty();
  sizes.schedule.peak = fitting_learning_rate(model.hidden, trained);
  sizes.schedule.warmup = options.steps.value_or(sizes.schedule.steps) / 20;
  return sizes;
}

TrainerOptions trainer_options(const TrainOptions& options, const ModelConfig& model,
                               const Sizes& sizes) {
  TrainerOptions result;
  result.model = model;
  result.precision = options.precision;
  result.recompute = options.recompute;
  result.global_batch = options.global_batch != 0 ? options.global_batch : sizes.global_batch;
  result.micro_batch = options.micro_batch != 0 ? options.micro_batch : sizes.micro_batch;
  result.adamw.weight_decay = options.weight_decay;
  result.clip = options.clip;
  result.seed = options.seed;
  Schedule& schedule = result.schedule;
  schedule.steps = options.steps.value_or(sizes.schedule.steps);
  schedule.decay = options.decay;
  schedule.peak = options.learning_rate.value_or(sizes.schedule.peak);
  schedule.floor = schedule.peak / 10;
  schedule.warmup = options.warmup.value_or(sizes.schedule.warmup);
  result.reducer = options.reducer;
  result.balance = options.balance;
  result.verify_every = options.verify_every;
  result.skip_lanes = skipped_lanes(options.skip_lanes);
  result.early_stop = options.early_stop;
  result.eval_every = options.eval_every.value_or(std::max<std::int64_t>(1, schedule.steps / 10));
  return result;
}

// The model of --init, before whose weights are read memory is looked at.
SavedModel load_start(const std::string& folder) {
  if (!std::filesystem::is_directory(folder)) {
    refuse(
        fmt::format("--init {}: {}; a model is a folder with {} and {}", folder,
                    std::filesystem::exists(folder) ? "this is a file" : "there is no such folder",
                    kConfigFile, kWeightsFile));
  }
  StoredFiles files(folder);
  const ModelConfig config =
      parse_config_json(files.path(kConfigFile), files.text(kConfigFile)).model;
  if (const auto why = model_memory_refusal(config, 0, available_memory().value_or(SIZE_MAX))) {
    refuse(*why);
  }
  return load_model(folder);
}

}  // namespace

std::optional<std::string> precision_refusal(Precision precision, bool gpu, bool processor) {
  if (gpu || processor) return std::nullopt;
  return fmt::format(
      "--precision {} needs a GPU (--device cuda) or a processor with AMX, which this one does not "
      "have; "
      "fp32 works everywhere",
      to_string(precision));
}

HaltReport read_halt_report(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw_io("reading " + path, errno);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto report = parse_halt_report(text);
  if (!report || report->samples.empty()) refuse(fmt::format("{} names no lane", path));
  return *report;
}

std::uint64_t tokens_in(std::span<const TokenShard> shards) {
  std::uint64_t tokens = 0;
  for (const TokenShard& shard : shards) tokens += shard.size();
  return tokens;
}

TrainPlan make_train_plan(const TrainOptions& options, const ResumePoint& resume) {
  const bool gpu = choose_device(options.device) == "cuda";
  if (const auto why = precision_refusal(options.precision, gpu, supports(options.precision))) {
    refuse(*why);
  }
  std::optional<SavedModel> init;
  std::optional<ModelTokenizer> start;
  if (!options.init.empty() && !resume.run) {
    init = load_start(options.init);
    start = {options.init, init->tokenizer};
  }
  if (resume.run) start = {"the run that was saved", resume.tokenizer, true};
  DataSource data = options.data(start);
  if (resume.run) init.emplace().config = resume.run->settings.model;
  const ModelConfig model = choose_model(options, data, init);
  SplitSamples samples = split_samples(data, model);
  Sizes sizes = fitting_sizes(options, model, samples_of_a_pass(samples));
  if (resume.run) {
    const RunSettings& saved = resume.run->settings;
    sizes = {saved.global_batch, saved.micro_batch, saved.schedule};
  }
  TrainerOptions how = trainer_options(options, model, sizes);
  how.mix = samples.mix;
  if (gpu) how.gpu = gpu_versions();
  if (resume.run) {
    init.reset();
    add_skipped_lanes(how.skip_lanes, resume.run->skipped_lanes);
  }
  require_lanes(how);
  return {std::move(data),
          std::move(init),
          how,
          std::move(samples.training),
          std::move(samples.validation),
          gpu};
}

}  // namespace lockstep
