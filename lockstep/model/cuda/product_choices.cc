#include "lockstep/model/cuda/product_choices.h"

#include <cublasLt.h>

#include <algorithm>
#include <array>

namespace lockstep {
namespace {

using Kind = CudaProducts::Kind;

// The proposals are those of this version.
constexpr std::size_t kMeasuredVersion = 130100;

// With the card at its power limit, as in training.
struct Choice {
  Kind kind;
  std::size_t tokens, ins, outs;
  std::size_t proposal;
};

constexpr std::array<Choice, 23> kChoices = {{
    {Kind::kForward, 65536, 768, 2304, 5},   {Kind::kInputs, 65536, 768, 2304, 5},
    {Kind::kWeights, 65536, 768, 2304, 5},   {Kind::kForward, 65536, 768, 768, 5},
    {Kind::kInputs, 65536, 768, 768, 5},     {Kind::kForward, 65536, 768, 4096, 6},
    {Kind::kInputs, 65536, 768, 4096, 5},    {Kind::kWeights, 65536, 768, 4096, 7},
    {Kind::kForward, 65536, 2048, 768, 5},   {Kind::kInputs, 65536, 2048, 768, 4},
    {Kind::kWeights, 65536, 2048, 768, 7},   {Kind::kForward, 16384, 768, 50304, 6},
    {Kind::kInputs, 16384, 768, 50304, 2},   {Kind::kWeights, 16384, 768, 50304, 2},
    {Kind::kForward, 32768, 1024, 1536, 6},  {Kind::kInputs, 32768, 1024, 1536, 5},
    {Kind::kWeights, 32768, 1024, 1536, 2},  {Kind::kForward, 32768, 1024, 1024, 5},
    {Kind::kInputs, 32768, 1024, 1024, 4},   {Kind::kForward, 32768, 1024, 8192, 7},
    {Kind::kWeights, 32768, 1024, 8192, 1},  {Kind::kInputs, 32768, 4096, 1024, 5},
    {Kind::kForward, 16384, 1024, 32768, 6},
}};

}  // namespace

std::size_t preferred_proposal(const CudaProducts::Call& call) {
  static const bool measured = cublasLtGetVersion() == kMeasuredVersion;
  if (!measured) return 0;
  const auto found = std::ranges::find_if(kChoices, [&](const Choice& choice) {
    return choice.kind == call.kind && choice.tokens == call.tokens && choice.ins == call.ins &&
           choice.outs == call.outs;
  });
  return found == kChoices.end() ? 0 : found->proposal;
}

}  // namespace lockstep
