#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "lockstep/base/canonical_tree.h"

namespace lockstep {

// What the gradient server makes of n gradients, always in the canonical tree over worker order.
// Values are part of the protocol.
enum class Average : std::uint8_t {
  kMean = 0,      // tree sum of g, times f32(1/n)
  kWeighted = 1,  // tree sum of f32(w)·g, times f32(1/Σw); 0 if Σw is 0
};
std::string_view to_string(Average average);

// Averages vectors, any number of elements at a time: the result of an element does not depend on
// how the vector is cut.
class Averager {
 public:
  // `weights` are used by kWeighted only; one per worker, though.
  Averager(Average average, std::vector<std::uint64_t> weights);

  // An input of `worker`, or the average itself (worker -1), that is NaN or infinite.
  struct Defect {
    int worker = -1;
    std::size_t index = 0;
    float value = 0;
  };
  // inputs[w] are `count` f32 elements of worker w, of any alignment. Stops at the first defect.
  std::optional<Defect> run(std::span<const std::byte* const> inputs, float* out,
                            std::size_t count);

 private:
  std::optional<Defect> run_strip(std::span<const std::byte* const> inputs, float* out,
                                  std::size_t offset, std::size_t count);
  // Who is to blame for element `at` of the strip, or nobody: its sum overflows.
  Defect find_defect(std::span<const std::byte* const> inputs, const float* sum, std::size_t offset,
                     std::size_t count, std::size_t at) const;

  const Average average_;
  const std::vector<CombineStep> program_;
  std::vector<float> weights_;
  float factor_;                              // f32(1/Σw); 0 for Σw = 0
  std::vector<std::vector<float>> repeated_;  // one strip of every weight, and of the factor
  std::vector<std::vector<float>> products_;  // one strip of every worker
  std::vector<const void*> strips_;
};

}  // namespace lockstep
