#pragma once

#include <cstdint>

#include "cli/stories/grammar.h"
#include "lockstep/data/source.h"

namespace lockstep::cli {

// The built-in corpus: small English stories about animals who find something, have some trouble
// with it, and are helped by a friend. No two choices lead to the same text (see ambiguity()), so
// the entropy that expected() computes is the least loss that any model can reach.
Grammar story_grammar();

// The least loss in bits per byte. A story is followed by one byte that ends it, which is certain.
double story_entropy_per_byte(const Grammar& grammar);

// The first `count` stories under `seed`.
Documents built_in_stories(std::uint64_t seed, std::uint64_t count = 20'000);

}  // namespace lockstep::cli
