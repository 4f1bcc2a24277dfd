#include <cstdlib>
#include <string_view>
#include <variant>

#include "lockstep/base/error.h"
#include "lockstep/train/checkpoint/manifest.h"
#include "lockstep/train/checkpoint/run_state.h"
#include "lockstep/train/formats/model_files.h"

// The first byte chooses the reader. Whatever a reader takes, it writes and reads again as the
// same; whatever it does not take is told with an Error at most.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto require = [](bool condition) {
    if (!condition) std::abort();
  };
  try {
    switch (data[0]) {
      case 'm': {
        const auto parsed = parse_manifest(text);
        if (const auto* manifest = std::get_if<Manifest>(&parsed)) {
          const auto again = parse_manifest(to_json(*manifest));
          require(std::holds_alternative<Manifest>(again));
          require(std::get<Manifest>(again) == *manifest);
        }
        break;
      }
      case 's': {
        const auto parsed = parse_run_state(text);
        if (const auto* state = std::get_if<RunState>(&parsed)) {
          const auto again = parse_run_state(to_json(*state));
          require(std::holds_alternative<RunState>(again));
          require(to_json(std::get<RunState>(again)) == to_json(*state));
          require(compare(*state, std::get<RunState>(again)).forbidden.empty());
        }
        break;
      }
      case 'c': parse_config_json("config.json", text); break;
      default: break;
    }
  } catch (const Error&) {
  }
  return 0;
}
