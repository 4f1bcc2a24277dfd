#include <cmath>

#include "lockstep/base/index.h"
#include "lockstep/data/grammar.h"

namespace lockstep {
namespace {

using Symbol = GrammarSymbol;
using Kind = GrammarSymbol::Kind;
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

}  // namespace

GrammarMeans expected(const Grammar& grammar) { return Means(grammar).all(); }

}  // namespace lockstep
