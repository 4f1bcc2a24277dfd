#include "cli/star.h"

#include "cli/options.h"

namespace lockstep::cli {

void add_synthetic_options(CLI::App& command, SyntheticOptions& options) {
  command
      .add_option("--seed", options.seed,
                  "Seed of the synthetic gradients; the same for all workers")
      ->transform(any_seed())
      ->option_text("N [1]");
  command.add_option("--blocks", options.shape.blocks, "Transformer blocks of the synthetic model")
      ->transform(whole_number(1, 100000))
      ->option_text("N [24]");
  command.add_option("--hidden", options.shape.hidden, "Width of the synthetic model")
      ->transform(whole_number(1, 16384))
      ->option_text("N [64]");
  command
      .add_option("--intermediate", options.shape.intermediate, "Width of its feed-forward layers")
      ->transform(whole_number(1, 65536))
      ->option_text("N [256]");
  command.add_option("--vocab", options.shape.vocab, "Vocabulary of the synthetic model")
      ->transform(whole_number(1, 1 << 22))
      ->option_text("N [2048]");
  command
      .add_option("--elements", options.shape.elements,
                  "Length of the gradient in vector mode, instead of the model's")
      ->transform(whole_number(1, 1 << 30))
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
