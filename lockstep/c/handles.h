#pragma once

#include <memory>
#include <optional>

#include "lockstep/c.h"
#include "lockstep/comm/buffer.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/comm/work.h"
#include "lockstep/lockstep.h"
#include "lockstep/train/checkpoint/tensor_folder.h"

// What the handles of the C interface stand for.

struct lockstep_communicator {
  lockstep::Job* job = nullptr;                   // of that of a job, which changes with it
  std::unique_ptr<lockstep::Communicator> owned;  // of the others

  // Throws Error{kInvalidArgument} for that of a newcomer.
  lockstep::Communicator& get() const;
};

struct lockstep_job {
  explicit lockstep_job(lockstep::Job joined) : job(std::move(joined)) { world.job = &job; }

  lockstep::Job job;
  lockstep_communicator world;
};

struct lockstep_work {
  lockstep::Work work;
};

struct lockstep_buffer {
  lockstep::Buffer buffer;
};

struct lockstep_lane_sum {
  lockstep::Job& job;
  lockstep::LaneSum sum;
};

struct lockstep_checkpoint {
  lockstep::TensorFolder folder;
};
