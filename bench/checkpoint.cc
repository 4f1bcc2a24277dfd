// How fast checkpoints are saved, loaded and verified, beside plain writes and reads of the same
// files, in alternating pairs.
// usage: checkpoint FOLDER [MODEL=124m] [ROUNDS=15] [--json]    FOLDER is on the disk to be
// measured. With --json a line per row: its name and for every pair our rate divided by the plain
// one's.

#include <fcntl.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/base/descriptor.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/model/layout.h"
#include "lockstep/train/checkpoint/folders.h"
#include "lockstep/train/checkpoint/writer.h"

namespace {

using namespace lockstep;

constexpr std::size_t kPiece = 1 << 20;

[[noreturn]] void fail(const std::string& what) {
  fmt::print(stderr, "{}\n", what);
  std::exit(1);
}

template <typename Body>
double seconds(Body&& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

TrainingState make_state(const ModelConfig& model) {
  TrainingState state;
  state.run.step = 1;
  state.run.settings.model = model;
  state.run.settings.global_batch = 1;
  state.run.settings.micro_batch = 1;
  const std::size_t size = ParameterLayout(model).size();
  float value = 1;
  for (FloatBuffer* buffer : {&state.parameters, &state.first_moment, &state.second_moment}) {
    *buffer = FloatBuffer(size);
    for (float& element : buffer->span()) element = value = value * 1.0001f + 1e-3f;
  }
  return state;
}

void write_plain(const std::string& path, std::span<const std::byte> rest) {
  const Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666));
  while (!rest.empty()) {
    const ssize_t done = ::write(file.get(), rest.data(), std::min(rest.size(), kPiece));
    if (done <= 0) fail("writing " + path);
    rest = rest.subspan(static_cast<std::size_t>(done));
  }
  if (::fsync(file.get()) != 0) fail("syncing " + path);
}

void read_plain(const std::string& path, std::span<std::byte> rest) {
  const Descriptor file(::open(path.c_str(), O_RDONLY));
  while (!rest.empty()) {
    const ssize_t done = ::read(file.get(), rest.data(), std::min(rest.size(), kPiece));
    if (done <= 0) fail("reading " + path);
    rest = rest.subspan(static_cast<std::size_t>(done));
  }
}

// Memory for the large files of a checkpoint, as a load allocates it.
std::vector<FloatBuffer> new_memory(const std::vector<std::string>& paths) {
  std::vector<FloatBuffer> memory;
  for (const std::string& path : paths) {
    memory.push_back(FloatBuffer::untouched(std::filesystem::file_size(path) / sizeof(float) + 1));
  }
  return memory;
}

void read_files(const std::vector<std::string>& paths, const std::vector<FloatBuffer>& memory) {
  for (std::size_t i = 0; i < paths.size(); ++i) {
    const auto room = std::as_writable_bytes(memory[i].span());
    read_plain(paths[i], room.first(std::filesystem::file_size(paths[i])));
  }
}

// What is timed, and the seconds it took in each round.
struct Series {
  std::string name;
  std::vector<double> times = {};
};

// Of two things that are compared, each goes first every other time.
void in_turn(int round, Series& one, const std::function<void()>& do_one, Series& other,
             const std::function<void()>& do_other) {
  if (round % 2 == 0) one.times.push_back(seconds(do_one));
  other.times.push_back(seconds(do_other));
  if (round % 2 != 0) one.times.push_back(seconds(do_one));
}

std::vector<double> ratios(const Series& what, const Series& beside) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < what.times.size(); ++i) {
    ratios.push_back(beside.times[i] / what.times[i]);
  }
  return ratios;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  const bool json = std::erase(words, "--json") > 0;
  if (words.empty()) fail("usage: checkpoint FOLDER [MODEL] [ROUNDS] [--json]");
  const std::string folder = words[0] + "/checkpoint_bench";
  const auto model = named_model(words.size() > 1 ? words[1] : "124m");
  if (!model) fail("no such model");
  const int rounds = words.size() > 2 ? std::stoi(words[2]) : 15;
  const auto start_over = [&] {
    std::filesystem::remove_all(folder);
    make_folder(folder);
  };
  start_over();

  const TrainingState state = make_state(*model);
  TrainingState snapshot = make_state(*model);
  const std::vector<const FloatBuffer*> from = {&state.parameters, &state.first_moment,
                                                &state.second_moment};
  const auto copy_to = [&](const TrainingState& copy) {
    const FloatBuffer* to[] = {&copy.parameters, &copy.first_moment, &copy.second_moment};
    for (std::size_t i = 0; i < 3; ++i) {
      std::memcpy(to[i]->data(), from[i]->data(), from[i]->size() * sizeof(float));
    }
  };
  const double bytes = 3.0 * sizeof(float) * static_cast<double>(state.parameters.size());
  const std::string saved = checkpoint_path(folder, 1);
  const std::vector<std::string> files = {saved + "/model.safetensors",
                                          saved + "/optimizer.safetensors"};
  const Deadline deadline = Deadline::after(std::chrono::hours(1));

  Series copy{"copy in memory"}, stalled{"training stalled by a save"};
  Series plain_write{"plain write and sync"}, save{"save"};
  Series read_again{"plain read into memory that is there"};
  Series read_beside_load{"plain read into new memory"}, load{"load"};
  Series read_beside_verify{"plain read into new memory"}, verify{"verify"};
  for (int round = 0; round < rounds; ++round) {
    copy.times.push_back(seconds([&] { copy_to(snapshot); }));
    in_turn(
        round, save, [&] { save_checkpoint(folder, state); }, plain_write,
        [&] {
          write_plain(folder + "/weights", std::as_bytes(from[0]->span()));
          write_plain(folder + "/moments", std::as_bytes(from[1]->span()));
          write_plain(folder + "/moments2", std::as_bytes(from[2]->span()));
        });
    const auto memory = new_memory(files);
    read_files(files, memory);
    read_again.times.push_back(seconds([&] { read_files(files, memory); }));
    std::optional<TrainingState> loaded;
    std::vector<FloatBuffer> kept;
    in_turn(
        round, load, [&] { loaded = load_checkpoint(saved); }, read_beside_load,
        [&] {
          kept = new_memory(files);
          read_files(files, kept);
        });
    if (std::memcmp(loaded->second_moment.data(), state.second_moment.data(),
                    state.second_moment.size() * sizeof(float)) != 0) {
      fail("what was loaded is not what was saved");
    }
    loaded.reset();
    kept.clear();
    in_turn(
        round, verify,
        [&] {
          StoredFiles stored(saved);
          if (!find_damage(stored, true).empty()) fail("damaged");
        },
        read_beside_verify,
        [&] {
          kept = new_memory(files);
          read_files(files, kept);
        });
    start_over();
    TrainingState room;
    room.run = state.run;
    for (FloatBuffer* buffer : {&room.parameters, &room.first_moment, &room.second_moment}) {
      *buffer = FloatBuffer(from[0]->size());
    }
    CheckpointWriter writer(
        std::move(room), [&](const TrainingState& each) { return save_checkpoint(folder, each); });
    stalled.times.push_back(seconds([&] {
      if (!writer.request_save(2, false, deadline)) fail("skipped");
      writer.write([&](TrainingState& each) { copy_to(each); });
    }));
    writer.finish(deadline);
    start_over();
  }
  std::filesystem::remove_all(folder);

  const std::tuple<std::string, const Series&, const Series&> rows[] = {
      {"checkpoint save / write and sync", save, plain_write},
      {"checkpoint load / plain read into new memory", load, read_beside_load},
      {"checkpoint verify / plain read into new memory", verify, read_beside_verify},
      {"checkpoint load / plain read into memory that is there", load, read_again},
      {"checkpoint verify / plain read into memory that is there", verify, read_again},
  };
  for (const auto& [name, what, beside] : rows) {
    std::vector<double> sorted = ratios(what, beside);
    if (json) {
      fmt::print("{{\"row\": \"{}\", \"ratios\": [{:.4f}]}}\n", name, fmt::join(sorted, ", "));
      continue;
    }
    std::ranges::sort(sorted);
    fmt::print("{}: {:.0f} % (median of pairs, {:.0f} to {:.0f})\n", name,
               100 * sorted[sorted.size() / 2], 100 * sorted.front(), 100 * sorted.back());
  }
  if (json) return 0;
  fmt::print("{:.2f} GB, {} rounds, GB/s: best, median, worst\n", bytes / 1e9, rounds);
  for (Series* each :
       {&copy, &stalled, &plain_write, &save, &read_again, &read_beside_load, &load, &verify}) {
    std::ranges::sort(each->times);
    fmt::print("{:<38} {:6.2f} {:6.2f} {:6.2f}\n", each->name, bytes / each->times.front() / 1e9,
               bytes / each->times[each->times.size() / 2] / 1e9, bytes / each->times.back() / 1e9);
  }
}
