#pragma once

#include <cstring>

#include "lockstep/model/layout.h"
#include "lockstep/train/checkpoint/training_state.h"

namespace lockstep {

// A small state with numbers of its own in every element.
inline TrainingState some_state(std::int64_t step, bool tied = false) {
  TrainingState state;
  RunSettings& settings = state.run.settings;
  settings.model = {.vocab = 256,
                    .hidden = 32,
                    .layers = 2,
                    .heads = 2,
                    .kv_heads = 1,
                    .intermediate = 48,
                    .context = 16,
                    .tie_embeddings = tied};
  settings.global_batch = 6;
  settings.micro_batch = 2;
  settings.schedule.steps = 100;
  state.run.step = step;
  state.run.data = {77, std::string(64, 'd')};
  state.run.versions = {"0.1.0", "2.36", "x"};
  state.tokenizer = byte_tokenizer();
  const std::size_t size = ParameterLayout(settings.model).size();
  float value = static_cast<float>(step);
  for (FloatBuffer* buffer : {&state.parameters, &state.first_moment, &state.second_moment}) {
    *buffer = FloatBuffer(size);
    for (float& element : buffer->span()) element = value += 0.25f;
  }
  return state;
}

inline bool same_bits(const FloatBuffer& a, const FloatBuffer& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

inline bool same_bits(const TrainingState& a, const TrainingState& b) {
  return to_json(a.run) == to_json(b.run) && same_bits(a.parameters, b.parameters) &&
         same_bits(a.first_moment, b.first_moment) && same_bits(a.second_moment, b.second_moment);
}

}  // namespace lockstep
