// What the gradient server makes of the frames that have come.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/index.h"
#include "lockstep/server/gradient_server.h"

namespace lockstep {
namespace {

// Bytes of sums that a worker has not taken yet; with more, no new piece is begun.
constexpr std::size_t kMostQueued = std::size_t{4} << 20;
// Of a partial sum, and of its tail.
constexpr std::size_t kMostPieceBytes = std::size_t{4} << 20;
constexpr std::size_t kMostTailBytes = 16 * 1024;

}  // namespace

void GradientServer::process_all() {
  do {
    for_each_line([this](int worker, Line&) {
      try {
        process(worker);
      } catch (const Error& error) {
        lose(worker, error);
      }
    });
    // What a worker has sent ahead may be waiting for the end of the piece.
  } while (advance_round() || std::exchange(piece_finished_, false));
  if (lanes_) lanes_->check_stuck();
}

void GradientServer::process(int worker) {
  while (true) {
    bool moved = false;
    if (!line(worker).channel.gradient_is_open()) {
      moved = process_between(worker);
    } else if (round_) {
      moved = process_round(worker);
    } else if (lanes_) {
      moved = process_lanes(worker);
    }
    if (!moved) return;
  }
}

bool GradientServer::process_between(int worker) {
  FrameChannel& channel = line(worker).channel;
  const auto start = channel.start();
  if (!start) return false;
  if (!is_gradient(start->tag)) {
    const auto message = channel.take_small();
    if (message) handle(worker, *message);
    return message.has_value();
  }
  // A gradient that nobody has asked for yet waits, and with it what follows.
  if (round_ ? round_->begun(worker) : !lanes_ || lanes_->done()) return false;
  if (round_) round_->check_tag(worker, start->tag);
  return channel.open_gradient();
}

void GradientServer::handle(int worker, const SmallMessage& message) {
  if (std::holds_alternative<Alive>(message) || std::holds_alternative<Heartbeat>(message)) return;
  Line& each = line(worker);
  if (const auto* totals = std::get_if<Totals>(&message); totals && each.ours && !each.totals) {
    each.totals = *totals;
    return;
  }
  if (const auto* halted = std::get_if<Halt>(&message); halted && each.ours) {
    // All workers have found it together and say it alike.
    if (halted->error.code == ErrorCode::kCollectiveMismatch) {
      throw Error(halted->error.code, halted->error.message, worker);
    }
    throw Error(ErrorCode::kAborted,
                fmt::format("{} gave up: {}: {}", membership_.name(worker),
                            to_string(halted->error.code), halted->error.message),
                worker);
  }
  const std::string& owes = membership_.owes(worker);
  throw Error(ErrorCode::kUnexpectedMessage,
              fmt::format("{} sent a {}; {} is expected", membership_.name(worker),
                          to_string(tag_of(message)), owes.empty() ? "nothing" : owes),
              worker);
}

void GradientServer::begin_round(int worker) {
  Line& each = line(worker);
  const GradientHead& head = each.channel.head();
  round_->begin(worker, head);
  if (head.tag == WireTag::kGradientPayload && each.totals) {
    const Totals totals = *std::exchange(each.totals, std::nullopt);
    if (totals.step != head.step) {
      throw Error(ErrorCode::kStepMismatch,
                  fmt::format("{} announced totals of step {}, then sent a gradient of step {}",
                              membership_.name(worker), totals.step, head.step),
                  worker);
    }
    round_->set_totals(worker, totals.loss, totals.correct, totals.total);
  }
  // Its weight is in the foot: all of it has to be here before the first element is used. Twice
  // the room, because a window counts as full at half; memory that is not used costs nothing.
  if (round_->waits_for_totals(worker)) {
    each.channel.set_window(2 * (static_cast<std::size_t>(head.count) * sizeof(float) +
                                 foot_bytes(head) + kMaxGradientHead));
  }
}

// Where the average goes; not before one of the two payloads is free.
bool GradientServer::take_output() {
  if (output_) return true;
  output_ = pool_.take(static_cast<std::size_t>(*round_->count()), /*force=*/!anyone_sending());
  if (output_) round_->set_output(output_->elements.get());
  return output_ != nullptr;
}

bool GradientServer::process_round(int worker) {
  FrameChannel& channel = line(worker).channel;
  if (!round_->begun(worker)) begin_round(worker);
  if (!take_output()) return false;
  if (round_->waits_for_totals(worker)) {
    const auto foot = channel.peek_foot();
    if (!foot) return false;
    round_->set_totals(worker, foot->loss, foot->correct, foot->total);
  }
  if (channel.elements_left() > 0) return false;  // advance_round() takes them
  const auto foot = channel.take_foot();
  if (!foot) return false;
  round_->end(worker, *foot);
  membership_.brought(worker);
  return true;
}

bool GradientServer::advance_round() {
  if (!round_ || !round_->ready()) return false;
  std::size_t count = SIZE_MAX;
  for_each_line([&](int worker, Line& each) {
    count = std::min(count, each.channel.elements_here());
    inputs_[index_of(worker)] = each.channel.elements();
  });
  if (count == 0) return false;
  round_->advance(inputs_, count);
  for_each_line([&](int, Line& each) { each.channel.consume_elements(count); });
  return true;
}

bool GradientServer::process_lanes(int worker) {
  Line& each = line(worker);
  FrameChannel& channel = each.channel;
  const GradientHead& head = channel.head();
  if (!each.accepted) {
    const auto behind = [&](const auto& other) {
      return other && other->channel.queued_bytes() > kMostQueued;
    };
    if (lanes_->done() || std::ranges::any_of(lines_, behind)) return false;
    if (head.count > kMostPieceBytes / sizeof(float) || foot_bytes(head) > kMostTailBytes) {
      throw Error(ErrorCode::kMessageTooLarge,
                  fmt::format("{} sent a PartialSum of {} elements and a tail of {}; {} and {} "
                              "bytes are allowed",
                              membership_.name(worker), head.count, head.tail_count,
                              kMostPieceBytes, kMostTailBytes),
                  worker);
    }
    const bool first = !lanes_->begun();
    if (!lanes_->offer(worker, head)) return false;
    // Until somebody brings something all may be computing, for as long as they like.
    if (first) owe_all(fmt::format("its lanes of step {}", head.step));
    each.accepted = true;
    each.incoming.data.reserve(static_cast<std::size_t>(head.count));
  }
  const std::size_t count = channel.elements_here();
  if (count > 0) {
    const std::size_t before = each.incoming.data.size();
    each.incoming.data.resize(before + count);
    std::copy_n(
        channel.elements(), count * sizeof(float),
        std::as_writable_bytes(std::span(each.incoming.data)).data() + before * sizeof(float));
    channel.consume_elements(count);
  }
  if (channel.elements_left() > 0) return false;
  const GradientHead whole = head;
  auto foot = channel.take_foot();
  if (!foot) return false;
  each.accepted = false;
  each.incoming.tail = std::move(foot->tail);
  lanes_->add(worker, whole, std::exchange(each.incoming, {}));
  membership_.brought(worker);
  finish_piece();
  return true;
}

void GradientServer::finish_piece() {
  auto piece = lanes_->take_finished();
  if (!piece) return;
  piece_finished_ = true;
  const auto sum = std::make_shared<LaneValue>(piece->sum);
  queue_all({encode_head(piece->head), std::as_bytes(std::span(sum->data)),
             encode_foot(piece->head, GradientFoot{0, 0, 0, sum->tail}), sum});
  if (lanes_->done()) {
    for_each_line([this](int worker, Line&) { membership_.brought(worker); });
    last_piece_ = std::move(piece);
  } else {
    owe_all("its lanes of the next piece");
  }
}

}  // namespace lockstep
