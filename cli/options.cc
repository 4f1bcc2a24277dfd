#include "cli/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "lockstep/launch/rank_environment.h"

namespace lockstep::cli {

CLI::Option* add_device_option(CLI::App& command, std::string& device) {
  return command
      .add_option("--device", device,
                  "cpu, cuda, or auto: a GPU if there is one, otherwise the CPU")
      ->check(CLI::IsMember({"cpu", "cuda", "auto"}))
      ->option_text("NAME [cpu]");
}

CLI::Option* add_options_file(CLI::App& command, std::string& path) {
  return command
      .add_option("--config", path, "A TOML file with any of these options, by the same names")
      ->option_text("FILE");
}

void apply_options_file(CLI::App& command, const std::string& path) {
  if (path.empty()) return;
  std::ifstream file(path);
  if (!file) throw CLI::FileError::Missing(path);
  for (CLI::ConfigItem& item : CLI::ConfigTOML().from_config(file)) {
    std::ranges::replace(item.name, '_', '-');             // either spelling will do
    if (item.name == "--" || item.name == "++") continue;  // where a section begins or ends
    CLI::Option* option = command.get_option_no_throw("--" + item.name);
    if (option == nullptr || item.name == "config" || item.name == "help") {
      throw CLI::ConfigError(
          fmt::format("{}: '{}' is no option of {}", path, item.fullname(), command.get_name()));
    }
    if (option->count() > 0) continue;
    try {
      for (const std::string& value : item.inputs) option->add_result(value);
      option->run_callback();
    } catch (const CLI::ParseError& error) {
      throw CLI::ConfigError(fmt::format("{}: {}: {}", path, item.name, error.what()));
    }
  }
}

std::string token_from(const std::string& file) {
  if (!file.empty()) return read_token_file(file);
  const char* value = std::getenv(kTokenVariable);
  return value == nullptr ? "" : value;
}

std::chrono::nanoseconds duration_of(double seconds) {
  return std::chrono::round<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
}

}  // namespace lockstep::cli
