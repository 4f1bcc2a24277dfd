#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "lockstep/server/settings.h"
#include "lockstep/server/worker_client.h"

namespace lockstep::cli {

// A model's shape, for gradients of the right sizes; the default is a 350M-class model scaled down.
struct SyntheticShape {
  std::uint32_t blocks = 24;
  std::uint32_t hidden = 64;
  std::uint32_t intermediate = 256;
  std::uint32_t vocab = 2048;
  std::size_t elements = 0;  // of the gradient vector; 0: those of the whole model

  // Query, key, value and output projections, gate, up, down, two norms.
  std::vector<std::uint32_t> block_sizes() const;
  std::size_t block_elements() const;
  std::size_t component_elements(std::uint8_t component) const;
  std::size_t vector_elements() const;
};

// What a part of a synthetic gradient is called: 0 for the vector, a block's number plus one, and
// components from kSyntheticComponents on.
inline constexpr std::uint32_t kSyntheticComponents = 0xffffff00;

// Element i is a pure function of all of these: Philox with the seed as key and the counter
// (i / 4, part, step mod 2^32, source); word i mod 4 of it, as a number in [-1, 1). The source is a
// worker. So anybody can compute anybody's gradient.
void synthetic_gradient(std::uint64_t seed, std::uint64_t step, std::uint32_t source,
                        std::uint32_t part, std::span<float> gradient);
float synthetic_loss(std::uint64_t seed, std::uint64_t step, std::uint32_t source);

struct SyntheticOptions {
  std::uint64_t seed = 1;
  SyntheticShape shape;
  // Recompute everybody's gradients and compare every result bit for bit. Needs the settings, so it
  // does not go with the original protocol.
  bool check = false;
  Mode mode = Mode::kVector;  // where the coordinator does not tell
};

// The worker's side of a job whose gradients come from the generator.
class SyntheticJob {
 public:
  SyntheticJob(WorkerClient& client, const SyntheticOptions& options);

  struct Report {
    std::uint64_t step = 0;      // from 0, as on the wire
    std::optional<Shard> shard;  // in vector mode
    std::optional<float> loss;   // of all workers, in vector mode
    std::size_t elements = 0;    // reduced
    std::size_t compared = 0;    // of them, bit for bit
  };
  // The next step, or nothing: the coordinator has ended the job. Throws Error{kCollectiveMismatch}
  // that names the first element which is not what it should be.
  std::optional<Report> step();

 private:
  bool vector_step(Report& report);
  bool block_step(Report& report);
  void check_average(std::uint64_t step, std::uint32_t part, std::span<const float> received,
                     Report& report) const;
  void compare(std::uint64_t step, std::string_view what, std::span<const float> expected,
               std::span<const float> received, Report& report) const;
  // The sum of `sources` in the canonical tree, each times its weight.
  std::vector<float> sum(std::uint64_t step, std::uint32_t part, Range sources,
                         std::size_t elements, std::span<const float> weights = {}) const;

  WorkerClient& client_;
  const SyntheticOptions options_;
  const Mode mode_;
  std::uint64_t next_step_ = 0;  // in mode blocks, where nobody else counts
  std::vector<float> gradient_;
};

}  // namespace lockstep::cli
