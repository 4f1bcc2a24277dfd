#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/net/job/centre.h"
#include "lockstep/net/job/member.h"
#include "lockstep/net/job/succession.h"
#include "tests/support/message_parser.h"

namespace lockstep::test {

// A job that survives, from its start to the end of its run, in one thread with virtual time: the
// real Centre, Member and Succession in every process, and around them what a process does with
// them (ControlLoop, ControlPlane and Job::regroup), a network and a training run that are toys.
//
// The network delays. A connection keeps its order; connections overtake each other. Links between
// two processes are cut for a while, the job is split into halves. Processes are killed, stopped
// and woken, give up, leave and come. All of that, and every delay, is a function of the seed.
//
// The run: every rank adds up a hash of (step, lane) over its lanes, a collective adds up the sums,
// and the state is a hash of the state before and of the sum. A collective ends at a rank when all
// ranks of the generation have entered it, at each rank at another time. At the start of a
// generation the ranks level: all take the state of the one that is furthest.
//
// run() checks after every event:
//  1. a state that a process commits is that of the undisturbed run at that step;
//  2. all members of a generation have the same roster; nobody enters a collective before all have
//     made their connections; all call the same collective;
//  3. once the faults are over, a step commits or a process ends within kBound timeouts; a founder
//     that no fault ever touched finishes the run;
//  4. nobody is expelled whom no fault touched;
//  5. who stood still for the timeout never serves as the centre.
class SurvivalSimulator {
 public:
  using Clock = Deadline::Clock;
  using Time = Clock::time_point;
  using Duration = Clock::duration;

  static constexpr int kBound = 40;  // in timeouts

  // Who is the centre at first: a launcher that is no rank, rank 0, or a coordinator that never
  // passes the role on and may be started anew.
  enum class CentreKind : std::uint8_t { kLauncher, kRank, kHome };
  struct Options {
    std::uint64_t seed = 1;
    int members = 3;
    CentreKind centre = CentreKind::kRank;
    std::int64_t steps = 12;
    int faults = 2;
    bool faults_while_forming = false;
    std::uint32_t min_workers = 1;
    std::uint32_t most_workers = 0;
    Duration timeout = std::chrono::seconds(10);
    Duration longest_delay = std::chrono::milliseconds(2);
    Duration compute = std::chrono::milliseconds(700);
    bool trace = false;  // tell on stderr what happens
  };
  // The options of a schedule.
  static Options drawn(std::uint64_t seed);

  explicit SurvivalSimulator(const Options& options);
  ~SurvivalSimulator();
  SurvivalSimulator(const SurvivalSimulator&) = delete;
  SurvivalSimulator& operator=(const SurvivalSimulator&) = delete;

  // Runs the whole schedule. Returns which of the above did not hold; empty: all did.
  std::string run();

  struct Counts {
    std::uint64_t events = 0;
    std::uint64_t messages = 0;  // to and from centres
    std::uint64_t generations = 0;
    std::uint64_t commits = 0;
    std::uint64_t finished = 0;  // processes that did the whole run
  };
  const Counts& counts() const { return counts_; }
  Time now() const { return now_; }

 private:
  enum class Phase : std::uint8_t {
    kCalling,     // the first call
    kJoining,     // it has asked for the first time
    kPreparing,   // a newcomer that was told what the job is
    kWaiting,     // for the roster of the next generation
    kSearching,   // between two calls, for the centre
    kSeeking,     // calls who may be the centre
    kAsking,      // has asked who may be the centre
    kEntering,    // makes its connections
    kReady,       // for collectives, when all are
    kComputing,   // its lanes
    kCollective,  // inside
    kEnded,       // the process is dead, or the centre alone
  };
  enum class Call : std::uint8_t { kLevel, kStep, kPart, kFinish };
  struct Collective {
    Call call{};
    std::int64_t step = 0;
    int count = 0;
    std::vector<bool> entered;
    std::uint64_t sum = 0;
    bool regroup = false;
    std::set<int> leavers;
    std::int64_t best_step = -1;
    std::uint64_t best_state = 0;
  };
  struct Generation {
    GenerationName name;
    Time formed;
    std::int32_t centre = 0;     // the pid of the process that formed it
    std::vector<int> processes;  // by rank
    std::vector<bool> entering;
    std::vector<bool> ready;
    std::vector<bool> gone;
    int last = -1;                                    // the rank that came last
    std::map<std::uint64_t, Collective> collectives;  // by sequence number
  };
  struct Process {
    // Lasting.
    Card card;
    bool founder = false;
    bool touched = false;          // by a fault, ever
    std::optional<Time> slept;     // for the timeout, since then
    int steps_since = 0;           // it slept
    bool heir_of_touched = false;  // a centre that follows one that a fault has touched
    bool alive = true;
    bool stopped = false;
    Time stopped_at{};
    int attempts = 0;  // of this newcomer before, under another process

    // The control thread.
    std::unique_ptr<Centre> centre;
    std::unique_ptr<Member> member;
    int link = -1;  // of the member
    Time wake = Time::max();
    GenerationName formed;   // by the centre
    std::set<int> expelled;  // by the centre

    // The training thread.
    Phase phase = Phase::kEnded;
    std::uint64_t epoch = 0;  // counts what it has waited for
    int call = -1;            // the connection that it makes
    std::string first_address;
    bool redirected = false;
    std::uint64_t regroups = 0;
    bool out_of_patience = false;
    std::optional<RosterMessage> news;
    Time deadline{};  // of the call, or of the regroup
    Standing standing = Standing::kNew;
    std::optional<RosterMessage> roster;
    std::optional<Description> description;
    std::optional<Succession> search;
    bool newcomer = false;
    bool wants_to_leave = false;
    bool leaving = false;
    std::optional<Error> latch;
    std::optional<Error> seen;  // told to the centre, whose word it waits for
    std::shared_ptr<Generation> generation;
    int rank = -1;
    std::uint64_t sequence = 0;
    bool inside = false;
    std::set<int> closed;    // ranks whose connections it has seen close
    std::uint64_t torn = 0;  // this collective does not end: something was left unsent
    std::int64_t step = -1;
    std::uint64_t state = 0;

    std::deque<std::size_t> unread;  // events that came while it was stopped
  };
  struct Connection {
    std::array<int, 2> ends{};  // who called, who was called
    std::array<bool, 2> open{true, true};
    std::array<Time, 2> last{};  // arrival, by the end that it goes to
    bool accepted = false;
  };
  enum class Kind : std::uint8_t {
    kDial,
    kAccept,
    kRefuse,
    kBytes,
    kClose,
    kWake,
    kTrain,
    kPatience,
    kComplete,
    kOverdue,
    kMeshClosed,
    kFault,
    kHeal,
    kRevive,
    kRestart,
  };
  struct Event {
    Kind kind{};
    int process = -1;  // whom it reaches
    int from = -1;     // whence, where it crosses the network
    int connection = -1;
    int end = 0;
    std::uint64_t number = 0;
    SharedBytes bytes = {};
    std::shared_ptr<Generation> generation = {};
  };
  struct Due {
    Time time;
    std::uint64_t order;
    std::size_t event;
    bool operator>(const Due& other) const {
      return time != other.time ? time > other.time : order > other.order;
    }
  };

  std::uint64_t draw();
  std::uint64_t draw(std::uint64_t below) { return draw() % below; }
  bool chance(std::uint64_t of) { return draw(of) == 0; }
  Duration draw_time(Duration least, Duration most);
  Process& at(int process) { return processes_[static_cast<std::size_t>(process)]; }
  void broke(std::string what);
  void tell(int process, std::string_view what);

  void schedule(Time time, Event event);
  // Over the network, in the order of its connection if it has one.
  void transmit(Event event);
  void happen(std::size_t index);
  void reach(Process& process, int number, Event& event);
  bool next_event();

  void start();
  int add_process();
  int add_newcomer();
  void start_founder(int number);
  std::unique_ptr<Centre> make_centre(int number, std::optional<Inheritance> inherited);
  CentreCard centre_card(int number) const;
  void dial(int number, const std::string& address, Time until);
  void take_member(int number, int link, MemberOptions options);
  MemberOptions member_options(const Process& process) const;
  void close_link(int connection, int end);
  // One turn of the control thread and of the training thread, until both have nothing to do.
  void turn(int number);
  void send_all(int number);
  void watch_events(int number);
  bool advance(int number);
  void set_wake(int number);
  bool was_replaced(int number, const std::vector<int>& needed);

  void call_over(int number, bool refused);
  void start_regroup(int number, Standing standing);
  void search_on(int number);
  void find_centre(int number);
  void enter(int number, RosterMessage roster);
  void leave_generation(int number, bool torn);
  void fail(int number, const Error& seen);
  void survive(int number);
  void end_process(int number, std::string_view why);
  void finish(int number, std::string_view how);
  void die(int number, bool torn);

  void enter_collective(int number, Call call);
  void complete(int number, std::uint64_t sequence);
  void commit(int number, std::uint64_t sum);
  void begin_step(int number);
  void mesh_closed(int number, int rank);

  void start_faults();
  void next_fault();
  void inject();
  void touch(int number);
  void kill(int number);
  void stop(int number, Duration duration);
  void cut(int a, int b, Duration duration);
  bool is_cut(int a, int b) const;
  Duration slowest() const { return options_.timeout / 8; }  // of a message on a slow network
  void replace_later(int attempts);
  std::vector<int> workers() const;

  std::uint64_t state_after(std::int64_t step);

  const Options options_;
  Time now_ = Time{} + std::chrono::hours(1);
  std::uint64_t draws_ = 0;
  std::uint64_t order_ = 0;
  std::uint64_t ids_ = 0;
  std::vector<Event> events_;
  std::vector<std::size_t> free_events_;
  std::vector<Due> due_;  // a heap
  std::deque<Process> processes_;
  std::vector<Connection> connections_;
  std::map<std::string, int, std::less<>> addresses_;
  std::map<std::uint32_t, std::shared_ptr<Generation>> generations_;
  std::map<std::pair<int, int>, Time> cuts_;  // until when
  std::vector<std::pair<std::pair<int, int>, std::size_t>> held_;
  MessageParser parser_;
  std::vector<std::uint64_t> states_;
  int hub_ = -1;  // the launcher or the coordinator
  int faults_left_ = 0;
  std::uint64_t fault_at_message_ = UINT64_MAX;
  int running_ = 0;  // workers that live
  int restarts_pending_ = 0;
  bool formed_ = false;
  bool disturbed_forming_ = false;
  bool centre_touched_ = false;
  bool slow_ = false;   // the network
  Time slow_until_{};   // until what it delayed has arrived
  Time quiet_since_{};  // no fault lasts, or the last progress after that
  Time last_fault_end_{};
  std::string broken_;
  Counts counts_;
};

}  // namespace lockstep::test
