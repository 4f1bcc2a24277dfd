#include "cli/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <numeric>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/launch/launch.h"
#include "lockstep/launch/rank_environment.h"
#include "lockstep/net/socket/interface.h"

namespace lockstep::cli {
namespace {

std::optional<double> parse_real(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !std::isfinite(value)) return std::nullopt;
  return value;
}

// Names may be written with either.
char dash(char letter) { return letter == '_' ? '-' : letter; }

// How many letters must be inserted, removed or replaced to turn one word into the other.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row[b.size()];
}

// "; did you mean X?", where one of the names is near enough.
std::string suggestion(std::string_view word, const std::vector<std::string>& names) {
  const auto nearest = std::ranges::min_element(
      names, {}, [&](const std::string& name) { return distance(word, name); });
  if (nearest == names.end() ||
      distance(word, *nearest) > std::max<std::size_t>(word.size() > 4 ? 2 : 1, word.size() / 3))
    return "";
  return fmt::format("; did you mean {}?", *nearest);
}

// The subcommand that was being read.
const CLI::App& innermost(const CLI::App& app) {
  const auto parsed = app.get_subcommands();
  return parsed.empty() ? app : innermost(*parsed[0]);
}

std::string command_name(const CLI::App& command) {
  const CLI::App* parent = command.get_parent();
  return parent == nullptr ? command.get_name() : command_name(*parent) + " " + command.get_name();
}

bool has_option(const CLI::App& command, const std::string& name) {
  return const_cast<CLI::App&>(command).get_option_no_throw(name) != nullptr;
}

// Of which an empty value is an empty variable of the shell.
bool takes_path(const CLI::Option& option) {
  const std::string text = option.get_option_text();
  return text.starts_with("DIR") || text.starts_with("PATH") || text.starts_with("FILE");
}

// What other programs call our options.
constexpr std::pair<std::string_view, std::string_view> kCalledElsewhere[] = {
    {"--learning-rate", "--lr"}, {"--batch", "--global-batch"}, {"--batch-size", "--global-batch"},
    {"--epochs", "--steps"},     {"--max-steps", "--steps"},    {"--output", "--out"},
    {"--seq-len", "--context"},  {"--gpu", "--device"},         {"--max-tokens", "--tokens"},
};

std::string unexpected(const CLI::App& command, const std::string& word) {
  std::vector<std::string> names;
  if (word.starts_with("-")) {
    for (const CLI::Option* option : command.get_options()) {
      for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    }
    const std::string flag = word.substr(0, word.find('='));
    std::string hint = suggestion(flag, names);
    for (const auto& [others, ours] : kCalledElsewhere) {
      if (flag == others && has_option(command, std::string(ours))) {
        hint = fmt::format("; did you mean {}?", ours);
      }
    }
    return fmt::format("{} has no option {}{}", command_name(command), flag, hint);
  }
  for (const CLI::App* each : command.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(each->get_name());
  }
  if (word == "train" && command.get_name() == "launch") {
    return fmt::format("{}: -- is missing ahead of train", command_name(command));
  }
  if (names.empty())
    return fmt::format("{}: '{}' is one word too many", command_name(command), word);
  return fmt::format("{} has no command {}{}", command_name(command), word,
                     suggestion(word, names));
}

// "lockstep bench needs a command: allreduce or step"
std::string missing_command(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::App* each : command.get_subcommands([](const CLI::App*) { return true; })) {
    if (!each->get_group().empty()) names.push_back(each->get_name());
  }
  return fmt::format("{} needs a command: {}", command_name(command), fmt::join(names, ", "));
}

// "lockstep generate needs MODEL: the model's folder"
std::string missing_argument(const CLI::App& command) {
  for (const CLI::Option* option : command.get_options()) {
    if (!option->get_required() || option->count() > 0) continue;
    std::string description = option->get_description();
    if (!description.empty()) {
      description[0] = static_cast<char>(std::tolower(static_cast<unsigned char>(description[0])));
    }
    const std::string text = option->get_option_text();
    return fmt::format("{} needs {}: {}", command_name(command),
                       option->get_positional() ? text.substr(0, text.find_first_of(" ."))
                                                : fmt::format("{} {}", option->get_name(), text),
                       description);
  }
  return "";
}

// What CLI11 says, in words of ours.
std::string in_plain_words(const CLI::App& command, const CLI::ParseError& error) {
  const std::string said = error.what();
  if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr) {
    std::string argument = missing_argument(command);
    return argument.empty() ? missing_command(command) : argument;
  }
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr) {
    return said.substr(0, said.find(':')) + " needs a value";
  }
  // "Could not convert: --dry-run = maybe"
  constexpr std::string_view kConvert = "Could not convert: ";
  const std::size_t equals = said.find(" = ");
  if (said.starts_with(kConvert) && equals != std::string::npos) {
    return fmt::format("{}: {} is neither true nor false",
                       said.substr(kConvert.size(), equals - kConvert.size()),
                       said.substr(equals + 3));
  }
  return said;
}

}  // namespace

std::optional<std::string> unknown_command(CLI::App& app, const std::vector<std::string>& words) {
  const CLI::App* command = &app;
  for (const std::string& word : words) {
    if (word.starts_with('-')) continue;
    const auto below =
        command->get_subcommands([&](const CLI::App* each) { return each->get_name() == word; });
    if (below.empty()) {
      return fmt::format("{} ({} --help explains it)", unexpected(*command, word),
                         command_name(*command));
    }
    command = below[0];
  }
  return std::nullopt;
}

std::optional<std::string> missing_value(CLI::App& app, const std::vector<std::string>& words) {
  CLI::App* command = &app;
  for (std::size_t i = 0; i < words.size() && words[i] != "--"; ++i) {
    if (!words[i].starts_with('-')) {
      for (CLI::App* below : command->get_subcommands([](CLI::App*) { return true; })) {
        if (below->get_name() == words[i]) command = below;
      }
      continue;
    }
    const std::size_t equals = words[i].find('=');
    const bool apart = equals == std::string::npos;  // not --out=DIR
    const std::string name = words[i].substr(0, equals);
    const CLI::Option* option = command->get_option_no_throw(name);
    if (option == nullptr || option->get_items_expected_max() == 0) continue;
    if (apart && option->get_items_expected_min() == 0) continue;
    const bool last = apart && i + 1 == words.size();
    const std::string value = last ? "" : apart ? words[i + 1] : words[i].substr(equals + 1);
    if (last || (value.empty() && takes_path(*option)) ||
        (apart && value.starts_with("--") &&
         has_option(*command, value.substr(0, value.find('='))))) {
      return fmt::format("{} needs a value ({} --help explains it)", name, command_name(*command));
    }
    if (apart) ++i;
  }
  return std::nullopt;
}

std::vector<std::string> take_program(const CLI::App& command, std::vector<std::string>& words) {
  std::size_t end = 1;  // behind the command's name
  for (; end < words.size() && words[end].starts_with('-') && words[end] != "--"; ++end) {
    const CLI::Option* option = command.get_option_no_throw(words[end]);
    if (option != nullptr && option->get_items_expected_min() > 0) ++end;
  }
  end = std::min(end, words.size());
  const std::size_t begin = end < words.size() && words[end] == "--" ? end + 1 : end;
  std::vector<std::string> program(words.begin() + static_cast<std::ptrdiff_t>(begin), words.end());
  words.resize(end);
  return program;
}

CLI::Validator tokenizer_name() {
  return {[](std::string& text) -> std::string {
            const std::vector<std::string> names = {"bytes", "sentencepiece", "bpe"};
            if (std::ranges::find(names, text) != names.end()) return "";
            if (std::filesystem::exists(text)) return "";
            return fmt::format("{} is none of {}, and there is no such file or folder{}", text,
                               fmt::join(names, ", "), suggestion(text, names));
          },
          "bytes sentencepiece bpe", kOneOf};
}

CLI::Validator one_of(const std::vector<std::string>& names) {
  return {[names](std::string& text) -> std::string {
            const auto same = [&](const std::string& name) {
              return std::ranges::equal(name, text, {}, dash, dash);
            };
            if (std::ranges::any_of(names, same)) return "";
            return fmt::format("{} is none of {}{}", text, fmt::join(names, ", "),
                               suggestion(text, names));
          },
          fmt::format("{}", fmt::join(names, " ")), kOneOf};
}

CLI::Validator whole_number(std::int64_t least, std::int64_t most) {
  return {[least, most](std::string& text) -> std::string {
            std::int64_t value = 0;
            const auto [end, error] =
                std::from_chars(text.data(), text.data() + text.size(), value);
            if (error != std::errc() || end != text.data() + text.size()) {
              if (text.empty()) return "a number is missing";
              const auto real = parse_real(text);  // such as 1e6
              if (real && std::floor(*real) == *real && *real > static_cast<double>(most)) {
                return fmt::format("{} is too large; at most {}", text, most);
              }
              if (!real || std::abs(*real) > 1e15 || std::floor(*real) != *real) {
                return fmt::format("{} is not a whole number", text);
              }
              value = static_cast<std::int64_t>(*real);
              text = std::to_string(value);
            }
            if (value < least) return fmt::format("{} is too small; at least {}", text, least);
            if (value > most) return fmt::format("{} is too large; at most {}", text, most);
            return "";
          },
          ""};
}

CLI::Validator any_seed() { return whole_number(0, std::numeric_limits<std::int64_t>::max()); }

CLI::Validator real_number(double least, double most) {
  return {[least, most](std::string& text) -> std::string {
            const auto value = parse_real(text);
            if (text.empty()) return "a number is missing";
            if (!value) return fmt::format("{} is not a number", text);
            if (*value < least) return fmt::format("{} is too small; at least {}", text, least);
            if (*value > most) return fmt::format("{} is too large; at most {}", text, most);
            return "";
          },
          ""};
}

void let_the_last_count(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    if (option->get_items_expected_max() == 1) {
      option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    }
  }
  for (CLI::App* each : app.get_subcommands([](CLI::App*) { return true; })) {
    let_the_last_count(*each);
  }
}

std::string usage_problem(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App& command = innermost(app);
  const auto words = app.remaining(true);
  // Of a word that is no subcommand CLI11 says only that one is required.
  const bool extra = !words.empty() && (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr ||
                                        dynamic_cast<const CLI::RequiredError*>(&error) != nullptr);
  return fmt::format("{} ({} --help explains it)",
                     extra ? unexpected(command, words[0]) : in_plain_words(command, error),
                     command_name(command));
}

void add_wire_compression(CLI::App& command, WireCompression& compression) {
  add_choice(command, "--wire-compress", compression,
             "Compress what goes to other hosts, without loss: auto (where the link is slow beside "
             "the processor), on or off",
             {WireCompression::kAuto, WireCompression::kOn, WireCompression::kOff})
      ->option_text("NAME [auto]");
}

CLI::Option* add_device_option(CLI::App& command, std::string& device) {
  return command
      .add_option("--device", device,
                  "cpu, cuda, or auto: a GPU if there is one, otherwise the CPU")
      ->check(one_of({"cpu", "cuda", "auto"}))
      ->option_text("NAME [cpu]");
}

CLI::Option* add_options_file(CLI::App& command, std::string& path) {
  return command
      .add_option(
          "--config", path,
          "A TOML file with any of these options, by the same names, in no section or in [train]")
      ->option_text("FILE");
}

void apply_options_file(CLI::App& command, const std::string& path) {
  if (path.empty()) return;
  std::ifstream file(path);
  if (!file) throw CLI::FileError(fmt::format("opening {}: {}", path, std::strerror(errno)));
  if (std::filesystem::is_directory(path)) {
    throw CLI::FileError(fmt::format("{}: this is a folder, and not a TOML file", path));
  }
  for (CLI::ConfigItem& item : CLI::ConfigTOML().from_config(file)) {
    if (!item.parents.empty() && item.parents != std::vector{command.get_name()}) {
      throw CLI::ConfigError(fmt::format(
          "{}: [{}] is not of {}: its options stand in no section or "
          "in [{}]",
          path, fmt::join(item.parents, "."), command_name(command), command.get_name()));
    }
    std::ranges::replace(item.name, '_', '-');             // either spelling will do
    if (item.name == "--" || item.name == "++") continue;  // where a section begins or ends
    CLI::Option* option = command.get_option_no_throw("--" + item.name);
    if (option == nullptr || item.name == "config" || item.name == "help") {
      throw CLI::ConfigError(fmt::format("{}: '{}' is not an option of {}", path, item.fullname(),
                                         command.get_name()));
    }
    if (option->count() > 0) continue;
    try {
      for (const std::string& value : item.inputs) option->add_result(value);
      option->run_callback();
    } catch (const CLI::ParseError& error) {
      throw CLI::ConfigError(fmt::format("{}: {}", path, in_plain_words(command, error)));
    }
  }
}

void refuse_together(const CLI::App& command, const std::string& option,
                     const std::vector<std::string>& others) {
  if (command.get_option(option)->count() == 0) return;
  for (const std::string& other : others) {
    if (command.get_option(other)->count() == 0) continue;
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} does not go with {}", other, option));
  }
}

namespace {

std::string find_token(const std::string& file) {
  if (!file.empty()) return read_token_file(file);
  if (std::string token = launched_token(); !token.empty()) return token;
  const char* value = std::getenv(kTokenVariable);
  return value == nullptr ? "" : value;
}

}  // namespace

std::string token_from(const std::string& file) {
  std::string token = find_token(file);
  static bool told = false;
  if (is_launched()) told = true;  // by our launcher, for its ranks
  if (!token.empty() && token.size() < kLeastToken && !std::exchange(told, true)) {
    log(LogLevel::kWarning,
        "the job's token has {} bytes and can be guessed: on this host it keeps other users out "
        "no better than none does, between hosts it is refused; take {} bytes or more, at random "
        "(openssl rand -hex 16 >FILE)",
        token.size(), kLeastToken);
  }
  return token;
}

std::chrono::nanoseconds duration_of(double seconds) {
  return std::chrono::round<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
}

}  // namespace lockstep::cli
