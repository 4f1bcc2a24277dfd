// Two ranks that level and go on to train, of which one errs: the input says what it changes in the
// bytes that it brings to collectives. The honest one ends with a result or with an Error, whatever
// it is told, and tells people of its steps.
#include <array>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/report/metrics.h"
#include "lockstep/report/progress.h"
#include "lockstep/train/agreement.h"
#include "lockstep/train/levelling.h"
#include "lockstep/train/resume.h"
#include "tests/fuzz/script.h"
#include "tests/support/lying_engine.h"
#include "tests/support/trainers.h"

using namespace lockstep;

namespace {

constexpr std::int64_t kSteps = 4;
constexpr std::size_t kMostLies = 16;

struct Lie {
  unsigned call = 0;
  std::size_t where = 0;
  std::uint8_t what = 0;
};

template <typename Number>
void put(std::span<std::byte> bytes, std::size_t place, Number number) {
  const std::size_t count = bytes.size() / sizeof number;
  if (count > 0) std::memcpy(&bytes[place % count * sizeof number], &number, sizeof number);
}

void tell(const Lie& lie, DataType type, std::span<std::byte> bytes) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr std::array kReals = {std::numeric_limits<double>::quiet_NaN(),
                                 kInfinity,
                                 -kInfinity,
                                 -1.0,
                                 0.5,
                                 1e300,
                                 -1e300,
                                 0x1p31,
                                 0x1p53,
                                 0.0,
                                 1.0,
                                 2.0,
                                 3.0,
                                 4.0,
                                 9.0,
                                 65.0};
  constexpr std::array kWholes = {
      INT64_MIN,        INT64_MAX,       std::int64_t{1} << 40, std::int64_t{1} << 23,
      std::int64_t{-1}, std::int64_t{0}, std::int64_t{1},       std::int64_t{2},
      std::int64_t{7}};
  if (bytes.empty()) return;
  switch (type) {
    case DataType::kF64: return put(bytes, lie.where, kReals[lie.what % kReals.size()]);
    case DataType::kI64: return put(bytes, lie.where, kWholes[lie.what % kWholes.size()]);
    default: return put(bytes, lie.where, lie.what);
  }
}

// A report of step 3, as both ranks have read it.
StepReport last_report() {
  StepReport report;
  report.step = 3;
  report.tokens = 64;
  report.phases.resize(2);
  report.lanes = {2, 2};
  report.next_lanes = {1, 3};
  report.straggler = Straggler{1, 0.5};
  return report;
}

void tell_people(const StepReport& report) {
  metrics_line(report, 1);
  ProgressMeter(kSteps).update(report);
  if (!report.next_lanes.empty()) describe_lanes(report.lanes, report.next_lanes);
}

// How far a rank is: 0 nowhere yet, 1 at step 2, 2 at step 3 with all that belongs to it.
void stand(Trainer& trainer, int how) {
  TrainerStanding& standing = trainer.standing();
  standing.has_state = how > 0;
  standing.has_moments = how > 0;
  standing.step = how > 0 ? 1 + how : 0;
  if (how != 2) return;
  standing.last = StepBoundary{.report = last_report(),
                               .norm = 0.5,
                               .verified = true,
                               .evaluated = true,
                               .reported = true,
                               .closed = false};
}

void work(Communicator& communicator, bool shard, int how) {
  TrainerOptions options = test::small_training();
  options.model.layers = 1;
  options.global_batch = 4;
  options.micro_batch = 1;
  options.schedule.steps = kSteps;
  options.verify_every = 1;
  options.eval_every = 1;
  options.reducer.shard = shard;
  ThreadPool pool(1);
  const auto replica = make_cpu_replica(replica_options(options, 0, 1), pool);
  Trainer trainer(options, test::some_samples(20), test::some_samples(3), *replica);
  stand(trainer, how);
  try {
    compare_settings(communicator, std::vector<Setting>{{"seed", "11"}});
    if (level(trainer, communicator).lost) {
      if (auto point = find_newest_checkpoint(communicator, ""); point.run) restore(trainer, point);
      trainer.start();
    }
    trainer.run([] { return Requests(); }, tell_people);
  } catch (const Error&) {
  }
  trainer.detach();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Script script(data, size);
  const std::uint8_t how = script.byte();
  std::vector<Lie> lies;
  while (!script.ended() && lies.size() < kMostLies) {
    Lie& lie = lies.emplace_back();
    lie.call = script.byte();
    lie.where = script.number(2);
    lie.what = script.byte();
  }
  auto group = make_local_group(2);
  const auto communicator_of = [](std::unique_ptr<Engine> engine) {
    return std::make_unique<Communicator>(std::move(engine), std::chrono::seconds(1));
  };
  std::thread liar([&] {
    unsigned calls = 0;
    const auto communicator = communicator_of(
        std::make_unique<test::LyingEngine>(std::make_unique<PlanEngine>(std::move(group[1])),
                                            [&](const Call& call, std::span<std::byte> brought) {
                                              for (const Lie& lie : lies) {
                                                if (lie.call == calls)
                                                  tell(lie, call.in.type(), brought);
                                              }
                                              ++calls;
                                            }));
    work(*communicator, (how & 1) != 0, how / 8 % 3);
  });
  {
    const auto communicator = communicator_of(std::make_unique<PlanEngine>(std::move(group[0])));
    work(*communicator, (how & 1) != 0, how / 2 % 3);
  }
  liar.join();
  return 0;
}
