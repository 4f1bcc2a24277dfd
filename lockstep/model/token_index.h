#pragma once

#include <cstdint>
#include <span>

namespace lockstep {

// Sorts the places of a batch by token, keeping their order: those of token t are
// places[begin[t]] to places[begin[t + 1]]. `begin` has one element more than the vocabulary.
void index_tokens(std::span<const std::int32_t> tokens, std::span<std::uint32_t> begin,
                  std::span<std::uint32_t> places);

}  // namespace lockstep
