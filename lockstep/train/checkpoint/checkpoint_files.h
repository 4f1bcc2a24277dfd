#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/float_buffer.h"
#include "lockstep/data/tokenizer.h"
#include "lockstep/files/file_source.h"
#include "lockstep/train/checkpoint/run_state.h"
#include "lockstep/train/formats/safetensors.h"

namespace lockstep {

// A run's whole state and the files that it is saved as. No file is opened or written here: the
// same code serves folders and memory.

constexpr const char* kStateFile = "trainer_state.json";
constexpr const char* kOptimizerFile = "optimizer.safetensors";
constexpr const char* kResidualFile = "residual.safetensors";

// The buffers are in the order of ParameterLayout(run.settings.model).
struct TrainingState {
  RunState run;
  std::shared_ptr<const Tokenizer> tokenizer;  // may be none
  FloatBuffer parameters;
  FloatBuffer first_moment;
  FloatBuffer second_moment;
  // With bf16 on the wire: what rounding took from every rank so far, flat buffers end to end.
  FloatBuffer residuals;
};

// One file: `head`, then the tensors' values, which belong to the state it was made of.
struct CheckpointFile {
  std::string name;
  std::string head;
  std::vector<TensorToStore> tensors = {};

  std::uint64_t bytes() const;
};

// All but the manifest, which needs their hashes. They depend on the state alone, not on the
// number of workers, the time or the machine.
std::vector<CheckpointFile> checkpoint_files(const TrainingState& state);

using ByteSink = std::function<void(std::span<const std::byte>)>;
// Gives the file's bytes to `sink`, piece by piece, and returns what the manifest says of it.
ManifestFile emit_file(const CheckpointFile& file, const ByteSink& sink);

Manifest make_manifest(const RunState& run, std::vector<ManifestFile> files);

// What is wrong with a checkpoint: the file, and its tensor where the damage lies in one.
struct Damage {
  std::string path;
  std::string what;
};
// Reads and hashes everything the manifest names; no damage means that all is as it was written.
// With `tensors` every tensor is hashed as well, else only those of a file whose hash differs.
std::vector<Damage> find_damage(FileSource& files, bool tensors);
// Throws Error{kIo} when the manifest or one of these files, where the manifest has it, is damaged.
void require_intact(FileSource& files, std::initializer_list<const char*> names);

// Throws Error{kIo} that names what is damaged or missing.
TrainingState read_training_state(FileSource& files);

// The same files, one after another in memory: to bring another process up to date.
std::vector<std::byte> to_bytes(const TrainingState& state);
// Throws Error{kIo} for bytes that are not a state; `where` names them in messages.
TrainingState from_bytes(std::span<const std::byte> bytes, const std::string& where);

}  // namespace lockstep
