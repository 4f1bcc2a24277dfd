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
#include "lockstep/net/socket/interface.h"
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

WireTag average_tag(RoundKind kind) {
  switch (kind) {
    case RoundKind::kVector: return WireTag::kAveragedGradient;
    case RoundKind::kBlock: return WireTag::kAveragedBlockGradient;
    case RoundKind::kComponent: return WireTag::kAveragedNonBlockGradient;
  }
  return {};
}

// A worker asks to join at once, however long the job's timeout is.
constexpr Deadline::Clock::duration kLongestRequest = 10s;
constexpr std::size_t kNewcomerWindow = 48 * 1024;  // more than twice any of their messages
constexpr std::size_t kNewcomerBytes = 16 * 1024;
constexpr std::uint32_t kNoGradients = 0;

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
  require_token_for(address, token);
  return listen_tcp(address);
}

GradientServer::GradientServer(Arrivals* arrivals, ServerOptions options)
    : options_(std::move(options)),
      arrivals_(arrivals),
      membership_(options_.workers, options_.settings.timeout, Clock::now()),
      connections_(static_cast<std::size_t>(options_.workers)),
      inputs_(connections_.size()),
      total_samples_(options_.settings.total_samples) {
  LOCKSTEP_CHECK(options_.window >= kLeastWindow);
}

void GradientServer::adopt(Socket socket, int place) {
  newcomers_.push_back({.frames = FrameSocket(std::move(socket), kNewcomerWindow, kNoGradients),
                        .limit = Deadline::after(options_.settings.timeout).time(),
                        .ours = true,
                        .place = place});
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
    const Shard shard = shard_of(step, total_samples_, membership_.size(), worker);
    each.frames.queue(encode(ShardAssignment{step, shard.begin, shard.end}));
  });
  run([] { return true; });
}

int GradientServer::worker_count() const {
  return static_cast<int>(
      std::ranges::count_if(connections_, [](const auto& each) { return each.has_value(); }));
}

bool GradientServer::await_step(std::uint64_t step) {
  LOCKSTEP_CHECK(membership_.complete() && !round_);
  between_steps_ = true;
  departed_.reset();
  owe_all(fmt::format("its part of step {} (mode blocks)", step_number(step)));
  if (step == 0) hint_at_ = Clock::now() + options_.settings.timeout;
  run([this] {
    if (!anyone_begins()) return worker_count() == 0;
    if (departed_) throw Error(*departed_);
    return true;
  });
  between_steps_ = false;
  return worker_count() > 0;
}

bool GradientServer::anyone_begins() const {
  return std::ranges::any_of(connections_, [](const auto& each) {
    const auto start = each ? each->frames.start() : std::nullopt;
    return start && is_bulk(start->tag);
  });
}

void GradientServer::hint_at_mode(Clock::time_point now) {
  if (!hint_at_ || now < *hint_at_) return;
  hint_at_.reset();
  for_each_connection([&](int worker, const Connection& each) {
    if (each.ours || each.begun) return;
    log(LogLevel::kWarning,
        "coordinator: nothing has come from {} for {}; if it waits for a shard, it needs a "
        "coordinator with --mode vector",
        membership_.name(worker), format_duration(options_.settings.timeout));
  });
}

bool GradientServer::left_in_order(int worker) const {
  const FrameSocket& frames = connections_[index_of(worker)]->frames;
  return between_steps_ && frames.ended() && frames.ended()->code() == ErrorCode::kChannelClosed &&
         frames.raw().empty() && !frames.wants_to_send();
}

RoundResult GradientServer::reduce(const RoundKey& key) {
  LOCKSTEP_CHECK(membership_.complete());
  const auto start = Clock::now();
  output_ = nullptr;
  round_.emplace(key, options_.settings.average, names());
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

void GradientServer::drain() {
  run([this] { return !anyone_sending(); });
}

void GradientServer::shutdown() {
  finished_ = true;  // who has all that it was owed may go at once
  drain();
  for_each_connection([](int, Connection& each) { each.frames.queue(encode(Shutdown{})); });
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
    const bool open = each && !each->frames.ended();
    entries_.push_back({open ? each->frames.socket().fd() : -1, events, 0});
  }
  entries_.push_back({arrivals_ != nullptr ? arrivals_->fd() : -1, POLLIN, 0});
  auto wake = membership_.wake_at();
  for (const Newcomer& newcomer : newcomers_) {
    const short events = newcomer.frames.wants_to_send() ? POLLIN | POLLOUT : POLLIN;
    entries_.push_back({newcomer.frames.socket().fd(), events, 0});
    wake = std::min(wake, newcomer.limit);
  }
  const auto has_more = [](const FrameSocket& frames) {
    return !frames.full() && frames.buffered();
  };
  const bool more =
      std::ranges::any_of(connections_,
                          [&](const auto& each) { return each && has_more(each->frames); }) ||
      std::ranges::any_of(newcomers_, has_more, &Newcomer::frames);
  if (more) wake = {};
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
    const bool ready = (entry.revents & (POLLIN | POLLHUP | POLLERR | POLLRDHUP)) != 0;
    if (!ready && (each.frames.full() || !each.frames.buffered())) return;
    if (each.frames.full()) {
      return lose(worker, Error(ErrorCode::kPeerLost,
                                fmt::format("{} closed its connection while it was held back",
                                            membership_.name(worker)),
                                worker));
    }
    if (each.frames.fill(kTurnBytes) > 0) membership_.heard(worker, now);
  });
  meet_newcomers(now);
}

void GradientServer::meet_newcomers(Clock::time_point now) {
  while (auto arrival = arrivals_ != nullptr ? arrivals_->next() : std::nullopt) {
    newcomers_.push_back({.frames = FrameSocket(std::move(arrival->link.socket()), kNewcomerWindow,
                                                kNoGradients, arrival->link.rest()),
                          .limit = now + std::min(options_.settings.timeout, kLongestRequest),
                          .ours = !arrival->original});
  }
  for (auto newcomer = newcomers_.begin(); newcomer != newcomers_.end();) {
    bool done = false;
    std::string why;
    try {
      done = attend(*newcomer, now);
      const bool joined = !newcomer->frames.socket();
      if (done && !joined && !newcomer->leaving) why = "it left before it joined";
      if (!done && now >= newcomer->limit) why = "it did not ask to join in time";
    } catch (const Error& error) {
      why = error.message();
    }
    done = done || !why.empty();
    if (!why.empty()) {
      log(LogLevel::kWarning, "coordinator: let {} go: {}", newcomer->frames.socket().peer(), why);
    }
    if (done && newcomer->frames.socket()) newcomer->frames.socket().close_gently();
    newcomer = done ? newcomers_.erase(newcomer) : std::next(newcomer);
  }
}

bool GradientServer::attend(Newcomer& newcomer, Clock::time_point now) {
  FrameSocket& frames = newcomer.frames;
  frames.fill(kNewcomerBytes);
  if (newcomer.leaving) {
    frames.consume(frames.raw().size());
  } else if (const auto start = frames.start()) {
    if (start->tag != WireTag::kJoinRequest) {
      throw Error(ErrorCode::kUnexpectedMessage,
                  fmt::format("it sent a {} before it joined", to_string(start->tag)));
    }
    if (const auto message = frames.take_small()) {
      welcome(newcomer, std::get<JoinRequest>(*message), now);
    }
  }
  if (!frames.socket()) return true;  // it has joined
  frames.flush(kNewcomerBytes);
  return frames.ended() || (newcomer.leaving && !frames.wants_to_send());
}

void GradientServer::welcome(Newcomer& newcomer, const JoinRequest& request,
                             Clock::time_point now) {
  FrameSocket& frames = newcomer.frames;
  const auto [worker, refusal] = membership_.join({.node_id = printable(request.node_id),
                                                   .gpu_count = request.gpu_count,
                                                   .backend = printable(request.backend),
                                                   .address = frames.socket().peer(),
                                                   .ours = newcomer.ours,
                                                   .place = newcomer.place},
                                                  now);
  if (worker < 0) {
    log(LogLevel::kWarning, "coordinator: turned {} ({}) away: {}", printable(request.node_id),
        frames.socket().peer(), refusal);
    newcomer.leaving = true;
    if (newcomer.ours) frames.queue(encode(Refusal{{ErrorCode::kInvalidRank, -1, refusal}}));
    return;
  }
  frames.socket().set_peer(membership_.name(worker), worker);
  frames.set_window(options_.window);
  frames.set_largest_frame(options_.settings.largest_frame);
  frames.queue(encode(JoinAccepted{static_cast<std::uint32_t>(worker),
                                   static_cast<std::uint32_t>(membership_.size())}));
  if (newcomer.ours) frames.queue(encode(to_welcome(options_.settings)));
  if (notice_) {
    const WorkerCard& card = membership_.card(worker);
    notice_(fmt::format("{} joined: {} GPUs, backend {}{}", membership_.name(worker),
                        card.gpu_count, card.backend, card.ours ? "" : ", original protocol"));
  }
  connections_[index_of(worker)].emplace(
      Connection{.frames = std::move(frames), .ours = newcomer.ours, .totals = {}});
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
  hint_at_mode(now);
  for_each_connection([&](int worker, Connection& each) {
    const bool expected = each.ours || each.frames.awaits_more() || each.frames.wants_to_send();
    const bool heard_all = each.frames.ended().has_value();
    membership_.watch(worker, expected && !each.frames.full() && !heard_all, now);
    const bool all_here = each.frames.bulk_is_open() && each.frames.peek_foot();
    if (all_here || each.frames.full()) membership_.excuse(worker, now);
    // What it sent before it went comes first: why it did may be behind it. Of no interest before
    // all are there.
    const bool left_words = membership_.complete() && each.frames.has_whole_message();
    if (heard_all && !left_words) lose(worker, departure(worker));
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
  const bool in_order = left_in_order(worker);
  if (in_order || (finished_ && !each->frames.wants_to_send())) {
    if (in_order && !departed_) departed_ = error;
    membership_.watch(worker, false, Clock::now());
    membership_.brought(worker);
    return each.reset();
  }
  if (membership_.complete()) throw Error(error);
  if (notice_) notice_(fmt::format("{}; its place is free again", error.message()));
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
  } while (advance_round());
}

void GradientServer::process(int worker) {
  while (true) {
    bool moved = false;
    if (!connection(worker).frames.bulk_is_open()) {
      moved = process_between(worker);
    } else if (round_) {
      moved = process_round(worker);
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
  // A gradient that nobody has asked for yet waits, and with it what follows.
  if (!round_ || round_->begun(worker)) return false;
  round_->check_tag(worker, start->tag);
  return frames.open_bulk();
}

void GradientServer::handle(int worker, const SmallMessage& message) {
  if (std::holds_alternative<Alive>(message) || std::holds_alternative<Heartbeat>(message)) return;
  Connection& each = connection(worker);
  if (const auto* totals = std::get_if<Totals>(&message); totals && each.ours && !each.totals) {
    each.totals = *totals;
    return;
  }
  if (const auto* halted = std::get_if<Halt>(&message); halted && each.ours) {
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
  each.begun = true;
  round_->begin(worker, head);
  check_average_fits(head);
  if (head.worker_id != static_cast<std::uint32_t>(worker) && !std::exchange(each.misnamed, true)) {
    log(LogLevel::kWarning, "coordinator: {} calls itself worker {} in its payloads",
        membership_.name(worker), head.worker_id);
  }
  if (head.tag == WireTag::kGradientPayload && each.totals) {
    const Totals totals = *std::exchange(each.totals, std::nullopt);
    if (totals.step != head.step) {
      throw Error(
          ErrorCode::kStepMismatch,
          fmt::format("{} announced totals of step {}, then sent a gradient of step {}",
                      membership_.name(worker), step_number(totals.step), step_number(head.step)),
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

// Before anything is added up: a worker of the original protocol refuses longer frames.
void GradientServer::check_average_fits(const BulkHead& head) const {
  BulkHead average = head;
  average.tag = average_tag(round_->key().kind);
  const std::uint64_t length = frame_length(average);
  if (length <= kOriginalLargestFrame) return;
  for (int worker = 0; worker < membership_.size(); ++worker) {
    if (connections_[index_of(worker)]->ours) continue;
    throw Error(ErrorCode::kMessageTooLarge,
                fmt::format("the average of {} would be a message of {} bytes, and {} speaks the "
                            "original protocol, which takes {} at most",
                            describe(round_->key()), length, membership_.name(worker),
                            kOriginalLargestFrame),
                worker);
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

LocalStar make_local_star(const ServerOptions& options) {
  LocalStar star;
  star.server = std::make_unique<GradientServer>(nullptr, options);
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
