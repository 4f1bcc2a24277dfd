#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <numeric>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/thread.h"
#include "lockstep/data/samples.h"
#include "lockstep/data/shard_builder.h"
#include "lockstep/data/source.h"
#include "lockstep/files/mapped_file.h"
#include "tests/support/error_text.h"
#include "tests/support/temporary_folder.h"

namespace lockstep::data_test {
namespace {

using test::message_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string write(const std::string& path, std::string_view text) {
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

// Without the library the rest is still tested.
bool has_sentencepiece() {
  return message_of([] { sentencepiece_tokenizer("", "x"); }).find("built without") ==
         std::string::npos;
}

TEST(Samples, CutEndToEndWithTheNextTokenAsTarget) {
  std::vector<std::int32_t> first(11), second(4);
  std::iota(first.begin(), first.end(), 0);
  std::iota(second.begin(), second.end(), 100);
  const Samples samples(
      {TokenShard::of("a", first, {}), TokenShard::of("s", std::vector<std::int32_t>{7}, {}),
       TokenShard::of("b", second, {})},
      200, 3);
  ASSERT_EQ(samples.size(), 4u);  // 3 of the first; none of the one token; 1 of the second
  std::vector<std::int32_t> tokens(3), targets(3);
  samples.read(2, tokens, targets);
  EXPECT_THAT(tokens, ElementsAre(6, 7, 8));
  EXPECT_THAT(targets, ElementsAre(7, 8, 9));
  samples.read(3, tokens, targets);
  EXPECT_THAT(tokens, ElementsAre(100, 101, 102));
  EXPECT_THAT(targets, ElementsAre(101, 102, 103));
  const Samples end = samples.slice(3, 1);
  EXPECT_EQ(end.size(), 1u);
  end.read(0, tokens, targets);
  EXPECT_THAT(tokens, ElementsAre(100, 101, 102));

  Samples both = samples.slice(1, 1);
  both.append(end);
  both.append(samples.slice(2, 2));
  ASSERT_EQ(both.size(), 4u);
  for (const auto& [sample, begins] : {std::pair(0u, 3), {1u, 100}, {2u, 6}, {3u, 100}}) {
    both.read(sample, tokens, targets);
    EXPECT_EQ(tokens[0], begins) << sample;
    EXPECT_EQ(targets[2], begins + 3) << sample;
  }
  both.slice(2, 2).read(0, tokens, targets);
  EXPECT_EQ(tokens[0], 6);
}

TEST(Samples, TheFingerprintSeesEveryToken) {
  std::vector<std::int32_t> tokens(5000, 1);
  const auto fingerprint = [&](int context = 10) {
    return Samples({TokenShard::of("t", tokens, {})}, 200, context).fingerprint();
  };
  const Blake3Hash before = fingerprint();
  EXPECT_EQ(fingerprint(), before);
  EXPECT_NE(fingerprint(11), before);
  for (const std::size_t place : {std::size_t{0}, std::size_t{2511}, tokens.size() - 1}) {
    tokens[place] = 2;
    EXPECT_NE(fingerprint(), before) << place;
    tokens[place] = 1;
  }
  const Samples all({TokenShard::of("t", tokens, {})}, 200, 10);
  EXPECT_NE(all.slice(0, 100).fingerprint(), all.slice(100, 100).fingerprint());
  // The order of files counts: it is the order of the samples.
  const TokenShard a = TokenShard::of("a", std::vector<std::int32_t>(50, 1), {});
  const TokenShard b = TokenShard::of("b", std::vector<std::int32_t>(50, 2), {});
  EXPECT_NE(Samples({a, b}, 200, 10).fingerprint(), Samples({b, a}, 200, 10).fingerprint());
}

TEST(Tokenizer, BytesComeBack) {
  const auto tokenizer = byte_tokenizer();
  std::vector<std::int32_t> tokens;
  tokenizer->encode("h\xc3\xa9!", tokens);
  EXPECT_THAT(tokens, ElementsAre('h', 0xc3, 0xa9, '!'));
  EXPECT_EQ(tokenizer->decode(tokens), "h\xc3\xa9!");
  EXPECT_EQ(tokenizer->vocab(), 256u);
  EXPECT_EQ(tokenizer->end_of_document(), 0);
}

TEST(Tokenizer, SentencePieceComesBack) {
  if (!has_sentencepiece()) GTEST_SKIP() << "built without SentencePiece";
  std::string text;
  for (int i = 0; i < 200; ++i)
    text += "The quick brown fox jumps  over the lazy dog\n  and again, na\xc3\xafve.\n\n";
  const std::vector<std::string_view> texts = {text};
  const std::string model = train_sentencepiece(texts, 320);
  EXPECT_EQ(model, train_sentencepiece(texts, 320)) << "training is not reproducible";
  const auto tokenizer = sentencepiece_tokenizer(model, "m");
  EXPECT_LE(tokenizer->vocab(), 320u);
  std::vector<std::int32_t> tokens;
  const std::string other =
      text.substr(0, 200) + "\ttabs, \xf0\x9f\x99\x82 and what it never saw: Zw\xc3\xb6lf\n";
  tokenizer->encode(other, tokens);
  EXPECT_EQ(tokenizer->decode(tokens), other);
  EXPECT_LT(tokens.size(), other.size() * 2 / 3);
  for (const std::int32_t token : tokens)
    EXPECT_LT(static_cast<std::uint32_t>(token), tokenizer->vocab());
  EXPECT_THAT(message_of([] { sentencepiece_tokenizer("nonsense", "bad.model"); }),
              HasSubstr("bad.model: not a Sentence"));
}

TEST(ShardBuilder, DocumentsToShardsAndBack) {
  TemporaryFolder folder;
  const auto tokenizer = byte_tokenizer();
  ShardBuilder builder(
      {.folder = folder.path() + "/deep/down", .shard_tokens = 10, .entropy_per_byte = 0.5},
      *tokenizer);
  builder.add_document("once upon", {});
  builder.add_document("a", {});
  builder.add_document("time", {});
  const auto totals = builder.finish();
  EXPECT_EQ(totals.shards, 2u);
  EXPECT_EQ(totals.documents, 3u);
  EXPECT_EQ(totals.tokens, 17u);
  EXPECT_EQ(totals.text_bytes, 17u);

  const DataSource source = open_data({folder.path() + "/deep/down"});
  ASSERT_EQ(source.training.size(), 2u);
  EXPECT_EQ(source.vocab, 256u);
  EXPECT_EQ(source.entropy_per_byte, 0.5);
  EXPECT_EQ(source.bytes_per_token, 1.0);
  std::vector<std::int32_t> tokens(source.training[1].size());
  source.training[1].copy(0, 256, tokens);
  EXPECT_EQ(source.tokenizer->decode(tokens), "atime");  // the ends of documents are no text
  EXPECT_THAT(
      message_of([&] { ShardBuilder({.folder = folder.path() + "/deep/down"}, *tokenizer); }),
      HasSubstr("shard_00000.bin is there already"));
}

TEST(ShardBuilder, ValidationHasShardsOfItsOwn) {
  TemporaryFolder folder;
  const auto tokenizer = byte_tokenizer();
  ShardBuilder builder({.folder = folder.path()}, *tokenizer);
  builder.add_document("once upon", {});
  builder.for_validation();
  builder.add_document("a time", {});
  EXPECT_EQ(builder.finish().shards, 2u);
  const DataSource source = open_data({folder.path()});
  ASSERT_EQ(source.training.size(), 1u);
  ASSERT_EQ(source.validation.size(), 1u);
  EXPECT_EQ(source.validation[0].name(), folder.path() + "/val_00000.bin");
  EXPECT_EQ(source.validation[0].size(), 7u);
}

TEST(ShardBuilder, ATokenizerOfSomebodyElseStays) {
  TemporaryFolder folder;
  const auto tokenizer = make_tokenizer({"bpe", 260}, std::vector<std::string_view>{"a fox a fox"});
  const std::string path = write(folder.path() + "/tokenizer.json", "theirs");
  EXPECT_THAT(message_of([&] { ShardBuilder({.folder = folder.path()}, *tokenizer); }),
              HasSubstr("tokenizer.json is there already, and is another tokenizer"));
  EXPECT_EQ(std::filesystem::file_size(path), 6u);
  std::filesystem::remove(path);
  ShardBuilder({.folder = folder.path()}, *tokenizer);
  ShardBuilder({.folder = folder.path()}, *tokenizer);  // the same one
}

TEST(ShardBuilder, SentencePieceModelLiesBesideTheShards) {
  if (!has_sentencepiece()) GTEST_SKIP() << "built without SentencePiece";
  TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 300; ++i) text += "a small fox sat under a small tree and slept\n";
  const auto tokenizer =
      make_tokenizer({"sentencepiece", 300}, std::vector<std::string_view>{text});
  ShardBuilder builder({.folder = folder.path()}, *tokenizer);
  builder.add_document(text, {});
  builder.finish();
  const DataSource source = open_data({folder.path()});
  std::vector<std::int32_t> tokens(source.training[0].size());
  source.training[0].copy(0, source.vocab, tokens);
  EXPECT_EQ(source.tokenizer->decode(tokens), text);
  EXPECT_GT(source.bytes_per_token, 2.0);

  const auto other =
      train_sentencepiece(std::vector<std::string_view>{"another text, another model\n"}, 280);
  write(folder.path() + "/tokenizer.model", other);
  EXPECT_THAT(message_of([&] { open_data({folder.path()}); }), HasSubstr("not the tokenizer that"));
}

TEST(OpenData, TextFilesAndWhatIsWrongWithThem) {
  TemporaryFolder folder;
  const std::string good = write(folder.path() + "/good.txt", "hello\n");
  const DataSource source = open_data({good, good});
  EXPECT_EQ(source.training.size(), 2u);
  EXPECT_EQ(source.training[0].size(), 7u);
  const auto problem = [&](const char* name, std::string_view text) {
    return message_of([&] { open_data({good, write(folder.path() + "/" + name, text)}); });
  };
  EXPECT_THAT(problem("empty.txt", ""), HasSubstr("empty.txt: the file is empty"));
  EXPECT_THAT(problem("latin.txt", "caf\xe9 au lait"),
              HasSubstr("latin.txt: byte 3: 0xe9 is not UTF-8"));
  EXPECT_THAT(problem("zero.txt", std::string_view("ab\0c", 4)),
              HasSubstr("zero.txt: byte 2: a zero byte"));
  EXPECT_THAT(problem("mixed.bin", "1234"), HasSubstr("train on one kind"));
  EXPECT_THAT(message_of([&] { open_data({folder.path() + "/none.txt"}); }),
              HasSubstr("none.txt: No such file"));
  // One that nobody writes to is not waited for.
  ASSERT_EQ(::mkfifo((folder.path() + "/pipe.txt").c_str(), 0600), 0);
  EXPECT_THAT(message_of([&] { open_data({folder.path() + "/pipe.txt"}); }),
              HasSubstr("pipe.txt: not a regular file"));
}

// Text is mapped while it is turned into tokens. A file of the kernel stands for one on a bad disk:
// it has a size and cannot be read.
TEST(OpenData, ATextThatCannotBeReadIsAnError) {
  const std::string bad = "/sys/class/net/lo/speed";
  if (!std::filesystem::exists(bad)) GTEST_SKIP() << bad << " is not there";
  EXPECT_THAT(message_of([&] { const MappedFile file(bad); }),
              HasSubstr("reading " + bad + " at byte 0"));
}

// Somebody cuts it short, or writes another one in its place, while it is read.
TEST(OpenData, ATextThatIsCutShortWhileItIsMappedIsAnError) {
  TemporaryFolder folder;
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::string path = write(folder.path() + "/cut.txt", std::string(3 * page, 'a'));
  const std::string other = write(folder.path() + "/other.txt", std::string(3 * page, 'b'));
  MappedFile file(path);
  const MappedFile untouched(other);
  file.require_whole();
  ASSERT_EQ(::truncate(path.c_str(), static_cast<off_t>(page)), 0);
  const auto bytes = file.bytes();
  EXPECT_EQ(std::ranges::count(bytes, std::byte{'a'}), static_cast<std::ptrdiff_t>(page));
  EXPECT_EQ(std::ranges::count(bytes, std::byte{0}), static_cast<std::ptrdiff_t>(2 * page));
  const MappedFile moved = std::move(file);
  const auto expected = fmt::format("{}: byte {}: cannot be read any more", path, page);
  EXPECT_THAT(message_of([&] { moved.require_whole(); }), HasSubstr(expected));
  EXPECT_THAT(message_of([&] { text_of(moved); }), HasSubstr(expected));
  EXPECT_EQ(std::ranges::count(untouched.bytes(), std::byte{'b'}),
            static_cast<std::ptrdiff_t>(3 * page));
  untouched.require_whole();
}

// A thread of ours has its faults handled, too.
TEST(OpenData, ATextThatIsCutShortIsFoundOnEveryThread) {
  TemporaryFolder folder;
  const std::string path = write(folder.path() + "/cut.txt", std::string(1 << 16, 'a'));
  const MappedFile file(path);
  ASSERT_EQ(::truncate(path.c_str(), 0), 0);
  Thread thread;
  thread.start(
      "a reader", [&] { EXPECT_EQ(std::ranges::count(file.bytes(), std::byte{'a'}), 0); },
      [](const Error& error) { ADD_FAILURE() << error.what(); });
  thread.join();
  EXPECT_THAT(message_of([&] { file.require_whole(); }), HasSubstr("byte 0"));
}

TEST(ShardBuilder, APieceThatIsRefusedIsInNoShard) {
  TemporaryFolder folder;
  const std::string out = folder.path() + "/shards";
  std::string text;  // three pieces
  while (text.size() < 3 << 20) text += std::string(1023, 'a') + '\n';
  std::size_t pieces = 0;
  const auto refuse_last = [&](std::size_t) {
    if (++pieces == 3) throw Error(ErrorCode::kIo, "gone");
  };
  {
    const auto tokenizer = byte_tokenizer();
    ShardBuilder builder({out, 1 << 20, 0}, *tokenizer);
    EXPECT_THAT(message_of([&] { builder.add_document(text, refuse_last); }), HasSubstr("gone"));
  }
  EXPECT_EQ(shards_in(out).size(), 2u);
}

TEST(OpenData, ValidationByName) {
  EXPECT_TRUE(is_for_validation("x/val.bin"));
  EXPECT_TRUE(is_for_validation("fineweb_val_000000.bin"));
  EXPECT_TRUE(is_for_validation("validation.bin"));
  EXPECT_FALSE(is_for_validation("val/train.bin"));
  EXPECT_FALSE(is_for_validation("medieval.bin"));
  EXPECT_FALSE(is_for_validation("values.bin"));
  TemporaryFolder folder;
  write(folder.path() + "/train.bin", "aabbcc");
  write(folder.path() + "/val.bin", "dd");
  const DataSource source = open_data({folder.path()}, {.vocab = 0x6464 + 1});
  EXPECT_EQ(source.training[0].size(), 3u);
  EXPECT_EQ(source.validation[0].size(), 1u);
  EXPECT_EQ(source.vocab, 0x6464u + 1);
  EXPECT_EQ(source.tokenizer, nullptr);
}

TEST(OpenData, TextIsKeptForValidationByNameToo) {
  TemporaryFolder folder;
  const std::string train = write(folder.path() + "/train.txt", "learn this\n");
  const std::string val = write(folder.path() + "/val.txt", "and try it on this\n");
  for (const auto& paths : {std::vector{train, val}, std::vector{folder.path()},
                            std::vector{folder.path() + "/*.txt"}}) {
    const DataSource source = open_data(paths);
    ASSERT_EQ(source.training.size(), 1u);
    ASSERT_EQ(source.validation.size(), 1u);
    EXPECT_EQ(source.training[0].name(), train);
    EXPECT_EQ(source.validation[0].name(), val);
  }
  const DataSource alone = open_data({val});  // there is nothing else to train on
  EXPECT_EQ(alone.training.size(), 1u);
  EXPECT_THAT(alone.notes, ElementsAre(HasSubstr("val.txt is trained on, though its name")));
  write(folder.path() + "/tokens.bin", "aabb");
  EXPECT_THAT(open_data({folder.path()}, {.vocab = 0x6464}).notes,
              ElementsAre(HasSubstr("only its shards (.bin) are taken, not its 2 .txt files")));
  EXPECT_THAT(message_of([&] { open_data({folder.path() + "/*.md"}); }),
              HasSubstr("*.md: there is no such file"));
  EXPECT_THAT(message_of([] { open_data({"-"}); }), HasSubstr("standard input"));
}

TEST(OpenData, AMixKnowsWhatEachPathHasGiven) {
  TemporaryFolder folder;
  std::filesystem::create_directory(folder.path() + "/web");
  const std::string one = write(folder.path() + "/web/one.txt", "learn this\n");
  const std::string two = write(folder.path() + "/web/two.txt", "and this\n");
  const std::string val = write(folder.path() + "/web/val.txt", "and try it on this\n");
  const std::string code = write(folder.path() + "/my_val.txt", "int main() {}\n");
  const DataSource source = open_data({folder.path() + "/web", code}, {}, {3, 1});
  ASSERT_EQ(source.mix.size(), 2u);
  EXPECT_EQ(source.mix[0].name, folder.path() + "/web");
  EXPECT_EQ(source.mix[0].weight, 3);
  EXPECT_EQ(source.mix[0].training, 2u);
  EXPECT_EQ(source.mix[0].validation, 1u);
  // There is nothing else in this path to train on.
  EXPECT_EQ(source.mix[1].training, 1u);
  EXPECT_EQ(source.mix[1].validation, 0u);
  ASSERT_EQ(source.training.size(), 3u);
  EXPECT_EQ(source.training[0].name(), one);
  EXPECT_EQ(source.training[1].name(), two);
  EXPECT_EQ(source.training[2].name(), code);
  EXPECT_EQ(source.validation[0].name(), val);
  EXPECT_EQ(source.bytes_per_token, 1.0);
  EXPECT_THAT(message_of([&] {
                open_data({one, two, code}, {}, {3, 1});
              }),
              HasSubstr("--mix has 2 weights for 3 paths of --data"));
}

TEST(OpenData, TokensOfUnknownOriginAreTakenForThoseOfTheModel) {
  TemporaryFolder folder;
  const std::string path = write(folder.path() + "/tokens.bin", std::string("a\0b\0", 4));
  TokenizerChoice choice = {.vocab = 256, .inherited = ModelTokenizer{"first", byte_tokenizer()}};
  const DataSource taken = open_data({path}, choice);
  EXPECT_EQ(taken.tokenizer, choice.inherited->tokenizer);
  EXPECT_THAT(taken.notes, ElementsAre(HasSubstr("they are taken for those of first")));
  choice.force = true;
  EXPECT_EQ(open_data({path}, choice).tokenizer, nullptr);
  choice.inherited->same_run = true;  // which goes on as it began
  EXPECT_EQ(open_data({path}, choice).tokenizer, choice.inherited->tokenizer);
}

TEST(OpenData, BytesWithoutAHeaderAreNoTokensUnlessSomebodySaysSo) {
  TemporaryFolder folder;
  const std::string path = write(folder.path() + "/some.bin", "abcdef");
  EXPECT_THAT(message_of([&] { open_data({path}); }), HasSubstr("has no header that we know"));
  EXPECT_EQ(open_data({path}, {.vocab = 50000}).vocab, 50000u);
  EXPECT_THAT(message_of([&] { open_data({path}, {.name = "bytes", .vocab = 50000}); }),
              HasSubstr("holds tokens already"));
}

// A run leaves the hash of a shard beside it, where the next run's pattern finds it.
TEST(OpenData, KeptHashesOfShardsAreNoData) {
  TemporaryFolder folder;
  const std::string path = write(folder.path() + "/some.bin", "abcdef");
  open_data({path}, {.vocab = 50000}).training[0].payload().get();
  const std::string kept = path + ".blake3";
  ASSERT_TRUE(std::filesystem::exists(kept));
  const std::string temporary = write(path + ".blake3.17.tmp", "{");  // of a run that was killed
  for (const std::vector<std::string>& paths :
       {std::vector{folder.path() + "/*"}, std::vector{path, kept, temporary}}) {
    EXPECT_EQ(open_data(paths, {.vocab = 50000}).training.size(), 1u);
  }
  EXPECT_THAT(message_of([&] { open_data({kept}, {.vocab = 50000}); }), HasSubstr("no data"));
  EXPECT_THAT(message_of([&] {
                open_data({path, kept}, {.vocab = 50000}, {1, 1});
              }),
              HasSubstr("some.bin.blake3 holds no data"));
}

TEST(OpenData, AVocabularyThatTheTokensCannotHaveIsRefused) {
  TemporaryFolder folder;
  const std::string text = write(folder.path() + "/text.txt", "some text\n");
  EXPECT_THAT(message_of([&] { open_data({text}, {.vocab = 100}); }),
              HasSubstr("--vocab 100: bytes have a vocabulary of 256"));
  const std::string shards = folder.path() + "/shards";
  const auto tokenizer = byte_tokenizer();
  ShardBuilder builder({.folder = shards}, *tokenizer);
  builder.add_document("a document", {});
  builder.finish();
  EXPECT_THAT(message_of([&] { open_data({shards}, {.vocab = 100}); }),
              HasSubstr("has a vocabulary of 256"));
  EXPECT_EQ(open_data({shards}, {.vocab = 512}).vocab, 512u);
  EXPECT_THAT(message_of([&] { open_data({shards}, {.name = "sentencepiece"}); }),
              HasSubstr("are bytes already"));
}

// A tokenizer of bytes that is not byte_tokenizer().
class Letters final : public Tokenizer {
 public:
  TokenizerKind kind() const override { return TokenizerKind::kSentencePiece; }
  std::uint32_t vocab() const override { return 300; }
  std::optional<std::int32_t> end_of_document() const override { return 299; }
  void encode(std::string_view text, std::vector<std::int32_t>& tokens) const override {
    for (const char c : text) tokens.push_back(c - 'a');
  }
  std::string decode(std::span<const std::int32_t>) const override { return {}; }
  std::string_view model() const override { return "letters"; }
  std::vector<TokenizerFile> files() const override { return {}; }
};

TEST(OpenData, TextIsEncodedWithTheTokenizerOfTheModelThatTrainingStartsFrom) {
  TemporaryFolder folder;
  const std::string text = write(folder.path() + "/text.txt", "abc");
  const auto letters = std::make_shared<Letters>();
  const ModelTokenizer start = {"some-model", letters};
  const DataSource source = open_data({text}, {.inherited = start});
  EXPECT_EQ(source.tokenizer, letters);
  std::vector<std::int32_t> tokens(4);
  source.training[0].copy(0, 300, tokens);
  EXPECT_THAT(tokens, ElementsAre(0, 1, 2, 299));
  EXPECT_THAT(message_of([&] { open_data({text}, {.name = "bytes", .inherited = start}); }),
              HasSubstr("some-model was trained with another tokenizer (one of 300 pieces)"));
  EXPECT_THAT(message_of([&] { open_data({text}, {.name = "sentencepiece", .inherited = start}); }),
              HasSubstr("trains a new one, but some-model"));
  EXPECT_EQ(open_data({text}, {.name = "bytes", .inherited = start, .force = true}).vocab, 256u);
  const ModelTokenizer bytes = {"some-model", byte_tokenizer()};
  EXPECT_EQ(open_data({text}, {.name = "bytes", .inherited = bytes}).vocab, 256u);
  const ModelTokenizer none = {"some-model", nullptr};
  EXPECT_THAT(message_of([&] { open_data({text}, {.inherited = none}); }),
              HasSubstr("has no tokenizer: --tokenizer says which"));
  EXPECT_EQ(open_data({text}, {.name = "bytes", .inherited = none}).vocab, 256u);

  const std::string shards = folder.path() + "/shards";
  const auto tokenizer = byte_tokenizer();
  ShardBuilder builder({.folder = shards}, *tokenizer);
  builder.add_document("abc", {});
  builder.finish();
  EXPECT_THAT(message_of([&] { open_data({shards}, {.inherited = start}); }),
              HasSubstr("are bytes, but some-model was trained with another tokenizer"));
  EXPECT_EQ(open_data({shards}, {.inherited = bytes}).vocab, 256u);
}

TEST(OpenData, FewerPiecesThanAskedForAreTheVocabulary) {
  if (!has_sentencepiece()) GTEST_SKIP() << "built without SentencePiece";
  std::string text;
  for (int i = 0; i < 100; ++i) text += "a small fox sat under a small tree\n";
  ::testing::internal::CaptureStderr();
  const auto tokenizer =
      make_tokenizer({"sentencepiece", 100'000}, std::vector<std::string_view>{text});
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr(std::to_string(tokenizer->vocab()) + " pieces"));
  EXPECT_LT(tokenizer->vocab(), 1000u);
}

TEST(OpenData, NoPath) {
  EXPECT_EQ(message_of([] { open_data({}); }),
            "invalid argument: there is no data: no path is given");
}

}  // namespace
}  // namespace lockstep::data_test
