#include "cli/stories/grammar.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/index.h"
#include "lockstep/base/random.h"

namespace lockstep::cli {
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

using Variables = std::vector<bool>;

// By linearity the mean of a text is the sum of the means of the story's symbols. The mean of one
// symbol is taken over every assignment of the variables it depends on, and of no others, so
// nothing is sampled and the number of terms stays small.
class Means {
 public:
  explicit Means(const Grammar& grammar)
      : grammar_(grammar), values_(grammar.variables.size()), choices_(grammar.variables.size()) {
    for (const Symbol& symbol : grammar.story) {
      if (symbol.kind == Kind::kChoice) {
        choices_[index_of(symbol.variable)] = &symbol;
      }
    }
  }

  GrammarMeans all() {
    GrammarMeans sum;
    for (const Symbol& symbol : grammar_.story) {
      Variables needed(values_.size());
      depend(symbol, needed);
      const GrammarMeans mean = mean_over(needed, 0, symbol);
      sum.bits += mean.bits;
      sum.bytes += mean.bytes;
    }
    return sum;
  }

 private:
  // Marks the variables that the means of `symbol` depend on, and those that these depend on.
  void depend(const Symbol& symbol, Variables& needed) const {
    switch (symbol.kind) {
      case Kind::kText: return;
      case Kind::kField: return need(symbol.variable, needed);
      case Kind::kRule: return depend_on_rule(symbol.rule, needed);
      case Kind::kNamedRule:
        need(symbol.variable, needed);
        for (const GrammarTable& table : grammar_.tables) {
          if (table.fields != fields_of(symbol.variable)) continue;
          for (const auto& row : table.rows) {
            depend_on_rule(grammar_.rule_named(row[index_of(symbol.field)]), needed);
          }
        }
        return;
      case Kind::kChoice:
        if (symbol.named_by >= 0) need(symbol.named_by, needed);
        return;
    }
  }

  void depend_on_rule(int rule, Variables& needed) const {
    for (const auto& alternative : grammar_.rules[index_of(rule)].alternatives) {
      for (const Symbol& symbol : alternative.symbols) depend(symbol, needed);
    }
  }

  void need(int variable, Variables& needed) const {
    needed[index_of(variable)] = true;
    const int parent = choices_[index_of(variable)]->named_by;
    if (parent >= 0) need(parent, needed);
  }

  const std::vector<std::string>& fields_of(int variable) const {
    return grammar_.tables[static_cast<std::size_t>(grammar_.variable_tables[index_of(variable)])]
        .fields;
  }

  int table_of(const Symbol& choice) const {
    return choice.table >= 0
               ? choice.table
               : grammar_.table_named(field_of(grammar_, values_, choice.named_by, choice.field));
  }

  // Variables are chosen in order, so those that another depends on have their values by then.
  GrammarMeans mean_over(const Variables& needed, std::size_t variable, const Symbol& symbol) {
    while (variable < needed.size() && !needed[variable]) ++variable;
    if (variable == needed.size()) return mean_of(symbol);
    const int table = table_of(*choices_[variable]);
    const auto rows = static_cast<int>(grammar_.tables[index_of(table)].rows.size());
    GrammarMeans sum;
    for (int row = 0; row < rows; ++row) {
      values_[variable] = {table, row};
      const GrammarMeans mean = mean_over(needed, variable + 1, symbol);
      sum.bits += mean.bits;
      sum.bytes += mean.bytes;
    }
    return {sum.bits / rows, sum.bytes / rows};
  }

  GrammarMeans mean_of(const Symbol& symbol) const {
    switch (symbol.kind) {
      case Kind::kText: return {0, static_cast<double>(symbol.text.size())};
      case Kind::kField:
        return {0, static_cast<double>(
                       field_of(grammar_, values_, symbol.variable, symbol.field).size())};
      case Kind::kRule: return mean_of_rule(symbol.rule);
      case Kind::kNamedRule:
        return mean_of_rule(
            grammar_.rule_named(field_of(grammar_, values_, symbol.variable, symbol.field)));
      case Kind::kChoice: break;
    }
    const auto& rows = grammar_.tables[index_of(table_of(symbol))].rows;
    double bytes = 0;
    for (const auto& row : rows) bytes += static_cast<double>(row[0].size());
    const auto count = static_cast<double>(rows.size());
    return {std::log2(count), bytes / count};
  }

  GrammarMeans mean_of_rule(int index) const {
    const GrammarRule& rule = grammar_.rules[index_of(index)];
    GrammarMeans sum;
    for (const GrammarAlternative& alternative : rule.alternatives) {
      const double share = static_cast<double>(alternative.weight) / rule.total_weight;
      sum.bits -= share * std::log2(share);
      for (const Symbol& symbol : alternative.symbols) {
        const GrammarMeans mean = mean_of(symbol);
        sum.bits += share * mean.bits;
        sum.bytes += share * mean.bytes;
      }
    }
    return sum;
  }

  const Grammar& grammar_;
  GrammarValues values_;
  std::vector<const Symbol*> choices_;
};

// Two alternatives must differ within so many bytes.
constexpr std::size_t kLookAhead = 40;

// The beginnings of the texts of a piece of grammar, whole texts where they are shorter. Variables
// are taken as if every mention could have any value: more texts than there are, so what is told
// apart here is told apart in truth.
using Beginnings = std::set<std::string>;

Beginnings append(const Beginnings& left, const Beginnings& right) {
  Beginnings joined;
  for (const std::string& start : left) {
    if (start.size() == kLookAhead) {
      joined.insert(start);
    } else {
      for (const std::string& end : right) joined.insert((start + end).substr(0, kLookAhead));
    }
  }
  return joined;
}

class Checker {
 public:
  explicit Checker(const Grammar& grammar) : grammar_(grammar) {}

  std::optional<std::string> check() {
    for (const GrammarRule& rule : grammar_.rules) {
      std::vector<Beginnings> branches;
      for (const auto& alternative : rule.alternatives) {
        branches.push_back(beginnings(alternative.symbols));
      }
      if (auto found = collision("rule " + rule.name, branches)) return found;
    }
    for (const GrammarTable& table : grammar_.tables) {
      std::vector<Beginnings> branches;
      for (const auto& row : table.rows) branches.push_back({row[0].substr(0, kLookAhead)});
      if (auto found = collision("table " + table.name, branches)) return found;
    }
    return std::nullopt;
  }

 private:
  static std::optional<std::string> collision(const std::string& where,
                                              const std::vector<Beginnings>& branches) {
    for (std::size_t i = 0; i < branches.size(); ++i) {
      for (std::size_t j = i + 1; j < branches.size(); ++j) {
        for (const std::string& a : branches[i]) {
          for (const std::string& b : branches[j]) {
            if (a.starts_with(b) || b.starts_with(a)) {
              return fmt::format("{}: '{}' or '{}'", where, a, b);
            }
          }
        }
      }
    }
    return std::nullopt;
  }

  Beginnings beginnings(const std::vector<Symbol>& symbols) const {
    Beginnings all = {""};
    for (const Symbol& symbol : symbols) {
      if (std::ranges::all_of(all, [](const auto& s) { return s.size() == kLookAhead; })) break;
      all = append(all, beginnings(symbol));
    }
    return all;
  }

  Beginnings beginnings(const Symbol& symbol) const {
    switch (symbol.kind) {
      case Kind::kText: return {symbol.text.substr(0, kLookAhead)};
      case Kind::kField: return fields(symbol);
      case Kind::kRule: return rule(symbol.rule);
      case Kind::kNamedRule: {
        Beginnings all;
        for (const std::string& name : fields(symbol)) all.merge(rule(grammar_.rule_named(name)));
        return all;
      }
      case Kind::kChoice: break;
    }
    return {""};  // the story alone chooses, and it has no alternatives
  }

  Beginnings rule(int index) const {
    Beginnings all;
    for (const auto& alternative : grammar_.rules[index_of(index)].alternatives) {
      all.merge(beginnings(alternative.symbols));
    }
    return all;
  }

  // Every value of a field, in all the tables that the variable may come from: those of its form.
  Beginnings fields(const Symbol& symbol) const {
    const auto variable = static_cast<std::size_t>(symbol.variable);
    const auto& form =
        grammar_.tables[static_cast<std::size_t>(grammar_.variable_tables[variable])].fields;
    Beginnings all;
    for (const GrammarTable& table : grammar_.tables) {
      if (table.fields != form) continue;
      for (const auto& row : table.rows) {
        std::string text = row[index_of(symbol.field)];
        if (symbol.capital) {
          text[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(text[0])));
        }
        all.insert(text.substr(0, kLookAhead));
      }
    }
    return all;
  }

  const Grammar& grammar_;
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

GrammarMeans expected(const Grammar& grammar) { return Means(grammar).all(); }

std::optional<std::string> ambiguity(const Grammar& grammar) { return Checker(grammar).check(); }

}  // namespace lockstep::cli
