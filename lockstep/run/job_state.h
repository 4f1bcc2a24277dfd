#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/flight_recorder.h"
#include "lockstep/lockstep.h"

namespace lockstep {

// One worker's place in a job, by what carries its bytes.
struct Job::State {
  virtual ~State() = default;

  virtual bool survives(const Error&) const { return false; }
  virtual bool stood_still() const { return false; }
  virtual void regroup(std::int64_t, Regroup) {
    throw Error(ErrorCode::kInvalidArgument, "this job does not survive losses");
  }
  virtual void give_up(const std::string& reason) { communicator->abort(reason); }
  virtual void abort(const std::string& reason) { communicator->abort(reason); }
  virtual void set_transport(TransportKind) {}
  virtual void describe(std::vector<std::byte> contents, int) { description = std::move(contents); }
  virtual JobWishes wishes() const { return {}; }
  virtual void tell(const std::string&) {}
  virtual bool ask_flight() { return false; }
  virtual void on_flight_asked(const std::function<void()>&) {}
  virtual bool on_one_host() const { return true; }

  std::shared_ptr<FlightRecorder> flight = std::make_shared<FlightRecorder>();
  std::unique_ptr<Communicator> communicator;  // null: a newcomer, or between two generations
  std::uint32_t generation = 0;
  int newcomers = 0;
  std::vector<Departure> departed;
  bool too_few = false;
  bool newcomer = false;
  std::vector<std::byte> description;
  // Give up what belongs to the communicator; false: there is nothing any more.
  std::vector<std::function<bool()>> before_regroup;
};

// Whether all workers of the generation are on this host, or, between two, of the one before. True
// where nobody knows.
bool on_one_host(const Job& job);

}  // namespace lockstep
