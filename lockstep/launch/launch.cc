#include "lockstep/launch/launch.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/descriptor.h"
#include "lockstep/base/exit_code.h"
#include "lockstep/base/host.h"
#include "lockstep/base/index.h"
#include "lockstep/base/log.h"
#include "lockstep/base/signal_count.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/flight_recorder.h"
#include "lockstep/flight/flight_file.h"
#include "lockstep/launch/blocked_signals.h"
#include "lockstep/launch/memory_file.h"
#include "lockstep/launch/rank_environment.h"
#include "lockstep/launch/rank_lines.h"
#include "lockstep/launch/restart_policy.h"
#include "lockstep/launch/secret_file.h"
#include "lockstep/launch/start_rank.h"
#include "lockstep/launch/started_rank.h"
#include "lockstep/net/job/blame.h"
#include "lockstep/net/job/control_plane.h"
#include "lockstep/net/socket/interface.h"
#include "lockstep/net/socket/socket.h"

namespace lockstep {
namespace {

constexpr std::string_view kErrorPrefix = "error: ";
constexpr int kCompanion = -1;  // among the parts of the job; the others are ranks
constexpr std::string_view kClearLine = "\r\x1b[K";
// How often the job is asked what has become of its members.
constexpr std::chrono::milliseconds kBetweenLooks{100};

// Where ranks of this host find the listener. What they listen on themselves has the same address,
// and ranks of other hosts must reach them by it.
std::string host_for_ranks(const SocketAddress& bound) {
  if (!bound.is_any()) return bound.host();
  const auto way_out = address_for_others(bound.family());
  return way_out ? way_out->host() : "127.0.0.1";
}

// Where `lockstep launch` reads what becomes of the job; none if it has not started us.
Descriptor inherited_status() {
  const char* number = std::getenv(kStatusVariable);
  if (number == nullptr) return Descriptor();
  Descriptor status(std::atoi(number));
  ::fcntl(status.get(), F_SETFD, FD_CLOEXEC);
  return status;
}

class Launcher {
 public:
  explicit Launcher(const LaunchOptions& options) : options_(options) {}
  ~Launcher() { kill_and_reap(); }  // only after an exception is there anything left to do
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  int run() {
    serve_job();
    lend_board();
    for (int place = 0; place < options_.ranks; ++place) start(place, options_.joins.has_value());
    while (running() > 0 || (others_work() && stopped_by_ == 0) || waits_to_join_again()) {
      wait();
      pass_lines_on();
      if (options_.survive && options_.joins) {
        look_after_joined();
        start_again();
      } else if (options_.survive) {
        look_after_job();
        end_leftovers();
      }
      if (stop_at_ && stop_at_->expired()) end_the_rest();
      note_verdict();
    }
    for (StartedRank& child : children_) forward(child);
    note_verdict();
    // Who aborts a job may end with code 0 itself.
    const bool aborted = verdict_ && verdict_->code() == ErrorCode::kAborted;
    const bool survived = options_.survive && !blame_.culprit() && !aborted && ended_well();
    if (options_.survive && !survived && !blame_.culprit() && stopped_by_ == 0) blame_last();
    std::optional<Error> beside;
    if (options_.finish_companion) {
      beside = options_.finish_companion(!blame_.culprit() && stopped_by_ == 0);
    }
    if (beside) blame_.add(kCompanion, evidence_of(*beside, kCompanion));
    if (options_.before_failure && (blame_.culprit() || ended_at_once_)) {
      options_.before_failure(exit_code());
    }
    if (blame_.culprit() && exit_code() != kExitUsage) tell_flight();
    return conclude(beside);
  }

 private:
  // The centre goes when the job has failed.
  void note_verdict() {
    const auto centre = centre_.lock();
    if (centre && centre->latch().tripped()) verdict_ = centre->latch().error();
  }

  // This process becomes the centre of the job.
  void serve_job() {
    secret_ = memory_file("lockstep-secret", options_.secret);
    centre_ = options_.centre;
    rendezvous_ = options_.joins;
    if (options_.joins || options_.listen) attempt_.clear();  // others do not know it
    if (!options_.job || (options_.ranks == 1 && !options_.listen)) return;
    Socket listener = listen_tcp(options_.listen.value_or(SocketAddress::loopback_v4()));
    const SocketAddress bound = listener.local_address();
    rendezvous_ = {host_for_ranks(bound), bound.port()};
    if (options_.listen) {
      if (!options_.secret.empty()) kept_secret_.emplace(bound, options_.secret);
      // `lockstep launch` brings them.
      if (!tell_status(std::to_string(bound.port()))) {
        log(LogLevel::kInfo, "others can join this job: lockstep train --join {} --data PATH",
            to_string(*rendezvous_));
      }
    }
    HostOptions job = *options_.job;
    job.title = "the launcher";
    job.world_size = world_size(options_);
    job.job = job_name(job.job, attempt_);
    control_ = host_job(job, {std::move(listener), {Purpose::kRendezvous}});
    centre_ = control_;
  }

  // False if nobody wants to know.
  bool tell_status(std::string_view line) const {
    if (!status_) return false;
    const std::string text = std::string(line) + "\n";
    return ::write(status_.get(), text.data(), text.size()) > 0;
  }

  // Who looks at the board may want to know of ranks on other hosts, too. Those of this one that
  // are asked as well write the same once more.
  void lend_board() {
    if (!options_.flight_board) return;
    options_.flight_board->set_ask([centre = centre_] {
      const auto job = centre.lock();
      return job && job->ask_flight();
    });
  }

  void start(int place, bool newcomer) {
    std::array<int, 2> pipe{};
    if (::pipe2(pipe.data(), O_CLOEXEC) != 0) throw_io("pipe", errno);
    StartedRank child;
    child.place = place;
    child.rank = newcomer ? -1 : place;
    child.messages = Descriptor(pipe[0]);
    if (options_.prefix_lines) {
      child.lines = RankLines(newcomer ? "[newcomer] " : fmt::format("[rank {}] ", place));
    }
    const Descriptor write_end(pipe[1]);
    auto [flight, flight_file] = FlightRecorder::share();
    child.flight = std::move(flight);
    if (options_.flight_board) options_.flight_board->add(child.flight);
    ::fcntl(pipe[0], F_SETFL, O_NONBLOCK);
    child.pid = start_rank({.place = place,
                            .newcomer = newcomer,
                            .attempt = attempt_,
                            .rendezvous = rendezvous_,
                            .secret = secret_.get(),
                            .flight = flight_file.get(),
                            .messages = write_end.get(),
                            .signals = signals_.before()},
                           options_);
    restart_.started(place, std::chrono::steady_clock::now());
    children_.push_back(std::move(child));
  }

  bool formed() const { return generation_ > 0 || options_.joins; }

  // What has become of the ranks as the job sees it, and what follows.
  void look_after_job() {
    const auto centre = centre_.lock();
    if (!centre) return;
    for (const MemberEvent& event : centre->take_events()) {
      if (event.departure) others_.erase(event.card.id);
      StartedRank* child = child_of(event.card);
      if (child == nullptr) continue;
      if (event.departure && event.departure->kind != Departure::Kind::kLeft) {
        // It may have something to say yet; but one that is stopped never ends by itself.
        child->lost = Deadline::after(options_.grace);
      }
    }
    learn_ranks();
    for (StartedRank& child : children_) {
      if (child.running && child.lost && child.lost->expired()) {
        child.killed_by_us = true;
        ::kill(child.pid, SIGKILL);
      }
    }
    if (centre->latch().tripped()) restart_.stop();
    if (centre->gave_role_up() && !std::exchange(stood_still_, true)) {
      restart_.stop();  // nobody could join through us
      log(LogLevel::kWarning,
          "the launcher stood still for longer than the timeout: the workers go "
          "on without it, and it restarts no lost worker");
    }
    if (stood_still_) end_who_stands_still();
    start_again();
  }

  // The same for ranks of a job that others have started.
  void look_after_joined() {
    for (StartedRank& child : children_) {
      if (!child.running || child.worked) continue;
      child.rank = child.flight->snapshot().rank;
      child.worked = child.has_gone_on();
      if (child.worked) restart_.took_part(child.place);
    }
    end_who_stands_still();
  }

  // Where the centre is elsewhere, nobody tells who of ours is lost. When the run is over, who was
  // in it ends by itself, and so does who runs on alone, unless it stands still.
  void end_who_stands_still() {
    const bool over = std::ranges::any_of(children_, &StartedRank::finished);
    if (over) restart_.stop();
    if (!over && !only_stopped_ones_run()) return ends_at_.reset();
    if (!ends_at_) ends_at_ = Deadline::after(options_.end_grace);
    for (StartedRank& child : children_) {
      const bool came_too_late = over && child.rank < 0;
      if (!child.running || (!came_too_late && !ends_at_->expired())) continue;
      child.left_over = true;
      ::kill(child.pid, SIGKILL);
    }
  }

  bool only_stopped_ones_run() const {
    return !restart_.next() && std::ranges::all_of(children_, [](const StartedRank& child) {
      return !child.running || child.is_stopped();
    });
  }

  // Nobody of ours is left, and the job goes on without us.
  bool waits_to_join_again() const { return options_.joins && restart_.next(); }

  void start_again() {
    for (const auto& due : restart_.take_due(std::chrono::steady_clock::now())) {
      if (const auto held = held_back_.extract(due.place)) {
        log(LogLevel::kWarning, "{}{}", held.mapped(),
            due.given_up ? "" : "; a worker is started in its place");
      }
      if (!due.given_up) {
        start(due.place, true);
        continue;
      }
      log(LogLevel::kWarning,
          "a worker was started {} times without finishing a step, and is not started again",
          RestartPolicy::kStartsWithoutStep);
    }
  }

  void pass_lines_on() {
    const auto centre = centre_.lock();
    if (!options_.heard || !centre) return;
    for (std::string& line : centre->take_lines()) options_.heard(std::move(line));
  }

  // When the last member has ended, nobody is left to let newcomers in.
  void end_leftovers() {
    const bool members = std::ranges::any_of(children_, [this](const StartedRank& child) {
      return child.running && child.generation == generation_ && !child.lost;
    });
    if (!formed() || members || others_work()) return;
    restart_.stop();
    for (StartedRank& child : children_) {
      // Those that the job has lost end by themselves, or are ended while it runs.
      if (!child.running || (child.lost && !centre_.expired())) continue;
      child.left_over = true;
      ::kill(child.pid, SIGKILL);
    }
  }

  void learn_ranks() {
    const auto centre = centre_.lock();
    const auto roster = centre ? centre->centre_roster() : std::nullopt;
    if (!roster || roster->generation.number == generation_) return;
    if (generation_ == 0) tell_status("formed");
    see_who_worked(roster->step);
    generation_ = roster->generation.number;
    others_.clear();
    for (const Card& card : roster->roster) {
      StartedRank* child = child_of(card);
      if (child == nullptr) {
        if (!is_ours(card)) others_.insert(card.id);
        continue;
      }
      child->rank = card.rank;
      if (child->generation == 0) child->joined_after = roster->step;
      child->generation = generation_;
      if (options_.prefix_lines) child->lines.set_prefix(fmt::format("[rank {}] ", card.rank));
    }
  }

  // Another generation forms after `step`. Who has gone from the one before had no part in any
  // later step.
  void see_who_worked(std::int64_t step) {
    for (StartedRank& child : children_) {
      const bool was_in = child.generation > 0 && child.generation == generation_;
      if (!was_in || child.worked || step <= child.joined_after) continue;
      child.worked = true;
      restart_.took_part(child.place);
    }
  }

  // Containers of one machine have networks of their own, and the same process numbers.
  bool is_ours(const Card& card) const {
    return same_host(card.host, host_) &&
           std::ranges::find(children_, card.pid, &StartedRank::pid) != children_.end();
  }

  StartedRank* child_of(const Card& card) {
    const auto found = std::ranges::find_if(children_, [&](const StartedRank& child) {
      return child.pid == card.pid && child.running;
    });
    return found == children_.end() || !same_host(card.host, host_) ? nullptr : &*found;
  }

  // Whether the ranks that were left at the end came to it in order.
  bool ended_well() const {
    if (options_.joins) return std::ranges::count(children_, 0, &StartedRank::status) > 0;
    // The end is the same for all: who came to it has the whole result.
    if (std::ranges::any_of(children_, &StartedRank::finished)) return true;
    // A program may leave the job in order and fail all the same.
    if (std::ranges::any_of(children_, [this](const StartedRank& child) {
          return child.generation == generation_ && child.failed_by_itself();
        })) {
      return false;
    }
    const auto centre = centre_.lock();
    if (!centre) {  // it goes once all have left, and when the job has failed
      return std::ranges::any_of(children_, [this](const StartedRank& child) {
        return child.generation == generation_ && child.status == 0;
      });
    }
    try {
      centre->wait_until_all_left(Deadline::after(options_.grace));
      return centre->all_left();
    } catch (const Error&) {
      return false;
    }
  }

  // All are gone, and the job has not come to its end: those of the last generation tell why, and
  // those of them that we have ended only where nobody else does.
  void blame_last() {
    std::uint32_t last = 0;
    for (const StartedRank& child : children_) last = std::max(last, child.generation);
    for (const bool left_over : {false, true}) {
      for (std::size_t i = 0; i < children_.size() && !(left_over && blame_.culprit()); ++i) {
        const StartedRank& child = children_[i];
        if (child.generation != last || child.status == 0 || child.left_over != left_over) continue;
        blame_.add(static_cast<int>(i), child.evidence());
      }
    }
  }

  // Whether the job goes on with members that others have started. Those that say goodbye at its
  // end are no departures.
  bool others_work() const {
    const auto centre = centre_.lock();
    return !others_.empty() && centre && !centre->all_left() && !centre->gave_role_up() &&
           !centre->latch().tripped();
  }

  int running() const {
    int count = 0;
    for (const StartedRank& child : children_) count += child.running ? 1 : 0;
    return count;
  }

  // Until something happens: a message, a signal, the end of a rank or of somebody's time.
  void wait() {
    std::vector<pollfd> polled = {{signals_.fd(), POLLIN, 0}};
    for (const StartedRank& child : children_) polled.push_back({child.messages.get(), POLLIN, 0});
    int patience = stop_at_ ? stop_at_->poll_timeout() : -1;
    if (options_.survive || options_.heard) {
      const auto look = static_cast<int>(kBetweenLooks.count());
      patience = patience < 0 ? look : std::min(patience, look);
    }
    ::poll(polled.data(), polled.size(), patience);
    for (StartedRank& child : children_) forward(child);
    while (const auto signal = signals_.next()) {
      if (signal->ssi_signo == SIGCHLD) continue;
      if (signal->ssi_signo == SIGUSR1) {
        send_to_first_running(SIGUSR1);
        continue;
      }
      if (signal->ssi_signo == SIGUSR2) {
        write_flight_of_all();
        continue;
      }
      stop(static_cast<int>(signal->ssi_signo), signal->ssi_code == SI_KERNEL);
    }
    reap(WNOHANG);
  }

  void stop(int signal, bool from_terminal) {
    switch (stop_signals_.take(signal, std::chrono::steady_clock::now())) {
      case SignalCount::Meaning::kFirst: break;
      case SignalCount::Meaning::kSameAgain: return;
      case SignalCount::Meaning::kSecond:
        cut_short_ = true;
        ended_at_once_ = true;
        return send_to_running(SIGKILL);
    }
    stopped_by_ = signal;
    restart_.stop();
    if (const auto centre = centre_.lock(); options_.survive && centre && centre->centre_roster() &&
                                            !centre->gave_role_up() && options_.program.empty()) {
      // A signal to one rank alone would have it leave. One whose job has not formed ends by it.
      centre->wish({.stop = static_cast<std::uint32_t>(signal)});
    } else if (signal == SIGHUP) {  // which they ignore
      send_to_running(SIGTERM);
    } else if (!from_terminal) {  // a terminal has sent it to the ranks already
      send_to_running(signal);
    }
    if (!stop_at_) stop_at_ = Deadline::after(options_.stop_grace);
    if (options_.stop_grace > options_.grace && running() > 0) {
      // Where a rank's bar is, the message has a line of its own.
      if (std::ranges::any_of(children_,
                              [](const StartedRank& c) { return c.lines.bar_is_open(); })) {
        [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, "\n", 1);
      }
      log(LogLevel::kInfo, "stopping; press Ctrl-C again to end all workers at once");
    }
  }

  // Passes on what a rank has written to stderr, whole lines at a time.
  void forward(StartedRank& child) {
    std::array<char, 4096> bytes{};
    while (child.messages) {
      const ssize_t count = ::read(child.messages.get(), bytes.data(), bytes.size());
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return;
      std::string text = child.lines.take({bytes.data(), static_cast<std::size_t>(count)});
      if (count == 0) {
        child.messages.reset();
        text = child.lines.end();
      }
      show(child, text);
    }
  }

  void show(const StartedRank& child, std::string text) {
    if (text.empty()) return;
    // Another rank's bar would share the line; it is drawn again soon.
    const bool bar = std::ranges::any_of(children_, [&](const StartedRank& other) {
      return other.pid != child.pid && other.lines.bar_is_open();
    });
    if (bar) text.insert(0, kClearLine);
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
  }

  void reap(int flags) {
    if (options_.survive) learn_ranks();
    for (std::size_t i = 0; i < children_.size(); ++i) {
      StartedRank& child = children_[i];
      if (!child.reap(flags)) continue;
      if (options_.flight_board) options_.flight_board->remove(*child.flight);
      keep_flight(child);
      if (options_.joins) child.rank = child.flight->snapshot().rank;
      child.give_flight_back();
      if (child.status == 0 || cut_short_ || child.left_over) continue;
      if (options_.survive && formed() && !child.was_killed() && child.ended_as_told()) {
        // All ranks were told to stop, and have stopped together.
        if (stopped_by_ == 0) stopped_by_ = child.exit_code() - 128;
        restart_.stop();
        continue;
      }
      const bool as_told = stopped_by_ != 0 && child.ended_as_told();
      if (options_.survive && formed() && !child.ended_for_all()) {
        if (!as_told) forward_loss(child);
        continue;
      }
      if (as_told && !child.was_killed()) continue;
      if (as_told) {
        if (blame_.evidence() >= Evidence::kKilled) continue;
        // It could not stop in order, and so the others cannot either.
        cut_short_ = true;
        blame_ = {};
      } else if (!blame_.add(static_cast<int>(i), child.evidence())) {
        continue;
      }
      restart_.stop();
      hurry();
    }
  }

  // What a rank did last that has ended in a bad way and has not written it itself.
  void keep_flight(const StartedRank& child) {
    if (options_.flight_folder.empty() || child.left_over) return;
    if (!child.was_killed() && (child.status == 0 || child.ended_for_all() ||
                                child.ended_as_told() || child.flight->written())) {
      return;
    }
    const std::string end = to_string(ProcessEnd::of(child.status));
    FlightFile file = flight_file_of(
        child.flight->snapshot(),
        cut_short_ ? fmt::format("the job had failed, and the launcher ended it ({})", end) : end,
        "the launcher");
    if (!cut_short_) {
      file.ended = child.killed_by_us ? "stood still, and was ended by the launcher" : end;
    }
    if (file.rank < 0 && !child.was_killed()) return;  // it was in no job: its error says all
    flight_.push_back(std::move(file));
    if (options_.flight_keeps) write_kept_flight();
  }

  void write_kept_flight() {
    for (const FlightFile& file : std::exchange(flight_, {})) write_flight(file);
  }

  bool write_flight(const FlightFile& file) {
    try {
      write_flight_file(options_.flight_folder, file);
      return true;
    } catch (const Error& error) {
      log(LogLevel::kWarning, "what {} did last is not written: {}", file.name(), error.message());
      return false;
    }
  }

  // Also of ranks that are stopped; those that others have started write for themselves.
  void write_flight_of_all() {
    ask_others_for_flight();
    if (options_.flight_folder.empty()) return;
    bool written = false;
    for (const StartedRank& child : children_) {
      if (!child.running) continue;
      written = write_flight(flight_file_of(child.flight->snapshot(), "SIGUSR2 asked for it",
                                            "the launcher")) ||
                written;
    }
    if (written) {
      log(LogLevel::kInfo, "what the ranks did last is in {}; lockstep explain {}",
          options_.flight_folder, shell_word(options_.flight_folder));
    }
  }

  void ask_others_for_flight() {
    const auto centre = centre_.lock();
    if (!centre) return;
    std::vector<std::int32_t> own;
    for (const StartedRank& child : children_) own.push_back(child.pid);
    centre->ask_flight(std::move(own));
  }

  // Ahead of the last line of a run that has failed.
  void tell_flight() {
    if (options_.flight_folder.empty()) return;
    write_kept_flight();
    std::error_code none;
    if (!std::filesystem::exists(options_.flight_folder, none)) return;
    log(LogLevel::kInfo, "lockstep explain {} says what every rank did last",
        shell_word(options_.flight_folder));
  }

  // A rank is lost, and the others go on.
  void forward_loss(StartedRank& child) {
    forward(child);  // its last words
    const ProcessEnd end = ProcessEnd::of(child.status);
    const auto centre = centre_.lock();
    // There is no job to come to.
    const bool over =
        options_.joins ? !end.killed && cannot_join(child) : !centre || centre->latch().tripped();
    if (over && !options_.joins) restart_.stop();
    // One that failed has told the job itself.
    if (centre && end.killed && !child.killed_by_us) {
      centre->process_ended(child.pid, to_string(end), end.own_fault());
    }
    if (over) return;  // the last line tells
    const bool again = restart_.ended(child.place, end, std::chrono::steady_clock::now());
    if (again && !end.killed) {
      // Its own error is told. The job may be about to end by it, and then nobody is started.
      held_back_[child.place] = child.describe_end();
      return;
    }
    const double pause = std::chrono::duration<double>(restart_.pause_of(child.place)).count();
    log(LogLevel::kWarning, "{}{}", child.describe_end(),
        again ? fmt::format("; a worker is started in its place in {:.1f} s", pause) : "");
  }

  // In a job of another launcher that survives losses, a rank exits with kExitEcho only when the
  // job ends, or is not there any more. If none of our ranks has computed a lane, the job may never
  // have been there, or cannot begin.
  bool cannot_join(const StartedRank& child) {
    return child.exit_code() == kExitEcho ||
           std::ranges::none_of(children_, &StartedRank::has_begun_lanes);
  }

  // Ours, once the culprit is known.
  int exit_code() const {
    const auto culprit = blame_.culprit();
    const bool by_itself = blame_.evidence() == Evidence::kOwn && *culprit != kCompanion;
    return by_itself ? children_[index_of(*culprit)].exit_code() : 1;
  }

  // The rest have a short while to say what they saw.
  void hurry() {
    const Deadline soon = Deadline::after(options_.grace);
    stop_at_ = stop_at_ ? earlier(*stop_at_, soon) : soon;
  }

  void send_to_running(int signal) {
    for (const StartedRank& child : children_) {
      if (child.running) ::kill(child.pid, signal);
    }
  }

  // For a signal that one rank passes on to all.
  void send_to_first_running(int signal) {
    const auto first = std::ranges::find_if(children_, &StartedRank::running);
    if (first != children_.end()) ::kill(first->pid, signal);
  }

  // First asks, then makes them.
  void end_the_rest() {
    cut_short_ = true;  // what they do from now on is our doing
    ended_at_once_ = true;
    if (std::exchange(asked_to_stop_, true)) {
      send_to_running(SIGKILL);
    } else {
      if (stopped_by_ != 0 && !blame_.culprit()) {
        log(LogLevel::kError, "{} of {} ranks did not stop in time and are ended", running(),
            options_.ranks);
      }
      send_to_running(SIGTERM);
    }
    stop_at_ = Deadline::after(options_.grace / 4);
  }

  void kill_and_reap() {
    send_to_running(SIGKILL);
    reap(0);
  }

  // All ranks have ended with the same exit code, and one of them has said why: what is wrong for
  // all alike needs no culprit.
  bool all_agree() const {
    const auto tells = [](const StartedRank& child) {
      return child.lines.last_line().starts_with(kErrorPrefix);
    };
    const auto alike = [&](const StartedRank& child) {
      return !child.was_killed() && child.status == children_[0].status;
    };
    return children_.size() > 1 && std::ranges::all_of(children_, alike) &&
           std::ranges::count_if(children_, tells) == 1;
  }

  int conclude(const std::optional<Error>& beside) const {
    const auto culprit = blame_.culprit();
    if (beside) log(LogLevel::kError, "{}: {}", options_.companion, beside->what());
    if (culprit && *culprit != kCompanion) {
      const StartedRank& child = children_[index_of(*culprit)];
      if (child.was_killed()) {
        log(LogLevel::kError, "{}", child.describe_end());
        return 1;
      }
      if (blame_.evidence() == Evidence::kEcho) {
        // It reports the failure of another rank, which could not say anything itself.
        if (verdict_) {
          log(LogLevel::kError, "{}", verdict_->what());
          return exit_code();
        }
        std::string_view told = child.lines.last_line();
        if (told.starts_with(kErrorPrefix)) told.remove_prefix(kErrorPrefix.size());
        log(LogLevel::kError, "{} (reported by rank {})", told.empty() ? "a rank failed" : told,
            child.rank);
        return exit_code();
      }
      if (all_agree()) return exit_code();
      log(LogLevel::kError, "rank {} (pid {}) failed first, with exit code {}: {}", child.rank,
          child.pid, exit_code(),
          child.lines.last_line().empty() ? "it said nothing" : child.lines.last_line());
      return exit_code();
    }
    // Ranks that have joined a job leave it when they are asked to end.
    if (stopped_by_ == SIGTERM && options_.joins && ended_well()) return 0;
    if (stopped_by_ != 0) return 128 + stopped_by_;
    return beside ? 1 : 0;
  }

  const LaunchOptions options_;
  const BlockedSignals signals_;
  const Descriptor status_ = inherited_status();
  std::string attempt_ = to_string(random_member_id());
  const HostIdentity host_ = this_host();
  std::shared_ptr<ControlPlane> control_;  // of the job whose centre we are
  std::weak_ptr<ControlPlane> centre_;     // that one, or the companion's
  std::optional<Error> verdict_;           // why the job has failed, as it says itself
  Descriptor secret_;
  std::optional<SecretFile> kept_secret_;  // for those who join on this host
  std::optional<HostPort> rendezvous_;     // of the job
  std::vector<StartedRank> children_;      // all that were ever started
  std::uint32_t generation_ = 0;           // the newest
  std::set<MemberId> others_;              // its members that others have started
  RestartPolicy restart_;
  bool stood_still_ = false;              // and the job has another centre
  std::map<int, std::string> held_back_;  // by place: how a worker ended that is started anew
  std::vector<FlightFile> flight_;        // of ranks that have ended, not written yet
  Blame blame_;
  std::optional<Deadline> stop_at_;  // set once somebody failed or we were told to stop
  std::optional<Deadline> ends_at_;  // of those whom end_who_stands_still() is about to end
  SignalCount stop_signals_;
  bool asked_to_stop_ = false;
  bool ended_at_once_ = false;  // by us, before they had stopped
  bool cut_short_ = false;      // those who still run cannot end in order
  int stopped_by_ = 0;
};

}  // namespace

bool is_launched() { return std::getenv(kLaunchedVariable) != nullptr; }

bool is_launched_echo(const Error& error) {
  const char* own = std::getenv(kLaunchedVariable);
  if (own == nullptr) return false;
  // A newcomer that nobody answers.
  const bool finds_no_job =
      std::getenv(kNewcomerVariable) != nullptr && error.rank() < 0 &&
      (error.code() == ErrorCode::kNoConnection || error.code() == ErrorCode::kTimeout);
  return finds_no_job || evidence_of(error, std::atoi(own)) == Evidence::kEcho;
}

int launch_ranks(const LaunchOptions& options) { return Launcher(options).run(); }

}  // namespace lockstep
