#include "lockstep/data/grammar.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/index.h"
#include "lockstep/base/random.h"

namespace lockstep {
namespace {

using Symbol = GrammarSymbol;
using Kind = GrammarSymbol::Kind;

std::string_view trim(std::string_view text) {
  const auto first = text.find_first_not_of(' ');
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(' ') - first + 1);
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (;;) {
    const auto end = text.find(separator);
    parts.emplace_back(trim(text.substr(0, end)));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

// Names are looked up when all of the text is read, so rules may stand in any order.
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Grammar parse() {
    collect_lines();
    for (const auto& [rule, lines] : rule_lines_) {
      for (const std::string_view line : lines) add_alternative(rule, line);
    }
    return std::move(grammar_);
  }

 private:
  [[noreturn]] void fail(std::string_view where, std::string_view what) const {
    fmt::print(stderr, "grammar: {}: {}\n", what, where);
    std::abort();
  }

  void collect_lines() {
    enum class Section { kNone, kTable, kRule, kStory } section = Section::kNone;
    std::vector<std::string_view> story;
    for (std::string_view rest = text_; !rest.empty();) {
      const auto end = std::min(rest.find('\n'), rest.size());
      const std::string_view line = rest.substr(0, end);
      rest.remove_prefix(std::min(end + 1, rest.size()));
      const std::string_view words = trim(line);
      if (words.empty() || words[0] == '#') continue;
      if (line[0] != ' ') {
        const auto head = split(words, ' ');
        if (head[0] == "table" && head.size() == 2) {
          section = Section::kTable;
          grammar_.tables.push_back({head[1], {}, {}});
        } else if (head[0] == "rule" && head.size() == 2) {
          section = Section::kRule;
          rule_lines_.emplace_back(grammar_.rules.size(), std::vector<std::string_view>());
          grammar_.rules.push_back({head[1], {}, 0});
        } else if (words == "story") {
          section = Section::kStory;
        } else {
          fail(line, "neither table, rule nor story");
        }
        continue;
      }
      switch (section) {
        case Section::kNone: fail(line, "belongs to nothing");
        case Section::kTable: add_row(words); break;
        case Section::kRule: rule_lines_.back().second.push_back(words); break;
        case Section::kStory: story.push_back(words); break;
      }
    }
    // The story names the variables that rules speak of.
    for (const std::string_view line : story) {
      if (!grammar_.story.empty()) grammar_.story.push_back({.text = "\n"});
      const auto symbols = parse_symbols(line, true);
      grammar_.story.insert(grammar_.story.end(), symbols.begin(), symbols.end());
    }
  }

  void add_row(std::string_view line) {
    GrammarTable& table = grammar_.tables.back();
    auto fields = split(line, ';');
    if (table.fields.empty()) {
      table.fields = std::move(fields);
    } else if (fields.size() != table.fields.size()) {
      fail(line, fmt::format("{} has {} fields", table.name, table.fields.size()));
    } else {
      table.rows.push_back(std::move(fields));
    }
  }

  void add_alternative(std::size_t rule, std::string_view line) {
    GrammarAlternative alternative;
    const auto star = line.find("* ");
    if (star != std::string_view::npos && star > 0 && std::isdigit(line[0])) {
      const auto parsed = std::from_chars(line.data(), line.data() + star, alternative.weight);
      if (parsed.ptr != line.data() + star || alternative.weight == 0) fail(line, "bad weight");
      line.remove_prefix(star + 2);
    }
    alternative.symbols = parse_symbols(line, false);
    grammar_.rules[rule].total_weight += alternative.weight;
    grammar_.rules[rule].alternatives.push_back(std::move(alternative));
  }

  std::vector<Symbol> parse_symbols(std::string_view line, bool story) {
    std::vector<Symbol> symbols;
    std::string text;
    const auto flush = [&] {
      if (!text.empty()) symbols.push_back({.text = std::exchange(text, {})});
    };
    while (!line.empty()) {
      const char open = line[0];
      const char close = open == '[' ? ']' : open == '{' ? '}' : open == '<' ? '>' : '\0';
      if (close == '\0') {
        text += open == '~' ? '\n' : open;
        line.remove_prefix(1);
        continue;
      }
      const auto end = line.find(close);
      if (end == std::string_view::npos) fail(line, "not closed");
      const std::string_view name = line.substr(1, end - 1);
      line.remove_prefix(end + 1);
      flush();
      switch (open) {
        case '<':
          if (!story) fail(name, "only the story chooses");
          symbols.push_back(parse_choice(name));
          break;
        case '{': symbols.push_back(parse_field(name, Kind::kField)); break;
        default: symbols.push_back(parse_rule(name)); break;
      }
    }
    flush();
    return symbols;
  }

  Symbol parse_choice(std::string_view name) {
    Symbol symbol{.kind = Kind::kChoice};
    const auto colon = name.find(':');
    const std::string variable(name.substr(0, colon));
    if (variable_named(variable) >= 0) fail(name, "chosen twice");
    symbol.table = -1;
    int fields_from = -1;
    if (colon == std::string_view::npos) {
      symbol.table = fields_from = grammar_.table_named(variable);
    } else {
      const Symbol from = parse_field(name.substr(colon + 1), Kind::kNamedRule);
      symbol.named_by = from.variable;
      symbol.field = from.field;
      const GrammarTable& by = table_of(from.variable);
      for (const auto& row : by.rows) {
        fields_from = grammar_.table_named(row[index_of(from.field)]);
        if (fields_from < 0) fail(row[index_of(from.field)], "no such table");
      }
    }
    if (fields_from < 0) fail(name, "no such table");
    symbol.variable = static_cast<int>(grammar_.variables.size());
    grammar_.variables.push_back(variable);
    grammar_.variable_tables.push_back(fields_from);
    return symbol;
  }

  Symbol parse_field(std::string_view name, Kind kind) {
    Symbol symbol{.kind = kind};
    const auto dot = name.find('.');
    if (dot == std::string_view::npos) fail(name, "no field");
    std::string variable(name.substr(0, dot));
    symbol.capital = std::isupper(static_cast<unsigned char>(variable[0])) != 0;
    variable[0] = static_cast<char>(std::tolower(static_cast<unsigned char>(variable[0])));
    symbol.variable = variable_named(variable);
    if (symbol.variable < 0) fail(name, "not chosen yet");
    const auto& fields = table_of(symbol.variable).fields;
    const auto found = std::ranges::find(fields, name.substr(dot + 1));
    if (found == fields.end()) fail(name, "no such field");
    symbol.field = static_cast<int>(found - fields.begin());
    return symbol;
  }

  Symbol parse_rule(std::string_view name) {
    if (name.find('.') != std::string_view::npos) return parse_field(name, Kind::kNamedRule);
    Symbol symbol{.kind = Kind::kRule, .rule = grammar_.rule_named(name)};
    if (symbol.rule < 0) fail(name, "no such rule");
    return symbol;
  }

  int variable_named(std::string_view name) const {
    const auto found = std::ranges::find(grammar_.variables, name);
    return found == grammar_.variables.end() ? -1
                                             : static_cast<int>(found - grammar_.variables.begin());
  }

  const GrammarTable& table_of(int variable) const {
    return grammar_.tables[static_cast<std::size_t>(grammar_.variable_tables[index_of(variable)])];
  }

  std::string_view text_;
  Grammar grammar_;
  std::vector<std::pair<std::size_t, std::vector<std::string_view>>> rule_lines_;
};

// Numbers of a stream of their own, so that other uses of the seed do not share them.
constexpr std::uint64_t kStories = std::uint64_t{0x53544f52} << 32;  // "STOR"

class Generator {
 public:
  Generator(const Grammar& grammar, std::uint64_t seed, std::uint64_t index)
      : grammar_(grammar), seed_(seed), index_(index), values_(grammar.variables.size()) {}

  GrammarText generate() {
    write(grammar_.story);
    return std::move(result_);
  }

 private:
  // In [0, total); a bias of 2^-64 times the total is below what a double can tell.
  std::uint32_t choose(std::uint32_t total) {
    return static_cast<std::uint32_t>(random_u64(seed_, kStories + count_++, index_) % total);
  }

  void write(const std::vector<Symbol>& symbols) {
    for (const Symbol& symbol : symbols) write(symbol);
  }

  void write(const Symbol& symbol) {
    switch (symbol.kind) {
      case Kind::kText: result_.text += symbol.text; break;
      case Kind::kField: write_field(symbol); break;
      case Kind::kRule: write_rule(symbol.rule); break;
      case Kind::kNamedRule:
        write_rule(grammar_.rule_named(field_of(grammar_, values_, symbol.variable, symbol.field)));
        break;
      case Kind::kChoice: choose_value(symbol); break;
    }
  }

  void write_field(const Symbol& symbol) {
    const std::size_t begin = result_.text.size();
    result_.text += field_of(grammar_, values_, symbol.variable, symbol.field);
    char& first = result_.text[begin];
    if (symbol.capital) first = static_cast<char>(std::toupper(static_cast<unsigned char>(first)));
  }

  void write_rule(int index) {
    const GrammarRule& rule = grammar_.rules[index_of(index)];
    std::uint32_t ticket = choose(rule.total_weight);
    for (const GrammarAlternative& alternative : rule.alternatives) {
      if (ticket < alternative.weight) {
        result_.bits += std::log2(static_cast<double>(rule.total_weight) / alternative.weight);
        write(alternative.symbols);
        return;
      }
      ticket -= alternative.weight;
    }
  }

  void choose_value(const Symbol& symbol) {
    const int table =
        symbol.table >= 0
            ? symbol.table
            : grammar_.table_named(field_of(grammar_, values_, symbol.named_by, symbol.field));
    const auto& rows = grammar_.tables[index_of(table)].rows;
    const std::uint32_t row = choose(static_cast<std::uint32_t>(rows.size()));
    values_[index_of(symbol.variable)] = {table, static_cast<int>(row)};
    result_.bits += std::log2(static_cast<double>(rows.size()));
    result_.text += rows[row][0];
  }

  const Grammar& grammar_;
  const std::uint64_t seed_;
  const std::uint64_t index_;
  std::uint64_t count_ = 0;
  GrammarValues values_;
  GrammarText result_;
};

}  // namespace

int Grammar::rule_named(std::string_view name) const {
  const auto found = std::ranges::find(rules, name, &GrammarRule::name);
  return found == rules.end() ? -1 : static_cast<int>(found - rules.begin());
}

int Grammar::table_named(std::string_view name) const {
  const auto found = std::ranges::find(tables, name, &GrammarTable::name);
  return found == tables.end() ? -1 : static_cast<int>(found - tables.begin());
}

Grammar parse_grammar(std::string_view text) { return Parser(text).parse(); }

const std::string& field_of(const Grammar& grammar, const GrammarValues& values, int variable,
                            int field) {
  const GrammarValue value = values[index_of(variable)];
  LOCKSTEP_CHECK(value.table >= 0);
  return grammar.tables[index_of(value.table)].rows[index_of(value.row)][index_of(field)];
}

GrammarText generate_text(const Grammar& grammar, std::uint64_t seed, std::uint64_t index) {
  return Generator(grammar, seed, index).generate();
}

}  // namespace lockstep
