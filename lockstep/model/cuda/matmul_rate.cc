#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "lockstep/base/cuda/runtime.h"
#include "lockstep/base/random.h"
#include "lockstep/model/cuda/products.h"
#include "lockstep/model/gpu_model.h"

namespace lockstep {
namespace {

// Uniform in [-1, 1) in either type: zeros would multiply faster than a model does.
DeviceMemory noise(std::size_t count, Precision precision, std::uint64_t stream) {
  constexpr std::size_t kPeriod = 1 << 20;
  std::vector<std::uint32_t> bits(kPeriod);
  for (std::size_t i = 0; i < kPeriod; ++i) {
    const auto value =
        static_cast<float>(static_cast<double>(random_u64(0, stream, i) >> 11) * 0x1p-52 - 1.0);
    std::memcpy(&bits[i], &value, sizeof(value));
  }
  std::vector<std::byte> host(kPeriod * (precision == Precision::kBf16 ? 2 : 4));
  for (std::size_t i = 0; i < kPeriod; ++i) {
    if (precision == Precision::kBf16) {
      const auto half = static_cast<std::uint16_t>(bits[i] >> 16);
      std::memcpy(host.data() + 2 * i, &half, sizeof(half));
    } else {
      std::memcpy(host.data() + 4 * i, &bits[i], sizeof(bits[i]));
    }
  }
  DeviceMemory device(count / kPeriod * host.size(), "a product");
  for (std::size_t at = 0; at < device.bytes(); at += host.size()) {
    check_cuda(cudaMemcpy(static_cast<std::byte*>(device.data()) + at, host.data(), host.size(),
                          cudaMemcpyDefault),
               "copying");
  }
  return device;
}

}  // namespace

double gpu_matmul_gflops(Precision precision) {
  constexpr std::size_t kSize = 8192;
  constexpr int kRepeats = 10;
  const DeviceMemory a = noise(kSize * kSize, precision, 1);
  const DeviceMemory b = noise(kSize * kSize, precision, 2);
  const DeviceMemory out(kSize * kSize * sizeof(float), "a product");
  const CudaStream stream = make_stream();
  CudaProducts products(precision);
  const std::vector<float> times = products.time_algorithms(
      {CudaProducts::Kind::kForward, kSize, kSize, kSize, a.data(), b.data(), out.data()},
      stream.get(), kRepeats);
  const double best = *std::ranges::min_element(times);
  return 2.0 * kSize * kSize * kSize / best / 1e6;
}

}  // namespace lockstep
