#include "cli/star.h"

namespace lockstep::cli {

void add_synthetic_options(CLI::App& command, SyntheticOptions& options) {
  command
      .add_option("--seed", options.seed, "Of the synthetic gradients; the same for all workers")
      ->option_text("N [1]");
  command.add_option("--blocks", options.shape.blocks, "Transformer blocks of the synthetic model")
      ->check(CLI::Range(1U, 100000U))
      ->option_text("N [24]");
  command.add_option("--hidden", options.shape.hidden, "Its width")
      ->check(CLI::Range(1U, 16384U))
      ->option_text("N [64]");
  command.add_option("--intermediate", options.shape.intermediate, "The width of its MLP")
      ->check(CLI::Range(1U, 65536U))
      ->option_text("N [256]");
  command.add_option("--vocab", options.shape.vocab, "Its vocabulary")
      ->check(CLI::Range(1U, 1U << 22))
      ->option_text("N [2048]");
  command
      .add_option("--elements", options.shape.elements,
                  "Length of the gradient in vector mode, instead of the model's")
      ->check(CLI::Range(std::size_t{1}, std::size_t{1} << 30))
      ->option_text("N");
  command.add_flag("--check", options.check,
                   "Recompute all workers' gradients and compare every result bit for bit");
}

bool is_defect(ErrorCode code) {
  switch (code) {
    case ErrorCode::kNonFinite:
    case ErrorCode::kStepMismatch:
    case ErrorCode::kBlockMismatch:
    case ErrorCode::kComponentMismatch:
    case ErrorCode::kSizeMismatch:
    case ErrorCode::kUnexpectedMessage:
    case ErrorCode::kMessageTooLarge: return true;
    default: return false;
  }
}

}  // namespace lockstep::cli
