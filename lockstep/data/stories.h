#pragma once

#include <string>

#include "lockstep/data/grammar.h"

namespace lockstep {

// The built-in corpus: small English stories about animals who find something, have some trouble
// with it, and are helped by a friend. No two choices lead to the same text (see ambiguity()), so
// the entropy that expected() computes is the least loss that any model can reach.
Grammar story_grammar();

// The least loss in bits per byte. A story is followed by one byte that ends it, which is certain.
double story_entropy_per_byte(const Grammar& grammar);

}  // namespace lockstep
