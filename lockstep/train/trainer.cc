#include "lockstep/train/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <tuple>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/hash/blake3.h"
#include "lockstep/base/host.h"
#include "lockstep/base/index.h"
#include "lockstep/base/version.h"
#include "lockstep/base/whole_number.h"
#include "lockstep/comm/flight_recorder.h"
#include "lockstep/comm/kernels/kernels.h"
#include "lockstep/model/init.h"
#include "lockstep/model/update.h"
#include "lockstep/model/weights_hash.h"

namespace lockstep {
namespace {

// The tail. Every lane has the numbers ahead of kFirstRank. A rank's own numbers are in the tail of
// its first lane, at places where all other tails have zeros, so that the sum keeps them.
enum TailPlace : std::size_t { kLoss, kTokens, kCorrect, kBadLosses, kFirstRank };
enum RankPlace : std::size_t { kStop, kSave, kSaveRequest, kRegroup, kLeave, kFirstPhase };
constexpr std::size_t kRankPlaces = kFirstPhase + kPhases;

std::size_t rank_place(int rank) { return kFirstRank + index_of(rank) * kRankPlaces; }

// A rank is reported when it takes this share longer than the others, over a window of steps that
// take this time at least: less is noise.
constexpr double kStragglerShare = 0.25;
constexpr double kStragglerSeconds = 0.2;
// No phase of a step takes a thousand years.
constexpr double kMostSeconds = 3e10;

std::vector<std::uint64_t> validation_ids(const TrainerOptions& options, const Samples& samples) {
  const MixPart all = {samples.size(), kMixBlock};
  const std::span<const MixPart> parts =
      options.mix.validation.empty() ? std::span(&all, 1) : std::span(options.mix.validation);
  return spread_samples(parts, std::min(options.eval_samples, samples.size()));
}

LanePlan checked(const LanePlan& plan) {
  validate(plan);
  return plan;
}

std::vector<std::span<float>> partials_of(Replica& replica) {
  std::vector<std::span<float>> partials;
  for (std::size_t i = 0; i < replica.schedule().partials.size(); ++i) {
    partials.push_back(replica.partial(i));
  }
  return partials;
}

// How the partials of the ranks become one sum.
Exchange exchange_of(const TrainerOptions& options, int world_size) {
  if (options.outside != nullptr) return Exchange::kHost;
  if (options.reducer.on_device) return Exchange::kDevice;
  return travels(options.reducer, world_size) ? Exchange::kHost : Exchange::kNone;
}

bool balances(const TrainerOptions& options, int world_size) {
  const bool exact =
      options.reducer.reduction == Reduction::kTree && options.reducer.wire == DataType::kF32;
  return options.balance && exact && world_size > 1 &&
         options.global_batch / options.micro_batch > index_of(world_size);
}

}  // namespace

LeafOwners lane_owners(const TrainerOptions& options, int world_size) {
  const std::uint64_t lanes = options.global_batch / options.micro_batch;
  if (lanes < static_cast<std::uint64_t>(world_size)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{} workers, but a step has only {} lane{} (--global-batch {} / --micro-batch "
                    "{}), and a worker needs at least one: take {}a larger --global-batch or fewer "
                    "workers",
                    world_size, lanes, lanes == 1 ? "" : "s", options.global_batch,
                    options.micro_batch,
                    options.micro_batch > 1 ? "a smaller --micro-batch, " : ""));
  }
  return even_owners(lanes, world_size);
}

ReplicaOptions replica_options(const TrainerOptions& options, int rank, int world_size) {
  const std::size_t size = ParameterLayout(options.model).size();
  ReplicaOptions result;
  result.model = options.model;
  result.precision = options.precision;
  result.adamw = options.adamw;
  result.rows = static_cast<int>(options.micro_batch);
  result.context = options.model.context;
  result.owners = lane_owners(options, world_size);
  result.partials = owned_nodes(result.owners, rank);
  if (balances(options, world_size)) {
    result.accumulators = most_accumulators(result.owners, world_size);
  }
  result.shard = held_range(options.reducer, size, rank, world_size);
  result.exchange = exchange_of(options, world_size);
  result.recompute = options.recompute;
  result.native = options.reducer.reduction == Reduction::kNccl;
  result.sharded = options.reducer.shard;
  result.buddy = options.reducer.buddy;
  return result;
}

void initialise(Replica& replica, std::uint64_t seed, ThreadPool& pool) {
  replica.complete_parameters(
      [&](std::span<float> parameters) { initialise(replica.layout(), seed, pool, parameters); });
}

void decide_requests(std::span<const Requests> by_rank, const ReducerOptions& reducer,
                     StepReport& report) {
  const int world_size = static_cast<int>(by_rank.size());
  report.save_request = by_rank.front().save_request;
  std::optional<Range> last_buddies;  // of the rank that leaves
  for (int rank = 0; rank < world_size; ++rank) {
    const Requests& told = by_rank[index_of(rank)];
    report.stop = std::max(report.stop, told.stop);
    report.save = report.save || told.save;
    report.regroup = report.regroup || told.regroup;
    if (told.leave < 2) continue;
    const Range buddies = buddies_of(rank, world_size);
    if (reducer.shard && reducer.buddy && last_buddies == buddies) continue;
    last_buddies = buddies;
    report.leaving.push_back(rank);
  }
  if (std::ranges::all_of(by_rank, [](const Requests& told) { return told.leave > 0; })) {
    report.leaving.clear();
    report.stop = std::max(report.stop, SIGTERM);
  }
  if (!report.leaving.empty() && reducer.shard && !reducer.buddy) report.save = true;
}

Trainer::Trainer(const TrainerOptions& options, Samples training, Samples validation,
                 Replica& replica)
    : options_(options),
      training_(std::move(training)),
      validation_(std::move(validation)),
      replica_(replica),
      lanes_(checked({training_.size(), options.seed, options.global_batch, options.micro_batch,
                      options.mix.training})),
      validation_ids_(validation_ids(options, validation_)),
      block_sums_(norm_blocks(layout().size())),
      share_{0, options.global_batch},
      sample_ids_(options.micro_batch),
      tokens_(options.micro_batch * static_cast<std::size_t>(training_.context())),
      targets_(tokens_.size()) {}

Trainer::Trainer(const TrainerOptions& options, Samples training, Samples validation,
                 Replica& replica, Communicator& communicator)
    : Trainer(options, std::move(training), std::move(validation), replica) {
  connect(communicator);
}

void Trainer::connect(Communicator& communicator) {
  LOCKSTEP_CHECK(options_.outside == nullptr ||
                 (communicator.world_size() == 1 && !options_.reducer.shard));
  communicator_ = &communicator;
  owners_ = lane_owners(options_, communicator.world_size());
  reducer_.emplace(communicator, owners_, partials_of(replica_), options_.reducer,
                   [this](Range range) { replica_.reduced(range); });
  LOCKSTEP_CHECK(replica_.shard() == reducer_->held());
  balance_.reset();
  if (balances(options_, communicator.world_size())) {
    balance_.emplace(owners_, communicator.world_size(), options_.balance_rule);
  }
  compute_seconds_.assign(index_of(communicator.world_size()), 0.0);
}

void Trainer::attach(Communicator& communicator) {
  LOCKSTEP_CHECK(!attached());
  keep_moments();
  replica_.attach(replica_options(options_, communicator.rank(), communicator.world_size()),
                  communicator);
  connect(communicator);
  if (!standing_.last) return;
  standing_.last->report.regroup = false;  // that is done
  standing_.last->report.leaving.clear();
}

void Trainer::detach() {
  reducer_.reset();
  replica_.detach();
  finish_open_update();
  communicator_ = nullptr;
}

// The replica's range will be another one.
void Trainer::keep_moments() {
  if (!options_.reducer.shard || !standing_.has_moments) return;
  KeptMoments own;
  own.range = replica_.shard();
  own.step = standing_.step + (standing_.open && standing_.open->updated ? 1 : 0);
  own.first = FloatBuffer(own.range.size());
  own.second = FloatBuffer(own.range.size());
  replica_.get_moments(own.first.span(), own.second.span());
  std::erase_if(standing_.kept, [&](const KeptMoments& old) {
    return old.step < own.step || common_part(old.range, own.range) == old.range;
  });
  standing_.kept.push_back(std::move(own));
  standing_.has_moments = false;
}

// Without shards an update that has begun is the whole step, and needs nobody else.
void Trainer::finish_open_update() {
  std::optional<OpenStep>& open = standing_.open;
  if (!open) return;
  if (open->begun && !open->updated) {
    const UpdateResult updated = replica_.finish_update();
    if (open->report.step == 0) {  // one worker, that began before it had the tail
      standing_.has_state = false;
    } else if (std::isfinite(updated.norm)) {
      know_norm(updated.norm);
      open->updated = true;
    }
  }
  if (options_.reducer.shard) {
    if (open->begun && !open->updated) open.reset();
    return;
  }
  if (open->updated) commit();
  open.reset();
}

void Trainer::decide(const StepReport& report, double norm) {
  LOCKSTEP_CHECK(!attached() && standing_.open && standing_.has_moments);
  OpenStep& open = *standing_.open;
  open.report = report;
  open.norm = norm;
  open.decided = true;
  open.begun = true;
  replica_.update(update_request(report.tokens, norm));
  replica_.finish_update();
  open.updated = true;
}

void Trainer::stand(TrainerStanding standing) {
  if (standing.step > standing_.step) asked_ = {};
  standing_ = std::move(standing);
}

void Trainer::set_owners(const LeafOwners& owners) {
  owners_ = owners;
  replica_.set_owners(owners_, communicator_->rank());
  reducer_->set_owners(owners_, partials_of(replica_));
}

// Everything that the bits of the result or the order of collectives depend on.
std::vector<Setting> Trainer::settings() const {
  std::vector<Setting> list;
  const auto add = [&](const char* name, const auto& value) {
    list.push_back({name, fmt::format("{}", value), true});
  };
  add("version", version());
  add("mix", to_string(std::span(options_.mix.training)));
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
  add("steps done", standing_.step);
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
  add("training data", to_hex(training_.fingerprint()));
  add("validation data", to_hex(validation_.fingerprint()));
  add("eval every", options_.eval_every);
  add("early stop", options_.early_stop);
  add("verify every", options_.verify_every);
  add("reduction", to_string(options_.reducer.reduction));
  add("wire type", to_string(options_.reducer.wire));
  add("bucket bytes", options_.reducer.bucket_bytes);
  add("sharded optimizer", options_.reducer.shard);
  add("buddies", options_.reducer.shard && options_.reducer.buddy);
  add("balance", options_.balance);
  std::string skipped;
  for (const SkippedLane& lane : options_.skip_lanes) {
    skipped += fmt::format(" {}:{}", lane.step, lane.lane);
  }
  add("skipped lanes", skipped);
  list.push_back({"processor and C library", host_fingerprint(), false});
  const GpuVersions& gpu = options_.gpu;
  list.push_back({"GPU, CUDA, cuBLASLt and cuDNN",
                  fmt::format("{} {} {} {}", gpu.name, gpu.cuda, gpu.cublas_lt, gpu.cudnn), false});
  return list;
}

void Trainer::start(std::vector<Setting> more) {
  std::vector<Setting> compared = settings();
  compared.insert(compared.end(), more.begin(), more.end());
  compare_settings(*communicator_, compared);
  replica_.complete_parameters(
      [&](std::span<float> parameters) { communicator_->broadcast(parameters, 0); });
  verify();
  standing_.has_state = true;
  standing_.has_moments = true;
}

std::string Trainer::verify() {
  const PhaseTimer timer(phases_, Phase::kVerify);
  const PhaseRecord record(communicator_->flight(), "verify", standing_.step);
  const std::vector<Blake3Hash> hashes = replica_.tensor_hashes();
  at("verify", standing_.step);
  compare_replicas(*communicator_, layout(), hashes, standing_.step);
  return to_weights_hash(hash_of_hashes(hashes));
}

Batch Trainer::read_batch(const Samples& samples, std::span<const std::uint64_t> ids) {
  const auto context = static_cast<std::size_t>(samples.context());
  for (std::size_t row = 0; row < ids.size(); ++row) {
    samples.read(ids[row], std::span(tokens_).subspan(row * context, context),
                 std::span(targets_).subspan(row * context, context));
  }
  return {std::span(tokens_).first(ids.size() * context),
          std::span(targets_).first(ids.size() * context), static_cast<int>(ids.size()),
          samples.context()};
}

// Samples that do not fill a lane, at the end of a share, make a smaller one.
Batch Trainer::lane_batch(std::uint32_t lane) {
  const std::uint64_t first = share_.begin + lane * options_.micro_batch;
  sample_ids_.resize(std::min<std::uint64_t>(options_.micro_batch, share_.end - first));
  lanes_.samples_from(static_cast<std::uint64_t>(standing_.step), first, sample_ids_);
  return read_batch(training_, sample_ids_);
}

void Trainer::set_share(Range samples) {
  LOCKSTEP_CHECK(samples.begin <= samples.end && samples.end <= options_.global_batch);
  share_ = samples;
  const std::uint64_t micro = options_.micro_batch;
  const std::uint64_t lanes = std::max<std::uint64_t>(1, (samples.size() + micro - 1) / micro);
  if (lanes != owners_.size()) set_owners(LeafOwners(lanes, 0));
}

bool Trainer::skipped(std::uint32_t lane) const {
  if (share_.size() == 0) return true;
  return std::ranges::find(options_.skip_lanes, SkippedLane{standing_.step + 1, lane}) !=
         options_.skip_lanes.end();
}

// Begins a lane; returns how many tokens it has.
std::int64_t Trainer::run_lane(std::size_t index) {
  const LaneSchedule& schedule = replica_.schedule();
  const std::uint32_t lane = schedule.lanes[index].lane;
  RangeReady ready;  // only with the last lane: before it nothing is final
  if (index + 1 == schedule.lanes.size()) {
    ready = [&](Range range) {
      reducer_->ready(range);
      at("backward");
      at("bucket");
    };
  }
  if (skipped(lane)) {
    replica_.skip(index, ready);
    return 0;
  }
  FlightRecorder& flight = communicator_->flight();
  Batch batch;
  {
    const PhaseTimer timer(phases_, Phase::kData);
    const PhaseRecord record(flight, "data", standing_.step + 1, static_cast<int>(lane));
    at("lane");
    if (options_.at) at(fmt::format("lane{}", lane));
    at("data");
    batch = lane_batch(lane);
  }
  const PhaseRecord record(flight, "forward and backward", standing_.step + 1,
                           static_cast<int>(lane));
  at("forward");
  replica_.gradient(batch, index, ready);
  return std::ranges::count_if(batch.targets, [](std::int32_t target) { return target >= 0; });
}

// Waits for the lanes; their tails, without this rank's own numbers.
std::vector<std::vector<double>> Trainer::finish_lanes() {
  const std::vector<LaneWork>& lanes = replica_.schedule().lanes;
  const PhaseRecord record(communicator_->flight(), "finishing lanes", standing_.step + 1);
  const std::vector<LaneResult> results = replica_.finish_lanes();
  LOCKSTEP_CHECK(results.size() == lanes.size());
  std::vector<std::vector<double>> tails(
      lanes.size(), std::vector<double>(rank_place(communicator_->world_size())));
  for (std::size_t i = 0; i < results.size(); ++i) {
    const LaneResult& result = results[i];
    phases_[Phase::kForward] += result.forward_seconds;
    phases_[Phase::kBackward] += result.backward_seconds;
    const bool finite = std::isfinite(result.sum.loss);
    std::vector<double>& tail = tails[lanes[i].place];
    tail[kLoss] = finite ? result.sum.loss : 0;
    tail[kTokens] = static_cast<double>(result.sum.tokens);
    tail[kCorrect] = static_cast<double>(result.sum.correct);
    tail[kBadLosses] = finite ? 0 : 1;
  }
  return tails;
}

void Trainer::add_requests(const Requests& requests, std::vector<double>& tail) const {
  const std::span<double> own =
      std::span(tail).subspan(rank_place(communicator_->rank()), kRankPlaces);
  own[kStop] = requests.stop;
  // What the job asks for it asks until it is told something else.
  const std::uint32_t carried = standing_.last ? standing_.last->report.save_request : 0;
  const std::uint32_t asked = requests.save_request != 0 ? requests.save_request : carried;
  own[kSave] = requests.save || asked != carried ? 1 : 0;
  own[kSaveRequest] = asked;
  own[kRegroup] = requests.regroup ? 1 : 0;
  own[kLeave] = requests.leave;
  std::ranges::copy(phases_.all(), own.begin() + kFirstPhase);
}

void Trainer::read_tail(std::span<const double> tail, StepReport& report) {
  const std::int64_t step = standing_.step;
  report.step = step + 1;
  report.epoch = lanes_.epochs(static_cast<std::uint64_t>(report.step));
  report.learning_rate = learning_rate(options_.schedule, step);
  // Sums over all ranks: nobody can be named.
  const auto counted = [&](double sum, std::string_view what) {
    const auto count = whole_number<std::int64_t>(sum);
    if (count && *count >= 0) return *count;
    communicator_->fail(
        Error(ErrorCode::kUnexpectedMessage,
              fmt::format("step {} has {} {}, as the ranks add them up", report.step, sum, what)));
  };
  report.tokens = counted(tail[kTokens], "tokens");
  report.correct = counted(tail[kCorrect], "tokens that are right");
  report.loss = report.tokens > 0 ? tail[kLoss] / tail[kTokens] : 0;
  report.lanes = lanes_by_rank(owners_, communicator_->world_size());
  std::vector<Requests> requests;
  for (int rank = 0; rank < communicator_->world_size(); ++rank) {
    const std::span<const double> told = tail.subspan(rank_place(rank), kRankPlaces);
    const auto stop = whole_number<int>(told[kStop]);
    const auto save_request = whole_number<std::uint32_t>(told[kSaveRequest]);
    const auto leave = whole_number<int>(told[kLeave]);
    const auto plausible = [](double seconds) { return std::abs(seconds) < kMostSeconds; };
    if (!stop || *stop < 0 || *stop >= NSIG || !save_request || !leave || *leave < 0 ||
        !std::ranges::all_of(told.subspan(kFirstPhase), plausible)) {
      refuse_telling(*communicator_, rank, fmt::format("its requests of step {}", report.step));
    }
    requests.push_back({.stop = *stop,
                        .save = told[kSave] > 0,
                        .save_request = *save_request,
                        .regroup = told[kRegroup] > 0,
                        .leave = *leave});
    PhaseTimes times;
    std::ranges::copy(told.subspan(kFirstPhase), times.all().begin());
    compute_seconds_[index_of(rank)] += times.compute();
    report.phases.push_back(times);
  }
  decide_requests(requests, options_.reducer, report);
  if (report.step % kStragglerWindow != 0) return;
  if (std::ranges::max(compute_seconds_) >= kStragglerSeconds) {
    report.straggler = find_straggler(compute_seconds_, kStragglerShare);
  }
  std::ranges::fill(compute_seconds_, 0.0);
}

// All ranks have read the same numbers from the tail, so all decide alike. A step that leaves lanes
// out says nothing about speed.
void Trainer::balance() {
  StepReport& report = standing_.last->report;
  const auto skips = [&](const SkippedLane& lane) { return lane.step == report.step; };
  if (!balance_ || std::ranges::any_of(options_.skip_lanes, skips)) return;
  if (!balance_->add_step(report.phases)) return;
  set_owners(balance_->owners());
  report.next_lanes = lanes_by_rank(owners_, communicator_->world_size());
}

// The norm of a sharded sum: the same number on every rank, and the same as without shards.
double Trainer::norm_of_shards(Range range) {
  const std::size_t first = range.begin / kNormBlock;
  const std::span<double> own =
      std::span(block_sums_).subspan(first, norm_blocks(range.end) - first);
  replica_.block_squares(range, own);
  std::vector<std::size_t> counts = shard_sizes(layout().size(), communicator_->world_size());
  for (std::size_t& count : counts) count = norm_blocks(count);
  at("norm");
  communicator_->all_gather(std::span<const double>(own), std::span(block_sums_), counts);
  return std::sqrt(tree_sum(block_sums_));
}

UpdateRequest Trainer::update_request(std::int64_t tokens, std::optional<double> norm) const {
  return {.tokens = tokens,
          .clip = options_.clip,
          .learning_rate = learning_rate(options_.schedule, standing_.step),
          .step = standing_.step,
          .norm = norm};
}

void Trainer::begin_update(std::int64_t tokens, std::optional<double> norm) {
  const PhaseRecord record(communicator_->flight(), "optimizer", standing_.step + 1);
  at("update");
  const PhaseTimer timer(phases_, Phase::kOptimizer);
  standing_.open->begun = true;
  replica_.update(update_request(tokens, norm));
}

void Trainer::share_parameters() {
  at("gather");
  // Two or three ranks are all buddies: everybody has updated everything.
  if (reducer_->held().size() == layout().size()) return;
  if (replica_.complete_on_device()) return;
  const Range own = reducer_->shard();
  replica_.complete_parameters([&](std::span<float> parameters) {
    communicator_->all_gather(std::span<const float>(parameters.subspan(own.begin, own.size())),
                              parameters,
                              shard_sizes(layout().size(), communicator_->world_size()));
  });
}

// Of the open step.
void Trainer::know_norm(double norm) {
  OpenStep& open = *standing_.open;
  const std::int64_t parts = divisor(open.report);
  open.norm = norm;
  open.report.gradient_norm = parts > 0 ? norm / static_cast<double>(parts) : 0;
}

// The open step is done on this rank.
void Trainer::commit() {
  TrainerStanding& standing = standing_;
  StepReport& report = standing.open->report;
  standing.step = report.step;
  standing.last.emplace().norm = standing.open->norm;
  standing.last->report = std::move(report);
  standing.open.reset();
  standing.has_state = true;
  standing.has_moments = true;
  standing.kept.clear();
  asked_ = {};
}

StepReport Trainer::step(const Requests& requests) {
  LOCKSTEP_CHECK(make_step(requests));
  return standing_.last->report;
}

bool Trainer::make_step(const Requests& requests) {
  const auto begin = std::chrono::steady_clock::now();
  FlightRecorder& flight = communicator_->flight();
  standing_.open.reset();
  at("step");
  reducer_->begin(standing_.step + 1);
  std::int64_t own_tokens = 0;
  for (std::size_t i = 0; i < replica_.schedule().lanes.size(); ++i) own_tokens += run_lane(i);
  // A single worker begins the update without waiting for its lanes, so that a GPU is never idle.
  const bool alone = communicator_->world_size() == 1 && !options_.reducer.shard &&
                     exchange_of(options_, 1) != Exchange::kHost;
  if (alone) {
    standing_.open.emplace();
    begin_update(own_tokens, std::nullopt);
  }
  // The barrier names a rank that is missing; a GPU that waits for it could not.
  if (options_.reducer.on_device && !alone) communicator_->barrier();
  std::vector<std::vector<double>> tails = finish_lanes();
  add_requests(requests, tails[0]);
  phases_ = {};
  std::optional<double> norm;
  {
    const PhaseRecord record(flight, "communication", standing_.step + 1);
    at("communication");
    at("tail");
    const PhaseTimer timer(phases_, Phase::kCommunication);
    const auto ended = std::chrono::steady_clock::now();  // the backward pass
    const ReducedStep reduced = reducer_->finish(tails);
    const std::chrono::duration<double> hidden =
        reduced.travelled - (std::chrono::steady_clock::now() - ended);
    phases_[Phase::kHidden] = std::max(0.0, hidden.count());
    if (reduced.withheld > 0 || reduced.tail[kBadLosses] > 0) halt();
    if (!alone) standing_.open.emplace();
    standing_.open->held = reducer_->held();
    read_tail(reduced.tail, standing_.open->report);
    if (options_.outside != nullptr && !average_outside(standing_.open->report)) {
      standing_.open.reset();
      return false;
    }
    if (options_.reducer.shard) norm = norm_of_shards(reduced.range);
  }
  OpenStep& open = *standing_.open;
  if (norm) know_norm(*norm);
  open.decided = norm && std::isfinite(*norm);
  if (!alone) begin_update(divisor(open.report), norm);
  {
    const PhaseTimer timer(phases_, Phase::kOptimizer);
    const PhaseRecord record(flight, "optimizer", standing_.step + 1);
    const UpdateResult updated = replica_.finish_update();
    if (!std::isfinite(updated.norm)) halt();
    know_norm(updated.norm);
    open.updated = true;
    if (options_.reducer.shard && updated.done) share_parameters();
  }
  commit();
  verify_if_due();
  balance();
  StepReport& report = standing_.last->report;
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return true;
}

// This worker's mean for the mean of all workers' means.
bool Trainer::average_outside(StepReport& report) {
  const std::span<float> gradient = replica_.partial(0);
  if (find_non_finite(DataType::kF32, gradient.data(), gradient.size()) < gradient.size()) halt();
  const double tokens = static_cast<double>(report.tokens);
  const float factor = report.tokens > 0 ? static_cast<float>(1 / tokens) : 0.0f;
  for (float& value : gradient) value *= factor;
  const auto averaged = options_.outside->average(
      gradient, {.loss = report.loss * tokens, .tokens = report.tokens, .correct = report.correct});
  if (!averaged) return false;
  if (averaged->loss) report.loss = *averaged->loss;
  replica_.reduced({0, gradient.size()});
  return true;
}

std::optional<Validation> Trainer::evaluate() {
  const std::uint64_t count = validation_ids_.size();
  if (count == 0) return std::nullopt;
  const PhaseRecord record(communicator_->flight(), "validation", standing_.step);
  const std::uint64_t batches = (count + options_.micro_batch - 1) / options_.micro_batch;
  const auto first_of = [&](int rank) {
    return batches * static_cast<std::uint64_t>(rank) /
           static_cast<std::uint64_t>(communicator_->world_size());
  };
  const int rank = communicator_->rank();
  std::vector<double> own;
  for (std::uint64_t batch = first_of(rank); batch < first_of(rank + 1); ++batch) {
    const std::uint64_t first = batch * options_.micro_batch;
    const auto ids =
        std::span(validation_ids_).subspan(first, std::min(options_.micro_batch, count - first));
    const LossSum sum = replica_.loss(read_batch(validation_, ids));
    own.push_back(sum.loss);
    own.push_back(static_cast<double>(sum.tokens));
    own.push_back(static_cast<double>(sum.correct));
  }
  constexpr std::size_t kNumbers = 3;  // of a batch
  std::vector<std::size_t> counts;
  for (int i = 0; i < communicator_->world_size(); ++i) {
    counts.push_back(kNumbers * (first_of(i + 1) - first_of(i)));
  }
  std::vector<double> all(kNumbers * batches);
  at("validation", standing_.step);
  communicator_->all_gather(std::span<const double>(own), std::span(all), counts);
  std::vector<double> losses, tokens, correct;
  for (std::uint64_t batch = 0; batch < batches; ++batch) {
    losses.push_back(all[kNumbers * batch]);
    tokens.push_back(all[kNumbers * batch + 1]);
    correct.push_back(all[kNumbers * batch + 2]);
  }
  const double counted = tree_sum(tokens);
  return Validation{tree_sum(losses) / counted, tree_sum(correct) / counted};
}

void Trainer::verify_if_due() {
  StepBoundary& last = *standing_.last;
  const bool due = options_.verify_every > 0 && standing_.step % options_.verify_every == 0;
  if (due && !last.verified) verify();
  last.verified = true;
}

void Trainer::evaluate_if_due() {
  StepBoundary& last = *standing_.last;
  if (last.evaluated) return;
  const std::int64_t step = standing_.step;
  const bool due = step == options_.schedule.steps ||
                   (options_.eval_every > 0 && step % options_.eval_every == 0);
  if (due || last.report.stop != 0) {
    if (const auto validation = evaluate()) {
      last.report.validation_loss = validation->loss;
      last.report.validation_accuracy = validation->accuracy;
    }
  }
  if (due) record_validation(last.report);
  last.evaluated = true;
}

void Trainer::finish_boundary(const std::function<void(const StepReport&)>& report,
                              const std::function<void(const StepReport&)>& save) {
  StepBoundary& last = *standing_.last;
  if (!last.closed) {
    verify_if_due();
    evaluate_if_due();
  }
  if (!last.reported) {
    at("report", last.report.step);
    last.reported = true;
    report(last.report);
  }
  if (!last.closed && save) save(last.report);
  last.closed = true;
}

RunEnd Trainer::run(const std::function<Requests()>& requests,
                    const std::function<void(const StepReport&)>& report,
                    const std::function<void(const StepReport&)>& save) {
  for (;;) {
    if (standing_.last) finish_boundary(report, save);
    const bool stopped = standing_.last && standing_.last->report.stop != 0;
    if (stopped || finished()) {
      at("end", standing_.step);
      return stopped ? RunEnd::kStopped : RunEnd::kDone;
    }
    if (standing_.last &&
        (standing_.last->report.regroup || !standing_.last->report.leaving.empty())) {
      return RunEnd::kRegroup;
    }
    if (options_.outside != nullptr) {
      const auto share = options_.outside->next_share();
      if (!share) return RunEnd::kOutside;
      set_share(*share);
    }
    Requests now = requests();
    if (asked_.stop != 0) now.stop = asked_.stop;
    now.save = now.save || asked_.save;
    asked_ = {.stop = now.stop, .save = now.save};
    if (!make_step(now)) return RunEnd::kOutside;
  }
}

void Trainer::record_validation(StepReport& report) {
  if (!report.validation_loss) return;
  ValidationRecord& record = standing_.validation;
  if (std::isfinite(*report.validation_loss) &&
      (record.best_step == 0 || *report.validation_loss < record.best_loss)) {
    record = {standing_.step, *report.validation_loss, 0};
    report.best = true;
  } else {
    ++record.since_best;
  }
  report.ends_early = ends_early() && standing_.step < options_.schedule.steps;
}

// Lanes are pure functions: a rank computes its own again, one by one, to find the one at fault.
HaltReport Trainer::find_culprit() {
  HaltReport report;
  report.step = standing_.step + 1;
  report.rank = communicator_->rank();
  report.host = this_host().hostname;
  report.what = "weight";
  bool found = false;
  replica_.complete_parameters([&](std::span<float> parameters) {
    found = find_non_finite_tensor(layout(), parameters, report);
  });
  if (found) return report;
  HaltReport sum = report;
  sum.what = "sum";
  const bool bad_sum =
      !options_.reducer.shard && find_non_finite_tensor(layout(), replica_.reduced_sum(), sum);
  report.what = "gradient";
  for (const LaneWork& work : replica_.schedule().lanes) {
    report.lane = work.lane;
    if (skipped(work.lane)) continue;
    LossSum loss;
    const std::span<const float> gradient = replica_.single_gradient(lane_batch(work.lane), loss);
    report.samples = sample_ids_;
    if (find_non_finite_tensor(layout(), gradient, report)) return report;
    if (std::isfinite(loss.loss)) continue;
    report.what = "loss";
    report.value = fmt::format("{}", loss.loss);
    return report;
  }
  if (bad_sum) return sum;
  report.what.clear();  // this rank has nothing that is not finite
  return report;
}

void Trainer::halt() {
  standing_.open.reset();  // nothing was changed
  const std::string own = to_json(find_culprit());
  // A lane that is not finite explains a sum that is not. Of several lanes the first counts.
  const auto weight = [](const HaltReport& report) {
    const int kind = report.what.empty() ? 3 : report.what == "sum" ? 2 : 1;
    return std::tuple(kind, report.lane, report.rank);
  };
  for (const HaltReport& report :
       gather_parsed(*communicator_, own, "what is not finite", parse_halt_report)) {
    if (!halt_report_ || weight(report) < weight(*halt_report_)) halt_report_ = report;
  }
  const std::string message =
      halt_report_->what.empty()
          ? fmt::format(
                "step {}: all lanes are finite, but their sum is not; no weights were "
                "changed",
                standing_.step + 1)
          : to_string(*halt_report_);
  throw Error(ErrorCode::kNonFinite, message, halt_report_->rank);
}

}  // namespace lockstep
