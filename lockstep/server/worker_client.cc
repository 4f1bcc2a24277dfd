#include "lockstep/server/worker_client.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/kernels/kernels.h"
#include "lockstep/net/job/handshake.h"
#include "lockstep/net/socket/address.h"
#include "lockstep/net/socket/interface.h"
#include "lockstep/server/membership.h"

namespace lockstep {
namespace {

constexpr std::size_t kWindow = 256 * 1024;
constexpr std::uint32_t kLargestFrame = UINT32_MAX;

Socket connect_to_coordinator(const WorkerOptions& options) {
  const auto deadline = Deadline::after(options.timeout);
  Socket socket = connect_with_retry(options.coordinator, deadline);
  tune_tcp(socket, options.timeout);
  socket.set_peer(fmt::format("the coordinator ({})", socket.peer()), -1);
  if (options.original) return socket;
  if (!options.token.empty()) {
    require_token_for(socket.peer_address(), options.token);
  } else if (!socket.peer_address().is_loopback()) {  // as --insecure there allows
    log(LogLevel::kWarning,
        "without a token nobody proves to be the coordinator: gradients go to whoever answers at "
        "{}; --token-file FILE has it prove that it has the job's",
        to_string(socket.peer_address()));
  }
  const Identity identity{
      .job = options.job, .id = random_member_id(), .token = options.token, .wire = options.wire};
  try {
    client_handshake(socket, identity, Purpose::kServer, 0, deadline);
  } catch (const Error& error) {
    const bool hung_up =
        error.code() == ErrorCode::kChannelClosed || error.code() == ErrorCode::kPeerLost;
    if (!hung_up) throw;
    throw Error(error.code(),
                fmt::format("{}; if it is a server of the original protocol, use --original",
                            error.message()));
  }
  return socket;
}

std::string describe(const BulkHead& head) {
  switch (head.tag) {
    case WireTag::kAveragedBlockGradient:
      return fmt::format("the average of block {} of step {}", head.block_idx,
                         step_number(head.step));
    case WireTag::kAveragedNonBlockGradient:
      return fmt::format("the average of component {} of step {}", head.component,
                         step_number(head.step));
    default: return fmt::format("the {} of step {}", to_string(head.tag), step_number(head.step));
  }
}

BulkHead average_head(WireTag tag, std::uint64_t step, std::span<const float> gradients) {
  BulkHead head;
  head.tag = tag;
  head.step = step;
  head.count = gradients.size();
  return head;
}

BulkHead payload_head(int worker, WireTag tag, std::uint64_t step,
                      std::span<const float> gradients) {
  BulkHead head = average_head(tag, step, gradients);
  head.worker_id = static_cast<std::uint32_t>(worker);
  return head;
}

}  // namespace

WorkerClient::WorkerClient(const WorkerOptions& options)
    : WorkerClient(connect_to_coordinator(options), options) {}

WorkerClient::WorkerClient(Socket socket, const WorkerOptions& options)
    : ours_(!options.original),
      timeout_(options.timeout),
      frames_(std::move(socket), kWindow, kLargestFrame),
      last_heard_(Clock::now()),
      last_look_(last_heard_),
      next_alive_(last_heard_) {
  join(options);
  // The pulse keeps what goes wrong for the next call.
  if (ours_)
    thread_.start(
        "the heartbeat's thread", [this] { pulse(); }, [](const Error&) {});
}

WorkerClient::~WorkerClient() {
  {
    const Lock lock(mutex_);
    stop_ = true;
  }
  stopping_.notify_all();
  thread_.join();
  frames_.socket().close_gently();
}

void WorkerClient::join(const WorkerOptions& options) {
  const Lock lock(mutex_);
  frames_.queue(encode(JoinRequest{options.node_id, options.gpu_count, options.backend}));
  const SmallMessage answer = receive_small(
      ours_ ? "its answer to the join"
            : "its answer to the join; a coordinator in mode lanes, or with a token and without "
              "--insecure, takes nobody of the original protocol");
  if (const auto* refusal = std::get_if<Refusal>(&answer)) {
    throw Error(refusal->error.code, fmt::format("{} refused this worker: {}",
                                                 frames_.socket().peer(), refusal->error.message));
  }
  const auto* accepted = std::get_if<JoinAccepted>(&answer);
  if (accepted == nullptr || accepted->worker_id >= accepted->total_workers ||
      accepted->total_workers > INT32_MAX) {
    throw Error(ErrorCode::kUnexpectedMessage,
                fmt::format("{} answered the join with a {}", frames_.socket().peer(),
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
        fmt::format("{} sent no settings that this worker understands", frames_.socket().peer()));
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
      if (!frames_.full()) fill();
      take_control();
      if (frames_.ended()) return;  // what it said last is for the next call
      queue_alive(now);
      frames_.flush_while_open(kTurnBytes);
      if (!frames_.full()) check_limits("its heartbeat", now, now);
    } catch (...) {
      failure_ = caught_error("the heartbeat's thread");
    }
  }
}

std::string WorkerClient::gone() const {
  const Error& end = *frames_.ended();
  return end.code() == ErrorCode::kChannelClosed
             ? fmt::format("{} closed the connection", frames_.socket().peer())
             : std::string(end.message());
}

void WorkerClient::fail(const Error& error) {
  if (!failure_) failure_ = error;
  throw Error(*failure_);
}

void WorkerClient::fill() {
  if (frames_.fill(kTurnBytes) > 0) last_heard_ = Clock::now();
}

void WorkerClient::take_control() {
  while (!frames_.bulk_is_open()) {
    const auto start = frames_.start();
    if (!start || !is_control(start->tag)) return;
    const auto message = frames_.take_small();
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
  if (!frames_.wants_to_send()) frames_.queue(encode(Alive{}));
}

void WorkerClient::drive(const std::string& what, const std::function<bool()>& done) {
  if (failure_) throw Error(*failure_);
  const auto since = Clock::now();
  try {
    while (true) {
      queue_alive(Clock::now());
      frames_.flush_while_open(kTurnBytes);
      take_control();
      if (frames_.ended()) frames_.stop_sending();  // so that all that came is read
      if (done()) return;
      if (frames_.ended()) throw Error(ErrorCode::kPeerLost, gone() + "; we wait for " + what);
      wait(what, since);
    }
  } catch (const Error& error) {
    // While the buffers of what is half sent are still there.
    if (!halted_ && !frames_.ended()) tell(error);
    fail(error);
  }
}

void WorkerClient::wait(const std::string& what, Clock::time_point since) {
  // The elements of an open gradient go straight to where they belong.
  const bool reading = !frames_.bulk_is_open() || frames_.elements_left() == 0;
  // Nobody takes what comes while we send; holding it back could stop the coordinator for good.
  if (reading && frames_.full()) frames_.set_window(2 * frames_.window());
  const short events = frames_.wants_to_send() ? POLLIN | POLLOUT : POLLIN;
  pollfd entries[2] = {{frames_.socket().fd(), events, 0}, {stop_fd_, POLLIN, 0}};
  const bool buffered = reading && frames_.buffered();
  const int patience = buffered ? 0 : Deadline::after(timeout_ / 5).poll_timeout();
  if (::poll(entries, 2, patience) < 0 && errno != EINTR) throw_io("polling", errno);
  if (entries[1].revents != 0) {
    throw Error(ErrorCode::kAborted, "this worker was told to stop");
  }
  if (buffered || (entries[0].revents & (POLLIN | POLLHUP | POLLERR)) != 0) {
    if (reading) {
      fill();
    } else {
      last_heard_ = Clock::now();
    }
  }
  check_limits(what, since, Clock::now());
}

void WorkerClient::check_limits(const std::string& what, Clock::time_point since,
                                Clock::time_point now) {
  last_heard_ = excuse_own_pause(last_heard_, last_look_, now, timeout_);  // or nobody listened
  last_look_ = now;
  // Without heartbeats a coordinator that waits for other workers is silent.
  const bool patient = !ours_ && !frames_.awaits_more() && worker_id_ >= 0;
  if (patient && now - last_heard_ >= timeout_ && !std::exchange(hinted_, true)) {
    log(LogLevel::kWarning, "nothing was heard of {} for {}; we wait for {}",
        frames_.socket().peer(), format_duration(timeout_), what);
  }
  const auto silence = patient ? timeout_ * kOverdueFactor : timeout_;
  if (now - last_heard_ >= silence) {
    throw Error(ErrorCode::kPeerLost,
                fmt::format("nothing was heard of {} for {}; we wait for {}",
                            frames_.socket().peer(), format_duration(silence), what));
  }
  // The coordinator gives up on anybody a little earlier, and says so.
  const auto longest = timeout_ * (kOverdueFactor + 1);
  if (now - since >= longest) {
    throw Error(ErrorCode::kTimeout,
                fmt::format("{} has not brought {} within {}", frames_.socket().peer(), what,
                            format_duration(longest)));
  }
}

SmallMessage WorkerClient::receive_small(const std::string& what) {
  std::optional<SmallMessage> message;
  drive(what, [&] {
    const auto start = frames_.start();
    if (!start) return false;
    if (is_bulk(start->tag)) {
      throw Error(ErrorCode::kUnexpectedMessage,
                  fmt::format("{} sent a {}; we wait for {}", frames_.socket().peer(),
                              to_string(start->tag), what));
    }
    message = frames_.take_small();
    return message.has_value();
  });
  return std::move(*message);
}

std::optional<Shard> WorkerClient::next_shard() {
  const Lock lock(mutex_);
  const SmallMessage message = receive_small(
      ours_ ? "a shard" : "a shard, which servers of mode vector send, and of mode blocks never");
  if (std::holds_alternative<Shutdown>(message)) return std::nullopt;
  const auto* shard = std::get_if<ShardAssignment>(&message);
  if (shard == nullptr || shard->shard_start > shard->shard_end) {
    fail(Error(ErrorCode::kUnexpectedMessage,
               fmt::format("{} sent a {} where a shard was expected", frames_.socket().peer(),
                           to_string(tag_of(message)))));
  }
  return Shard{shard->step, shard->shard_start, shard->shard_end};
}

void WorkerClient::set_stop(int fd) {
  const Lock lock(mutex_);
  stop_fd_ = fd;
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
    frames_.drop_unsent();
    frames_.queue(encode(
        Halt{{reason.code(), worker_id_, std::string(reason.message().substr(0, kMaxErrorText))}}));
    frames_.flush(kTurnBytes);
  } catch (const Error&) {  // it is gone already
  }
}

void WorkerClient::send(const BulkHead& head, std::span<const float> data, const BulkFoot& foot) {
  const Lock lock(mutex_);
  if (failure_) throw Error(*failure_);
  const std::uint32_t most = settings_ ? settings_->largest_frame : kOriginalLargestFrame;
  if (frame_length(head) > most) {
    throw Error(
        ErrorCode::kMessageTooLarge,
        fmt::format("a {} of {} elements is {} bytes long; {} {} at most", to_string(head.tag),
                    data.size(), frame_length(head),
                    settings_ ? "the coordinator takes" : "peers of the original protocol take",
                    most));
  }
  if (head.tag == WireTag::kGradientPayload && ours_) {
    frames_.queue(encode(Totals{head.step, foot.loss, foot.correct, foot.total}));
  }
  frames_.queue({encode_head(head), std::as_bytes(data), encode_foot(head, foot), {}});
  drive(fmt::format("{} to take the {} of step {}", frames_.socket().peer(), to_string(head.tag),
                    step_number(head.step)),
        [this] { return !frames_.wants_to_send(); });
}

bool WorkerClient::open_expected(const BulkHead& expected) {
  const auto start = frames_.start();
  if (!start || is_control(start->tag)) return false;
  const auto refuse = [&](ErrorCode code, const std::string& what) {
    throw Error(code, fmt::format("{} sent {}; we wait for {}", frames_.socket().peer(), what,
                                  describe(expected)));
  };
  if (start->tag != expected.tag) {
    const bool shard = start->tag == WireTag::kShardAssignment;
    refuse(ErrorCode::kUnexpectedMessage,
           fmt::format("a {}{}", to_string(start->tag),
                       shard ? " (it deals out samples, as in mode vector)" : ""));
  }
  if (!frames_.open_bulk()) return false;
  const BulkHead& head = frames_.head();
  if (head.step != expected.step) {
    refuse(ErrorCode::kStepMismatch, fmt::format("step {}", step_number(head.step)));
  }
  if (head.block_idx != expected.block_idx) {
    refuse(ErrorCode::kBlockMismatch, fmt::format("block {}", head.block_idx));
  }
  if (head.component != expected.component) {
    refuse(ErrorCode::kComponentMismatch, fmt::format("component {}", head.component));
  }
  if (head.count != expected.count) {
    refuse(ErrorCode::kSizeMismatch,
           fmt::format("{} elements instead of {}", head.count, expected.count));
  }
  last_sizes_ = head.component_sizes;
  return true;
}

std::optional<BulkFoot> WorkerClient::take_expected(const BulkHead& expected, std::span<float> into,
                                                    std::size_t& done) {
  if (!frames_.bulk_is_open() && !open_expected(expected)) return std::nullopt;
  const auto bytes = std::as_writable_bytes(into);
  while (frames_.elements_left() > 0) {
    if (frames_.read_elements(bytes, done) == 0 && frames_.elements_left() > 0) return std::nullopt;
  }
  return frames_.take_foot();
}

bool WorkerClient::take_shutdown(const BulkHead& expected) {
  if (expected.tag != WireTag::kAveragedBlockGradient || frames_.bulk_is_open()) return false;
  const auto start = frames_.start();
  return start && start->tag == WireTag::kShutdown && frames_.take_small();
}

std::optional<BulkFoot> WorkerClient::receive(const BulkHead& expected, std::span<float> into) {
  const Lock lock(mutex_);
  std::size_t done = 0;  // bytes
  std::optional<BulkFoot> foot;
  drive(describe(expected), [&] {
    if (take_shutdown(expected)) return true;
    foot = take_expected(expected, into, done);
    if (foot) check_finite(expected, into, *foot);
    return foot.has_value();
  });
  return foot;
}

void WorkerClient::check_finite(const BulkHead& head, std::span<const float> elements,
                                const BulkFoot& foot) {
  const std::size_t at = find_non_finite(DataType::kF32, elements.data(), elements.size());
  if (at < elements.size()) {
    throw Error(ErrorCode::kNonFinite,
                fmt::format("{} sent {} as element {} of {}", frames_.socket().peer(), elements[at],
                            at, describe(head)));
  }
  if (!std::isfinite(foot.loss)) {
    throw Error(ErrorCode::kNonFinite,
                fmt::format("{} sent the loss {} with {}", frames_.socket().peer(), foot.loss,
                            describe(head)));
  }
}

void WorkerClient::send_gradient(std::uint64_t step, std::span<const float> gradients, float loss,
                                 std::uint64_t correct, std::uint64_t total) {
  send(payload_head(worker_id_, WireTag::kGradientPayload, step, gradients), gradients,
       {loss, correct, total, {}});
}

float WorkerClient::receive_averaged(std::uint64_t step, std::span<float> gradients) {
  return receive(average_head(WireTag::kAveragedGradient, step, gradients), gradients)->loss;
}

void WorkerClient::send_block(std::uint64_t step, std::uint32_t block, std::uint32_t num_blocks,
                              std::span<const float> gradients,
                              std::span<const std::uint32_t> component_sizes) {
  BulkHead head = payload_head(worker_id_, WireTag::kBlockGradientPayload, step, gradients);
  head.block_idx = block;
  head.num_blocks = num_blocks;
  head.component_sizes.assign(component_sizes.begin(), component_sizes.end());
  send(head, gradients, {});
}

std::optional<std::vector<std::uint32_t>> WorkerClient::receive_averaged_block(
    std::uint64_t step, std::uint32_t block, std::span<float> gradients) {
  BulkHead head = average_head(WireTag::kAveragedBlockGradient, step, gradients);
  head.block_idx = block;
  if (!receive(head, gradients)) return std::nullopt;
  return std::exchange(last_sizes_, {});
}

void WorkerClient::send_component(std::uint64_t step, std::uint8_t component,
                                  std::span<const float> gradients) {
  BulkHead head = payload_head(worker_id_, WireTag::kNonBlockGradientPayload, step, gradients);
  head.component = component;
  send(head, gradients, {});
}

void WorkerClient::receive_averaged_component(std::uint64_t step, std::uint8_t component,
                                              std::span<float> gradients) {
  BulkHead head = average_head(WireTag::kAveragedNonBlockGradient, step, gradients);
  head.component = component;
  receive(head, gradients);
}

}  // namespace lockstep
