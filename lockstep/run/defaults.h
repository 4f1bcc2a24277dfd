#pragma once

#include <cstdint>

#include "lockstep/model/config.h"

namespace lockstep {

// A model that fits `tokens` tokens of training data: larger data, larger model, and a context that
// leaves enough samples to shuffle. The vocabulary is not looked at.
ModelConfig fitting_model(std::uint64_t tokens);

// So many steps that a model of `parameters` sees ten tokens for each of them, at least 200, but no
// more than kMostPasses over `tokens` tokens of training data: what follows is learnt by heart.
inline constexpr std::uint64_t kMostPasses = 40;
std::int64_t fitting_steps(std::uint64_t parameters, std::uint64_t tokens_per_step,
                           std::uint64_t tokens);

// Samples of a step, and of a lane of it. Eight lanes where they divide the batch, else the next
// number that does, so that one to eight workers share them: never fewer for fewer workers, because
// lanes are part of the result.
inline constexpr std::uint64_t kGlobalBatch = 16;
std::uint64_t fitting_micro_batch(std::uint64_t global_batch);

// The wider the model, the smaller its steps. Weights that are trained already get a tenth: larger
// steps would undo what they have learnt.
double fitting_learning_rate(int hidden, bool trained);

// Samples that are kept for validation: one in twenty, at least one, at most half.
std::uint64_t validation_samples(std::uint64_t samples);

}  // namespace lockstep
