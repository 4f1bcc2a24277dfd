#include "lockstep/data/unicode.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <unordered_map>
#include <utility>

#include "lockstep/base/utf8.h"
#include "lockstep/data/unicode_tables.h"

namespace lockstep {
namespace {

using unicode_tables::kCombining;
using unicode_tables::kDecompositions;

// \s of Oniguruma.
constexpr std::pair<std::uint32_t, std::uint32_t> kSpaces[] = {
    {0x9, 0xd},       {0x20, 0x20},     {0x85, 0x85},     {0xa0, 0xa0},     {0x1680, 0x1680},
    {0x2000, 0x200a}, {0x2028, 0x2029}, {0x202f, 0x202f}, {0x205f, 0x205f}, {0x3000, 0x3000}};

// Syllables of Hangul are composed by arithmetic.
constexpr std::uint32_t kFirstSyllable = 0xac00, kFirstLead = 0x1100, kFirstVowel = 0x1161,
                        kTailBefore = 0x11a7;
constexpr std::uint32_t kLeads = 19, kVowels = 21, kTails = 28;

struct Mark {
  std::uint32_t point;
  std::uint8_t combining_class;
};

std::uint8_t combining_class(std::uint32_t point) {
  const auto* run =
      std::ranges::upper_bound(kCombining, point, {}, &unicode_tables::CombiningRun::first);
  if (run == std::begin(kCombining)) return 0;
  --run;
  return point <= run->last ? run->combining_class : 0;
}

void decompose(std::uint32_t point, std::vector<Mark>& marks) {
  if (point >= kFirstSyllable && point < kFirstSyllable + kLeads * kVowels * kTails) {
    const std::uint32_t index = point - kFirstSyllable;
    marks.push_back({kFirstLead + index / (kVowels * kTails), 0});
    marks.push_back({kFirstVowel + index / kTails % kVowels, 0});
    if (index % kTails != 0) marks.push_back({kTailBefore + index % kTails, 0});
    return;
  }
  const auto* found =
      std::ranges::lower_bound(kDecompositions, point, {}, &unicode_tables::Decomposition::whole);
  if (found == std::end(kDecompositions) || found->whole != point) {
    marks.push_back({point, combining_class(point)});
    return;
  }
  decompose(found->first, marks);  // the tables are a few levels deep
  if (found->second != 0) decompose(found->second, marks);
}

std::uint64_t pair_key(std::uint32_t first, std::uint32_t second) {
  return std::uint64_t{first} << 32 | second;
}

const std::unordered_map<std::uint64_t, std::uint32_t>& compositions() {
  static const auto kCompositions = [] {
    std::unordered_map<std::uint64_t, std::uint32_t> pairs;
    for (const auto& entry : kDecompositions) {
      if (entry.composes) pairs[pair_key(entry.first, entry.second)] = entry.whole;
    }
    return pairs;
  }();
  return kCompositions;
}

// What the two become; 0: nothing.
std::uint32_t compose(std::uint32_t first, std::uint32_t second) {
  if (first >= kFirstLead && first < kFirstLead + kLeads && second >= kFirstVowel &&
      second < kFirstVowel + kVowels) {
    return kFirstSyllable + ((first - kFirstLead) * kVowels + (second - kFirstVowel)) * kTails;
  }
  if (first >= kFirstSyllable && first < kFirstSyllable + kLeads * kVowels * kTails &&
      (first - kFirstSyllable) % kTails == 0 && second > kTailBefore &&
      second < kTailBefore + kTails) {
    return first + (second - kTailBefore);
  }
  const auto found = compositions().find(pair_key(first, second));
  return found == compositions().end() ? 0 : found->second;
}

// Marks after a starter in the order of their classes; those of one class stay in theirs.
void order_marks(std::vector<Mark>& marks) {
  for (auto from = marks.begin(); from != marks.end();) {
    if (from->combining_class == 0) {
      ++from;
      continue;
    }
    const auto to =
        std::find_if(from, marks.end(), [](const Mark& m) { return m.combining_class == 0; });
    std::stable_sort(from, to, [](const Mark& a, const Mark& b) {
      return a.combining_class < b.combining_class;
    });
    from = to;
  }
}

// A mark joins the starter before it unless one of its class or above, or a starter, is between.
void compose_all(std::vector<Mark>& marks) {
  std::size_t kept = 0;
  std::size_t starter = SIZE_MAX;
  int last_class = -1;  // of what was kept since the starter; -1: nothing
  for (const Mark mark : marks) {
    if (starter != SIZE_MAX && last_class < int{mark.combining_class}) {
      if (const std::uint32_t whole = compose(marks[starter].point, mark.point); whole != 0) {
        marks[starter].point = whole;
        continue;
      }
    }
    if (mark.combining_class == 0) {
      starter = kept;
      last_class = -1;
    } else {
      last_class = mark.combining_class;
    }
    marks[kept++] = mark;
  }
  marks.resize(kept);
}

}  // namespace

const Unicode& Unicode::get() {
  static const Unicode kUnicode;
  return kUnicode;
}

Unicode::Unicode() {
  const auto mark = [&](std::uint32_t first, std::uint32_t last, std::uint8_t bits) {
    if (last >= flags_.size()) flags_.resize(last + 1);
    for (std::uint32_t point = first; point <= last; ++point) flags_[point] |= bits;
  };
  const auto bits = [](CharacterClass type) { return static_cast<std::uint8_t>(type); };
  for (const auto& run : unicode_tables::kLetters) {
    mark(run.first, run.last, bits(CharacterClass::kLetter));
  }
  for (const auto& run : unicode_tables::kNumbers) {
    mark(run.first, run.last, bits(CharacterClass::kNumber));
  }
  for (const auto& [first, last] : kSpaces) mark(first, last, bits(CharacterClass::kSpace));
  for (const auto& run : kCombining) mark(run.first, run.last, kUnstable);
  for (const auto& entry : kDecompositions) {
    if (entry.composes) {
      mark(entry.second, entry.second, kUnstable);
    } else {
      mark(entry.whole, entry.whole, kUnstable);
    }
  }
  mark(kFirstVowel, kFirstVowel + kVowels - 1, kUnstable);
  mark(kTailBefore + 1, kTailBefore + kTails - 1, kUnstable);
}

std::string_view Unicode::nfc(std::string_view text, std::string& storage) const {
  storage.clear();
  std::size_t copied = 0;  // what of the text is in `storage`
  std::size_t stable = 0;  // where the last stable character begins, or the text
  for (std::size_t at = 0; at < text.size();) {
    if (static_cast<std::uint8_t>(text[at]) < 0x80) {
      stable = at++;
      continue;
    }
    Character character = decode_character(text, at);
    if ((flags(character.point) & kUnstable) == 0) {
      stable = at;
      at += character.length;
      continue;
    }
    // From the stable character before to the one after nothing else plays a part.
    while (at < text.size() && (flags(character.point) & kUnstable) != 0) {
      at += character.length;
      if (at < text.size()) character = decode_character(text, at);
    }
    storage.append(text, copied, stable - copied);
    append_nfc(text.substr(stable, at - stable), storage);
    copied = stable = at;
  }
  if (copied == 0) return text;
  storage.append(text, copied);
  return storage;
}

void Unicode::append_nfc(std::string_view text, std::string& out) const {
  std::vector<Mark> marks;
  // A byte that is no UTF-8 can only stand first: it is stable.
  std::size_t at = 0;
  if (const Character first = decode_character(text, 0); first.point == kNoPoint) {
    out += text[0];
    at = 1;
  }
  while (at < text.size()) {
    const Character character = decode_character(text, at);
    decompose(character.point, marks);
    at += character.length;
  }
  order_marks(marks);
  compose_all(marks);
  for (const Mark& mark : marks) append_utf8(out, mark.point);
}

}  // namespace lockstep
