#include "lockstep/train/checkpoint/tensor_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "lockstep/base/error.h"
#include "tests/support/error_text.h"
#include "tests/support/temporary_folder.h"

namespace lockstep::tensor_folder_test {
namespace {

using test::message_of;
using ::testing::HasSubstr;

class TensorFolders : public testing::Test {
 protected:
  // Larger than what is read at once, and one of another type.
  TensorFolders() : weights_(700'000), counts_{5, -6} {
    std::iota(weights_.begin(), weights_.end(), 1.0F);
    save_tensors(path_, 12, tensors(), std::as_bytes(std::span(metadata_)));
  }

  std::vector<TensorToStore> tensors() const {
    return {{"a.weights", {7, 100'000}, std::span<const float>(weights_)},
            {"none", {0}, std::span<const float>()},
            {"counts", {2}, std::as_bytes(std::span(counts_)), "I64"}};
  }
  void overwrite(const char* name, std::streamoff from_end, char byte) const {
    std::fstream file(path_ + "/" + name, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(from_end, std::ios::end);
    file.put(byte);
  }

  TemporaryFolder folder_;
  const std::string path_ = folder_.path() + "/checkpoint-12";
  const std::string metadata_ = "{}\0\xff";
  std::vector<float> weights_;
  std::array<std::int64_t, 2> counts_;
};

TEST_F(TensorFolders, AreReadAsTheyWereSaved) {
  const TensorFolder saved(path_);
  EXPECT_EQ(saved.step(), 12);
  EXPECT_EQ(saved.metadata(), metadata_);
  ASSERT_EQ(saved.tensors().size(), 3U);
  EXPECT_EQ(saved.tensors()[2].name, "counts");
  EXPECT_EQ(saved.tensors()[2].type_name, "I64");
  std::vector<float> weights(weights_.size());
  std::array<std::int64_t, 2> counts{};
  const auto place = [](auto& values) { return reinterpret_cast<std::byte*>(values.data()); };
  saved.read(std::array{place(weights), static_cast<std::byte*>(nullptr), place(counts)});
  EXPECT_EQ(weights, weights_);
  EXPECT_EQ(counts, counts_);
}

TEST_F(TensorFolders, AnythingThatIsDamagedIsFound) {
  const auto read = [&] { TensorFolder(path_).read(std::array<std::byte*, 3>{}); };
  EXPECT_EQ(message_of(read), "no error");
  overwrite("model.safetensors", -1'000'000, 1);
  EXPECT_THAT(message_of(read), HasSubstr("model.safetensors: is damaged"));
  overwrite("metadata.bin", -1, 1);
  EXPECT_THAT(message_of(read), HasSubstr("metadata.bin: is damaged"));
  std::filesystem::resize_file(path_ + "/model.safetensors", 1000);
  EXPECT_THAT(message_of(read), HasSubstr("metadata.bin"));  // the first of both
  std::filesystem::remove(path_ + "/manifest.json");
  EXPECT_THAT(message_of(read), HasSubstr("manifest.json: is missing"));
}

TEST_F(TensorFolders, AFileThatIsNotListedIsRefused) {
  std::ofstream(path_ + "/.hidden") << "x";
  EXPECT_EQ(message_of([&] { TensorFolder{path_}; }), "no error");
  std::ofstream(path_ + "/model-2.safetensors") << "x";
  EXPECT_THAT(message_of([&] { TensorFolder{path_}; }),
              HasSubstr("/model-2.safetensors: does not belong to the checkpoint"));
}

TEST_F(TensorFolders, WhatDoesNotFitTogetherIsRefused) {
  const auto save = [&](std::vector<TensorToStore> tensors) {
    return message_of([&] { save_tensors(folder_.path() + "/b", 1, std::move(tensors), {}); });
  };
  const std::span<const float> values(weights_.data(), 6);
  EXPECT_THAT(save({{"w", {2, 2}, values}}), HasSubstr("24 bytes, but its shape takes 16"));
  EXPECT_THAT(save({{"w", {6}, values}, {"w", {6}, values}}), HasSubstr("is there twice"));
  EXPECT_THAT(save({{"w", {6}, std::as_bytes(values), "F31"}}), HasSubstr("unknown type F31"));
  EXPECT_FALSE(std::filesystem::exists(folder_.path() + "/b"));
  EXPECT_THAT(message_of([&] { save_tensors(path_, 1, tensors(), {}); }), HasSubstr(path_));
}

}  // namespace
}  // namespace lockstep::tensor_folder_test
