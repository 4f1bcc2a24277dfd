#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/float_buffer.h"
#include "lockstep/data/tokenizer.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/files/file_source.h"
#include "lockstep/train/checkpoint/run_state.h"
#include "lockstep/train/formats/model_files.h"

namespace lockstep {

// The whole state of a run, and the files that it is saved as: docs/checkpoint_format.md.

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
  // With bf16 on the wire: the rounding errors that every rank still has to add, one flat buffer
  // per rank, end to end.
  FloatBuffer residuals;
};

// Writes all files, the manifest last. The bytes are a function of the state alone: not of the
// number of workers, the time or the machine. Returns how many they are, without the manifest.
std::uint64_t write_training_state(const TrainingState& state, AtomicFolder& folder);

// Reads them back. Throws Error{kIo} that names what is damaged or missing.
TrainingState read_training_state(FileSource& files);

// A file of a checkpoint that is not as it was written, and its tensor where the damage is in one.
struct Damage {
  std::string path;
  std::string what;
};
// Reads and hashes every file that the manifest names. Empty: all are as they were written, and no
// other file is there. Tensors of a file whose hash differs are hashed to name those that are
// damaged; with `tensors` those of the weights always are, as the hash of the weights is made of
// theirs.
std::vector<Damage> find_damage(FileSource& files, bool tensors);
// The model in a checkpoint. Throws Error{kIo} when something that it consists of is damaged, or
// something else is there.
SavedModel read_checkpoint_model(FileSource& files);

}  // namespace lockstep
