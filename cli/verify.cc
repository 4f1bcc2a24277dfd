#include <fmt/format.h>

#include <filesystem>

#include "cli/commands.h"
#include "lockstep/files/mapped_file.h"
#include "lockstep/train/checkpoint/folders.h"
#include "lockstep/train/checkpoint/manifest.h"

namespace lockstep::cli {
namespace {

constexpr const char* kVerifyExplanation =
    R"(DIR is a checkpoint, or a folder of checkpoints as `lockstep train --out` leaves it: then all of them.
Every file and every tensor is read and hashed. Exit codes: 0 all are as they were written, 1 not.

  lockstep verify my-model/checkpoint-500)";

// One line that says OK, or one for each damage.
bool verify(const std::string& folder) {
  MappedFolder files(folder);
  const std::vector<Damage> damage = find_damage(files, true);
  for (const Damage& each : damage) fmt::print("{}: {}\n", each.path, each.what);
  if (!damage.empty()) return false;
  const auto parsed = parse_manifest(as_text(files.get(kManifestFile)));
  const auto& manifest = std::get<Manifest>(parsed);
  std::uint64_t bytes = 0;
  std::size_t tensors = 0;
  for (const ManifestFile& file : manifest.files) {
    bytes += file.bytes;
    tensors += file.tensors.size();
  }
  fmt::print("{}: OK, step {}, {} files, {} tensors, {:.1f} MB, weights {}\n", folder,
             manifest.step, manifest.files.size(), tensors, static_cast<double>(bytes) / 1e6,
             manifest.weights);
  return true;
}

int run_verify(const std::string& folder) {
  std::string plain = folder;
  while (plain.size() > 1 && plain.ends_with('/')) plain.pop_back();
  const auto steps = list_checkpoints(plain);
  if (std::filesystem::exists(plain + "/" + kManifestFile) || steps.empty()) {
    return verify(plain) ? 0 : 1;
  }
  bool all_good = true;
  for (const std::int64_t step : steps) {
    if (!verify(checkpoint_path(plain, step))) all_good = false;
  }
  return all_good ? 0 : 1;
}

}  // namespace

void add_verify(CLI::App& app, Action& action) {
  CLI::App& command =
      *app.add_subcommand("verify", "Check that a checkpoint is as it was written.");
  command.footer(kVerifyExplanation);
  const auto folder = std::make_shared<std::string>();
  command.add_option("checkpoint", *folder, "The checkpoint, or a folder of checkpoints")
      ->required()
      ->option_text("DIR");
  command.callback([folder, &action] { action = [folder] { return run_verify(*folder); }; });
}

}  // namespace lockstep::cli
