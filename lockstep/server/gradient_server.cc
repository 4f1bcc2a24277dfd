#include "lockstep/server/gradient_server.h"

#include <fmt/format.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/index.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/net/socket/unix_socket.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kLeastWindow = 64 * 1024;
// How long workers may take to hear why the job has ended, and to go when it is done.
constexpr Deadline::Clock::duration kHaltPatience = 700ms;
constexpr Deadline::Clock::duration kLeavePatience = 2s;

// Names come off the wire and go to terminals.
std::string printable(std::string_view text) {
  constexpr std::size_t kMost = 120;
  std::string clean(text.substr(0, kMost));
  std::ranges::replace_if(
      clean, [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
  return clean;
}

LobbyOptions lobby_options(const ServerOptions& options) {
  return {.identity = {.job = options.job,
                       .generation = 0,
                       .id = random_member_id(),
                       .rank = -1,
                       .token = options.token},
          .insecure = options.insecure,
          .timeout = options.settings.timeout};
}

WireTag average_tag(RoundKind kind) {
  switch (kind) {
    case RoundKind::kVector: return WireTag::kAveragedGradient;
    case RoundKind::kBlock: return WireTag::kAveragedBlockGradient;
    case RoundKind::kComponent: return WireTag::kAveragedNonBlockGradient;
  }
  return {};
}

// Bytes that a worker has not taken yet; with more, no new piece is begun and nothing passed on.
constexpr std::size_t kMostQueued = std::size_t{4} << 20;
// Of a partial sum, and of its tail.
constexpr std::size_t kMostPieceBytes = std::size_t{4} << 20;
constexpr std::size_t kMostTailBytes = 16 * 1024;

}  // namespace

std::shared_ptr<Payload> PayloadPool::take(std::size_t count, bool force) {
  for (auto& payload : payloads_) {
    if (!payload || payload.use_count() == 1) return fit(payload, count);
  }
  if (!force) return nullptr;
  payloads_.front() = nullptr;
  return fit(payloads_.front(), count);
}

std::shared_ptr<Payload> PayloadPool::fit(std::shared_ptr<Payload>& payload, std::size_t count) {
  if (!payload || payload->capacity < count) {
    payload = nullptr;  // before the new one is made, not after
    payload = std::make_shared<Payload>();
    payload->elements = std::make_unique_for_overwrite<float[]>(count);
    payload->capacity = count;
  }
  return payload;
}

Socket listen_for_workers(const HostPort& bind, const std::string& token, Deadline deadline) {
  const SocketAddress address = resolve(bind, deadline).front();
  if (token.empty() && !address.is_loopback()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{} can be reached by other hosts: that needs a token", to_string(address)));
  }
  return listen_tcp(address);
}

GradientServer::GradientServer(std::optional<Socket> listener, ServerOptions options)
    : options_(std::move(options)),
      lobby_(std::move(listener), lobby_options(options_)),
      membership_(options_.workers, options_.settings.timeout, Clock::now()),
      connections_(static_cast<std::size_t>(options_.workers)),
      inputs_(connections_.size()) {
  LOCKSTEP_CHECK(options_.window >= kLeastWindow);
}

std::vector<std::string> GradientServer::names() const {
  std::vector<std::string> all;
  for (int i = 0; i < membership_.size(); ++i) all.push_back(membership_.name(i));
  return all;
}

void GradientServer::wait_for_workers() {
  run([this] { return membership_.complete(); });
}

void GradientServer::send_shards(std::uint64_t step) {
  LOCKSTEP_CHECK(membership_.complete());
  for_each_connection([&](int worker, Connection& each) {
    const Shard shard = shard_of(step, options_.settings.total_samples, membership_.size(), worker);
    each.frames.queue(encode(ShardAssignment{step, shard.begin, shard.end}));
  });
  run([] { return true; });
}

RoundResult GradientServer::reduce(const RoundKey& key) {
  LOCKSTEP_CHECK(membership_.complete());
  const auto start = Clock::now();
  std::vector<std::uint64_t> shards;
  for (int i = 0; i < membership_.size(); ++i) {
    shards.push_back(
        shard_of(key.step, options_.settings.total_samples, membership_.size(), i).size());
  }
  output_ = nullptr;
  round_.emplace(key, options_.settings.average, names(), std::move(shards));
  owe_all(describe(key));
  run([this] { return round_->complete(); });
  RoundResult result = round_->result();
  result.gradients = {output_->elements.get(), static_cast<std::size_t>(*round_->count())};
  result.keep = std::move(output_);
  result.reduce_time = Clock::now() - start;
  round_.reset();
  return result;
}

void GradientServer::broadcast(const RoundResult& result) {
  BulkHead head;
  head.tag = average_tag(result.key.kind);
  head.step = result.key.step;
  head.block_idx = result.key.block.value_or(0);
  head.component = result.key.component;
  head.component_sizes = result.component_sizes;
  head.count = result.gradients.size();
  BulkFoot foot;
  foot.loss = result.loss;
  queue_all(
      {encode_head(head), std::as_bytes(result.gradients), encode_foot(head, foot), result.keep});
  run([] { return true; });
}

LaneStep::Piece GradientServer::reduce_lanes(std::uint64_t step) {
  LOCKSTEP_CHECK(membership_.complete());
  lanes_.emplace(step, names());
  run([this] { return lanes_->done(); });
  lanes_.reset();
  return std::move(*std::exchange(last_piece_, std::nullopt));
}

void GradientServer::serve_ranks(const std::function<void(const LaneStep::Piece&)>& after) {
  LOCKSTEP_CHECK(options_.settings.serves_ranks());
  wait_for_workers();
  lanes_.emplace(names());
  after_piece_ = after;
  run([this] {
    return std::ranges::all_of(connections_, [](const auto& each) { return !each || each->left; });
  });
  finished_ = true;
  take_leave(std::min(options_.settings.timeout, kLeavePatience));
}

void GradientServer::drain() {
  run([this] { return !anyone_sending(); });
}

void GradientServer::shutdown() {
  for_each_connection([](int, Connection& each) { each.frames.queue(encode(Shutdown{})); });
  finished_ = true;
  drain();
  take_leave(std::min(options_.settings.timeout, kLeavePatience));
}

void GradientServer::halt(const Error& cause) {
  if (failure_) return;
  failure_ = cause;
  const auto frame = encode(Halt{{cause.code(), cause.rank(), std::string(cause.message())}});
  for_each_connection([&](int, Connection& each) {
    each.frames.drop_unsent();
    if (each.ours) each.frames.queue(frame);
  });
  take_leave(std::min(options_.settings.timeout, kHaltPatience));
}

void GradientServer::queue_all(const FrameSocket::Outgoing& frame) {
  for_each_connection([&](int, Connection& each) { each.frames.queue(frame); });
}

bool GradientServer::anyone_sending() const {
  return std::ranges::any_of(connections_,
                             [](const auto& each) { return each && each->frames.wants_to_send(); });
}

void GradientServer::owe_all(const std::string& what) {
  const auto now = Clock::now();
  for_each_connection([&](int worker, Connection&) { membership_.owe(worker, what, now); });
}

void GradientServer::run(const std::function<bool()>& done) {
  if (failure_) throw Error(*failure_);
  try {
    process_all();
    send(Clock::now());
    while (!done()) {
      wait_for_events();
      const auto now = Clock::now();
      receive(now);
      process_all();
      send(now);
      judge(now);
    }
  } catch (const Error& error) {
    halt(error);
    throw Error(*failure_);
  } catch (const std::bad_alloc&) {
    halt(Error(ErrorCode::kIo, "the coordinator has too little memory"));
    throw Error(*failure_);
  }
}

void GradientServer::wait_for_events() {
  entries_.clear();
  entries_.push_back({options_.stop_fd, POLLIN, 0});
  for (const auto& each : connections_) {
    const bool reading = each && !each->frames.full();
    const bool sending = each && each->frames.wants_to_send();
    // Who is held back is not read, but that it has gone shows all the same.
    const short events =
        static_cast<short>((reading ? POLLIN : POLLRDHUP) | (sending ? POLLOUT : 0));
    entries_.push_back({each ? each->frames.socket().fd() : -1, events, 0});
  }
  lobby_.add_poll(entries_);
  const auto wake = std::min(membership_.wake_at(), lobby_.wake_at());
  const int ready = ::poll(entries_.data(), entries_.size(), Deadline::at(wake).poll_timeout());
  if (ready < 0 && errno != EINTR) throw_io("polling the workers", errno);
  if (ready < 0) {
    for (pollfd& entry : entries_) entry.revents = 0;
  }
  if (entries_.front().revents != 0) {
    throw Error(ErrorCode::kAborted, "the coordinator was told to stop");
  }
}

void GradientServer::receive(Clock::time_point now) {
  for_each_connection([&](int worker, Connection& each) {
    const pollfd& entry = entries_[index_of(worker) + 1];
    if ((entry.revents & (POLLIN | POLLHUP | POLLERR | POLLRDHUP)) == 0) return;
    if (each.frames.full()) {
      return lose(worker, Error(ErrorCode::kPeerLost,
                                fmt::format("{} closed its connection while it was held back",
                                            membership_.name(worker)),
                                worker));
    }
    if (each.frames.fill(kTurnBytes) > 0) membership_.heard(worker, now);
  });
  const auto rest = std::span<const pollfd>(entries_).subspan(1 + connections_.size());
  welcome(lobby_.serve(rest), now);
}

void GradientServer::welcome(std::vector<Lobby::Candidate> candidates, Clock::time_point now) {
  for (Lobby::Candidate& candidate : candidates) {
    const JoinRequest& request = candidate.request;
    const auto [worker, refusal] = membership_.join({.node_id = printable(request.node_id),
                                                     .gpu_count = request.gpu_count,
                                                     .backend = printable(request.backend),
                                                     .address = candidate.frames.socket().peer(),
                                                     .ours = candidate.ours,
                                                     .place = candidate.place},
                                                    now);
    if (worker < 0) {
      lobby_.turn_away(std::move(candidate), Error(ErrorCode::kInvalidRank, refusal));
      continue;
    }
    FrameSocket& frames = candidate.frames;
    frames.socket().set_peer(membership_.name(worker), worker);
    frames.set_window(options_.window);
    frames.set_largest_frame(options_.settings.largest_frame);
    frames.queue(encode(JoinAccepted{static_cast<std::uint32_t>(worker),
                                     static_cast<std::uint32_t>(membership_.size())}));
    if (candidate.ours) frames.queue(encode(to_welcome(options_.settings)));
    if (notice_) {
      const WorkerCard& card = membership_.card(worker);
      notice_(fmt::format("{} joined: {} GPUs, backend {}{}", membership_.name(worker),
                          card.gpu_count, card.backend, card.ours ? "" : ", original protocol"));
    }
    connections_[index_of(worker)].emplace(Connection{.frames = std::move(frames),
                                                      .ours = candidate.ours,
                                                      .totals = {},
                                                      .incoming = {},
                                                      .passing = {}});
  }
}

void GradientServer::send(Clock::time_point now) {
  const bool heartbeat = membership_.take_heartbeat(now);
  for_each_connection([&](int worker, Connection& each) {
    if (heartbeat && each.ours && !each.frames.wants_to_send()) each.frames.queue(encode(Alive{}));
    try {
      if (each.frames.flush(kTurnBytes) > 0 && !each.ours) membership_.heard(worker, now);
    } catch (const Error& error) {
      lose(worker, last_words(worker, error));
    }
  });
}

Error GradientServer::last_words(int worker, const Error& unsent) {
  FrameSocket& frames = connection(worker).frames;
  try {
    do {
      process(worker);
    } while (!frames.full() && frames.fill(kTurnBytes) > 0);
  } catch (const Error& error) {
    return error;
  }
  if (frames.ended()) return departure(worker);
  return Error(ErrorCode::kPeerLost, std::string(unsent.message()), worker);
}

void GradientServer::judge(Clock::time_point now) {
  for_each_connection([&](int worker, Connection& each) {
    const bool expected = each.ours || each.frames.awaits_more() || each.frames.wants_to_send();
    membership_.watch(worker, expected && !each.frames.full(), now);
    const bool all_here = each.frames.bulk_is_open() && each.frames.peek_foot();
    if (all_here || each.frames.full()) membership_.excuse(worker, now);
    if (each.frames.ended()) lose(worker, departure(worker));
  });
  while (const auto error = membership_.judge(now)) {
    if (error->rank() < 0) throw *error;
    lose(error->rank(), *error);
  }
}

Error GradientServer::departure(int worker) const {
  const FrameSocket& frames = connections_[index_of(worker)]->frames;
  const Error& end = *frames.ended();
  std::string text = end.code() == ErrorCode::kChannelClosed
                         ? fmt::format("{} closed its connection", membership_.name(worker))
                         : std::string(end.message());
  if (frames.awaits_more()) text += " in the middle of a message";
  const std::string& owes = membership_.owes(worker);
  if (!owes.empty()) text += fmt::format("; it owes {}", owes);
  return Error(ErrorCode::kPeerLost, text, worker);
}

void GradientServer::lose(int worker, const Error& error) {
  auto& each = connections_[index_of(worker)];
  if ((finished_ || each->left) && !each->frames.wants_to_send()) {
    membership_.watch(worker, false, Clock::now());
    return each.reset();
  }
  if (membership_.complete()) throw Error(error);
  if (notice_) notice_(fmt::format("{} left: {}", membership_.name(worker), error.message()));
  membership_.forget(worker);
  each.reset();
}

// Sends what is queued, then waits for the workers to close: with bytes of theirs unread, closing
// first would reset the connection and take our last words away.
void GradientServer::take_leave(Clock::duration patience) {
  const auto deadline = Deadline::after(patience);
  std::vector<bool> told(connections_.size());
  while (true) {
    entries_.clear();
    for_each_connection([&](int worker, Connection& each) {
      FrameSocket& frames = each.frames;
      try {
        while (frames.flush(kTurnBytes) > 0) {
        }
        if (!frames.wants_to_send() && !told[index_of(worker)]) {
          ::shutdown(frames.socket().fd(), SHUT_WR);
          told[index_of(worker)] = true;
        }
        do {
          frames.consume(frames.raw().size());
        } while (frames.fill(kTurnBytes) > 0);
      } catch (const Error&) {
        connections_[index_of(worker)].reset();
        return;
      }
      if (frames.ended()) {
        connections_[index_of(worker)].reset();
        return;
      }
      const short events = frames.wants_to_send() ? POLLIN | POLLOUT : POLLIN;
      entries_.push_back({frames.socket().fd(), events, 0});
    });
    if (entries_.empty() || deadline.expired()) break;
    ::poll(entries_.data(), entries_.size(), deadline.poll_timeout());
  }
  for (auto& each : connections_) each.reset();
}

void GradientServer::process_all() {
  do {
    for_each_connection([this](int worker, Connection&) {
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
    const FrameSocket& frames = connection(worker).frames;
    if (!frames.bulk_is_open()) {
      moved = process_between(worker);
    } else if (frames.head().tag == WireTag::kBytes) {
      moved = process_bytes(worker);
    } else if (round_) {
      moved = process_round(worker);
    } else if (lanes_) {
      moved = process_lanes(worker);
    }
    if (!moved) return;
  }
}

bool GradientServer::process_between(int worker) {
  FrameSocket& frames = connection(worker).frames;
  const auto start = frames.start();
  if (!start) return false;
  if (!is_bulk(start->tag)) {
    const auto message = frames.take_small();
    if (message) handle(worker, *message);
    return message.has_value();
  }
  if (start->tag == WireTag::kBytes && options_.settings.serves_ranks()) {
    return membership_.complete() && frames.open_bulk();
  }
  // A gradient that nobody has asked for yet waits, and with it what follows.
  if (round_ ? round_->begun(worker) : !lanes_ || lanes_->done()) return false;
  if (round_) round_->check_tag(worker, start->tag);
  return frames.open_bulk();
}

void GradientServer::handle(int worker, const SmallMessage& message) {
  if (std::holds_alternative<Alive>(message) || std::holds_alternative<Heartbeat>(message)) return;
  Connection& each = connection(worker);
  if (const auto* totals = std::get_if<Totals>(&message); totals && each.ours && !each.totals) {
    each.totals = *totals;
    return;
  }
  if (std::holds_alternative<Shutdown>(message) && options_.settings.serves_ranks()) {
    each.left = true;
    membership_.brought(worker);
    return;
  }
  if (const auto* halted = std::get_if<Halt>(&message); halted && each.ours) {
    // It saw what another rank did.
    const WireError& error = halted->error;
    if (error.code == ErrorCode::kCollectiveMismatch || error.code == ErrorCode::kSizeMismatch) {
      const bool known = error.rank >= 0 && error.rank < membership_.size();
      throw Error(error.code, error.message, known ? error.rank : worker);
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
  Connection& each = connection(worker);
  const BulkHead& head = each.frames.head();
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
    each.frames.set_window(2 * (static_cast<std::size_t>(head.count) * sizeof(float) +
                                foot_bytes(head) + kMaxBulkHead));
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
  FrameSocket& frames = connection(worker).frames;
  if (!round_->begun(worker)) begin_round(worker);
  if (!take_output()) return false;
  if (round_->waits_for_totals(worker)) {
    const auto foot = frames.peek_foot();
    if (!foot) return false;
    round_->set_totals(worker, foot->loss, foot->correct, foot->total);
  }
  if (frames.elements_left() > 0) return false;  // advance_round() takes them
  const auto foot = frames.take_foot();
  if (!foot) return false;
  round_->end(worker, *foot);
  membership_.brought(worker);
  return true;
}

bool GradientServer::advance_round() {
  if (!round_ || !round_->ready()) return false;
  std::size_t count = SIZE_MAX;
  for_each_connection([&](int worker, Connection& each) {
    count = std::min(count, each.frames.elements_here());
    inputs_[index_of(worker)] = each.frames.elements();
  });
  if (count == 0) return false;
  round_->advance(inputs_, count);
  for_each_connection([&](int, Connection& each) { each.frames.consume_elements(count); });
  return true;
}

bool GradientServer::process_lanes(int worker) {
  Connection& each = connection(worker);
  FrameSocket& frames = each.frames;
  const BulkHead& head = frames.head();
  if (!each.accepted) {
    const auto behind = [&](const auto& other) {
      return other && other->frames.queued_bytes() > kMostQueued;
    };
    if (lanes_->done() || std::ranges::any_of(connections_, behind)) return false;
    if (head.count > kMostPieceBytes / sizeof(float) || foot_bytes(head) > kMostTailBytes) {
      throw Error(ErrorCode::kMessageTooLarge,
                  fmt::format("{} sent a PartialSum of {} elements and a tail of {}; {} and {} "
                              "bytes are allowed",
                              membership_.name(worker), head.count, head.tail_count,
                              kMostPieceBytes, kMostTailBytes),
                  worker);
    }
    const bool first =
        options_.settings.serves_ranks() ? !lanes_->piece_is_open() : !lanes_->begun();
    if (!lanes_->offer(worker, head)) return false;
    check_all_stay();
    // Until somebody brings something all may be computing, for as long as they like.
    if (first) owe_all(fmt::format("its lanes of step {}", head.step));
    each.accepted = true;
    each.incoming.data.reserve(static_cast<std::size_t>(head.count));
  }
  const std::size_t count = frames.elements_here();
  if (count > 0) {
    const std::size_t before = each.incoming.data.size();
    each.incoming.data.resize(before + count);
    std::copy_n(
        frames.elements(), count * sizeof(float),
        std::as_writable_bytes(std::span(each.incoming.data)).data() + before * sizeof(float));
    frames.consume_elements(count);
  }
  if (frames.elements_left() > 0) return false;
  const BulkHead whole = head;
  auto foot = frames.take_foot();
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
             encode_foot(piece->head, BulkFoot{0, 0, 0, sum->tail}), sum});
  if (!lanes_->done() && !options_.settings.serves_ranks()) {
    return owe_all("its lanes of the next piece");
  }
  for_each_connection([this](int worker, Connection&) { membership_.brought(worker); });
  if (after_piece_) after_piece_(*piece);
  if (lanes_->done()) last_piece_ = std::move(piece);
}

// Ranks call their collectives together: whoever has left will be missed.
void GradientServer::check_all_stay() const {
  if (!options_.settings.serves_ranks()) return;
  for (int worker = 0; worker < membership_.size(); ++worker) {
    const auto& each = connections_[index_of(worker)];
    if (each && !each->left) continue;
    throw Error(ErrorCode::kPeerLost,
                fmt::format("{} has left the job; the others go on", membership_.name(worker)),
                worker);
  }
}

void GradientServer::check_bytes(int worker, const BulkHead& head) const {
  const auto size = static_cast<std::uint32_t>(membership_.size());
  const auto self = static_cast<std::uint32_t>(worker);
  std::string wrong;
  if (head.from != self) {
    wrong = fmt::format("in the name of {}", head.from);
  } else if (head.to != kEveryOther && (head.to >= size || head.to == self)) {
    wrong = fmt::format("for {} of {}", head.to, size);
  }
  if (!wrong.empty()) {
    throw Error(ErrorCode::kInvalidRank,
                fmt::format("{} sent Bytes {}", membership_.name(worker), wrong), worker);
  }
  if (head.count > kBytesPiece) {
    throw Error(ErrorCode::kMessageTooLarge,
                fmt::format("{} sent {} bytes at once; {} are allowed", membership_.name(worker),
                            head.count, kBytesPiece),
                worker);
  }
}

bool GradientServer::process_bytes(int worker) {
  Connection& each = connection(worker);
  FrameSocket& frames = each.frames;
  const BulkHead head = frames.head();
  if (!each.accepted) {
    check_bytes(worker, head);
    check_all_stay();
    bool room = true;
    for_each_receiver(head, [&](Connection& receiver) {
      room = room && receiver.frames.queued_bytes() <= kMostQueued;
    });
    if (!room) return false;
    each.accepted = true;
    each.passing = std::make_shared<std::vector<std::byte>>();
    each.passing->reserve(static_cast<std::size_t>(head.count));
  }
  const std::size_t count = frames.elements_here();
  each.passing->insert(each.passing->end(), frames.elements(), frames.elements() + count);
  frames.consume_elements(count);
  if (frames.elements_left() > 0) return false;
  frames.take_foot();
  each.accepted = false;
  const auto bytes = std::exchange(each.passing, nullptr);
  const FrameSocket::Outgoing whole{encode_head(head), *bytes, {}, bytes};
  for_each_receiver(head, [&](Connection& receiver) { receiver.frames.queue(whole); });
  return true;
}

LocalStar make_local_star(const ServerOptions& options) {
  LocalStar star;
  star.server = std::make_unique<GradientServer>(std::nullopt, options);
  for (int worker = 0; worker < options.workers; ++worker) {
    auto [ours, theirs] = unix_socket_pair();
    ours.set_peer(fmt::format("thread {}", worker), worker);
    theirs.set_peer("the coordinator (this process)", -1);
    star.server->adopt(std::move(ours), worker);
    star.ends.push_back(std::move(theirs));
  }
  return star;
}

}  // namespace lockstep
