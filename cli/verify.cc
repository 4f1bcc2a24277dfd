#include <fmt/format.h>

#include <filesystem>

#include "cli/commands.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/files/file_source.h"
#include "lockstep/model/weights_hash.h"
#include "lockstep/train/checkpoint/folders.h"
#include "lockstep/train/checkpoint/manifest.h"
#include "lockstep/train/formats/model_files.h"

namespace lockstep::cli {
namespace {

constexpr const char* kVerifyExplanation =
    R"(DIR is a checkpoint, or a folder as `lockstep train --out` leaves it: then the model and all checkpoints.
Every file is read and hashed, and every tensor of the weights; damage is told by file and tensor.
Exit codes: 0 all are as they were written, 1 not.

  lockstep verify my-model
  lockstep verify my-model/checkpoint-500)";

// One line that says OK, or one for each damage.
bool verify_checkpoint(const std::string& folder) {
  StoredFiles files(folder);
  const std::vector<Damage> damage = find_damage(files, true);
  for (const Damage& each : damage) {
    fmt::print("{}: {}\n", visible(each.path), visible(each.what));
  }
  if (!damage.empty()) return false;
  const auto parsed = parse_manifest(files.text(kManifestFile));
  const auto& manifest = std::get<Manifest>(parsed);
  std::uint64_t bytes = 0;
  std::size_t tensors = 0;
  for (const ManifestFile& file : manifest.files) {
    bytes += file.bytes;
    tensors += file.tensors.size();
  }
  fmt::print("{}: OK, step {}, {} files, {} tensors, {:.1f} MB, weights {}\n", visible(folder),
             manifest.step, manifest.files.size(), tensors, static_cast<double>(bytes) / 1e6,
             manifest.weights);
  return true;
}

// One that cannot even be opened keeps nobody from looking at the others.
bool verify(const std::string& folder) {
  try {
    return verify_checkpoint(folder);
  } catch (const Error& error) {
    fmt::print("{}: {}\n", visible(folder), visible(error.message()));
    return false;
  }
}

// A model has no manifest: the hashes of its weights and of its tokenizer are in the file of the
// weights, where we wrote it.
bool verify_model(const std::string& folder) {
  const std::string path = visible(folder + "/" + kWeightsFile);
  try {
    const SavedModel model = load_model(folder);
    if (!model.tokenizer_files.empty() &&
        tokenizer_hash(model.tokenizer.get()) != model.tokenizer_files) {
      fmt::print("{}: the tokenizer beside it is not the one that was written with it\n", path);
      return false;
    }
    if (model.weights.empty()) {
      fmt::print("{}: readable, weights {}; whoever wrote it left no hash to compare\n", path,
                 weights_hash(ParameterLayout(model.config), model.parameters.span()));
    } else {
      fmt::print("{}: OK, weights {}\n", path, model.weights);
    }
  } catch (const Error& error) {
    fmt::print("{}\n", visible(error.message()));
    return false;
  }
  return true;
}

int run_verify(const std::string& folder) {
  std::string plain = folder;
  while (plain.size() > 1 && plain.ends_with('/')) plain.pop_back();
  if (!std::filesystem::is_directory(plain)) {
    throw Error(ErrorCode::kIo,
                fmt::format("{}: {}", plain,
                            std::filesystem::exists(plain)
                                ? "this is a file; verify takes a checkpoint or the folder of a run"
                                : "there is no such folder"));
  }
  if (std::filesystem::exists(plain + "/" + kManifestFile)) return verify(plain) ? 0 : 1;
  const auto steps = list_checkpoints(plain);
  const bool has_model = std::filesystem::exists(plain + "/" + kWeightsFile);
  if (steps.empty() && !has_model) {
    const bool unfinished =
        parse_checkpoint_name(std::filesystem::path(plain).filename().string()).has_value();
    if (unfinished) return verify(plain) ? 0 : 1;
    throw Error(ErrorCode::kIo,
                fmt::format("{}: neither a model nor checkpoints are in it", plain));
  }
  bool all_good = !has_model || verify_model(plain);
  for (const std::int64_t step : steps) {
    if (!verify(checkpoint_path(plain, step))) all_good = false;
  }
  return all_good ? 0 : 1;
}

}  // namespace

void add_verify(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand(
      "verify", "Check that a model and its checkpoints are as they were written.");
  command.footer(kVerifyExplanation);
  const auto folder = std::make_shared<std::string>();
  command.add_option("checkpoint", *folder, "The checkpoint, or the folder of a run")
      ->required()
      ->option_text("DIR");
  command.callback([folder, &action] { action = [folder] { return run_verify(*folder); }; });
}

}  // namespace lockstep::cli
