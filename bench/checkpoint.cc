// How fast checkpoints are saved and loaded, beside plain copies of the same bytes.
// usage: checkpoint FOLDER [MODEL=124m] [ROUNDS=5]      FOLDER is on the disk to be measured.

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
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

void write_plain(const std::string& path, std::span<const float> values) {
  const Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666));
  auto rest = std::as_bytes(values);
  while (!rest.empty()) {
    const ssize_t done = ::write(file.get(), rest.data(), std::min(rest.size(), kPiece));
    if (done <= 0) fail("writing " + path);
    rest = rest.subspan(static_cast<std::size_t>(done));
  }
  if (::fsync(file.get()) != 0) fail("syncing " + path);
}

void read_plain(const std::string& path, std::span<float> values) {
  const Descriptor file(::open(path.c_str(), O_RDONLY));
  auto rest = std::as_writable_bytes(values);
  while (!rest.empty()) {
    const ssize_t done = ::read(file.get(), rest.data(), std::min(rest.size(), kPiece));
    if (done <= 0) fail("reading " + path);
    rest = rest.subspan(static_cast<std::size_t>(done));
  }
}

struct Series {
  std::string name;
  std::vector<double> times = {};
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) fail("usage: checkpoint FOLDER [MODEL] [ROUNDS]");
  const std::string folder = std::string(argv[1]) + "/checkpoint_bench";
  const auto model = named_model(argc > 2 ? argv[2] : "124m");
  if (!model) fail("no such model");
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 5;
  std::filesystem::remove_all(folder);
  make_folder(folder);

  const TrainingState state = make_state(*model);
  TrainingState snapshot = make_state(*model);
  const std::vector<const FloatBuffer*> from = {&state.parameters, &state.first_moment,
                                                &state.second_moment};
  const std::vector<FloatBuffer*> to = {&snapshot.parameters, &snapshot.first_moment,
                                        &snapshot.second_moment};
  const double bytes = 3.0 * sizeof(float) * static_cast<double>(state.parameters.size());
  std::vector<Series> series = {
      {"copy in memory"}, {"plain write and sync"}, {"save"}, {"plain read"}, {"load"},
      {"verify"},         {"stalled by a save"}};
  for (int round = 0; round < rounds; ++round) {
    series[0].times.push_back(seconds([&] {
      for (std::size_t i = 0; i < 3; ++i) {
        std::memcpy(to[i]->data(), from[i]->data(), from[i]->size() * sizeof(float));
      }
    }));
    series[1].times.push_back(seconds([&] {
      for (std::size_t i = 0; i < 3; ++i) {
        write_plain(fmt::format("{}/plain{}", folder, i), from[i]->span());
      }
    }));
    series[2].times.push_back(seconds([&] { save_checkpoint(folder, state); }));
    series[3].times.push_back(seconds([&] {
      for (std::size_t i = 0; i < 3; ++i) {
        read_plain(fmt::format("{}/plain{}", folder, i), to[i]->span());
      }
    }));
    TrainingState loaded;
    series[4].times.push_back(
        seconds([&] { loaded = load_checkpoint(checkpoint_path(folder, 1)); }));
    if (std::memcmp(loaded.second_moment.data(), state.second_moment.data(),
                    state.second_moment.size() * sizeof(float)) != 0) {
      fail("what was loaded is not what was saved");
    }
    series[5].times.push_back(seconds([&] {
      StoredFiles files(checkpoint_path(folder, 1));
      if (!find_damage(files, true).empty()) fail("damaged");
    }));
    std::filesystem::remove_all(folder);
    make_folder(folder);
    TrainingState room;
    room.run = state.run;
    for (FloatBuffer* buffer : {&room.parameters, &room.first_moment, &room.second_moment}) {
      *buffer = FloatBuffer(from[0]->size());
    }
    CheckpointWriter writer(
        std::move(room), [&](const TrainingState& copy) { return save_checkpoint(folder, copy); });
    const auto snapshot_into = [&](TrainingState& copy) {
      const FloatBuffer* into[] = {&copy.parameters, &copy.first_moment, &copy.second_moment};
      for (std::size_t i = 0; i < 3; ++i) {
        std::memcpy(into[i]->data(), from[i]->data(), from[i]->size() * sizeof(float));
      }
    };
    const Deadline deadline = Deadline::after(std::chrono::minutes(10));
    series[6].times.push_back(seconds([&] {
      if (!writer.request_save(2, false, deadline)) fail("skipped");
      writer.write(snapshot_into);
    }));
    writer.finish(deadline);
    std::filesystem::remove_all(folder);
    make_folder(folder);
  }
  struct Requirement {
    const Series& what;
    const Series& beside;
    double least;
  };
  for (const auto& [what, beside, least] :
       {Requirement{series[2], series[1], 0.95}, Requirement{series[4], series[3], 0.80},
        Requirement{series[5], series[3], 0.80}}) {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < what.times.size(); ++i) {
      ratios.push_back(beside.times[i] / what.times[i]);
    }
    std::ranges::sort(ratios);
    fmt::print(
        "{}: {:.0f} % of the rate of {} (median of pairs, {:.0f} to {:.0f}; required {:.0f})\n",
        what.name, 100 * ratios[ratios.size() / 2], beside.name, 100 * ratios.front(),
        100 * ratios.back(), 100 * least);
  }
  fmt::print("{:.2f} GB, {} rounds, GB/s: best, median, worst\n", bytes / 1e9, rounds);
  for (Series& each : series) {
    std::ranges::sort(each.times);
    fmt::print("{:<22} {:6.2f} {:6.2f} {:6.2f}\n", each.name, bytes / each.times.front() / 1e9,
               bytes / each.times[each.times.size() / 2] / 1e9, bytes / each.times.back() / 1e9);
  }
  std::filesystem::remove_all(folder);
}
