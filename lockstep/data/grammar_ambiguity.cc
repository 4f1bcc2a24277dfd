#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <set>

#include "lockstep/base/index.h"
#include "lockstep/data/grammar.h"

namespace lockstep {
namespace {

using Symbol = GrammarSymbol;
using Kind = GrammarSymbol::Kind;

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

std::optional<std::string> ambiguity(const Grammar& grammar) { return Checker(grammar).check(); }

}  // namespace lockstep
