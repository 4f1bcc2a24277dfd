#include "lockstep/server/worker_client.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/text.h"
#include "lockstep/net/job/handshake.h"
#include "lockstep/server/membership.h"

namespace lockstep {
namespace {

constexpr std::size_t kWindow = 256 * 1024;
constexpr std::size_t kTurnBytes = 256 * 1024;
constexpr std::uint32_t kLargestFrame = UINT32_MAX;

Socket connect_to_coordinator(const WorkerOptions& options) {
  const auto deadline = Deadline::after(options.timeout);
  Socket socket = connect_with_retry(options.coordinator, deadline);
  tune_tcp(socket, options.timeout);
  socket.set_peer(fmt::format("the coordinator ({})", socket.peer()), -1);
  if (!options.seed_protocol) {
    const Identity identity{options.job, 0, random_member_id(), -1, options.token};
    client_handshake(socket, identity, Purpose::kServer, 0, deadline);
  }
  return socket;
}

}  // namespace

WorkerClient::WorkerClient(const WorkerOptions& options)
    : WorkerClient(connect_to_coordinator(options), options) {}

WorkerClient::WorkerClient(Socket socket, const WorkerOptions& options)
    : ours_(!options.seed_protocol),
      timeout_(options.timeout),
      channel_(std::move(socket), kWindow, kLargestFrame),
      last_heard_(Clock::now()),
      last_look_(last_heard_),
      next_alive_(last_heard_) {
  join(options);
  if (ours_) thread_ = std::thread([this] { pulse(); });
}

WorkerClient::~WorkerClient() {
  {
    const Lock lock(mutex_);
    stop_ = true;
  }
  stopping_.notify_all();
  if (thread_.joinable()) thread_.join();
  channel_.socket().close_gently();
}

void WorkerClient::join(const WorkerOptions& options) {
  const Lock lock(mutex_);
  channel_.queue(encode(JoinRequest{options.node_id, options.gpu_count, options.backend}));
  const SmallMessage answer = receive_small("its answer to the join");
  if (const auto* refusal = std::get_if<Refusal>(&answer)) {
    throw Error(refusal->error.code, fmt::format("{} refused this worker: {}",
                                                 channel_.socket().peer(), refusal->error.message));
  }
  const auto* accepted = std::get_if<JoinAccepted>(&answer);
  if (accepted == nullptr || accepted->worker_id >= accepted->total_workers ||
      accepted->total_workers > INT32_MAX) {
    throw Error(ErrorCode::kUnexpectedMessage,
                fmt::format("{} answered the join with a {}", channel_.socket().peer(),
                            to_string(tag_of(answer))));
  }
  worker_id_ = static_cast<int>(accepted->worker_id);
  total_workers_ = static_cast<int>(accepted->total_workers);
  if (!ours_) return;
  const SmallMessage welcome = receive_small("its settings");
  if (const auto* message = std::get_if<Welcome>(&welcome)) settings_ = from_welcome(*message);
  if (!settings_) {
    throw Error(
        ErrorCode::kUnexpectedMessage,
        fmt::format("{} sent no settings that this worker understands", channel_.socket().peer()));
  }
  timeout_ = settings_->timeout;
  next_alive_ = Clock::now();  // by the new timeout
}

void WorkerClient::pulse() {
  Lock lock(mutex_);
  while (!stop_ && !failure_) {
    // Calls hold the mutex and see to all of this themselves.
    stopping_.wait_for(lock, timeout_ / 5);
    if (stop_ || failure_) return;
    try {
      const auto now = Clock::now();
      if (!channel_.full()) fill();
      take_control();
      if (channel_.ended()) return;  // what it said last is for the next call
      queue_alive(now);
      flush();
      if (!channel_.full()) check_limits("its heartbeat", now, now);
    } catch (const Error& error) {
      failure_ = error;
    }
  }
}

std::string WorkerClient::gone() const {
  const Error& end = *channel_.ended();
  return end.code() == ErrorCode::kChannelClosed
             ? fmt::format("{} closed the connection", channel_.socket().peer())
             : std::string(end.message());
}

void WorkerClient::fail(const Error& error) {
  if (!failure_) failure_ = error;
  throw Error(*failure_);
}

void WorkerClient::flush() {
  try {
    channel_.flush(kTurnBytes);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kChannelClosed) {
      throw Error(ErrorCode::kPeerLost, std::string(error.message()));
    }
    // What it said before it closed tells why, or that the job is done; reading comes to that.
    channel_.stop_sending();
  }
}

void WorkerClient::fill() {
  if (channel_.fill(kTurnBytes) > 0) last_heard_ = Clock::now();
}

void WorkerClient::take_control() {
  while (!channel_.gradient_is_open()) {
    const auto start = channel_.start();
    if (!start) return;
    if (!is_control(start->tag)) return;
    const auto message = channel_.take_small();
    if (!message) return;
    if (const auto* halt = std::get_if<Halt>(&*message)) {
      halted_ = true;
      throw halt->error.error();
    }
  }
}

void WorkerClient::queue_alive(Clock::time_point now) {
  if (!ours_ || worker_id_ < 0 || now < next_alive_) return;
  next_alive_ = now + timeout_ / 5;
  if (!channel_.wants_to_send()) channel_.queue(encode(Alive{}));
}

void WorkerClient::drive(const std::string& what, const std::function<bool()>& done) {
  if (failure_) throw Error(*failure_);
  const auto since = Clock::now();
  try {
    while (true) {
      queue_alive(Clock::now());
      flush();
      take_control();
      if (channel_.ended()) channel_.stop_sending();  // so that all that came is read
      if (done()) return;
      if (channel_.ended()) throw Error(ErrorCode::kPeerLost, gone() + "; we wait for " + what);
      wait(what, since);
    }
  } catch (const Error& error) {
    // While the buffers of what is half sent are still there.
    if (!halted_ && !channel_.ended()) tell(error);
    fail(error);
  }
}

void WorkerClient::wait(const std::string& what, Clock::time_point since) {
  // The elements of an open gradient go straight to where they belong.
  const bool reading = !channel_.gradient_is_open() || channel_.elements_left() == 0;
  // Nobody takes what comes while we send; holding it back could stop the coordinator for good.
  if (reading && channel_.full()) channel_.set_window(2 * channel_.window());
  const short events = channel_.wants_to_send() ? POLLIN | POLLOUT : POLLIN;
  pollfd entries[2] = {{channel_.socket().fd(), events, 0}, {stop_fd_, POLLIN, 0}};
  const auto wake = earlier(Deadline::after(timeout_ / 5), deadline_);
  if (::poll(entries, 2, wake.poll_timeout()) < 0 && errno != EINTR) throw_io("polling", errno);
  if (entries[1].revents != 0) {
    throw why_stop_ ? why_stop_() : Error(ErrorCode::kAborted, "this worker was told to stop");
  }
  if (entries[0].revents & (POLLIN | POLLHUP | POLLERR)) {
    if (reading) {
      fill();
    } else {
      last_heard_ = Clock::now();
    }
  }
  const auto now = Clock::now();
  check_limits(what, since, now);
  if (now >= deadline_.time()) {
    throw Error(ErrorCode::kTimeout, fmt::format("{} has not brought {} by the deadline",
                                                 channel_.socket().peer(), what));
  }
}

void WorkerClient::check_limits(const std::string& what, Clock::time_point since,
                                Clock::time_point now) {
  last_heard_ = excuse_own_pause(last_heard_, last_look_, now, timeout_);  // or nobody listened
  last_look_ = now;
  // Without heartbeats a coordinator that waits for other workers is silent.
  const bool patient = !ours_ && !channel_.awaits_more() && worker_id_ >= 0;
  const auto silence = patient ? timeout_ * kOverdueFactor : timeout_;
  if (now - last_heard_ >= silence) {
    throw Error(ErrorCode::kPeerLost,
                fmt::format("nothing was heard of {} for {}; we wait for {}",
                            channel_.socket().peer(), format_duration(silence), what));
  }
  // The coordinator gives up on anybody a little earlier, and says so.
  const auto longest = timeout_ * (kOverdueFactor + 1);
  if (now - since >= longest) {
    throw Error(ErrorCode::kTimeout,
                fmt::format("{} has not brought {} within {}", channel_.socket().peer(), what,
                            format_duration(longest)));
  }
}

SmallMessage WorkerClient::receive_small(const std::string& what) {
  std::optional<SmallMessage> message;
  drive(what, [&] {
    const auto start = channel_.start();
    if (!start) return false;
    if (is_gradient(start->tag)) {
      throw Error(ErrorCode::kUnexpectedMessage,
                  fmt::format("{} sent a {}; we wait for {}", channel_.socket().peer(),
                              to_string(start->tag), what));
    }
    message = channel_.take_small();
    return message.has_value();
  });
  return std::move(*message);
}

std::optional<Shard> WorkerClient::next_shard() {
  const Lock lock(mutex_);
  const SmallMessage message = receive_small("a shard");
  if (std::holds_alternative<Shutdown>(message)) return std::nullopt;
  const auto* shard = std::get_if<ShardAssignment>(&message);
  if (shard == nullptr || shard->shard_start > shard->shard_end) {
    fail(Error(ErrorCode::kUnexpectedMessage,
               fmt::format("{} sent a {} where a shard was expected", channel_.socket().peer(),
                           to_string(tag_of(message)))));
  }
  return Shard{shard->step, shard->shard_start, shard->shard_end};
}

void WorkerClient::set_stop(int fd, std::function<Error()> why) {
  const Lock lock(mutex_);
  stop_fd_ = fd;
  why_stop_ = std::move(why);
}

void WorkerClient::set_deadline(Deadline deadline) {
  const Lock lock(mutex_);
  deadline_ = deadline;
}

std::optional<SocketAddress> WorkerClient::own_address() const {
  const SocketAddress address = channel_.socket().local_address();
  if (address.family() != AF_INET && address.family() != AF_INET6) return std::nullopt;
  return address;
}

void WorkerClient::abort(const Error& reason) {
  const Lock lock(mutex_);
  if (failure_) return;
  failure_ = reason;
  tell(reason);
}

void WorkerClient::tell(const Error& reason) {
  if (!ours_ || worker_id_ < 0) return;
  try {
    channel_.drop_unsent();
    channel_.queue(encode(
        Halt{{reason.code(), worker_id_, std::string(reason.message().substr(0, kMaxErrorText))}}));
    channel_.flush(kTurnBytes);
  } catch (const Error&) {  // it is gone already
  }
}

}  // namespace lockstep
