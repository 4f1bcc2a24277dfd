#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/flight_recorder.h"
#include "lockstep/files/storage.h"

namespace lockstep {

// What one rank did last, as it is written to a file and read again; docs/flight_recorder.md
// describes the JSON. Times are nanoseconds of the steady clock of the rank's host; 0: not ended.
struct FlightFile {
  struct Collective {
    std::string name;  // "all_reduce"
    std::string call;  // all that its ranks must agree on, in words
    std::uint32_t generation = 0;
    std::uint32_t group = 0;
    std::uint64_t sequence = 0;
    std::int64_t step = 0;
    std::int64_t bucket = 0;
    std::uint64_t bytes = 0;
    std::int64_t begin = 0;
    std::int64_t end = 0;
    bool failed = false;
    int waited_for = -1;  // a rank of the job: at the end, or for longest; -1: for nobody long
    std::int64_t waited = 0;

    bool open() const { return end == 0 || failed; }
  };

  std::string version;  // of the program
  int rank = -1;        // -1: a newcomer that never had one
  int world_size = 0;
  std::uint32_t generation = 0;
  std::uint32_t tag = 0;
  std::string host;
  std::string boot_id;
  std::int64_t pid = 0;
  std::string written_by;  // "rank 2" or "the launcher"
  std::string why;         // it was written
  std::string last_words;  // of the rank, if it failed by itself
  std::string ended;       // how its process had ended by then, if others had not ended it
  std::int64_t taken = 0;
  std::int64_t unix_offset = 0;  // nanoseconds to add for the time since 1970
  std::vector<FlightSnapshot::Phase> phases;
  std::vector<Collective> collectives;

  // Nanoseconds since 1970 when it was taken.
  std::int64_t written_at() const { return taken + unix_offset; }
  std::string name() const;  // "rank 2"
};

// A snapshot of a process of this host. `written_by` empty: the rank itself.
FlightFile flight_file_of(const FlightSnapshot& snapshot, std::string why,
                          std::string written_by = {});
std::string encode(const FlightFile& file);
// Nothing if it is no such file; `problem` says why.
std::optional<FlightFile> parse_flight_file(std::string_view text, std::string& problem);

// Writes it to FOLDER/generation-NUMBER-TAG/rank-RANK.json, over an older one, and removes all but
// the newest few of such folders. FOLDER is made; a symbolic link in its place is not followed.
// Returns the file's path. Throws Error{kIo}, or what `check` throws, which is called when the file
// is about to appear.
std::string write_flight_file(const std::string& folder, const FlightFile& file,
                              Storage& storage = disk(),
                              const std::function<void(const std::string& path)>& check = {});
inline constexpr std::size_t kKeptGenerations = 8;

// What a run keeps below its own folder.
inline constexpr const char* kFlightFolder = "flight";

// The files of one generation, sorted by rank. Each of `folders` is one with such files, one with
// folders of generations, or that of a run. The generation of the newest file is taken, or the
// newest with `number`. `notes` gets a line for what is left out. Throws Error{kIo} when there is
// nothing.
std::vector<FlightFile> read_flight(const std::vector<std::string>& folders,
                                    std::optional<std::uint32_t> number,
                                    std::vector<std::string>& notes);

}  // namespace lockstep
