#include "lockstep/base/error.h"
#include "lockstep/data/tokenizer.h"

namespace lockstep {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::kInvalidArgument, "this program was built without SentencePiece");
}

}  // namespace

std::unique_ptr<Tokenizer> sentencepiece_tokenizer(std::string, const std::string&) { refuse(); }

std::string train_sentencepiece(std::span<const std::string_view>, std::uint32_t) { refuse(); }

}  // namespace lockstep
