#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/utf8.h"
#include "lockstep/data/byte_alphabet.h"
#include "lockstep/data/shard_builder.h"
#include "lockstep/data/source.h"
#include "lockstep/data/split_pattern.h"
#include "lockstep/data/tokenizer.h"
#include "lockstep/data/unicode.h"
#include "tests/support/error_text.h"
#include "tests/support/temporary_folder.h"

namespace lockstep::bpe_tokenizer_test {
namespace {

using nlohmann::json;
using test::message_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const json& vectors() {
  static const json kVectors = [] {
    std::ifstream file(LOCKSTEP_VECTORS "/bpe_vectors.json");
    return json::parse(file);
  }();
  return kVectors;
}

json saved(const std::string& family) { return vectors()["tokenizers"][family]; }

std::unique_ptr<Tokenizer> make(const json& file, const std::string& config = "") {
  return bpe_tokenizer(file.dump(), config, "t.json");
}

std::vector<std::int32_t> encode(const Tokenizer& tokenizer, std::string_view text) {
  std::vector<std::int32_t> tokens;
  tokenizer.encode(text, tokens);
  return tokens;
}

TEST(BpeTokenizer, IdsAndTextsOfTheRealPackage) {
  std::size_t compared = 0;
  for (const auto& [family, file] : vectors()["tokenizers"].items()) {
    const auto tokenizer = make(file);
    for (const json& one : vectors()["cases"]) {
      if (one["family"] != family) continue;
      const auto tokens = encode(*tokenizer, one["text"].get<std::string>());
      EXPECT_EQ(tokens, one["ids"].get<std::vector<std::int32_t>>()) << family << one["text"];
      EXPECT_EQ(tokenizer->decode(tokens), one["decoded"].get<std::string>()) << family;
      ++compared;
    }
  }
  EXPECT_EQ(compared, 78u);
}

TEST(TextSplitter, WordsOfTheRealPackage) {
  const std::map<std::string, SplitPattern> patterns = {{"gpt2", SplitPattern::kGpt2},
                                                        {"llama3", SplitPattern::kLlama3},
                                                        {"qwen2", SplitPattern::kQwen2}};
  for (const json& one : vectors()["cases"]) {
    const TextSplitter splitter(patterns.at(one["family"]));
    const auto text = one["text"].get<std::string>();
    std::vector<int> words;  // in characters, as the package counts
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t end = splitter.word_end(text, at);
      words.push_back(0);
      for (; at < end; at += decode_character(text, at).length) ++words.back();
    }
    EXPECT_EQ(words, one["words"].get<std::vector<int>>()) << one;
  }
}

// The bytes, merges "a b", and tokens that no merge makes.
json bytes_and(const std::vector<std::string>& merges, const std::vector<std::string>& more) {
  json file = saved("gpt2");
  json vocab;
  for (int byte = 0; byte < 256; ++byte) vocab[byte_letter(static_cast<std::uint8_t>(byte))] = byte;
  const auto add = [&](const std::string& token) { vocab.emplace(token, vocab.size()); };
  for (std::string token : merges) {
    token.erase(token.find(' '), 1);
    add(token);
  }
  for (const std::string& token : more) add(token);
  file["model"]["vocab"] = vocab;
  file["model"]["merges"] = merges;
  file["added_tokens"] = json::array();
  return file;
}

TEST(BpeTokenizer, MergesByRankAndNotByPlace) {
  // "b c" takes the b, so "a b" is gone when its turn comes, and "bc d" is before "a bc".
  const auto tokenizer = make(bytes_and({"b c", "a b", "bc d", "a bc"}, {}));
  EXPECT_THAT(encode(*tokenizer, "abcd"), ElementsAre('a', 258));
  EXPECT_THAT(encode(*tokenizer, "abc"), ElementsAre(259));
  EXPECT_THAT(encode(*tokenizer, "abd"), ElementsAre(257, 'd'));
  EXPECT_THAT(encode(*make(bytes_and({"a a"}, {})), "aaaaa"), ElementsAre(256, 256, 'a'));
  // The last of two that are the same counts.
  EXPECT_THAT(encode(*make(bytes_and({"a b", "b c", "a b"}, {})), "abc"), ElementsAre('a', 257));
}

TEST(BpeTokenizer, IgnoreMergesTakesWholeWords) {
  json file = bytes_and({"a b"}, {"abc", "\u0120abc"});
  EXPECT_THAT(encode(*make(file), "abc abc abcd"),
              ElementsAre(256, 'c', ' ', 256, 'c', ' ', 256, 'c', 'd'));
  file["model"]["ignore_merges"] = true;
  EXPECT_THAT(encode(*make(file), "abc abc abcd"), ElementsAre(257, 258, ' ', 256, 'c', 'd'));
}

TEST(BpeTokenizer, AddedTokensAreFoundFirst) {
  json file = bytes_and({"a b"}, {});
  const auto add = [&](const char* content, const char* how) {
    json token = {
        {"id", 257 + file["added_tokens"].size()}, {"content", content}, {"normalized", false}};
    if (*how != '\0') token[how] = true;
    file["added_tokens"].push_back(token);
  };
  add("<x>", "special");
  add("<x>y", "");
  add("<l>", "lstrip");
  add("<r>", "rstrip");
  const auto tokenizer = make(file);
  EXPECT_THAT(encode(*tokenizer, "ab<x>ab<x>y<x"), ElementsAre(256, 257, 256, 258, '<', 'x'));
  EXPECT_THAT(encode(*tokenizer, "a \t<l> a"), ElementsAre('a', 259, ' ', 'a'));
  EXPECT_THAT(encode(*tokenizer, "a <r> \u2003a"), ElementsAre('a', ' ', 260, 'a'));
  EXPECT_THAT(encode(*tokenizer, "<r>  <l>"), ElementsAre(260, 259));
  EXPECT_EQ(tokenizer->decode(encode(*tokenizer, "ab<x>ab<x>y")), "abab<x>y");
}

TEST(BpeTokenizer, DocumentsBeginAndEndAsTheFilesSay) {
  const auto gpt2 = make(saved("gpt2"));
  EXPECT_EQ(gpt2->kind(), TokenizerKind::kBpe);
  EXPECT_EQ(gpt2->start_of_document(), std::nullopt);
  const std::int32_t end = encode(*gpt2, "<|endoftext|>").at(0);
  EXPECT_EQ(gpt2->end_of_document(), end);
  EXPECT_EQ(gpt2->vocab(), static_cast<std::uint32_t>(end) + 2);  // one more token is added
  const auto llama3 = make(saved("llama3"));
  EXPECT_EQ(llama3->start_of_document(), encode(*llama3, "<|begin_of_text|>").at(0));
  const std::int32_t start = encode(*llama3, "<|im_start|>").at(0);
  for (const char* config :
       {R"({"eos_token": "<|im_start|>"})", R"({"eos_token": {"content": "<|im_start|>"}})"}) {
    EXPECT_EQ(make(saved("llama3"), config)->end_of_document(), start);
  }
  EXPECT_EQ(make(saved("llama3"), R"({"eos_token": null})")->end_of_document(), std::nullopt);
  for (const char* config : {R"({"eos_token": "<eos>"})", R"({"eos_token": 7})", "[", "7"}) {
    EXPECT_THAT(message_of([&] { make(saved("llama3"), config); }),
                HasSubstr("t.json: tokenizer_config.json"))
        << config;
  }
  // What others need to read it: the file as it came, and the other one made where there was none.
  const auto files = llama3->files();
  ASSERT_EQ(files.size(), 2u);
  EXPECT_EQ(files[0].name, "tokenizer.json");
  EXPECT_EQ(files[0].bytes, saved("llama3").dump());
  EXPECT_EQ(json::parse(files[1].bytes)["bos_token"], "<|begin_of_text|>");
  EXPECT_EQ(json::parse(files[1].bytes)["eos_token"], "<|endoftext|>");
  EXPECT_EQ(make(saved("gpt2"), R"({"eos_token": null, "x": 1})")->files()[1].bytes,
            R"({"eos_token": null, "x": 1})");
}

TEST(BpeTokenizer, EveryByteComesBack) {
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
  for (const char* family : {"gpt2", "llama3"}) {
    const auto tokenizer = make(saved(family));
    EXPECT_EQ(tokenizer->decode(encode(*tokenizer, all)), all);
    EXPECT_EQ(tokenizer->decode(encode(*tokenizer, all + all.substr(200))), all + all.substr(200));
  }
  const auto tokenizer = make(saved("qwen2"));
  EXPECT_EQ(tokenizer->decode(encode(*tokenizer, all)), all);
  EXPECT_EQ(tokenizer->decode(std::vector<std::int32_t>{-1, 1 << 29}), "");
}

// What is printed of a text that grows token by token is never half a character.
TEST(BpeTokenizer, TextThatGrowsIsCutBetweenCharacters) {
  const auto tokenizer = make(saved("gpt2"));
  const std::string text = "\xf0\x9f\x99\x82 \xe4\xbd\xa0\xe5\xa5\xbd\xe2\x98\x83 na\xc3\xafve";
  const auto tokens = encode(*tokenizer, text);
  std::string before;
  for (std::size_t count = 1; count <= tokens.size(); ++count) {
    const std::string now = tokenizer->decode(std::span(tokens).first(count));
    EXPECT_TRUE(now.starts_with(before));
    EXPECT_TRUE(is_utf8(now.substr(0, whole_characters(now))));
    before = now;
  }
  EXPECT_EQ(before, text);
}

TEST(BpeTokenizer, PiecesGiveTheTokensOfTheWhole) {
  const std::string text =
      "one\ntwo  \nthree\n\n four\n\tfive.\nsix "
      "\xe4\xbd\xa0\xe3\x80\x82\n\xe4\xbd\xa0\xe5\xa5\xbd\n7\n"
      "e\xcc\x81\n\xcc\x81x\nit's\n's<|im_start|>\nlast\r\nword\n\nend\n";
  for (const char* family : {"gpt2", "llama3", "qwen2"}) {
    const auto tokenizer = make(saved(family));
    std::vector<std::int32_t> tokens;
    std::size_t pieces = 0;
    for (std::size_t done = 0; done < text.size(); ++pieces) {
      const std::size_t end = done + tokenizer->piece_end(std::string_view(text).substr(done), 1);
      tokenizer->encode(std::string_view(text).substr(done, end - done), tokens);
      done = end;
    }
    EXPECT_EQ(tokens, encode(*tokenizer, text)) << family;
    EXPECT_GT(pieces, 4u);
    EXPECT_EQ(tokenizer->piece_end("no line end", 3), 11u);
    EXPECT_EQ(tokenizer->piece_end("", 3), 0u);
    EXPECT_EQ(tokenizer->piece_end("\n", 0), 1u);
  }
  json file = saved("gpt2");
  file["pre_tokenizer"]["add_prefix_space"] = true;
  EXPECT_EQ(make(file)->piece_end("a\nb", 1), 3u);
}

TEST(BpeTokenizer, LongWordsTakeLittleTime) {
  const auto tokenizer = make(saved("llama3"));
  for (const std::string_view one : {"t", "the", "\xcc\x81", "'", "\n", " ", "7"}) {
    std::string text;
    while (text.size() < 100'000) text += one;
    EXPECT_EQ(tokenizer->decode(encode(*tokenizer, text)), text);
  }
}

TEST(BpeTokenizer, ManyThreads) {
  const auto tokenizer = make(saved("gpt2"));
  const std::string text = "the cat sat on the mat, don't we'll 2026\n";
  const auto expected = encode(*tokenizer, text);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int turn = 0; turn < 20; ++turn) EXPECT_EQ(encode(*tokenizer, text), expected);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(BpeTokenizer, RefusesWhatItDoesNotKnow) {
  const auto problem = [](const std::string& family, const std::string& patch) {
    json file = saved(family);
    file.merge_patch(json::parse(patch));
    return message_of([&] { make(file); });
  };
  const auto expect = [&](const std::string& patch, const char* what) {
    const std::string message = problem("llama3", patch);
    EXPECT_THAT(message, HasSubstr("t.json")) << patch;
    EXPECT_THAT(message, HasSubstr(what)) << patch;
  };
  expect(R"({"version": "2.0"})", "version");
  expect(R"({"model": {"type": "WordPiece"}})", "model.type: only BPE");
  expect(R"({"model": {"dropout": 0.1}})", "model.dropout");
  expect(R"({"model": {"byte_fallback": true}})", "model.byte_fallback");
  expect(R"({"model": {"end_of_word_suffix": "</w>"}})", "model.end_of_word_suffix");
  expect(R"({"model": {"continuing_subword_prefix": "##"}})", "model.continuing_subword_prefix");
  expect(R"({"model": {"ignore_merges": 3}})", "neither true nor false");
  expect(R"({"model": {"vocab": null}})", "model.vocab: is missing");
  expect(R"({"model": {"merges": null}})", "model.merges: is missing");
  expect(R"({"model": {"vocab": {"a": null}}})", "lacks byte 0x61");
  expect(R"({"model": {"vocab": {"new": 5}}})", "id 5");
  expect(R"({"model": {"vocab": {"new": -1}}})", "not a whole number");
  expect(R"({"model": {"vocab": {"new": 4194304}}})", "a number above");
  expect(R"({"model": {"merges": [["t", "zzz"]]}})", "model.merges[0]: 'zzz'");
  expect(R"({"model": {"merges": [["t", "h", "e"]]}})", "model.merges[0]: not a pair");
  expect(R"({"model": {"merges": ["t h e"]}})", "model.merges[0]");
  expect(R"({"model": {"merges": ["the"]}})", "model.merges[0]");
  expect(R"({"model": {"merges": [7]}})", "not a text");
  expect(R"({"model": null})", "there is no 'model'");
  expect(R"({"normalizer": {"type": "NFKC"}})", "normalizer: NFKC is not known");
  expect(R"({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}})",
         "normalizer.normalizers[0]");
  expect(R"({"pre_tokenizer": null})", "pre_tokenizer");
  expect(R"({"pre_tokenizer": {"type": "Whitespace"}})", "pre_tokenizer: Whitespace");
  expect(R"({"pre_tokenizer": {"pretokenizers": []}})", "pre_tokenizer: neither");
  expect(R"({"post_processor": {"type": "BertProcessing"}})", "post_processor: BertProcessing");
  expect(R"({"decoder": {"type": "WordPiece"}})", "decoder");
  expect(R"({"added_tokens": [{"id": 9999, "content": "x1"}]})", "'x1' has id 9999");
  expect(R"({"added_tokens": [{"id": 0, "content": ""}]})", "is empty");
  expect(R"({"added_tokens": {}})", "not a list");
  for (const auto& [path, value, what] : std::vector<std::array<std::string, 3>>{
           {"/pre_tokenizer/pretokenizers/0/pattern/Regex", "\"\\\\d+\"", "not the expression"},
           {"/pre_tokenizer/pretokenizers/0/behavior", "\"Removed\"", "behavior Removed"},
           {"/pre_tokenizer/pretokenizers/1/use_regex", "true", "after a Split"},
           {"/post_processor/processors/1/special_tokens/<|begin_of_text|>/ids/0", "3",
            "not the id of an added token"},
           {"/added_tokens/0/single_word", "true", "single_word"},
           {"/added_tokens/1/content", "\"<|begin_of_text|>\"", "<|begin_of_text|>"},
       }) {
    json file = saved("llama3");
    file[json::json_pointer(path)] = json::parse(value);
    EXPECT_THAT(message_of([&] { make(file); }), HasSubstr(what)) << path;
  }
  for (const char* text : {"", "{", "[]", "null", "{}", "{\"model\": 1}", "\xff", "{\"a\": 1} x",
                           "{\"model\": {}, \"model\": {}}"}) {
    EXPECT_THAT(message_of([&] { bpe_tokenizer(text, "", "t.json"); }), HasSubstr("t.json"))
        << text;
  }
}

// Every cut of a file and every changed byte is refused or makes a tokenizer that works.
TEST(BpeTokenizer, DamagedFilesDoNoHarm) {
  json file = saved("qwen2");
  const std::string good = file.dump();
  std::size_t refused = 0;
  std::size_t turns = 0;
  for (std::size_t at = 0; at < good.size(); at += 97) {
    for (const std::string& bad :
         {good.substr(0, at), std::string(good).replace(at, 1, "\""),
          std::string(good).replace(at, 1, "9"), std::string(good).replace(at, 1, "}")}) {
      ++turns;
      try {
        const auto tokenizer = bpe_tokenizer(bad, "", "t.json");
        tokenizer->decode(encode(*tokenizer, "the cat's <|endoftext|> 12"));
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kIo);
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, turns / 2);
}

TEST(BpeTokenizer, LearnsMerges) {
  std::string text;
  for (int i = 0; i < 50; ++i) text += "low lower lowest newer wider\n";
  const std::vector<std::string_view> texts = {text, "low low"};
  const std::string learned = train_bpe(texts, 264);
  EXPECT_EQ(learned, train_bpe(texts, 264));
  // Of pairs that are there as often as others, the one with the lower ids: spaces come after
  // letters.
  EXPECT_EQ(json::parse(learned)["model"]["merges"],
            json::parse(R"(["l o","lo w","e r","Ġ low","d er","e s","e w"])"));
  std::string same;
  for (int i = 0; i < 10; ++i) same += "aaaa aaab abab ";
  EXPECT_EQ(json::parse(train_bpe(std::vector<std::string_view>{same}, 264))["model"]["merges"],
            json::parse(R"(["a a","a b","Ġ aa","Ġ ab","Ġaa ab","Ġab ab","Ġaa aa"])"));
  const auto tokenizer = bpe_tokenizer(learned, "", "learned");
  EXPECT_EQ(tokenizer->vocab(), 264u);
  EXPECT_EQ(tokenizer->end_of_document(), 0);
  EXPECT_EQ(tokenizer->decode(encode(*tokenizer, text)), text);
  EXPECT_THAT(message_of([&] { train_bpe(texts, 256); }), HasSubstr("it needs 257"));
  // No more than there is to learn: what is there once is not.
  EXPECT_EQ(
      json::parse(train_bpe(std::vector<std::string_view>{"abc abd"}, 1000))["model"]["merges"],
      json::parse(R"(["a b"])"));
}

TEST(BpeTokenizer, FilesLieBesideTheShards) {
  TemporaryFolder folder;
  const std::string path = folder.path() + "/in";
  std::filesystem::create_directory(path);
  std::ofstream(path + "/tokenizer.json") << saved("llama3").dump();
  std::ofstream(path + "/tokenizer_config.json") << R"({"eos_token": "<|im_start|>"})";
  for (const std::string& name : {path, path + "/tokenizer.json"}) {
    const auto tokenizer = make_tokenizer({name, 0}, {});
    const std::string out = folder.path() + "/out" + std::to_string(name.size());
    ShardBuilder builder({.folder = out}, *tokenizer);
    builder.add_document("the cat", {});
    builder.add_document("the mat", {});
    builder.finish();
    const DataSource source = open_data({out});
    std::vector<std::int32_t> tokens(source.training[0].size());
    source.training[0].copy(0, source.vocab, tokens);
    const std::int32_t start = *tokenizer->start_of_document();
    EXPECT_EQ(tokens[0], start);
    EXPECT_EQ(tokens.back(), *tokenizer->end_of_document());
    EXPECT_EQ(std::ranges::count(tokens, start), 2);
    EXPECT_EQ(source.tokenizer->decode(tokens), "the catthe mat");
    EXPECT_EQ(source.tokenizer->end_of_document(), tokenizer->end_of_document());
    // In memory, without shards, the tokens are the same.
    const DataSource direct = encode_documents({"d", {"the cat", "the mat"}}, {name, 0});
    std::vector<std::int32_t> others(direct.training[0].size());
    direct.training[0].copy(0, direct.vocab, others);
    EXPECT_EQ(others, tokens);
    std::ofstream(out + "/tokenizer.json") << saved("qwen2").dump();
    EXPECT_THAT(message_of([&] { open_data({out}); }), HasSubstr("not the tokenizer that"));
  }
  EXPECT_THAT(message_of([&] {
                make_tokenizer({folder.path(), 0}, {});
              }),
              HasSubstr("neither tokenizer.json nor tokenizer.model"));
}

TEST(Unicode, ComposesAsUnicodeSays) {
  const auto nfc = [](std::string_view text) {
    std::string storage;
    return std::string(Unicode::get().nfc(text, storage));
  };
  EXPECT_EQ(nfc("plain"), "plain");
  EXPECT_EQ(nfc("e\u0301"), "\u00e9");
  EXPECT_EQ(nfc("a\u0323\u0308"), nfc("a\u0308\u0323"));
  EXPECT_EQ(nfc("\u1e9b\u0323"), "\u1e9b\u0323");
  EXPECT_EQ(nfc("\u212b"), "\u00c5");
  EXPECT_EQ(nfc("\u0958"), "\u0915\u093c");  // never composed
  EXPECT_EQ(nfc("\u1100\u1161\u11a8x"), "\uac01x");
  EXPECT_EQ(nfc("\uac00\u11a8"), "\uac01");
  EXPECT_EQ(nfc("\u0301\u0301"), "\u0301\u0301");
  EXPECT_EQ(nfc("\xff"
                "e\u0301\xc3"),
            "\xff\u00e9\xc3");
  EXPECT_EQ(nfc("\xff\u0301"), "\xff\u0301");
}

}  // namespace
}  // namespace lockstep::bpe_tokenizer_test
