#include "lockstep/model/batch.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/index.h"

namespace lockstep {
namespace {

[[noreturn]] void refuse(std::string message) {
  throw Error(ErrorCode::kInvalidArgument, std::move(message));
}

// Token ids at or beyond the vocabulary; a negative id is one, a negative target is not.
void check_ids(const Batch& batch, std::span<const std::int32_t> ids, int least, int vocab,
               const char* what) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < vocab && ids[i] >= least) continue;
    const auto context = static_cast<std::size_t>(batch.context);
    refuse(fmt::format("{} {} in row {}, position {} is not in the vocabulary of {}", what, ids[i],
                       i / context, i % context, vocab));
  }
}

}  // namespace

void check_batch(const Batch& batch, int max_rows, int max_context, int vocab) {
  if (batch.rows < 1 || batch.context < 1 || batch.rows > max_rows || batch.context > max_context) {
    refuse(fmt::format("a batch of {} x {} tokens, where there is room for {} x {}", batch.rows,
                       batch.context, max_rows, max_context));
  }
  const std::size_t tokens = index_of(batch.rows) * index_of(batch.context);
  if (batch.tokens.size() != tokens || batch.targets.size() != tokens) {
    refuse(fmt::format("a batch of {} x {} has {} tokens and {} targets", batch.rows, batch.context,
                       batch.tokens.size(), batch.targets.size()));
  }
  check_ids(batch, batch.tokens, 0, vocab, "token");
  check_ids(batch, batch.targets, std::numeric_limits<int>::min(), vocab, "target");
}

void index_tokens(std::span<const std::int32_t> tokens, std::span<std::uint32_t> begin,
                  std::span<std::uint32_t> places) {
  std::ranges::fill(begin, 0U);
  for (const std::int32_t token : tokens) ++begin[index_of(token)];
  std::uint32_t end = 0;
  for (std::uint32_t& entry : begin) entry = end += entry;
  for (std::size_t i = tokens.size(); i-- > 0;) {
    places[--begin[index_of(tokens[i])]] = static_cast<std::uint32_t>(i);
  }
}

}  // namespace lockstep
