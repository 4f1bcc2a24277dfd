#include "lockstep/run/worker.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <system_error>
#include <utility>

#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"
#include "lockstep/base/exit_code.h"
#include "lockstep/base/host.h"
#include "lockstep/base/index.h"
#include "lockstep/base/log.h"
#include "lockstep/comm/flight_recorder.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/launch/launch.h"
#include "lockstep/launch/rank_environment.h"
#include "lockstep/model/gpu_model.h"
#include "lockstep/net/job/blame.h"
#include "lockstep/page/page.h"
#include "lockstep/run/description.h"
#include "lockstep/run/fault.h"
#include "lockstep/run/job_state.h"
#include "lockstep/run/memory.h"
#include "lockstep/run/narrator.h"
#include "lockstep/run/original_star.h"
#include "lockstep/run/output_hold.h"
#include "lockstep/run/plan.h"
#include "lockstep/run/roster_news.h"
#include "lockstep/run/signals.h"
#include "lockstep/train/agreement.h"
#include "lockstep/train/checkpoint/folders.h"
#include "lockstep/train/killing_lanes.h"
#include "lockstep/train/levelling.h"
#include "lockstep/train/resume.h"
#include "lockstep/train/run_checkpoints.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// What of the host this worker uses.
struct Share {
  int threads = 1;  // of the cores that it may use, with those who may use the same
  int device = 0;   // a GPU, the workers of a host taking turns
};
Share choose_share(int threads, Communicator& communicator) {
  const std::string host = this_host().boot_id + " ";
  const std::string place = host + core_list(own_cores());
  const std::vector<std::string> places = gather_texts(communicator, place);
  const auto same_cores = static_cast<int>(std::ranges::count(places, place));
  const auto before = std::span(places).first(index_of(communicator.rank()));
  const auto same_host = std::ranges::count_if(
      before, [&](const std::string& other) { return other.starts_with(host); });
  return {threads > 0 ? threads : std::max(1, available_cores() / same_cores),
          static_cast<int>(same_host)};
}

// Of a worker that comes later: its launcher has given it its cores, and its number on the host.
Share newcomers_share(const TrainOptions& options) {
  return {options.threads > 0 ? options.threads : available_cores(), options.local_rank};
}

std::string data_hash(const TrainPlan& plan) {
  return to_hex(plan.training.fingerprint()) + to_hex(plan.validation.fingerprint());
}

// Before any memory is taken: whether all workers of a host fit it. All ranks decide alike.
void check_memory(const TrainOptions& options, const TrainPlan& plan, Communicator& communicator) {
  if (plan.gpu) return;
  const std::size_t available = available_memory().value_or(SIZE_MAX);
  struct Told {
    std::size_t available = 0;
    std::string host;
  };
  const auto parse = [](const std::string& text) -> std::optional<Told> {
    Told told;
    const char* const end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, told.available);
    if (error != std::errc() || rest == end || *rest != ' ') return std::nullopt;
    told.host.assign(rest + 1, end);
    return told;
  };
  const std::vector<Told> told = gather_parsed(
      communicator, fmt::format("{} {}", available, this_host().boot_id), "its memory", parse);
  std::map<std::string, std::pair<std::vector<int>, std::size_t>> hosts;
  for (std::size_t rank = 0; rank < told.size(); ++rank) {
    auto& [ranks, least] =
        hosts.try_emplace(told[rank].host, std::vector<int>(), SIZE_MAX).first->second;
    ranks.push_back(static_cast<int>(rank));
    least = std::min(least, told[rank].available);
  }
  const bool saves = save_every(options) != SaveEvery{};
  for (const auto& [host, of_host] : hosts) {
    const auto refusal =
        memory_refusal(plan.how, of_host.first, communicator.world_size(), saves, of_host.second);
    if (refusal) throw Error(ErrorCode::kInvalidArgument, *refusal);
  }
}

// Does `work` on all ranks. What all find wrong alike is thrown with words only by the first rank
// of each launcher, which shows what all its ranks say.
template <typename Work>
void told_once(Communicator& communicator, Work&& work) {
  std::optional<Error> wrong;
  try {
    work();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument && error.code() != ErrorCode::kIo) throw;
    wrong = error;
  }
  const std::string launcher = fmt::format("{} {}", own_process_space(), ::getppid());
  const std::vector<std::string> told = gather_texts(communicator, wrong ? wrong->what() : "");
  const std::vector<std::string> launchers = gather_texts(communicator, launcher);
  if (!wrong) return;
  const bool alike =
      std::ranges::all_of(told, [&](const std::string& text) { return text == told[0]; });
  const bool first =
      std::ranges::find(launchers, launcher) - launchers.begin() == communicator.rank();
  if (alike && !first && is_launched()) throw Error(wrong->code(), "");
  throw Error(*wrong);
}

bool is_halt(ErrorCode code) {
  return code == ErrorCode::kNonFinite || code == ErrorCode::kReplicaMismatch;
}

// What all workers find out alike needs no telling.
bool all_know(ErrorCode code) { return code == ErrorCode::kInvalidArgument || is_halt(code); }

// One worker of a run, from the plan to the model: the parts that outlive generations, and the way
// from one generation to the next. One thread.
class Worker {
 public:
  Worker(const TrainOptions& options, Job& job, FlightWatch& watch)
      : options_(options),
        job_(job),
        watch_(watch),
        hold_(options.dry_run ? "" : options.out,
              options.job.name + (options.job.attempt.empty() ? "" : "/" + options.job.attempt),
              options.job.timeout) {}

  // Returns the exit code.
  int run();
  bool begun() const { return began_ != Clock::time_point{}; }  // to train

 private:
  void prepare();
  void join_original_star();
  void prepare_as_newcomer(const RunDescription& told);
  void make_trainer(const Share& share);
  void begin();
  void describe(const RunState& state);

  // What all do in a generation, up to the end of the run. Nothing: the generation ends in order.
  std::optional<int> run_generation();
  RunEnd run_steps();
  Requests requests();
  void save_step(const StepReport& report);
  int finish();
  const char* how_ended() const;
  bool leaves() const;
  int leave();

  // Into the next generation, with the same state as all others.
  void keep_flight(const std::string& why);
  void regroup();
  void level_with_others(Regroup how, Clock::time_point since);
  void start_from_checkpoint();
  void tell_events(const Levelled& levelled, Regroup how, double seconds);
  std::optional<HaltReport> agree_on_killing_lanes();
  void become_narrator(bool takes_over);
  void hand_over_lines();
  void open_page(bool takes_over);
  void see_out_page();
  void tell_saved();
  void save_and_wait();

  int dry_run();
  void save_model();
  void remember();
  void write_halt(const HaltReport& report);
  void save_halted();
  void tell_halted(std::string_view why);
  void part_after_halt(const Error& cause);
  CheckpointPolicy checkpoint_policy();
  bool survives(const Error& error) const { return !options_.fail_fast && job_.survives(error); }
  bool is_first() const { return job_.rank() == 0; }

  TrainOptions options_;
  Job& job_;
  FlightWatch& watch_;
  OutputHold hold_;
  ResumePoint resume_;
  std::optional<TrainPlan> plan_;
  std::optional<ThreadPool> pool_;
  std::unique_ptr<OriginalStar> star_;  // with StarProtocol::kOriginal and kOriginalVector
  std::unique_ptr<Replica> replica_;
  std::optional<Trainer> trainer_;
  std::mutex saved_mutex_;
  std::vector<std::string> saved_;  // guarded by saved_mutex_: checkpoints to tell of
  std::optional<RunCheckpoints> checkpoints_;
  std::optional<Page> page_;          // on rank 0, where no launcher serves it
  std::optional<Narrator> narrator_;  // on rank 0

  // How the generation under way came to its end, if it has.
  std::optional<Regroup> next_;
  std::string why_ended_;
  Clock::time_point ended_{};
  std::optional<FlightFile> late_flight_;  // not written yet
  bool level_ = true;                      // all ranks of the generation stood at the same step
  bool enters_ = false;                    // this worker comes to a job that runs already
  RosterNews news_;
  KillingLanes killing_;
  RunEvents events_;
  Clock::time_point began_{};
  int stopped_ = 0;
  RunEnd end_ = RunEnd::kDone;  // of the steps
  bool told_end_ = false;
  bool nothing_left_ = false;  // the run was resumed after its last step
  std::int64_t lost_at_ = 0;   // steps that were done when the last generation ended
};

CheckpointPolicy Worker::checkpoint_policy() {
  return {.out = options_.out,
          .save_every = save_every(options_).steps,
          .interval = save_every(options_).interval,
          .keep_last = options_.keep_last,
          .wait = options_.save_wait,
          .last_step = plan_->how.schedule.steps,
          .damaged = resume_.damaged,
          .saved =
              [this](const std::string& path) {
                note_checkpoint(path);
                const std::lock_guard lock(saved_mutex_);
                saved_.push_back(path);
              },
          .guard = hold_.guard()};
}

void Worker::make_trainer(const Share& share) {
  pool_.emplace(share.threads);
  ReplicaOptions for_replica = replica_options(plan_->how, 0, 1);
  for_replica.device = share.device;
  if (job_.newcomer()) {
    replica_ = plan_->gpu ? make_gpu_replica(for_replica) : make_cpu_replica(for_replica, *pool_);
  } else {
    Communicator& communicator = job_.communicator();
    for_replica = replica_options(plan_->how, job_.rank(), job_.world_size());
    for_replica.device = share.device;
    replica_ = plan_->gpu ? make_gpu_replica(for_replica, communicator)
                          : make_cpu_replica(for_replica, communicator, *pool_);
  }
  plan_->how.at = planned_fault(job_.newcomer() ? -1 : job_.rank(), replica_.get());
  if (job_.newcomer()) {
    trainer_.emplace(plan_->how, plan_->training, plan_->validation, *replica_);
  } else {
    trainer_.emplace(plan_->how, plan_->training, plan_->validation, *replica_,
                     job_.communicator());
  }
}

void Worker::prepare() {
  Communicator& communicator = job_.communicator();
  told_once(communicator, [&] {
    if (options_.dry_run) {
      if (options_.folder == FolderUse::kNew) check_folder_is_free(communicator, options_.out);
      return;
    }
    resume_ = find_resume_point(
        communicator, options_.out, options_.folder, [&] { hold_.take(); }, hold_.guard());
  });
  told_once(communicator, [&] { plan_.emplace(make_train_plan(options_, resume_)); });
  for (const Samples* samples : {&plan_->training, &plan_->validation}) {
    if (!options_.dry_run) {
      find_payload_hashes(communicator, samples->shards());
    } else {  // hashes would be kept beside the data
      for (const TokenShard& shard : samples->shards()) shard.payload().assume();
    }
  }
  if (options_.protocol != StarProtocol::kLanes) join_original_star();
  const Share share = choose_share(options_.threads, communicator);
  choose_exchange(options_.exchange, plan_->gpu, share.device, communicator, plan_->how.reducer);
  told_once(communicator, [&] { check_memory(options_, *plan_, communicator); });
  make_trainer(share);
}

void Worker::join_original_star() {
  WorkerOptions own;
  own.coordinator = require_host_port("--coordinator", options_.job.coordinator);
  own.node_id = fmt::format("{}-{}", this_host().hostname, ::getpid());
  own.gpu_count = plan_->gpu ? 1 : 0;  // that it computes on
  own.backend = plan_->gpu ? "cuda" : "cpu";
  own.timeout = options_.job.timeout;
  const bool vector = options_.protocol == StarProtocol::kOriginalVector;
  star_ = std::make_unique<OriginalStar>(std::move(own), vector ? Mode::kVector : Mode::kBlocks,
                                         plan_->how);
  plan_->how.outside = star_.get();
  // The job's steps begin with this one, whatever the run has done before.
  const std::string place =
      resume_.run ? fmt::format(", whose step 1 is step {} of this run", resume_.run->step + 1)
                  : "";
  log(LogLevel::kInfo,
      "joined {}{}, as worker {} of {}, in the original protocol: the workers' means are averaged, "
      "so another number of workers gives other bits",
      star_->coordinator(), place, star_->worker_id(), star_->total_workers());
}

// All that is not local to this worker comes from the job.
void Worker::prepare_as_newcomer(const RunDescription& told) {
  resume_.run = told.run;
  resume_.tokenizer = told.tokenizer;
  plan_.emplace(make_train_plan(options_, resume_));
  plan_->how.reducer.on_device = told.on_device;
  hash_payloads(plan_->training.shards());
  hash_payloads(plan_->validation.shards());
  if (data_hash(*plan_) != told.data) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} is other data than the job trains on", plan_->data.name));
  }
  make_trainer(newcomers_share(options_));
  job_.describe(job_.description(), static_cast<int>(trainer_->lanes().lanes()));
  const Differences differences = compare(*told.run, run_state_of(*trainer_));
  if (!differences.forbidden.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("this worker would not do what the job does: {}",
                            fmt::join(differences.forbidden, "; ")));
  }
}

// So that newcomers need no other option.
void Worker::describe(const RunState& state) {
  const RunDescription description{.options = options_.remembered,
                                   .out = options_.out,
                                   .data = data_hash(*plan_),
                                   .on_device = plan_->how.reducer.on_device,
                                   .page = options_.page_elsewhere,
                                   .run = state,
                                   .tokenizer = plan_->data.tokenizer};
  job_.describe(encode(description), static_cast<int>(trainer_->lanes().lanes()));
}

void Worker::begin() {
  if (resume_.run) {
    restore(*trainer_, resume_);
    nothing_left_ = trainer_->finished();
  } else if (is_first() && plan_->init) {
    replica_->set_parameters(plan_->init->parameters.span());
  } else if (is_first()) {
    initialise(*replica_, options_.seed, *pool_);
  }
  if (is_first()) {
    announce(options_, *plan_, *trainer_, pool_->threads());
    if (!options_.dry_run) {
      // Otherwise nothing will be saved, and options that were of no account are not the run's.
      if (!nothing_left_) {
        announce_folder(options_, *trainer_);
        remember();
      }
    }
  }
  plan_->init.reset();
  trainer_->start({{"data hash", data_hash(*plan_)},
                   {"save every", to_string(save_every(options_))},
                   {"out", options_.out.empty() ? "none" : "a folder"},
                   {"device", plan_->gpu ? gpu_name() : "cpu"}});
}

int Worker::run() {
  std::optional<RunDescription> told;
  if (job_.newcomer()) {
    told = description_of(job_);
    if (!told->run) job_.regroup(0, Regroup::kInOrder);  // it is still forming: one of the first
  }
  if (job_.newcomer()) {
    prepare_as_newcomer(*told);
    checkpoints_.emplace(*trainer_, checkpoint_policy(), plan_->data.tokenizer);
    next_ = Regroup::kInOrder;
    enters_ = true;
  } else {
    prepare();
    begin();
    // Whoever started this worker by hand sees nothing of the run here.
    const bool by_hand = told || (!options_.job.coordinator.empty() && !is_launched());
    if (by_hand && !is_first()) {
      log(LogLevel::kInfo, "joined the job as rank {} of {}; {} prints its progress", job_.rank(),
          job_.world_size(), job_.communicator().name_of(0));
    }
    if (options_.dry_run) return dry_run();
    const RunState state = run_state_of(*trainer_);
    describe(state);
    checkpoints_.emplace(*trainer_, checkpoint_policy(), plan_->data.tokenizer);
    if (is_first()) become_narrator(false);
    if (narrator_)
      narrator_->start(run_start(options_, *plan_, *trainer_, state, pool_->threads()));
  }
  began_ = ended_ = Clock::now();
  for (;;) {
    try {
      if (next_) regroup();
      if (const auto report = agree_on_killing_lanes()) {
        write_halt(*report);
        if (narrator_) tell_halted(to_string(*report));
        log(LogLevel::kError, "{}", to_string(*report));
        watch_.write(job_.flight(), to_string(*report));
        job_.leave();
        see_out_page();
        return kExitHalted;
      }
      if (job_.too_few()) {
        save_and_wait();
      } else if (const auto code = run_generation()) {
        return *code;
      }
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kNonFinite) save_halted();
      if (narrator_ && is_halt(error.code())) tell_halted(error.message());
      if (trainer_->halt_report()) part_after_halt(error);
      if (is_halt(error.code())) see_out_page();
      if (!survives(error)) throw;
      keep_flight(error.what());
      why_ended_ = error.message();
      next_ = Regroup::kAfterLoss;
      if (level_) ended_ = Clock::now();  // otherwise it has ended before, and nobody went on since
      trainer_->detach();
    }
  }
}

std::optional<int> Worker::run_generation() {
  end_ = run_steps();
  if (end_ != RunEnd::kRegroup) return finish();
  if (leaves()) return leave();
  next_ = Regroup::kInOrder;
  ended_ = Clock::now();
  return std::nullopt;
}

Requests Worker::requests() {
  Requests wanted = requests_of_signals();
  const JobWishes wishes = job_.wishes();
  if (wanted.stop == 0) wanted.stop = wishes.stop;
  wanted.save = wanted.save || checkpoints_->save_wanted();
  wanted.save_request = static_cast<std::uint32_t>(wishes.save);
  wanted.regroup = wishes.regroup;
  return wanted;
}

RunEnd Worker::run_steps() {
  const auto report = [&](const StepReport& done) {
    killing_.done(done.step);
    if (narrator_) narrator_->step(done);
    tell_saved();
    if (narrator_ && plan_->data.tokenizer && options_.sample_every > 0 &&
        done.step % options_.sample_every == 0) {
      log(LogLevel::kInfo, "sample after step {}: {}", done.step,
          sample_text(*trainer_, *plan_->data.tokenizer, *pool_));
    }
  };
  return trainer_->run([&] { return requests(); }, report,
                       [&](const StepReport& done) { save_step(done); });
}

void Worker::save_step(const StepReport& report) {
  const PhaseRecord record(*job_.flight(), "save", report.step);
  checkpoints_->after_step({.stopping = report.stop != 0 || report.ends_early,
                            .requested = report.save,
                            .best = report.best});
}

// All that follows the last step.
int Worker::finish() {
  Communicator& communicator = job_.communicator();
  if (const StepReport* last = trainer_->last_report()) stopped_ = last->stop;
  const std::string hash = trainer_->verify();
  checkpoints_->finish(stopped_ != 0 || end_ == RunEnd::kOutside);
  if (is_first() && !std::exchange(told_end_, true)) {
    save_model();
    // Those of workers that were lost while they wrote.
    if (hold_.held()) remove_temporaries(options_.out, hold_.guard());
    tell_saved();
    if (narrator_) {
      narrator_->result({trainer_->steps_done(), how_ended(), hash, seconds_since(began_)});
    }
    tell_end(options_, *plan_, *trainer_, {end_, stopped_, nothing_left_, seconds_since(began_)});
    for (const std::string& line : events_.summary()) log(LogLevel::kInfo, "{}", line);
    if (communicator.world_size() > 1) {
      log(LogLevel::kInfo, "the weights of all {} workers are the same", communicator.world_size());
    }
    print_text(fmt::format("weights {}\n", hash));
  }
  // Nobody goes while rank 0 still writes.
  communicator.barrier({.deadline = Deadline::after(kDiskPatience)});
  see_out_page();
  return stopped_ == 0 ? 0 : 128 + stopped_;
}

const char* Worker::how_ended() const {
  if (stopped_ != 0 || end_ == RunEnd::kOutside) return "stopped";
  return trainer_->steps_done() < plan_->how.schedule.steps ? "early" : "done";
}

bool Worker::leaves() const {
  const StepReport* last = trainer_->last_report();
  return last != nullptr && std::ranges::find(last->leaving, job_.rank()) != last->leaving.end();
}

int Worker::leave() {
  checkpoints_->wait();
  page_.reset();  // the next rank 0 opens it again
  job_.leave();
  log(LogLevel::kInfo, "this worker leaves after step {}; the others go on",
      trainer_->steps_done());
  return code_of_leaving();
}

void Worker::regroup() {
  const Regroup how = *next_;
  const Clock::time_point since = ended_;
  const std::uint32_t generation = job_.newcomer() ? 0 : job_.generation();
  LeafOwners owners;
  // A generation that ended before all stood at the same step has dealt no lanes.
  if (generation > 0 && level_) owners = trainer_->owners();
  level_ = false;
  trainer_->detach();
  // The others may have a rank 0 already.
  if (job_.stood_still()) hold_.let_go();
  lost_at_ = trainer_->steps_done();
  {
    const PhaseRecord record(*job_.flight(), "regroup", lost_at_);
    job_.regroup(lost_at_, how);
  }
  note_run_begins();  // to a newcomer, now that it is in the job
  if (late_flight_) watch_.write_loss(job_.flight(), *std::exchange(late_flight_, std::nullopt));
  std::vector<std::string> came;
  for (int rank = job_.world_size() - job_.newcomers(); rank < job_.world_size(); ++rank) {
    came.push_back(job_.communicator().name_of(rank));
  }
  news_.note(job_.departed(), generation, owners, came);
  next_ = Regroup::kAfterLoss;  // until all stand at the same step
  level_with_others(how, since);
  level_ = true;
  next_.reset();
}

// What this worker did in the generation that has ended. Who stood still writes it when the next
// one has let it in: until then the job may be over, and the outputs somebody else's.
void Worker::keep_flight(const std::string& why) {
  FlightFile file = flight_file_of(job_.flight()->snapshot(), why);
  if (!job_.stood_still()) {
    watch_.write_loss(job_.flight(), std::move(file));
  } else if (!late_flight_) {
    late_flight_ = std::move(file);
  }
}

void Worker::level_with_others(Regroup how, Clock::time_point since) {
  const Levelled levelled = [&] {
    const PhaseRecord record(*job_.flight(), "levelling", trainer_->steps_done());
    return level(*trainer_, job_.communicator());
  }();
  if (levelled.lost) start_from_checkpoint();
  if (!is_first()) hold_.let_go();
  checkpoints_->regroup();
  if (is_first()) {
    hold_.take_over(job_.generation());
    if (!narrator_) become_narrator(true);
  }
  hand_over_lines();
  news_.count_failures(trainer_->steps_done() + 1, killing_);
  if (levelled.residuals_lost && is_first()) {
    log(LogLevel::kWarning,
        "the rounding errors of bf16 gradients start at zero again: the result will be different");
  }
  tell_events(levelled, how, seconds_since(since));
  if (std::exchange(enters_, false)) {
    log(LogLevel::kInfo, "joined the job as rank {} of {}, after step {}", job_.rank(),
        job_.world_size(), trainer_->steps_done());
  }
}

// No whole state is left: the newest checkpoint, or the first step.
void Worker::start_from_checkpoint() {
  checkpoints_->wait();
  resume_ = find_newest_checkpoint(job_.communicator(), options_.out);
  checkpoints_->spare(resume_.damaged);
  if (resume_.run) {
    restore(*trainer_, resume_);
  } else if (is_first()) {
    if (options_.init.empty()) {
      initialise(*replica_, options_.seed, *pool_);
    } else {
      replica_->set_parameters(load_model(options_.init).parameters.span());
    }
  }
  trainer_->start({});
}

// Newcomers know nothing of earlier losses, so the ranks tell each other.
std::optional<HaltReport> Worker::agree_on_killing_lanes() {
  if (job_.generation() <= 1) return std::nullopt;  // nobody was lost yet
  std::string own;
  // The last worker cannot wait for a third time: nobody would be left to tell.
  const bool last = job_.world_size() == 1;
  if (const auto finding = killing_.finding(last ? 2 : KillingLanes::kTimes)) {
    own = to_json(halt_report(*finding, trainer_->lanes()));
  }
  for (const std::string& text : gather_texts(job_.communicator(), own)) {
    if (auto report = parse_halt_report(text)) return report;
  }
  return std::nullopt;
}

void Worker::become_narrator(bool takes_over) {
  // Who has the centre serves the page, or is a coordinator that shows the steps.
  const bool coordinated = !options_.job.coordinator.empty() && !star_ && !is_launched();
  const bool elsewhere = options_.page_elsewhere || coordinated;
  if (!options_.page_elsewhere && !options_.page.empty()) open_page(takes_over);
  Narrator::Listener listener;
  if (elsewhere || page_) {
    listener = [this, elsewhere](const std::string& line) {
      if (elsewhere) job_.tell(line);
      if (page_) page_->tell(line);
    };
  }
  narrator_.emplace(options_, *plan_, trainer_->steps_done(), takes_over, hold_, listener);
  // The rank 0 before may not have come to tell of the last step; metrics keep one line of it.
  if (takes_over && trainer_->standing().last) trainer_->standing().last->reported = false;
}

// Who is not rank 0 any more has lines of metrics, perhaps, that wait for the lease. Collective.
void Worker::hand_over_lines() {
  const bool former = narrator_ && !is_first();
  const std::string own = former ? narrator_->waiting_lines() : "";
  for (const std::string& lines : gather_texts(job_.communicator(), own)) {
    if (is_first()) narrator_->take_lines(lines);
  }
  if (!former) return;
  narrator_.reset();
  page_.reset();
}

void Worker::open_page(bool takes_over) {
  const bool goes_on = takes_over || options_.folder == FolderUse::kResume;
  try {
    page_.emplace(PageOptions{.address = parse_page_address(options_.page, options_.job.token),
                              .out = options_.out,
                              .goes_on = goes_on,
                              .token = options_.job.token});
    page_->offer(kFlightEndpoint, [board = watch_.board()] { return board->json(); });
    log(LogLevel::kInfo, "page: {}", page_->link());
  } catch (const Error& error) {
    if (!takes_over) throw;  // later nothing is worth the end of a run
    log(LogLevel::kWarning, "the page is not there any more: {}", error.message());
  }
}

void Worker::see_out_page() {
  if (page_) page_->see_out();
}

// Checkpoints are written behind training, by a thread of their own.
void Worker::tell_saved() {
  std::vector<std::string> saved;
  {
    const std::lock_guard lock(saved_mutex_);
    saved.swap(saved_);
  }
  if (!narrator_) return;
  for (const std::string& path : saved) narrator_->saved(path);
}

void Worker::tell_events(const Levelled& levelled, Regroup how, double seconds) {
  const bool after_loss = how == Regroup::kAfterLoss;
  RosterNews::GoesOn now{.steps = plan_->how.schedule.steps,
                         .lost_at = lost_at_,
                         .step = trainer_->steps_done(),
                         .after_loss = after_loss,
                         .went_back = levelled.lost,
                         .lanes = lanes_by_rank(trainer_->owners(), job_.world_size()),
                         .members = {},
                         .seconds = seconds};
  for (int rank = 0; rank < job_.world_size(); ++rank) {
    now.members.push_back(job_.communicator().name_of(rank));
  }
  const std::vector<RunEvent> events = news_.take_events(now);
  if (events.empty() && after_loss && is_first()) {
    log(LogLevel::kWarning, "{}; all {} workers are here and go on with step {}, after {:.1f} s",
        why_ended_, job_.world_size(), trainer_->steps_done() + 1, seconds);
  }
  for (const RunEvent& event : events) {
    events_.add(event);
    if (narrator_) narrator_->event(event);
  }
}

// Fewer workers are left than the job is to have: their work is safe while they wait for others.
void Worker::save_and_wait() {
  if (is_first()) {
    log(LogLevel::kWarning, "{} of the {} workers that --min-workers asks for are left: {}",
        job_.world_size(), options_.min_workers,
        options_.out.empty() ? "waiting for others" : "saving, then waiting for others");
  }
  checkpoints_->after_step({.requested = true});
  checkpoints_->wait();
  next_ = Regroup::kTooFew;
  ended_ = Clock::now();
}

// What the run would take. The steps that are measured are thrown away.
int Worker::dry_run() {
  constexpr std::int64_t kMeasured = 3;
  double fastest = 0;
  const std::int64_t steps = plan_->how.schedule.steps;
  for (std::int64_t i = 0; i < std::min(kMeasured, steps); ++i) {
    const double seconds = trainer_->step().seconds;
    fastest = i == 0 ? seconds : std::min(fastest, seconds);
  }
  Communicator& communicator = job_.communicator();
  if (is_first()) {
    const bool saves = save_every(options_) != SaveEvery{};
    const auto bytes_of = [&](int rank) {
      const std::size_t bytes =
          plan_->gpu
              ? gpu_bytes_needed(plan_->how, rank, communicator.world_size())
              : cpu_bytes_needed(plan_->how, rank, communicator.world_size(), saves && rank == 0);
      return short_number(static_cast<double>(bytes)) + "B";
    };
    log(LogLevel::kInfo, "memory: about {}{}{}", bytes_of(0), plan_->gpu ? " of a GPU" : "",
        communicator.world_size() > 1 ? fmt::format(" for rank 0, {} for every other", bytes_of(1))
                                      : "");
    log(LogLevel::kInfo, "time: about {} for {}; a step took {:.3f} s on this machine just now",
        short_duration(fastest * static_cast<double>(steps)), counted(steps, "step"), fastest);
    log(LogLevel::kInfo, "this was a dry run: nothing was written");
  }
  communicator.barrier();  // who goes earlier would end the others
  return 0;
}

void Worker::save_model() {
  if (options_.out.empty()) return;
  FloatBuffer parameters(trainer_->layout().size());
  replica_->get_parameters(parameters.span());
  lockstep::save_model(options_.out, trainer_->layout(), parameters.span(),
                       plan_->data.tokenizer.get(), trainer_->steps_done(), hold_.guard());
}

// So that --resume needs no other option.
void Worker::remember() {
  if (options_.out.empty() || options_.remembered.empty()) return;
  write_file(options_.out + "/" + kRunFile, options_.remembered, hold_.guard());
}

void Worker::write_halt(const HaltReport& report) {
  if (!is_first() || options_.out.empty()) return;
  const std::string path = options_.out + "/" + kHaltFile;
  write_file(path, to_json(report) + "\n", hold_.guard());
  log(LogLevel::kInfo,
      "{} says which lane it was: --replay {} computes it once more, --skip-lanes {} leaves it out",
      path, path, path);
}

// All as it was before the step. If that fails, why the run is halted still counts more.
void Worker::save_halted() {
  if (!checkpoints_) return;
  try {
    checkpoints_->finish(true);
    if (is_first()) save_model();
    if (trainer_->halt_report()) write_halt(*trainer_->halt_report());
  } catch (const std::exception& failed) {
    log(LogLevel::kError, "the state before the halt is not saved: {}", failed.what());
  }
}

// The run's own error counts more than a folder that cannot be written.
void Worker::tell_halted(std::string_view why) {
  try {
    tell_saved();
    narrator_->halted(trainer_->steps_done() + 1, std::string(why));
  } catch (const Error& failed) {
    log(LogLevel::kWarning, "the halt is not in the metrics: {}", failed.message());
  }
}

// Nobody goes while rank 0 still writes: who goes ends the others.
void Worker::part_after_halt(const Error& cause) {
  Communicator& communicator = job_.communicator();
  try {
    communicator.barrier({.deadline = Deadline::after(kDiskPatience)});
  } catch (const Error&) {  // somebody has gone all the same
  }
  communicator.abort(cause.what());  // for a gradient server, which knows nothing of it yet
}

// Rank 0 writes for all, and workers of one host have the same files: what one of them cannot read
// or write another cannot either. On another host are another disk and other copies of the data.
bool ends_the_job(const Error& error, const Worker& worker, const Job& job, int rank) {
  if (error.code() != ErrorCode::kIo) return false;
  return !worker.begun() || rank == 0 || on_one_host(job);
}

}  // namespace

int code_of_leaving() {
  if (started_by_kubernetes()) return 128 + SIGTERM;  // 0 would be the end of the work
  return is_launched() ? kExitLeft : 0;
}

int train_worker(const TrainOptions& options, Job& job, FlightWatch& watch) {
  const std::shared_ptr<FlightRecorder> flight = job.flight();
  watch.add(flight, options.dry_run ? "" : options.out, options.job.timeout);
  // Others may be asked, and may ask, for as long as the job is there.
  job.on_flight_asked([&watch] { watch.ask(); });
  watch.board()->set_ask([&job] { return job.ask_flight(); });
  const std::unique_ptr<FlightBoard, void (*)(FlightBoard*)> asking(
      watch.board().get(), [](FlightBoard* board) { board->set_ask({}); });
  // While the job still stands as it did, before others learn of the failure from us.
  const auto write_flight = [&](const std::string& why, bool own) {
    if (own) flight->set_last_words(why);
    watch.write(flight, why);
    watch.remove(flight);
  };
  const auto worker = std::make_unique<Worker>(options, job, watch);
  try {
    const int code = worker->run();
    watch.remove(flight);
    return code;
  } catch (const Error& error) {
    // Not from the job: between two generations it has no communicator.
    const FlightSnapshot last = flight->snapshot();
    const int rank = job.newcomer() ? -1 : last.rank;
    const bool own = evidence_of(error, rank) == Evidence::kOwn;
    // No flight file: a worker that fails by itself before training has already named its error,
    // and so has a lone worker that names a file.
    const bool alone = !job.newcomer() && last.world_size == 1 && error.code() == ErrorCode::kIo;
    if (error.code() == ErrorCode::kInvalidArgument || (own && (alone || !worker->begun()))) {
      flight->set_written();  // by the launcher neither
      watch.remove(flight);
    } else if (job.stood_still()) {
      // The outputs are not its own any more. A launcher of ours has seen what it did.
      if (!is_launched()) watch.write_apart(flight, error.what());
      watch.remove(flight);
    } else {
      write_flight(error.what(), own);
    }
    // Why this worker fails, and not only that it has gone; nothing, if that is known already.
    if (!all_know(error.code()) && !error.message().empty() && !job.newcomer()) {
      if (ends_the_job(error, *worker, job, rank)) {
        job.abort(error.what());
      } else {
        job.give_up(error.what());
      }
    }
    throw;
  } catch (const std::exception& error) {
    write_flight(error.what(), true);
    if (!job.newcomer()) job.give_up(error.what());
    throw;
  }
}

}  // namespace lockstep
