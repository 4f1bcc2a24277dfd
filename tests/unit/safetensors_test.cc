#include "lockstep/train/formats/safetensors.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "lockstep/base/error.h"
#include "lockstep/base/thread_pool.h"
#include "lockstep/files/file_source.h"
#include "lockstep/model/init.h"
#include "lockstep/model/weights_hash.h"
#include "lockstep/train/checkpoint/folders.h"
#include "lockstep/wire/bytes.h"
#include "tests/support/error_text.h"
#include "tests/support/temporary_folder.h"

namespace lockstep::safetensors_test {
namespace {

using test::message_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::byte> file_of(std::string_view header, std::size_t data_bytes) {
  ByteWriter writer;
  writer.u64(header.size());
  writer.bytes(std::as_bytes(std::span(header)));
  for (std::size_t i = 0; i < data_bytes; ++i) writer.u8(static_cast<std::uint8_t>(i));
  return std::move(writer).take();
}

std::string problem_of(std::span<const std::byte> file) {
  const auto parsed = parse_safetensors(file, file.size());
  const auto* problem = std::get_if<SafetensorsProblem>(&parsed);
  return problem == nullptr ? "none" : std::to_string(problem->position) + ": " + problem->what;
}

TEST(Safetensors, WhatItWritesItReads) {
  TemporaryFolder folder;
  const std::string path = folder.path() + "/m.safetensors";
  const std::vector<float> a = {1, -2, 3.5f, 0, 1e-40f, INFINITY};
  const std::vector<float> b = {7};
  const std::vector<TensorToStore> tensors = {{"z", {2, 3}, a}, {"a", {1}, b}, {"none", {0}, {}}};
  write_safetensors(path, tensors, {{"format", "pt"}});
  StoredFiles files(folder.path());
  const SafetensorsFile file(files, "m.safetensors");
  ASSERT_EQ(file.tensors().size(), 3u);
  EXPECT_EQ(file.tensors()[0].name, "z");  // in the order given, not by name
  EXPECT_THAT(file.tensors()[0].shape, ElementsAre(2, 3));
  EXPECT_EQ(file.tensors()[0].begin % 8, 0u);
  std::vector<float> back(6);
  const std::string text = files.text("m.safetensors");
  EXPECT_EQ(file.read({file.target("z", back)}), blake3(std::as_bytes(std::span(text))));
  EXPECT_EQ(file.metadata("format"), "pt");
  EXPECT_EQ(file.metadata("none"), "");
  EXPECT_EQ(std::memcmp(back.data(), a.data(), 24), 0);
  EXPECT_EQ(file.find("b"), nullptr);
  EXPECT_THAT(message_of([&] { file.target("a", back); }),
              HasSubstr("tensor 'a' has 1 elements, not 6"));
}

TEST(Safetensors, ReadsHalves) {
  TemporaryFolder folder;
  const std::string path = folder.path() + "/h.safetensors";
  const std::string header =
      R"({"h":{"dtype":"F16","shape":[6],"data_offsets":[0,12]},"b":{"dtype":"BF16","shape":[2],"data_offsets":[12,16]},)"
      R"("i":{"dtype":"I8","shape":[1],"data_offsets":[16,17]}})";
  ByteWriter writer;
  writer.u64(header.size());
  writer.bytes(std::as_bytes(std::span(std::string_view(header))));
  for (const int bits : {0x3c00, 0xc000, 0x0001, 0x8000, 0x7bff, 0x7c00, 0x3f80, 0xc049})
    writer.u16(static_cast<std::uint16_t>(bits));
  writer.u8(0);
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(writer.written().data()),
             static_cast<std::streamsize>(writer.written().size()));
  StoredFiles files(folder.path());
  const SafetensorsFile file(files, "h.safetensors");
  std::vector<float> h(6), b(2), i(1);
  file.read({file.target("h", h), file.target("b", b)});
  EXPECT_THAT(h, ElementsAre(1.0f, -2.0f, 0x1p-24f, -0.0f, 65504.0f, INFINITY));
  EXPECT_TRUE(std::signbit(h[3]));
  EXPECT_THAT(b, ElementsAre(1.0f, -3.140625f));
  EXPECT_THAT(message_of([&] { file.target("i", i); }), HasSubstr("neither F32"));
}

// Tensors of all widths that begin, end and have elements across the blocks in which files are
// read.
TEST(Safetensors, ReadsAcrossBlocks) {
  constexpr std::size_t kElements = 700'000;
  for (const std::size_t spaces : {0, 1, 2, 3}) {
    std::string header =
        fmt::format(R"({{"f":{{"dtype":"F32","shape":[{0}],"data_offsets":[0,{1}]}},)"
                    R"("b":{{"dtype":"BF16","shape":[{0}],"data_offsets":[{1},{2}]}}}})",
                    kElements, 4 * kElements, 6 * kElements);
    header.append(spaces, ' ');
    std::vector<std::byte> bytes = file_of(header, 6 * kElements);
    for (std::size_t i = 8 + header.size(); i < bytes.size(); ++i) {
      bytes[i] = static_cast<std::byte>(i * 2654435761u >> 13);
    }
    TemporaryFolder folder;
    std::ofstream(folder.path() + "/x", std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    StoredFiles files(folder.path());
    const SafetensorsFile file(files, "x");
    std::vector<float> f(kElements), b(kElements);
    EXPECT_EQ(file.read({file.target("b", b), file.target("f", f)}), blake3(bytes));
    const std::byte* data = bytes.data() + 8 + header.size();
    EXPECT_EQ(std::memcmp(f.data(), data, 4 * kElements), 0) << spaces;
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < kElements; ++i) {
      const auto half = load_little_endian<std::uint16_t>(data + 4 * kElements + 2 * i);
      wrong += std::bit_cast<std::uint32_t>(b[i]) != std::uint32_t{half} << 16;
    }
    EXPECT_EQ(wrong, 0u) << spaces;
  }
}

TEST(Safetensors, BrokenFilesAreTold) {
  const auto with = [](const char* entry, std::size_t data = 8) {
    return problem_of(file_of(std::string(R"({"t":)") + entry + "}", data));
  };
  EXPECT_EQ(with(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})"), "none");
  EXPECT_THAT(problem_of({}), HasSubstr("first 8 bytes"));
  const auto whole = file_of("{}", 0);
  EXPECT_THAT(problem_of(std::span(whole).first(9)), HasSubstr("0: a header of 2 bytes"));
  EXPECT_THAT(problem_of(file_of("[]", 0)), HasSubstr("8: the header is not a JSON object"));
  EXPECT_THAT(problem_of(file_of("{", 0)), HasSubstr("not a JSON object"));
  EXPECT_THAT(problem_of(file_of("{}", 3)), HasSubstr("10: bytes that belong to no tensor"));
  EXPECT_THAT(with("3"), HasSubstr("tensor 't' is not an object"));
  EXPECT_THAT(with(R"({"dtype":"F32","shape":[2]})"), HasSubstr("lacks"));
  EXPECT_THAT(with(R"({"dtype":"Q3","shape":[2],"data_offsets":[0,8]})"),
              HasSubstr("unknown type Q3"));
  EXPECT_THAT(with(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})"),
              HasSubstr("shape that cannot be"));
  EXPECT_THAT(with(R"({"dtype":"F32","shape":[2.5],"data_offsets":[0,8]})"),
              HasSubstr("shape that cannot be"));
  EXPECT_THAT(with(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})"),
              HasSubstr("larger than the file"));
  EXPECT_THAT(with(R"({"dtype":"F32","shape":[1],"data_offsets":[0,8]})"),
              HasSubstr("has 8 bytes, but its shape takes 4"));
  EXPECT_THAT(with(R"({"dtype":"F32","shape":[4294967296,4294967296,0],"data_offsets":[0,0]})", 0),
              HasSubstr("larger"));
  EXPECT_THAT(with(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})"),
              HasSubstr("outside the file"));
  EXPECT_THAT(with(R"({"dtype":"F32","shape":[2],"data_offsets":[4,12]})"),
              HasSubstr("outside the file"));
  EXPECT_THAT(with(R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})"),
              HasSubstr("gap or overlaps"));
  EXPECT_THAT(with(R"({"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]})"),
              HasSubstr("9 dimensions"));
}

ModelConfig small_model(bool tied) {
  ModelConfig config;
  config.vocab = 256;
  config.hidden = 32;
  config.layers = 2;
  config.heads = 2;
  config.kv_heads = 1;
  config.intermediate = 48;
  config.context = 16;
  config.tie_embeddings = tied;
  return config;
}

TEST(ModelFiles, ComeBackBitForBit) {
  ThreadPool pool(1);
  for (const bool tied : {false, true}) {
    TemporaryFolder folder;
    const ParameterLayout layout(small_model(tied));
    FloatBuffer parameters(layout.size());
    initialise(layout, 3, pool, parameters.span());
    save_model(folder.path(), layout, parameters.span(), byte_tokenizer().get(), 12);
    const SavedModel model = load_model(folder.path());
    EXPECT_EQ(model.config, layout.config());
    EXPECT_EQ(model.tokenizer->kind(), TokenizerKind::kBytes);
    EXPECT_EQ(model.start, 0);
    EXPECT_EQ(weights_hash(layout, model.parameters.span()),
              weights_hash(layout, parameters.span()));
    StoredFiles files(folder.path());
    const SafetensorsFile file(files, "model.safetensors");
    ASSERT_EQ(file.tensors().size(), layout.tensors().size());
    for (std::size_t i = 0; i < file.tensors().size(); ++i) {
      EXPECT_EQ(file.tensors()[i].name, layout.tensors()[i].name);
    }
    EXPECT_EQ(file.find("lm_head.weight") == nullptr, tied);
    EXPECT_EQ(file.find("model.norm.weight")->shape.size(), 1u);
    EXPECT_EQ(file.find("model.embed_tokens.weight")->shape.size(), 2u);
  }
}

TEST(ModelFiles, WhatIsWrongIsNamed) {
  ThreadPool pool(1);
  TemporaryFolder folder;
  const ParameterLayout layout(small_model(true));
  FloatBuffer parameters(layout.size());
  save_model(folder.path(), layout, parameters.span(), nullptr, 0);
  EXPECT_EQ(load_model(folder.path()).tokenizer, nullptr);
  const std::string config_path = folder.path() + "/config.json";
  std::string config;
  std::getline(std::ifstream(config_path), config, '\0');
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = config;
    changed.replace(changed.find(from), from.size(), to);
    std::ofstream(config_path) << changed;
    return message_of([&] { load_model(folder.path()); });
  };
  EXPECT_EQ(with("\"silu\"", "\"silu\""), "no error");
  EXPECT_THAT(with("\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false"),
              HasSubstr("model.safetensors: tensor 'lm_head.weight' is missing"));
  EXPECT_THAT(with("\"intermediate_size\": 48", "\"intermediate_size\": 64"),
              HasSubstr("elements, not"));
  EXPECT_THAT(with("\"hidden_size\": 32", "\"hidden_size\": \"x\""),
              HasSubstr("config.json: 'hidden_size' is not a whole number"));
  EXPECT_THAT(with("\"hidden_size\": 32", "\"hidden_size\": 33"),
              HasSubstr("config.json: model: hidden is 33"));
  EXPECT_THAT(with("\"rope_theta\": 10000.0", "\"rope_theta\": 1e39"),
              HasSubstr("config.json: 'rope_theta' is too large"));
  EXPECT_THAT(with("\"llama\"", "\"gpt2\""), HasSubstr("model_type 'gpt2', not 'llama'"));
  EXPECT_EQ(with("\"rope_theta\": 10000.0",
                 "\"rope_parameters\": {\"rope_theta\": 10000.0, "
                 "\"rope_type\": \"default\"}"),
            "no error");
  EXPECT_THAT(with("{", "{\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0},"),
              HasSubstr("rope_scaling is not supported"));
  EXPECT_EQ(with("{", "{\"rope_scaling\": null,"), "no error");
  EXPECT_THAT(with("\"silu\"", "\"gelu\""), HasSubstr("hidden_act 'gelu', not 'silu'"));
  EXPECT_THAT(with("{", "["), HasSubstr("config.json: not a JSON object"));
  EXPECT_THAT(message_of([] { load_model("/nonexistent"); }),
              HasSubstr("/nonexistent/config.json: No such file"));
}

TEST(ModelFiles, WeightsThatAreNotThoseThatWereWrittenAreRefused) {
  TemporaryFolder folder;
  const ParameterLayout layout(small_model(true));
  FloatBuffer parameters(layout.size());
  save_model(folder.path(), layout, parameters.span(), nullptr, 0);
  EXPECT_EQ(load_model(folder.path()).weights, weights_hash(layout, parameters.span()));
  const std::string path = folder.path() + "/model.safetensors";
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(-1, std::ios::end);
  file.put('\x3f');
  file.close();
  EXPECT_THAT(message_of([&] { load_model(folder.path()); }),
              HasSubstr("model.safetensors: is damaged: weights blake3:"));
}

// A model as Hugging Face saves large ones: two files and an index, here in half precision.
class ShardedModel : public ::testing::Test {
 protected:
  ShardedModel() : layout_(small_model(false)), parameters_(layout_.size()) {
    ThreadPool pool(1);
    initialise(layout_, 5, pool, parameters_.span());
    save_model(folder_.path(), layout_, parameters_.span(), byte_tokenizer().get(), 0);
    std::filesystem::remove(folder_.path() + "/model.safetensors");
  }

  // Tensor i goes into file i % 2, as the upper half of its bits.
  void write_shards() {
    std::string headers[2] = {"{", "{"};
    ByteWriter data[2];
    std::string map;
    const auto tensors = layout_.tensors();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const TensorSpec& tensor = tensors[i];
      std::string& header = headers[i % 2];
      const std::size_t begin = data[i % 2].written().size();
      for (std::size_t at = tensor.range.begin; at < tensor.range.end; ++at) {
        data[i % 2].u16(
            static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(parameters_.span()[at]) >> 16));
      }
      header += fmt::format(R"({}"{}":{{"dtype":"BF16","shape":[{}],"data_offsets":[{},{}]}})",
                            header.size() > 1 ? "," : "", tensor.name, tensor.range.size(), begin,
                            data[i % 2].written().size());
      map += fmt::format(R"({}"{}":"part-{}.safetensors")", map.empty() ? "" : ",", tensor.name,
                         i % 2);
    }
    for (int i = 0; i < 2; ++i) {
      ByteWriter file;
      headers[i] += "}";
      file.u64(headers[i].size());
      file.bytes(std::as_bytes(std::span(headers[i])));
      file.bytes(data[i].written());
      std::ofstream(folder_.path() + fmt::format("/part-{}.safetensors", i), std::ios::binary)
          .write(reinterpret_cast<const char*>(file.written().data()),
                 static_cast<std::streamsize>(file.written().size()));
    }
    write_index(map);
  }
  void write_index(const std::string& map) {
    std::ofstream(folder_.path() + "/model.safetensors.index.json")
        << R"({"metadata":{"total_size":1},"weight_map":{)" << map << "}}";
  }
  std::string load_error() {
    return message_of([&] { load_model(folder_.path()); });
  }

  TemporaryFolder folder_;
  ParameterLayout layout_;
  FloatBuffer parameters_;
};

TEST_F(ShardedModel, IsReadFromAllItsFiles) {
  write_shards();
  const SavedModel model = load_model(folder_.path());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto upper = std::bit_cast<std::uint32_t>(parameters_.span()[i]) & 0xffff0000u;
    ASSERT_EQ(std::bit_cast<std::uint32_t>(model.parameters.span()[i]), upper) << i;
  }
}

TEST_F(ShardedModel, WhatIsWrongIsNamed) {
  write_shards();
  std::filesystem::remove(folder_.path() + "/part-1.safetensors");
  EXPECT_THAT(load_error(), HasSubstr("part-1.safetensors: No such file"));
  write_index(R"("model.embed_tokens.weight":"part-0.safetensors")");
  EXPECT_THAT(load_error(), HasSubstr("index.json: tensor 'model.layers.0.self_attn.q_proj.weight' "
                                      "is missing"));
  write_index(R"("model.embed_tokens.weight":"../../etc/passwd")");
  EXPECT_THAT(load_error(), HasSubstr("which names no file"));
  std::ofstream(folder_.path() + "/model.safetensors.index.json") << "{}";
  EXPECT_THAT(load_error(), HasSubstr("there is no weight_map"));
}

}  // namespace
}  // namespace lockstep::safetensors_test
