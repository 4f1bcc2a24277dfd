#include "lockstep/server/worker_client.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/index.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/call_check.h"
#include "lockstep/net/job/handshake.h"
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
  if (!options.seed_protocol) {
    const Identity identity{options.job, 0, random_member_id(), -1, options.token};
    client_handshake(socket, identity, Purpose::kServer, 0, deadline);
  }
  return socket;
}

Socket connect_as_rank(const HostPort& coordinator, const JoinedJob& job) {
  Socket socket = connect_to_rendezvous(coordinator, job.identity, Deadline::after(job.timeout),
                                        Purpose::kServer);
  tune_tcp(socket, job.timeout);
  socket.set_peer(fmt::format("the coordinator ({})", socket.peer()), -1);
  return socket;
}

std::string describe(const BulkHead& head) {
  switch (head.tag) {
    case WireTag::kAveragedBlockGradient:
      return fmt::format("the average of block {} of step {}", head.block_idx, head.step);
    case WireTag::kAveragedNonBlockGradient:
      return fmt::format("the average of component {} of step {}", head.component, head.step);
    case WireTag::kRawSum:
      return fmt::format("the sum of step {} from element {} on", head.step, head.offset);
    default: return fmt::format("the {} of step {}", to_string(head.tag), head.step);
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
    : ours_(!options.seed_protocol),
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

WorkerClient::WorkerClient(const HostPort& coordinator, const JoinedJob& job)
    : ours_(true),
      is_rank_(true),
      timeout_(job.timeout),
      worker_id_(job.rank()),
      total_workers_(job.world_size()),
      frames_(connect_as_rank(coordinator, job), kWindow, kLargestFrame) {
  FailureLatch& latch = job.control->latch();
  set_stop(latch.fd(), [&latch] { return *latch.error(); });
  for (const Card& card : job.roster) {
    peers_.push_back({.name = name_of(card), .awaited = {}, .early = {}});
  }
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
  const SmallMessage answer = receive_small("its answer to the join");
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
      take_between();
      if (frames_.ended()) return;  // what it said last is for the next call
      queue_alive(now);
      flush();
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

void WorkerClient::flush() {
  try {
    frames_.flush(kTurnBytes);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kChannelClosed) {
      throw Error(ErrorCode::kPeerLost, std::string(error.message()));
    }
    // What it said before it closed tells why, or that the job is done; reading comes to that.
    frames_.stop_sending();
  }
}

void WorkerClient::fill() {
  if (frames_.fill(kTurnBytes) > 0) last_heard_ = Clock::now();
}

void WorkerClient::take_between() {
  while (true) {
    if (bytes_are_next()) {
      if (!take_bytes()) return;
      continue;
    }
    if (frames_.bulk_is_open()) return;
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
  if (!beats() || worker_id_ < 0 || now < next_alive_) return;
  next_alive_ = now + timeout_ / 5;
  if (!frames_.wants_to_send()) frames_.queue(encode(Alive{}));
}

void WorkerClient::drive(const std::string& what, const std::function<bool()>& done) {
  if (failure_) throw Error(*failure_);
  const auto since = Clock::now();
  try {
    while (true) {
      queue_alive(Clock::now());
      flush();
      take_between();
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
                                                 frames_.socket().peer(), what));
  }
}

void WorkerClient::check_limits(const std::string& what, Clock::time_point since,
                                Clock::time_point now) {
  if (is_rank_) return;
  last_heard_ = excuse_own_pause(last_heard_, last_look_, now, timeout_);  // or nobody listened
  last_look_ = now;
  // Without heartbeats a coordinator that waits for other workers is silent.
  const bool patient = !ours_ && !frames_.awaits_more() && worker_id_ >= 0;
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
    if (bytes_are_next()) return false;
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
  const SmallMessage message = receive_small("a shard");
  if (std::holds_alternative<Shutdown>(message)) return std::nullopt;
  const auto* shard = std::get_if<ShardAssignment>(&message);
  if (shard == nullptr || shard->shard_start > shard->shard_end) {
    fail(Error(ErrorCode::kUnexpectedMessage,
               fmt::format("{} sent a {} where a shard was expected", frames_.socket().peer(),
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

void WorkerClient::abort(const Error& reason) {
  const Lock lock(mutex_);
  if (failure_) return;
  failure_ = reason;
  tell(reason);
}

void WorkerClient::tell(const Error& reason) {
  if (!beats() || worker_id_ < 0) return;
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
  const std::uint64_t bytes = data.size_bytes() + kMaxBulkHead + foot_bytes(head);
  if (settings_ && bytes > settings_->largest_frame) {
    throw Error(ErrorCode::kMessageTooLarge,
                fmt::format("a {} of {} elements; the coordinator takes frames of up to {} bytes",
                            to_string(head.tag), data.size(), settings_->largest_frame));
  }
  if (head.tag == WireTag::kGradientPayload && ours_) {
    frames_.queue(encode(Totals{head.step, foot.loss, foot.correct, foot.total}));
  }
  frames_.queue({encode_head(head), std::as_bytes(data), encode_foot(head, foot), {}});
  drive(fmt::format("{} to take the {} of step {}", frames_.socket().peer(), to_string(head.tag),
                    head.step),
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
    refuse(ErrorCode::kUnexpectedMessage, fmt::format("a {}", to_string(start->tag)));
  }
  if (!frames_.open_bulk()) return false;
  const BulkHead& head = frames_.head();
  if (head.step != expected.step) {
    refuse(ErrorCode::kStepMismatch, fmt::format("step {}", head.step));
  }
  if (head.block_idx != expected.block_idx) {
    refuse(ErrorCode::kBlockMismatch, fmt::format("block {}", head.block_idx));
  }
  if (head.component != expected.component) {
    refuse(ErrorCode::kComponentMismatch, fmt::format("component {}", head.component));
  }
  if (head.call != expected.call) {
    refuse(ErrorCode::kCollectiveMismatch, "a sum of another collective");
  }
  if (head.count != expected.count || head.offset != expected.offset ||
      head.tail_count != expected.tail_count) {
    refuse(ErrorCode::kSizeMismatch,
           fmt::format("{} elements from {} on and a tail of {} instead of {}, {} and {}",
                       head.count, head.offset, head.tail_count, expected.count, expected.offset,
                       expected.tail_count));
  }
  last_sizes_ = head.component_sizes;
  return true;
}

std::optional<BulkFoot> WorkerClient::take_expected(const BulkHead& expected, std::span<float> into,
                                                    std::size_t& done) {
  if (bytes_are_next()) return std::nullopt;
  if (!frames_.bulk_is_open() && !open_expected(expected)) return std::nullopt;
  const auto bytes = std::as_writable_bytes(into);
  while (frames_.elements_left() > 0) {
    if (frames_.read_elements(bytes, done) == 0 && frames_.elements_left() > 0) return std::nullopt;
  }
  return frames_.take_foot();
}

BulkFoot WorkerClient::receive(const BulkHead& expected, std::span<float> into) {
  const Lock lock(mutex_);
  std::size_t done = 0;  // bytes
  std::optional<BulkFoot> foot;
  drive(describe(expected), [&] {
    foot = take_expected(expected, into, done);
    return foot.has_value();
  });
  return std::move(*foot);
}

void WorkerClient::send_gradient(std::uint64_t step, std::span<const float> gradients, float loss,
                                 std::uint64_t correct, std::uint64_t total) {
  send(payload_head(worker_id_, WireTag::kGradientPayload, step, gradients), gradients,
       {loss, correct, total, {}});
}

float WorkerClient::receive_averaged(std::uint64_t step, std::span<float> gradients) {
  return receive(average_head(WireTag::kAveragedGradient, step, gradients), gradients).loss;
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

std::vector<std::uint32_t> WorkerClient::receive_averaged_block(std::uint64_t step,
                                                                std::uint32_t block,
                                                                std::span<float> gradients) {
  BulkHead head = average_head(WireTag::kAveragedBlockGradient, step, gradients);
  head.block_idx = block;
  receive(head, gradients);
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

std::vector<double> WorkerClient::reduce_lanes(std::uint64_t step, std::uint64_t offset,
                                               std::uint32_t lanes,
                                               std::span<const LanePartial> partials,
                                               std::size_t tail_count, std::span<float> sum) {
  LOCKSTEP_CHECK(ours_);
  const Lock lock(mutex_);
  if (failure_) throw Error(*failure_);
  BulkHead head;
  head.tag = WireTag::kPartialSum;
  head.step = step;
  head.lanes = lanes;
  head.call = digest_;
  const std::size_t pieces = std::max<std::size_t>(1, (sum.size() + kLanePiece - 1) / kLanePiece);
  // The fields of a piece that both directions share; the last one has the tail.
  const auto select = [&](std::size_t piece) {
    const std::size_t begin = piece * kLanePiece;
    head.offset = offset + begin;
    head.count = std::min(kLanePiece, sum.size() - begin);
    head.tail_count = piece + 1 == pieces ? static_cast<std::uint32_t>(tail_count) : 0;
    return begin;
  };
  for (std::size_t piece = 0; piece < pieces; ++piece) {
    const std::size_t begin = select(piece);
    for (const LanePartial& partial : partials) {
      LOCKSTEP_CHECK(partial.data.size() == sum.size() && partial.tail.size() == tail_count);
      head.lane_begin = static_cast<std::uint32_t>(partial.node.begin);
      head.lane_end = static_cast<std::uint32_t>(partial.node.end);
      BulkFoot foot;
      if (head.tail_count > 0) foot.tail = partial.tail;
      frames_.queue({encode_head(head),
                     std::as_bytes(partial.data.subspan(begin, head.count)),
                     encode_foot(head, foot),
                     {}});
    }
  }
  head = {.tag = WireTag::kRawSum,
          .step = step,
          .component_sizes = {},
          .lanes = lanes,
          .call = digest_,
          .stamp = {}};
  std::size_t piece = 0;
  std::size_t begin = select(piece);
  std::size_t done = 0;  // bytes of the piece
  std::vector<double> tail;
  drive(describe(head), [&] {
    while (piece < pieces) {
      auto foot = take_expected(head, sum.subspan(begin, head.count), done);
      if (!foot) return false;
      tail = std::move(foot->tail);
      done = 0;
      if (++piece < pieces) begin = select(piece);
      take_between();
    }
    return !frames_.wants_to_send();
  });
  return tail;
}

void WorkerClient::enter(const MeshFrame& stamp) {
  const Lock lock(mutex_);
  if (failure_) throw Error(*failure_);
  call_ = stamp;
  digest_ = call_digest(stamp);
  for (int rank = 0; rank < total_workers_; ++rank) {
    Peer& peer = peers_[index_of(rank)];
    peer.sent = peer.received = 0;
    if (!peer.early.empty()) check_stamp(rank, peer.early.front().stamp);
  }
}

void WorkerClient::check_stamp(int from, const MeshFrame& stamp) const {
  if (stamp.sequence > call_.sequence) return;
  MeshFrame expected = call_;
  expected.part = stamp.part;
  expected.payload = stamp.payload;
  if (stamp == expected) return;
  throw frame_mismatch(stamp, peers_[index_of(from)].name, from, expected,
                       peers_[index_of(worker_id_)].name);
}

bool WorkerClient::bytes_are_next() const {
  if (frames_.bulk_is_open()) return frames_.head().tag == WireTag::kBytes;
  const auto start = frames_.start();
  return start && start->tag == WireTag::kBytes;
}

bool WorkerClient::take_bytes() {
  if (!frames_.bulk_is_open()) {
    if (!frames_.open_bulk()) return false;
    open_bytes();
  }
  while (frames_.elements_left() > 0) {
    if (frames_.read_elements(open_.place, open_.done) == 0 && frames_.elements_left() > 0) {
      return false;
    }
  }
  frames_.take_foot();
  if (open_.early) {
    peers_[index_of(open_.from)].early.push_back(std::move(open_.kept));
    take_early(open_.from);  // it may be waited for by now
  } else {
    count_placed(open_.from);
  }
  return true;
}

void WorkerClient::open_bytes() {
  const BulkHead& head = frames_.head();
  if (head.from >= peers_.size() || head.from == static_cast<std::uint32_t>(worker_id_)) {
    throw Error(ErrorCode::kUnexpectedMessage,
                fmt::format("{} sent Bytes of nobody", frames_.socket().peer()));
  }
  const int from = static_cast<int>(head.from);
  check_stamp(from, head.stamp);
  const bool early = head.stamp.sequence > call_.sequence || peers_[index_of(from)].awaited.empty();
  open_ = {.from = from, .early = early, .kept = {}, .place = {}};
  if (early) {
    open_.kept = {head.stamp, std::vector<std::byte>(static_cast<std::size_t>(head.count))};
    open_.place = open_.kept.bytes;
  } else {
    open_.place = place_of(from, head.stamp);
  }
}

std::span<std::byte> WorkerClient::place_of(int from, const MeshFrame& stamp) const {
  const Peer& peer = peers_[index_of(from)];
  const Awaited& awaited = peer.awaited.front();
  MeshFrame expected = call_;
  expected.part = peer.received;
  expected.payload = std::min(kBytesPiece, awaited.bytes.size() - awaited.done);
  if (stamp != expected) {
    throw frame_mismatch(stamp, peer.name, from, expected, peers_[index_of(worker_id_)].name);
  }
  return awaited.bytes.subspan(awaited.done, static_cast<std::size_t>(stamp.payload));
}

void WorkerClient::count_placed(int from) {
  Peer& peer = peers_[index_of(from)];
  Awaited& awaited = peer.awaited.front();
  awaited.done += std::min(kBytesPiece, awaited.bytes.size() - awaited.done);
  ++peer.received;
  if (awaited.done == awaited.bytes.size()) peer.awaited.pop_front();
}

void WorkerClient::take_early(int from) {
  Peer& peer = peers_[index_of(from)];
  while (!peer.early.empty() && !peer.awaited.empty() &&
         peer.early.front().stamp.sequence <= call_.sequence) {
    const Early& early = peer.early.front();
    std::ranges::copy(early.bytes, place_of(from, early.stamp).begin());
    peer.early.pop_front();
    count_placed(from);
  }
}

void WorkerClient::move_bytes(std::span<const BytesOut> out, std::span<const BytesIn> in) {
  const Lock lock(mutex_);
  if (failure_) throw Error(*failure_);
  LOCKSTEP_CHECK(!peers_.empty());
  for (const BytesOut& each : out) {
    std::size_t begin = 0;
    do {  // no bytes at all are a message, too
      BulkHead head;
      head.tag = WireTag::kBytes;
      head.to = each.to;
      head.from = static_cast<std::uint32_t>(worker_id_);
      head.stamp = call_;
      head.count = head.stamp.payload = std::min(kBytesPiece, each.bytes.size() - begin);
      for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
        if (each.to == kEveryOther || each.to == rank) head.stamp.part = peers_[rank].sent++;
      }
      frames_.queue({encode_head(head), each.bytes.subspan(begin, head.count), {}, {}});
      begin += head.count;
    } while (begin < each.bytes.size());
  }
  for (const BytesIn& each : in) peers_[index_of(each.from)].awaited.push_back({each.bytes});
  const auto first_missing = [this] {
    return std::ranges::find_if(peers_, [](const Peer& peer) { return !peer.awaited.empty(); });
  };
  for (const BytesIn& each : in) take_early(each.from);
  const auto missing = first_missing();
  const std::string what = missing == peers_.end()
                               ? fmt::format("{} to take bytes", frames_.socket().peer())
                               : fmt::format("the bytes of {}", missing->name);
  drive(what, [&] {
    const auto next = first_missing();
    waits_for_.store(next == peers_.end() ? -1 : static_cast<int>(next - peers_.begin()),
                     std::memory_order_relaxed);
    return next == peers_.end() && !frames_.wants_to_send();
  });
}

}  // namespace lockstep
