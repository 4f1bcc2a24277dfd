#include "lockstep/net/job/control_plane.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/index.h"
#include "lockstep/base/log.h"
#include "lockstep/net/job/control_loop.h"
#include "lockstep/net/job/job_health.h"
#include "lockstep/net/job/succession.h"

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kPauseBetweenCalls{100};

}  // namespace

ControlPlane::ControlPlane() : watch_(std::make_shared<Watch>()) {}

ControlPlane::ControlPlane(std::unique_ptr<Door> door, std::unique_ptr<Centre> centre,
                           std::string title, Deadline::Clock::duration timeout)
    : watch_(std::make_shared<Watch>()),
      name_(std::move(title)),
      rank_(-1),
      timeout_(timeout),
      loop_(std::make_unique<ControlLoop>(watch_, arrivals_, std::move(door), std::move(centre))) {}

ControlPlane::~ControlPlane() = default;

FailureLatch& ControlPlane::latch() { return watch_->latch; }
const FailureLatch& ControlPlane::latch() const { return watch_->latch; }
ProgressBook& ControlPlane::progress_book() { return watch_->book; }

std::optional<RosterMessage> ControlPlane::join(std::optional<Link> link, MemberOptions options,
                                                WayBack way_back) {
  options_ = std::move(options);
  way_back_ = std::move(way_back);
  // The member gives up by itself, and says why.
  const Deadline deadline = Deadline::after(options_.patience + std::chrono::seconds(1));
  loop_->join(std::move(link), options_);
  for (;;) {
    const ControlNews news = wait_for_answer(deadline);
    if (news.roster) {
      take_roster(*news.roster);
      return news.roster;
    }
    if (news.welcome) {
      welcome_ = description_ = news.welcome;
      return std::nullopt;
    }
    if (!news.redirect || deadline.expired()) {
      throw Error(ErrorCode::kTimeout, "the job has not formed in time");
    }
    // Whoever does not know the centre looks for it, too.
    const bool known = !news.redirect->empty();
    if (!known) ::poll(nullptr, 0, deadline.poll_timeout(kPauseBetweenCalls));
    const std::string& next = known ? *news.redirect : way_back_.first;
    loop_->join(way_back_.call(next, options_.card.rank, {}, deadline), options_);
  }
}

ControlNews ControlPlane::wait_for_answer(Deadline deadline) {
  const auto enough = [](const ControlNews& news) {
    return news.roster || news.failure || news.cut_off || news.welcome;
  };
  ControlNews news = loop_->wait_for_news(enough, deadline);
  if (!news.roster && news.failure) throw Error(*news.failure);
  if (!news.roster) latch().check();
  return news;
}

void ControlPlane::take_roster(const RosterMessage& message) {
  const auto own = std::ranges::find(message.roster, options_.card.id, &Card::id);
  rank_ = own->rank;
  name_ = name_of(*own);
  timeout_ = message.timeout;
  roster_ = message;
}

RosterMessage ControlPlane::wait_for_roster(Deadline deadline) {
  const auto enough = [](const ControlNews& news) { return news.roster || news.failure; };
  const ControlNews news = loop_->wait_for_news(enough, deadline);
  if (!news.roster) {
    latch().check();
    throw Error(ErrorCode::kTimeout, "the job has not formed in time");
  }
  roster_ = news.roster;
  timeout_ = news.roster->timeout;
  return *news.roster;
}

RosterMessage ControlPlane::regroup(Standing standing, std::int64_t step) {
  LOCKSTEP_CHECK(loop_);
  const auto cause = latch().error();
  why_ended_ = cause ? cause->message() : loop_->centre_left() ? "it left" : "";
  watch_ = std::make_shared<Watch>();
  loop_->join_again(watch_, standing, step);
  // A spare waits for as long as its centre is heard: the member notices when it is not.
  const Deadline deadline = standing == Standing::kPrepared
                                ? Deadline::at(Deadline::Clock::time_point::max())
                                : Deadline::after(options_.patience + std::chrono::seconds(1));
  for (;;) {
    const auto enough = [](const ControlNews& news) {
      return news.roster || news.failure || news.cut_off;
    };
    const ControlNews news = loop_->wait_for_news(enough, deadline);
    if (news.roster) {
      take_roster(*news.roster);
      return *news.roster;
    }
    if (news.failure) throw Error(*news.failure);
    if (!news.cut_off) {
      throw Error(ErrorCode::kTimeout, "the next generation has not formed in time");
    }
    find_centre(news, standing, step);
  }
}

void ControlPlane::find_centre(const ControlNews& news, Standing standing, std::int64_t step) {
  using Kind = Succession::Action::Kind;
  if (!way_back_.call || !roster_) {
    throw Error(ErrorCode::kPeerLost, "the centre of the job is gone");
  }
  MemberOptions options = options_;
  options.last = roster_;
  options.standing = standing;
  options.step = step;
  options.description = description_;
  options.paused = news.paused;
  Succession search(*roster_, rank_, way_back_.home, Deadline::Clock::now());
  std::optional<std::string> redirect = news.redirect;
  for (;;) {
    if (redirect) search.redirected(*std::exchange(redirect, std::nullopt), Deadline::Clock::now());
    options.paused = options.paused || loop_->news().paused;
    const bool may_serve = !options.paused && way_back_.make_centre != nullptr;
    const Succession::Action action = search.next(may_serve, Deadline::Clock::now());
    if (action.kind == Kind::kGiveUp) break;
    if (action.kind == Kind::kWait) {
      ::poll(nullptr, 0, Deadline::at(action.until).poll_timeout());
      continue;
    }
    if (action.kind == Kind::kServe) {
      // Whether this process has stood still the control thread knows.
      ControlNews now = loop_->news_of_a_turn(Deadline::after(timeout_));
      if (now.paused) return find_centre(now, standing, step);
      const Card& own = roster_->roster[index_of(rank_)];
      log(LogLevel::kInfo, "{} is the centre of the job now; others join it at {}", name_,
          own.mesh_address);
      loop_->serve(way_back_.make_centre(
          {*roster_, description_.value_or(Description()), action.lost, why_ended_}));
      return loop_->join(std::nullopt, options);
    }
    try {
      loop_->join(way_back_.call(action.address, -1, action.whom, Deadline::at(action.until)),
                  options);
    } catch (const Error&) {  // nobody there, or a stranger
      search.unreachable(Deadline::Clock::now());
      continue;
    }
    // Somebody is there. Until it has said that it is not the centre, it is.
    const auto answered = [](const ControlNews& heard) {
      return heard.roster || heard.failure || heard.cut_off;
    };
    const ControlNews heard = loop_->wait_for_news(
        answered,
        Deadline::after(std::max<Deadline::Clock::duration>(options_.patience, timeout_)));
    if (!heard.cut_off || heard.roster || heard.failure) return;
    redirect = heard.redirect;
    if (!redirect) search.unreachable(Deadline::Clock::now());
  }
  throw Error(ErrorCode::kPeerLost,
              options.paused
                  ? "this process stood still for longer than the timeout, and the job has gone"
                  : "the centre of the job is gone, and nobody else has become it");
}

void ControlPlane::ready_to_go() {
  loop_->ready();
  const auto enough = [this](const ControlNews& news) {
    return news.may_go || news.failure || latch().tripped();
  };
  // The centre expels who is not ready, long before that.
  const ControlNews news = loop_->wait_for_news(enough, Deadline::after(options_.patience));
  latch().check();
  if (!news.may_go) fail(Error(ErrorCode::kTimeout, "the new generation did not begin in time"));
}

bool ControlPlane::stood_still() const { return loop_ && loop_->news().paused; }

bool ControlPlane::others_survive() const {
  return loop_ && roster_ && roster_->survives && options_.survives;
}

bool ControlPlane::survives(const Error& error) const {
  if (!others_survive() || gave_up()) return false;
  const auto cause = latch().error();
  if (!cause || std::string_view(cause->what()) != error.what()) return false;
  return !loop_->news().failure;
}

void ControlPlane::describe(Description description) {
  description_ = description;
  if (loop_) loop_->describe(std::move(description));
}

void ControlPlane::tell(std::string line) {
  if (loop_) loop_->tell(std::move(line));
}

Wish ControlPlane::wanted() const { return loop_ ? loop_->wanted() : Wish(); }

void ControlPlane::wish(const Wish& wish) {
  if (loop_) loop_->wish(wish);
}

bool ControlPlane::ask_flight(std::vector<std::int32_t> but) {
  if (!loop_ || !loop_->centre_roster() || loop_->gave_role_up()) return false;
  loop_->ask_flight(std::move(but));
  return true;
}

void ControlPlane::on_flight_asked(std::function<void()> write) {
  if (loop_) loop_->on_flight_asked(std::move(write));
}

std::optional<RosterMessage> ControlPlane::centre_roster() const { return loop_->centre_roster(); }
std::vector<MemberEvent> ControlPlane::take_events() { return loop_->take_events(); }
std::vector<std::string> ControlPlane::take_lines() { return loop_->take_lines(); }
std::int64_t ControlPlane::centre_step() const { return loop_->centre_step(); }

void ControlPlane::process_ended(std::int32_t pid, std::string how, bool own_fault) {
  if (loop_) loop_->process_ended(pid, std::move(how), own_fault);
}

int ControlPlane::members_fd() const { return loop_->members_fd(); }
bool ControlPlane::all_left() const { return loop_ && loop_->all_left(); }
bool ControlPlane::gave_role_up() const { return loop_ && loop_->gave_role_up(); }

void ControlPlane::wait_until_all_left(Deadline deadline) {
  if (loop_) loop_->wait_until_all_left(deadline);
  latch().check();
}

void ControlPlane::fail(const Error& seen) {
  latch().check();
  // Out of descriptors or memory, for one: no other rank is to blame.
  const bool own = seen.rank() < 0 || seen.rank() == rank_;
  const bool lacks = seen.code() == ErrorCode::kIo || seen.code() == ErrorCode::kDevice;
  if (lacks && own && others_survive()) {
    give_up(std::string(seen.message()), Error(seen.code(), std::string(seen.message()), rank_));
    throw Error(*latch().error());
  }
  if (loop_ && loop_->report(seen)) {
    // The centre decides in less than half of this; see JobHealth.
    const Deadline deadline =
        Deadline::after(std::min<Deadline::Clock::duration>(timeout_, std::chrono::seconds(1)));
    pollfd entry{latch().fd(), POLLIN, 0};
    while (!latch().tripped() && !deadline.expired()) ::poll(&entry, 1, deadline.poll_timeout());
  }
  if (loop_ && loop_->centre_left() && roster_ && seen.rank() >= 0 &&
      seen.rank() == roster_->centre.rank) {
    latch().trip(Error(ErrorCode::kPeerLost,
                       fmt::format("{} has left the job", name_of(roster_->centre)), seen.rank()));
  }
  latch().trip(seen);
  throw Error(*latch().error());
}

void ControlPlane::report(const Error& seen, std::uint32_t generation) {
  if (loop_) loop_->report(seen, generation);
}

void ControlPlane::abort(const std::string& reason) {
  if (latch().trip(aborted_error(name_, rank_, reason)) && loop_) {
    loop_->report(Error(ErrorCode::kAborted, reason, rank_));
  }
}

void ControlPlane::give_up(const std::string& reason) {
  if (!roster_ || !roster_->survives) return abort(reason);
  give_up(reason, aborted_error(name_, rank_, reason));
}

void ControlPlane::give_up(const std::string& reason, const Error& cause) {
  {
    // Who sees the cause, and asks survives(), waits until it is known whose it is.
    const std::scoped_lock lock(giving_up_);
    if (!latch().trip(cause)) return;
    gave_up_ = true;
  }
  if (loop_) loop_->report(Error(ErrorCode::kPeerLost, reason, rank_));
}

bool ControlPlane::gave_up() const {
  const std::scoped_lock lock(giving_up_);
  return gave_up_;
}

}  // namespace lockstep
