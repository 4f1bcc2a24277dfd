#include "cli/stories/grammar.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cctype>
#include <cmath>
#include <set>

#include "cli/stories/stories.h"

namespace lockstep::cli::grammar_test {
namespace {

using Symbol = GrammarSymbol;
using Kind = GrammarSymbol::Kind;

// Every way to read a text, by trying everything: knows nothing of how texts are generated, and
// nothing of what makes a grammar unambiguous.
class Readings {
 public:
  Readings(const Grammar& grammar, std::string_view text) : grammar_(grammar), text_(text) {}

  // -log2 of the probability of each reading.
  std::vector<double> all() {
    std::vector<State> states = {{0, 0, GrammarValues(grammar_.variables.size())}};
    states = read(grammar_.story, std::move(states));
    std::vector<double> bits;
    for (const State& state : states) {
      if (state.position == text_.size()) bits.push_back(state.bits);
    }
    return bits;
  }

 private:
  struct State {
    std::size_t position;
    double bits;
    GrammarValues values;
  };

  std::vector<State> read(const std::vector<Symbol>& symbols, std::vector<State> states) {
    for (const Symbol& symbol : symbols) {
      std::vector<State> next;
      for (const State& state : states) {
        for (State& after : read(symbol, state)) next.push_back(std::move(after));
      }
      states = std::move(next);
    }
    return states;
  }

  std::vector<State> read(const Symbol& symbol, const State& state) {
    switch (symbol.kind) {
      case Kind::kText: return literal(symbol.text, state);
      case Kind::kField: {
        std::string text = field_of(grammar_, state.values, symbol.variable, symbol.field);
        if (symbol.capital) text[0] = static_cast<char>(std::toupper(text[0]));
        return literal(text, state);
      }
      case Kind::kRule: return rule(symbol.rule, state);
      case Kind::kNamedRule:
        return rule(
            grammar_.rule_named(field_of(grammar_, state.values, symbol.variable, symbol.field)),
            state);
      case Kind::kChoice: break;
    }
    const int table =
        symbol.table >= 0
            ? symbol.table
            : grammar_.table_named(field_of(grammar_, state.values, symbol.named_by, symbol.field));
    const auto& rows = grammar_.tables[static_cast<std::size_t>(table)].rows;
    std::vector<State> results;
    for (std::size_t row = 0; row < rows.size(); ++row) {
      for (State& after : literal(rows[row][0], state)) {
        after.values[static_cast<std::size_t>(symbol.variable)] = {table, static_cast<int>(row)};
        after.bits += std::log2(static_cast<double>(rows.size()));
        results.push_back(std::move(after));
      }
    }
    return results;
  }

  std::vector<State> rule(int index, const State& state) {
    const GrammarRule& rule = grammar_.rules[static_cast<std::size_t>(index)];
    std::vector<State> results;
    for (const GrammarAlternative& alternative : rule.alternatives) {
      State begin = state;
      begin.bits -= std::log2(static_cast<double>(alternative.weight) / rule.total_weight);
      for (State& after : read(alternative.symbols, {begin})) results.push_back(std::move(after));
    }
    return results;
  }

  std::vector<State> literal(const std::string& text, const State& state) const {
    if (text_.substr(state.position, text.size()) != text) return {};
    State after = state;
    after.position += text.size();
    return {after};
  }

  const Grammar& grammar_;
  const std::string_view text_;
};

constexpr const char* kSmall = R"(
table who
  name; he; song
  Ann; she; loud
  Bo; he; soft
rule loud
  3* LA
  DA
rule soft
  hum
story
  <who>: {Who.he} [who.song]
)";

TEST(Grammar, GeneratesWhatItSays) {
  const Grammar grammar = parse_grammar(kSmall);
  std::set<std::string> texts;
  for (std::uint64_t i = 0; i < 100; ++i) texts.insert(generate_text(grammar, 1, i).text);
  EXPECT_EQ(texts, (std::set<std::string>{"Ann: She LA", "Ann: She DA", "Bo: He hum"}));
}

TEST(Grammar, MeansAreThoseComputedByHand) {
  const GrammarMeans means = expected(parse_grammar(kSmall));
  const double song = -(0.75 * std::log2(0.75) + 0.25 * std::log2(0.25));
  EXPECT_DOUBLE_EQ(means.bits, 1 + song / 2);
  EXPECT_DOUBLE_EQ(means.bytes, (11 + 10) / 2.0);
}

TEST(Grammar, RulesWithinRules) {
  const GrammarMeans means = expected(parse_grammar(R"(
rule colour
  red
  blue
rule animal
  3* a [colour] fox
  nobody
story
  There was [animal].
)"));
  const double animal = -(0.75 * std::log2(0.75) + 0.25 * std::log2(0.25));
  EXPECT_DOUBLE_EQ(means.bits, animal + 0.75 * 1);
  EXPECT_DOUBLE_EQ(means.bytes, 11 + 0.75 * (6 + 3.5) + 0.25 * 6);
}

TEST(Grammar, TableNamedByAField) {
  const Grammar grammar = parse_grammar(R"(
table place
  where; finds
  sea; shells
  hill; stones
table shells
  what
  a conch
table stones
  what
  a flint
  a big pebble
story
  At the <place>: <thing:place.finds>, {thing.what}.
)");
  EXPECT_EQ(ambiguity(grammar), std::nullopt);
  const GrammarMeans means = expected(grammar);
  EXPECT_DOUBLE_EQ(means.bits, 1 + 0.5);
  EXPECT_DOUBLE_EQ(means.bytes, 12 + 3.5 + 0.5 * (2 * 7 + (7 + 12)));
}

TEST(Grammar, AmbiguityIsFound) {
  const auto with = [](const char* alternatives) {
    return ambiguity(parse_grammar(fmt::format("rule r\n{}story\n  [r] cat.\n", alternatives)));
  };
  EXPECT_EQ(with("  a\n  b\n"), std::nullopt);
  EXPECT_NE(with("  a\n  a\n"), std::nullopt);
  EXPECT_NE(with("  a\n  a cat\n"), std::nullopt);
  // A reading needs no second one to be refused: one alternative must not begin another.
  EXPECT_NE(with("  sea\n  seaside\n"), std::nullopt);
}

TEST(Stories, EveryChoiceIsToldByTheText) { EXPECT_EQ(ambiguity(story_grammar()), std::nullopt); }

TEST(Stories, EveryTextHasOneReadingOfTheSameProbability) {
  const Grammar grammar = story_grammar();
  for (std::uint64_t i = 0; i < 300; ++i) {
    const GrammarText story = generate_text(grammar, 5, i);
    const std::vector<double> readings = Readings(grammar, story.text).all();
    ASSERT_EQ(readings.size(), 1u) << story.text;
    EXPECT_NEAR(readings[0], story.bits, 1e-9);
  }
}

TEST(Stories, EntropyIsTheMeanOfTheSamples) {
  const Grammar grammar = story_grammar();
  const GrammarMeans means = expected(grammar);
  constexpr int kStories = 50'000;
  double bits = 0, bits_squared = 0, bytes = 0, bytes_squared = 0;
  for (int i = 0; i < kStories; ++i) {
    const GrammarText story = generate_text(grammar, 9, static_cast<std::uint64_t>(i));
    const auto size = static_cast<double>(story.text.size());
    bits += story.bits;
    bits_squared += story.bits * story.bits;
    bytes += size;
    bytes_squared += size * size;
  }
  const auto standard_error = [](double sum, double squares) {
    const double mean = sum / kStories;
    return std::sqrt((squares / kStories - mean * mean) / kStories);
  };
  EXPECT_NEAR(bits / kStories, means.bits, 4 * standard_error(bits, bits_squared));
  EXPECT_NEAR(bytes / kStories, means.bytes, 4 * standard_error(bytes, bytes_squared));
  EXPECT_LT(standard_error(bits, bits_squared), 0.01);  // so that the comparison means something
}

TEST(Stories, PureFunctionOfSeedAndIndex) {
  const Grammar grammar = story_grammar();
  EXPECT_EQ(generate_text(grammar, 1, 7).text, generate_text(grammar, 1, 7).text);
  EXPECT_NE(generate_text(grammar, 1, 7).text, generate_text(grammar, 2, 7).text);
  EXPECT_NE(generate_text(grammar, 1, 7).text, generate_text(grammar, 1, 8).text);
}

TEST(Stories, AsData) {
  const DataSource source = encode_documents(built_in_stories(1, 10));
  EXPECT_EQ(source.name, "10 built-in stories");
  EXPECT_EQ(source.vocab, 256u);
  EXPECT_GT(source.entropy_per_byte, 0.01);
  EXPECT_GT(source.training[0].size(), 5000u);
}

}  // namespace
}  // namespace lockstep::cli::grammar_test
