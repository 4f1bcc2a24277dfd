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

namespace lockstep {
namespace {

using namespace std::chrono_literals;

// So much is read from a worker, or sent to it, before the next has its turn: what all have sent
// then fits the second-level cache.
constexpr std::size_t kTurnBytes = 256 * 1024;
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

}  // namespace

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
      lines_(static_cast<std::size_t>(options_.workers)),
      inputs_(lines_.size()) {
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
  for_each_line([&](int worker, Line& each) {
    const Shard shard = shard_of(step, options_.settings.total_samples, membership_.size(), worker);
    each.channel.queue(encode(ShardAssignment{step, shard.begin, shard.end}));
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
  GradientHead head;
  head.tag = average_tag(result.key.kind);
  head.step = result.key.step;
  head.block_idx = result.key.block.value_or(0);
  head.component = result.key.component;
  head.component_sizes = result.component_sizes;
  head.count = result.gradients.size();
  GradientFoot foot;
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

void GradientServer::drain() {
  run([this] { return !anyone_sending(); });
}

void GradientServer::shutdown() {
  for_each_line([](int, Line& each) { each.channel.queue(encode(Shutdown{})); });
  finished_ = true;
  drain();
  take_leave(std::min(options_.settings.timeout, kLeavePatience));
}

void GradientServer::halt(const Error& cause) {
  if (failure_) return;
  failure_ = cause;
  const auto frame = encode(Halt{{cause.code(), cause.rank(), std::string(cause.message())}});
  for_each_line([&](int, Line& each) {
    each.channel.drop_unsent();
    if (each.ours) each.channel.queue(frame);
  });
  take_leave(std::min(options_.settings.timeout, kHaltPatience));
}

void GradientServer::queue_all(const FrameChannel::Outgoing& frame) {
  for_each_line([&](int, Line& each) { each.channel.queue(frame); });
}

bool GradientServer::anyone_sending() const {
  return std::ranges::any_of(
      lines_, [](const auto& each) { return each && each->channel.wants_to_send(); });
}

void GradientServer::owe_all(const std::string& what) {
  const auto now = Clock::now();
  for_each_line([&](int worker, Line&) { membership_.owe(worker, what, now); });
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
  for (const auto& each : lines_) {
    const bool reading = each && !each->channel.full();
    const bool sending = each && each->channel.wants_to_send();
    // Who is held back is not read, but that it has gone shows all the same.
    const short events =
        static_cast<short>((reading ? POLLIN : POLLRDHUP) | (sending ? POLLOUT : 0));
    entries_.push_back({each ? each->channel.socket().fd() : -1, events, 0});
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
  for_each_line([&](int worker, Line& each) {
    const pollfd& entry = entries_[static_cast<std::size_t>(worker) + 1];
    if ((entry.revents & (POLLIN | POLLHUP | POLLERR | POLLRDHUP)) == 0) return;
    if (each.channel.full()) {
      return lose(worker, Error(ErrorCode::kPeerLost,
                                fmt::format("{} closed its connection while it was held back",
                                            membership_.name(worker)),
                                worker));
    }
    if (each.channel.fill(kTurnBytes) > 0) membership_.heard(worker, now);
  });
  const auto rest = std::span<const pollfd>(entries_).subspan(1 + lines_.size());
  welcome(lobby_.serve(rest), now);
}

void GradientServer::welcome(std::vector<Lobby::Candidate> candidates, Clock::time_point now) {
  for (Lobby::Candidate& candidate : candidates) {
    const JoinRequest& request = candidate.request;
    const auto [worker, refusal] = membership_.join({.node_id = printable(request.node_id),
                                                     .gpu_count = request.gpu_count,
                                                     .backend = printable(request.backend),
                                                     .address = candidate.channel.socket().peer(),
                                                     .ours = candidate.ours,
                                                     .place = candidate.place},
                                                    now);
    if (worker < 0) {
      lobby_.turn_away(std::move(candidate), Error(ErrorCode::kInvalidRank, refusal));
      continue;
    }
    FrameChannel& channel = candidate.channel;
    channel.socket().set_peer(membership_.name(worker), worker);
    channel.set_window(options_.window);
    channel.set_largest_frame(options_.settings.largest_frame);
    channel.queue(encode(JoinAccepted{static_cast<std::uint32_t>(worker),
                                      static_cast<std::uint32_t>(membership_.size())}));
    if (candidate.ours) channel.queue(encode(to_welcome(options_.settings)));
    if (notice_) {
      const WorkerCard& card = membership_.card(worker);
      notice_(fmt::format("{} joined: {} GPUs, backend {}{}", membership_.name(worker),
                          card.gpu_count, card.backend, card.ours ? "" : ", original protocol"));
    }
    lines_[index_of(worker)].emplace(Line{std::move(channel), candidate.ours, {}, {}, false});
  }
}

void GradientServer::send(Clock::time_point now) {
  const bool heartbeat = membership_.take_heartbeat(now);
  for_each_line([&](int worker, Line& each) {
    if (heartbeat && each.ours && !each.channel.wants_to_send())
      each.channel.queue(encode(Alive{}));
    try {
      if (each.channel.flush(kTurnBytes) > 0 && !each.ours) membership_.heard(worker, now);
    } catch (const Error& error) {
      lose(worker, last_words(worker, error));
    }
  });
}

Error GradientServer::last_words(int worker, const Error& unsent) {
  FrameChannel& channel = line(worker).channel;
  try {
    do {
      process(worker);
    } while (!channel.full() && channel.fill(kTurnBytes) > 0);
  } catch (const Error& error) {
    return error;
  }
  if (channel.ended()) return departure(worker);
  return Error(ErrorCode::kPeerLost, std::string(unsent.message()), worker);
}

void GradientServer::judge(Clock::time_point now) {
  for_each_line([&](int worker, Line& each) {
    const bool expected = each.ours || each.channel.awaits_more() || each.channel.wants_to_send();
    membership_.watch(worker, expected && !each.channel.full(), now);
    const bool all_here = each.channel.gradient_is_open() && each.channel.peek_foot();
    if (all_here || each.channel.full()) membership_.excuse(worker, now);
    if (each.channel.ended()) lose(worker, departure(worker));
  });
  while (const auto error = membership_.judge(now)) {
    if (error->rank() < 0) throw *error;
    lose(error->rank(), *error);
  }
}

Error GradientServer::departure(int worker) const {
  const FrameChannel& channel = lines_[index_of(worker)]->channel;
  const Error& end = *channel.ended();
  std::string text = end.code() == ErrorCode::kChannelClosed
                         ? fmt::format("{} closed its connection", membership_.name(worker))
                         : std::string(end.message());
  if (channel.awaits_more()) text += " in the middle of a message";
  const std::string& owes = membership_.owes(worker);
  if (!owes.empty()) text += fmt::format("; it owes {}", owes);
  return Error(ErrorCode::kPeerLost, text, worker);
}

void GradientServer::lose(int worker, const Error& error) {
  auto& each = lines_[index_of(worker)];
  if (finished_ && !each->channel.wants_to_send()) {
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
  std::vector<bool> told(lines_.size());
  while (true) {
    entries_.clear();
    for_each_line([&](int worker, Line& each) {
      FrameChannel& channel = each.channel;
      try {
        while (channel.flush(kTurnBytes) > 0) {
        }
        if (!channel.wants_to_send() && !told[index_of(worker)]) {
          ::shutdown(channel.socket().fd(), SHUT_WR);
          told[index_of(worker)] = true;
        }
        do {
          channel.consume(channel.raw().size());
        } while (channel.fill(kTurnBytes) > 0);
      } catch (const Error&) {
        lines_[index_of(worker)].reset();
        return;
      }
      if (channel.ended()) {
        lines_[index_of(worker)].reset();
        return;
      }
      const short events = channel.wants_to_send() ? POLLIN | POLLOUT : POLLIN;
      entries_.push_back({channel.socket().fd(), events, 0});
    });
    if (entries_.empty() || deadline.expired()) break;
    ::poll(entries_.data(), entries_.size(), deadline.poll_timeout());
  }
  for (auto& each : lines_) each.reset();
}

}  // namespace lockstep
