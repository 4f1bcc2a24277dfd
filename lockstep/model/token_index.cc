#include "lockstep/model/token_index.h"

#include <algorithm>

#include "lockstep/base/index.h"

namespace lockstep {

void index_tokens(std::span<const std::int32_t> tokens, std::span<std::uint32_t> begin,
                  std::span<std::uint32_t> places) {
  std::ranges::fill(begin, 0U);
  for (const std::int32_t token : tokens) ++begin[index_of(token)];
  std::uint32_t end = 0;
  for (std::uint32_t& entry : begin) entry = end += entry;
  for (std::size_t i = tokens.size(); i-- > 0;) {
    places[--begin[static_cast<std::size_t>(tokens[i])]] = static_cast<std::uint32_t>(i);
  }
}

}  // namespace lockstep
