#include <cstdlib>
#include <span>
#include <variant>

#include "lockstep/train/formats/safetensors.h"

// Whatever is taken for a safetensors file has every tensor inside it, end to end.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  const auto parsed = parse_safetensors(std::as_bytes(std::span(data, size)), size);
  const auto* tensors = std::get_if<SafetensorsHeader>(&parsed);
  if (tensors == nullptr) return 0;
  std::size_t position = tensors->empty() ? size : tensors->front().begin;
  for (const StoredTensor& tensor : *tensors) {
    if (tensor.begin != position || tensor.end > size) std::abort();
    if (tensor.elements() > tensor.end - tensor.begin) std::abort();
    position = tensor.end;
  }
  if (position != size) std::abort();
  return 0;
}
