#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::cli {

// A grammar for small texts that hang together: weighted rules without recursion, and variables,
// chosen once where they are first mentioned and spoken of again later. Written as
//
//   table hero              a variable's values, one row per line, fields separated by ';'
//     name; he              the names of the fields
//     Mia; she
//   rule when               alternatives, one per line, all alike unless a weight is given
//     Once upon a time
//     3* Long ago
//   story                   the text, one paragraph per line
//     [when] there was <hero>. {Hero.he} sang. [hero.song]
//
// <v> chooses v from table v and writes its first field; <v:w.f> takes the table that field f of w
// names. Only the story chooses, each variable once. {v.f} writes a field, {V.f} with a capital,
// [r] expands a rule, [v.f] the rule that field f of v names. '~' is a line break.
struct GrammarSymbol {
  enum class Kind { kText, kField, kRule, kNamedRule, kChoice };
  Kind kind = Kind::kText;
  std::string text = {};  // kText
  int variable = -1;      // kField, kNamedRule, kChoice; for kChoice with `table` < 0: `named_by`
  int field = -1;         // kField, kNamedRule, and kChoice from a named table
  int rule = -1;          // kRule
  int table = -1;         // kChoice from a table of its own
  int named_by = -1;      // kChoice from the table that a field of this variable names
  bool capital = false;   // kField
};

struct GrammarAlternative {
  std::uint32_t weight = 1;
  std::vector<GrammarSymbol> symbols;
};

struct GrammarRule {
  std::string name;
  std::vector<GrammarAlternative> alternatives;
  std::uint32_t total_weight = 0;
};

struct GrammarTable {
  std::string name;
  std::vector<std::string> fields;
  std::vector<std::vector<std::string>> rows;
};

struct Grammar {
  std::vector<GrammarTable> tables;
  std::vector<GrammarRule> rules;
  std::vector<GrammarSymbol> story;
  std::vector<std::string> variables;  // in the order in which the story chooses them
  std::vector<int> variable_tables;    // for the fields of each; one of the tables it may come from

  int rule_named(std::string_view name) const;   // -1: none
  int table_named(std::string_view name) const;  // -1: none
};

// A grammar that does not parse is a bug of ours: it aborts with the line.
Grammar parse_grammar(std::string_view text);

// One row per variable: the table it came from and the row.
struct GrammarValue {
  int table = -1;
  int row = -1;
};
using GrammarValues = std::vector<GrammarValue>;

const std::string& field_of(const Grammar& grammar, const GrammarValues& values, int variable,
                            int field);

struct GrammarText {
  std::string text;
  double bits = 0;  // -log2 of the probability of the choices made, which is that of the text
};

// The `index`-th text under `seed`: a pure function of its arguments.
GrammarText generate_text(const Grammar& grammar, std::uint64_t seed, std::uint64_t index);

// The exact means over all texts of the grammar, not of a sample: by the chain rule over choices,
// so `bits` is the entropy of a text as long as ambiguity() finds nothing.
struct GrammarMeans {
  double bits = 0;
  double bytes = 0;
};
GrammarMeans expected(const Grammar& grammar);

// Whether a text could have come from two sequences of choices. Nothing: at every choice, no text
// of one alternative begins a text of another, so reading from left to right every choice is told
// by the text alone. Otherwise: the place, and two beginnings that cannot be told apart.
std::optional<std::string> ambiguity(const Grammar& grammar);

}  // namespace lockstep::cli
