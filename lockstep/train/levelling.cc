#include "lockstep/train/levelling.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/hash/blake3.h"
#include "lockstep/base/index.h"
#include "lockstep/base/whole_number.h"
#include "lockstep/files/json.h"
#include "lockstep/train/agreement.h"
#include "lockstep/train/level_plan.h"

namespace lockstep {
namespace {

// What travels between two ranks at once: large enough to be fast, small enough for a second copy.
constexpr std::size_t kPieceFloats = (std::size_t{16} << 20) / sizeof(float);

LevelStanding standing_of(Trainer& trainer) {
  const TrainerStanding& own = trainer.standing();
  LevelStanding told;
  told.has_state = own.has_state;
  told.step = own.step;
  if (own.open) {
    told.summed = true;
    told.decided = own.open->decided;
    told.updated = own.open->updated;
    told.held = own.open->held;
  }
  if (own.last) {
    told.done = (own.last->verified ? 1 : 0) + (own.last->evaluated ? 1 : 0);
    told.closed = own.last->closed;
  }
  for (const KeptMoments& kept : own.kept) told.moments.push_back({kept.range, kept.step});
  if (own.has_moments) {
    told.moments.push_back({trainer.replica().shard(), own.step + (told.updated ? 1 : 0)});
  }
  return told;
}

std::string standing_text(const LevelStanding& own) {
  Json moments = Json::array();
  for (const auto& [range, step] : own.moments) {
    moments.push_back({range.begin, range.end, step});
  }
  const Json json = {
      {"state", own.has_state}, {"step", own.step},       {"summed", own.summed},
      {"decided", own.decided}, {"updated", own.updated}, {"held", {own.held.begin, own.held.end}},
      {"done", own.done},       {"closed", own.closed},   {"moments", moments}};
  return to_text(json);
}

// Steps beyond this nobody has done; sums of a few of them fit their type.
constexpr std::int64_t kMostSteps = std::int64_t{1} << 53;

// Of a step that is complete: verified and evaluated.
constexpr int kMostDone = 2;

// A rank keeps one more range for each generation that dies before its first step is done.
constexpr std::size_t kMostMoments = 4096;

// `size` is that of the flat buffers, in which the ranges lie.
std::optional<LevelStanding> parse_standing(const std::string& text, std::size_t size) {
  const Json json = parse_json(text);
  JsonReader reader(json);
  LevelStanding told;
  told.has_state = reader.flag("state");
  told.step = static_cast<std::int64_t>(reader.whole("step", kMostSteps));
  told.summed = reader.flag("summed");
  told.decided = reader.flag("decided");
  told.updated = reader.flag("updated");
  told.done = static_cast<int>(reader.whole("done", kMostDone));
  told.closed = reader.flag("closed");
  const auto inside = [&](Range range) { return range.begin <= range.end && range.end <= size; };
  const auto held = wholes<std::size_t>(reader.list("held"));
  if (!held || held->size() != 2) return std::nullopt;
  told.held = {held->at(0), held->at(1)};
  if (!inside(told.held)) return std::nullopt;
  for (const Json& entry : reader.list("moments")) {
    const auto numbers = wholes<std::size_t>(entry);
    if (!numbers || numbers->size() != 3 || numbers->at(2) > kMostSteps) return std::nullopt;
    const Range range = {numbers->at(0), numbers->at(1)};
    if (!inside(range)) return std::nullopt;
    told.moments.push_back({range, static_cast<std::int64_t>(numbers->at(2))});
  }
  if (reader.problem() || told.moments.size() > kMostMoments) return std::nullopt;
  return told;
}

// What the teller knows, as numbers: they keep all bits, NaN included.
struct Record {
  bool has_last = false;
  StepBoundary last;
  ValidationRecord validation;
};

// A report with the phases of so many ranks and as many lanes is much smaller.
constexpr std::int64_t kMostNumbers = std::int64_t{1} << 24;

// Writes numbers one after another, or reads them into the same places. Numbers that do not fit
// leave the places as they are, and right() is false.
class Numbers {
 public:
  Numbers() : writes_(true) {}
  explicit Numbers(std::vector<double> numbers) : writes_(false), numbers_(std::move(numbers)) {}

  template <typename Number>
  void one(Number& value) {
    if (writes_) return numbers_.push_back(static_cast<double>(value));
    right_ = right_ && next_ < numbers_.size();
    if (!right_) return;
    const double number = numbers_[next_++];
    if constexpr (std::is_floating_point_v<Number>) {
      value = static_cast<Number>(number);
    } else {
      const auto whole = whole_number<Number>(number);
      right_ = whole.has_value();
      value = whole.value_or(value);
    }
  }
  template <typename Value, typename Each>
  void list(std::vector<Value>& values, const Each& each) {
    std::size_t size = values.size();
    one(size);
    // Every value takes a number at least, so that nothing is made for a size alone.
    if (!writes_ && (!right_ || size > numbers_.size() - next_)) {
      right_ = false;
      return;
    }
    values.resize(size);
    for (Value& value : values) each(value);
  }
  template <typename Value, typename Each>
  void maybe(std::optional<Value>& value, const Each& each) {
    bool there = value.has_value();
    one(there);
    if (there && !value) value.emplace();
    if (there) each(*value);
  }
  const std::vector<double>& all() const { return numbers_; }
  // All that was read was there and fitted, and there is no more.
  bool right() const { return right_ && next_ == numbers_.size(); }

 private:
  const bool writes_;
  std::vector<double> numbers_;
  std::size_t next_ = 0;
  bool right_ = true;
};

void pass(StepReport& report, Numbers& numbers) {
  const auto one = [&](auto& value) { numbers.one(value); };
  one(report.step);
  one(report.epoch);
  one(report.loss);
  one(report.gradient_norm);
  one(report.learning_rate);
  one(report.tokens);
  one(report.correct);
  numbers.maybe(report.validation_loss, one);
  numbers.maybe(report.validation_accuracy, one);
  one(report.best);
  one(report.ends_early);
  one(report.seconds);
  numbers.list(report.phases, [&](PhaseTimes& times) {
    for (double& seconds : times.all()) one(seconds);
  });
  numbers.maybe(report.straggler, [&](Straggler& straggler) {
    one(straggler.rank);
    one(straggler.slower);
  });
  numbers.list(report.lanes, one);
  numbers.list(report.next_lanes, one);
  one(report.stop);
  one(report.save);
  one(report.save_request);
  one(report.regroup);
  numbers.list(report.leaving, one);
}

void pass(Record& record, Numbers& numbers) {
  numbers.one(record.has_last);
  pass(record.last.report, numbers);
  numbers.one(record.last.norm);
  numbers.one(record.last.verified);
  numbers.one(record.last.evaluated);
  numbers.one(record.validation.best_step);
  numbers.one(record.validation.best_loss);
  numbers.one(record.validation.since_best);
}

// Of step `step`, which this rank has done or will do.
Record record_of(const TrainerStanding& own, std::int64_t step) {
  Record record;
  record.validation = own.validation;
  if (own.step < step) {
    LOCKSTEP_CHECK(own.open && own.open->decided);
    record.has_last = true;
    record.last.report = own.open->report;
    record.last.norm = own.open->norm;
  } else if (own.last) {
    record.has_last = true;
    record.last = *own.last;
  }
  return record;
}

// Whether it may be the report of `step`. What is told of it counts ranks by these lists.
bool is_possible(const StepReport& report, std::int64_t step) {
  const std::size_t ranks = report.lanes.size();
  const auto is_rank = [&](int rank) { return rank >= 0 && index_of(rank) < ranks; };
  return report.step == step && report.tokens >= 0 && report.correct >= 0 && report.stop >= 0 &&
         report.stop < NSIG && report.phases.size() == ranks &&
         (report.next_lanes.empty() || report.next_lanes.size() == ranks) &&
         (!report.straggler || is_rank(report.straggler->rank)) &&
         std::ranges::all_of(report.leaving, is_rank);
}

Record share_record(Communicator& communicator, int teller, const TrainerStanding& own,
                    std::int64_t step) {
  Record record;
  std::vector<double> numbers;
  if (communicator.rank() == teller) {
    record = record_of(own, step);
    Numbers out;
    pass(record, out);
    numbers = out.all();
  }
  auto size = static_cast<std::int64_t>(numbers.size());
  communicator.broadcast(std::span(&size, 1), teller);
  if (size < 0 || size > kMostNumbers) {
    refuse_telling(communicator, teller, fmt::format("a report of {} numbers", size));
  }
  numbers.resize(static_cast<std::size_t>(size));
  communicator.broadcast(std::span(numbers), teller);
  Numbers in(std::move(numbers));
  pass(record, in);
  if (!in.right() || (record.has_last && !is_possible(record.last.report, step))) {
    refuse_telling(communicator, teller, "the report of the last step");
  }
  return record;
}

// Where elements lie on this rank.
using Source = std::function<const float*(Range range)>;
using Sink = std::function<float*(Range range)>;

// Carries out transfers: in rounds, in each of which any two ranks exchange one piece at most. A
// piece is followed by its hash.
class Mover {
 public:
  Mover(Communicator& communicator, std::span<const StateTransfer> transfers,
        std::function<void()> before_piece)
      : communicator_(communicator), before_piece_(std::move(before_piece)) {
    const auto ranks = index_of(communicator.world_size());
    std::vector<std::size_t> next_round(ranks * ranks);
    for (const StateTransfer& transfer : transfers) {
      if (transfer.from == transfer.to) {
        if (transfer.to == communicator.rank()) stay_.push_back(transfer.range);
        continue;
      }
      for (std::size_t begin = transfer.range.begin; begin < transfer.range.end;) {
        const std::size_t end = std::min(begin + kPieceFloats, transfer.range.end);
        const std::size_t round =
            next_round[index_of(transfer.from) * ranks + index_of(transfer.to)]++;
        if (rounds_.size() <= round) rounds_.resize(round + 1);
        rounds_[round].push_back({transfer.from, transfer.to, {begin, end}});
        begin = end;
      }
    }
  }

  void move(const Source& source, const Sink& sink) const {
    for (const Range range : stay_) {
      std::memmove(sink(range), source(range), range.size() * sizeof(float));
    }
    for (const std::vector<StateTransfer>& round : rounds_) run_round(round, source, sink);
  }

 private:
  static std::size_t bytes_of(Range range) {
    return range.size() * sizeof(float) + sizeof(Blake3Hash);
  }

  void run_round(const std::vector<StateTransfer>& round, const Source& source,
                 const Sink& sink) const {
    const int own = communicator_.rank();
    std::vector<std::size_t> sent(index_of(communicator_.world_size()));
    std::vector<std::size_t> received(sent.size());
    for (const StateTransfer& piece : round) {
      if (piece.from == own) sent[index_of(piece.to)] = bytes_of(piece.range);
      if (piece.to == own) received[index_of(piece.from)] = bytes_of(piece.range);
    }
    std::vector<std::size_t> places(sent.size());
    std::vector<std::byte> out(lay_out(sent, places));
    for (const StateTransfer& piece : round) {
      if (piece.from != own) continue;
      const std::span<std::byte> bytes =
          std::span(out).subspan(places[index_of(piece.to)], bytes_of(piece.range));
      const std::size_t values = bytes.size() - sizeof(Blake3Hash);
      std::memcpy(bytes.data(), source(piece.range), values);
      std::ranges::copy(blake3(bytes.first(values)), bytes.begin() + static_cast<long>(values));
    }
    before_piece_();
    std::vector<std::byte> in(lay_out(received, places));
    communicator_.all_to_all(ConstBufferView(out.data(), out.size(), DataType::kU8),
                             BufferView(in.data(), in.size(), DataType::kU8), sent, received);
    for (const StateTransfer& piece : round) {
      if (piece.to != own) continue;
      const std::span<const std::byte> bytes =
          std::span(in).subspan(places[index_of(piece.from)], bytes_of(piece.range));
      const std::size_t values = bytes.size() - sizeof(Blake3Hash);
      if (!std::ranges::equal(blake3(bytes.first(values)), bytes.subspan(values))) {
        communicator_.fail(Error(
            ErrorCode::kPeerLost,
            fmt::format("{}: the state that {} sent arrived damaged: its hash is another one; if "
                        "that happens again, look for bad memory or a bad network adapter here",
                        communicator_.name_of(own), communicator_.name_of(piece.from)),
            own));
      }
      std::memcpy(sink(piece.range), bytes.data(), values);
    }
  }

  // Chunks of these sizes end to end; returns the size of all.
  static std::size_t lay_out(const std::vector<std::size_t>& sizes,
                             std::vector<std::size_t>& places) {
    std::size_t total = 0;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      places[i] = total;
      total += sizes[i];
    }
    return total;
  }

  Communicator& communicator_;
  const std::function<void()> before_piece_;
  std::vector<Range> stay_;  // on this rank
  std::vector<std::vector<StateTransfer>> rounds_;
};

bool sends(std::span<const StateTransfer> transfers, int rank) {
  return std::ranges::any_of(transfers, [&](const StateTransfer& t) { return t.from == rank; });
}
bool receives(std::span<const StateTransfer> transfers, int rank) {
  return std::ranges::any_of(transfers, [&](const StateTransfer& t) { return t.to == rank; });
}

// The state that a rank gets.
class Receipt {
 public:
  Receipt(Trainer& trainer, const LevelPlan& plan)
      : trainer_(trainer), replica_(trainer.replica()), plan_(plan) {}

  void receive_parameters() {
    const int rank = trainer_.communicator().rank();
    const bool takes = receives(plan_.parameters, rank);
    const Mover mover = mover_for(plan_.parameters);
    if (!takes && !sends(plan_.parameters, rank)) return mover.move({}, {});
    // Only a state needs to stay whole until all has come.
    if (takes && trainer_.standing().has_state) parameters_ = FloatBuffer(trainer_.layout().size());
    replica_.complete_parameters([&](std::span<float> values) {
      float* const into = parameters_.size() > 0 ? parameters_.data() : values.data();
      mover.move([&](Range range) { return values.data() + range.begin; },
                 [&](Range range) { return into + range.begin; });
    });
  }

  void receive_moments() {
    const int rank = trainer_.communicator().rank();
    const bool takes = receives(plan_.moments, rank);
    const bool shard = trainer_.options().reducer.shard;
    const Range held = replica_.shard();
    KeptMoments own;
    if (!shard && sends(plan_.moments, rank)) {
      own = {held, plan_.step, FloatBuffer(held.size()), FloatBuffer(held.size())};
      replica_.get_moments(own.first.span(), own.second.span());
    }
    if (takes) {
      first_ = FloatBuffer(held.size());
      second_ = FloatBuffer(held.size());
    }
    const Mover mover = mover_for(plan_.moments);
    const auto move = [&](FloatBuffer KeptMoments::*moment, FloatBuffer& into) {
      mover.move(
          [&](Range range) {
            const KeptMoments& source = shard ? kept(range) : own;
            return (source.*moment).data() + (range.begin - source.range.begin);
          },
          [&](Range range) { return into.data() + (range.begin - held.begin); });
    };
    move(&KeptMoments::first, first_);
    move(&KeptMoments::second, second_);
  }

  // All has come.
  void put_in_place() {
    if (parameters_.size() > 0) replica_.set_parameters(parameters_.span());
    if (first_.size() > 0) replica_.set_moments(first_.span(), second_.span());
  }

 private:
  Mover mover_for(std::span<const StateTransfer> transfers) const {
    return {trainer_.communicator(), transfers,
            [this] { trainer_.at("transfer", plan_.step + 1); }};
  }

  const KeptMoments& kept(Range range) const {
    for (const KeptMoments& kept : trainer_.standing().kept) {
      if (kept.step == plan_.step && common_part(kept.range, range) == range) return kept;
    }
    LOCKSTEP_CHECK(false);
    std::abort();
  }

  Trainer& trainer_;
  Replica& replica_;
  const LevelPlan& plan_;
  FloatBuffer parameters_;
  FloatBuffer first_;
  FloatBuffer second_;
};

// Nothing of the old state counts any more.
void start_over(Trainer& trainer, Communicator& communicator) {
  trainer.stand({});
  trainer.attach(communicator);
  const FloatBuffer zeros(trainer.replica().shard().size());
  trainer.replica().set_moments(zeros.span(), zeros.span());
}

void set_standing(Trainer& trainer, const LevelPlan& plan, const Record& record) {
  TrainerStanding& own = trainer.standing();
  TrainerStanding next;
  next.has_state = true;
  next.step = plan.step;
  next.validation = record.validation;
  if (record.has_last) {
    const bool knew = own.has_state && own.step == plan.step;
    next.last = record.last;
    next.last->report.regroup = false;  // that is done
    next.last->report.leaving.clear();
    next.last->reported = knew && own.last && own.last->reported;
    next.last->closed = plan.closed;
  }
  next.has_moments = true;
  next.kept = std::move(own.kept);
  trainer.stand(std::move(next));
}

}  // namespace

Levelled level(Trainer& trainer, Communicator& communicator) {
  LOCKSTEP_CHECK(!trainer.attached());
  const std::vector<LevelStanding> ranks = gather_parsed(
      communicator, standing_text(standing_of(trainer)), "where it stands",
      [&](const std::string& text) { return parse_standing(text, trainer.layout().size()); });
  const int own = communicator.rank();
  const LevelPlan plan = plan_levelling(ranks, trainer.layout().size(), trainer.options().reducer);
  if (plan.lost) {
    start_over(trainer, communicator);
  } else {
    const Record record = share_record(communicator, plan.teller, trainer.standing(), plan.step);
    if (plan.updates[index_of(own)]) trainer.decide(record.last.report, record.last.norm);
    std::optional<OpenStep>& open = trainer.standing().open;
    if (open && !open->updated) open.reset();  // computed again
    trainer.attach(communicator);
    Receipt receipt(trainer, plan);
    receipt.receive_parameters();
    receipt.receive_moments();
    receipt.put_in_place();
    set_standing(trainer, plan, record);
  }
  communicator.barrier();
  return {.lost = plan.lost,
          .step = plan.step,
          .residuals_lost = !trainer.reducer().residual().empty() && plan.step > 0};
}

}  // namespace lockstep
