#include "lockstep/base/cuda/runtime.h"
#include "lockstep/base/hash/blake3_kernel.h"
#include "lockstep/model/cuda/hash.h"
#include "lockstep/model/cuda/pack.cuh"

namespace lockstep {
namespace {

constexpr unsigned kThreads = 128;
constexpr std::size_t kChunkFloats = 256;
constexpr unsigned kBlockWords = 16;

__constant__ const std::uint32_t kIv[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                           0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

__device__ std::uint32_t turn(std::uint32_t value, int bits) {
  return __funnelshift_r(value, value, bits);
}

__device__ void mix(std::uint32_t& a, std::uint32_t& b, std::uint32_t& c, std::uint32_t& d,
                    std::uint32_t x, std::uint32_t y) {
  a += b + x;
  d = turn(d ^ a, 16);
  c += d;
  b = turn(b ^ c, 12);
  a += b + y;
  d = turn(d ^ a, 8);
  c += d;
  b = turn(b ^ c, 7);
}

// Turns `value` into the chaining value after the block of words `m`.
__device__ void compress(std::uint32_t (&value)[8], std::uint32_t (&m)[kBlockWords],
                         std::uint64_t counter, std::uint32_t flags) {
  std::uint32_t s[16];
#pragma unroll
  for (int i = 0; i < 8; ++i) s[i] = value[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) s[8 + i] = kIv[i];
  s[12] = static_cast<std::uint32_t>(counter);
  s[13] = static_cast<std::uint32_t>(counter >> 32);
  s[14] = kBlake3BlockBytes;
  s[15] = flags;
#pragma unroll
  for (int round = 0; round < 7; ++round) {
#pragma unroll
    for (int i = 0; i < 4; ++i) mix(s[i], s[4 + i], s[8 + i], s[12 + i], m[2 * i], m[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mix(s[i], s[4 + (i + 1) % 4], s[8 + (i + 2) % 4], s[12 + (i + 3) % 4], m[8 + 2 * i],
          m[9 + 2 * i]);
    }
    constexpr int kOrder[kBlockWords] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
    std::uint32_t next[kBlockWords];
#pragma unroll
    for (unsigned i = 0; i < kBlockWords; ++i) next[i] = m[kOrder[i]];
#pragma unroll
    for (unsigned i = 0; i < kBlockWords; ++i) m[i] = next[i];
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) value[i] = s[i] ^ s[8 + i];
}

__device__ void load_block(const void* from, std::uint32_t (&m)[kBlockWords]) {
  const auto* quads = static_cast<const uint4*>(from);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 quad = quads[i];
    m[4 * i] = quad.x;
    m[4 * i + 1] = quad.y;
    m[4 * i + 2] = quad.z;
    m[4 * i + 3] = quad.w;
  }
}

// The tensor whose nodes, which begin at begin[tensor], include `index`.
__device__ unsigned tensor_of(const std::uint32_t* begin, unsigned tensors, unsigned index) {
  unsigned low = 0;
  unsigned high = tensors;
  while (high - low > 1) {
    const unsigned middle = (low + high) / 2;
    (begin[middle] <= index ? low : high) = middle;
  }
  return low;
}

__device__ void store_node(std::uint32_t* nodes, unsigned index, const std::uint32_t (&value)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) nodes[8 * std::size_t{index} + i] = value[i];
}

__global__ void __launch_bounds__(kThreads)
    chunks_kernel(unsigned tensors, const std::uint64_t* __restrict__ tensor_begin,
                  const std::uint64_t* __restrict__ tensor_end,
                  const std::uint32_t* __restrict__ begin, const float* __restrict__ parameters,
                  std::uint32_t* __restrict__ nodes) {
  const unsigned index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= begin[tensors]) return;
  const unsigned tensor = tensor_of(begin, tensors, index);
  const unsigned chunk = index - begin[tensor];
  const std::uint64_t at = tensor_begin[tensor] + chunk * kChunkFloats;
  const auto blocks = static_cast<unsigned>(
      min(std::uint64_t{kChunkFloats}, tensor_end[tensor] - at) / kBlockWords);
  const bool alone = begin[tensor + 1] - begin[tensor] == 1;
  std::uint32_t value[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) value[i] = kIv[i];
  for (unsigned block = 0; block < blocks; ++block) {
    std::uint32_t flags = block == 0 ? kBlake3ChunkStart : 0;
    if (block + 1 == blocks) flags |= kBlake3ChunkEnd | (alone ? kBlake3Root : 0);
    std::uint32_t m[kBlockWords];
    load_block(parameters + at + block * kBlockWords, m);
    compress(value, m, chunk, flags);
  }
  store_node(nodes, index, value);
}

__global__ void __launch_bounds__(kThreads)
    parents_kernel(unsigned tensors, const std::uint32_t* __restrict__ begin,
                   const std::uint32_t* __restrict__ next_begin,
                   const std::uint32_t* __restrict__ nodes, std::uint32_t* __restrict__ next) {
  const unsigned index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= next_begin[tensors]) return;
  const unsigned tensor = tensor_of(next_begin, tensors, index);
  const unsigned count = begin[tensor + 1] - begin[tensor];
  const unsigned left = 2 * (index - next_begin[tensor]);
  const std::uint32_t* from = nodes + 8 * (std::size_t{begin[tensor]} + left);
  std::uint32_t value[8];
  if (left + 1 == count) {  // has no sibling on this level
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = from[i];
  } else {
    std::uint32_t m[kBlockWords];
    load_block(from, m);
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = kIv[i];
    compress(value, m, 0, kBlake3Parent | (count == 2 ? kBlake3Root : 0));
  }
  store_node(next, index, value);
}

}  // namespace

CudaHasher::CudaHasher(const ParameterLayout& layout) {
  std::vector<std::uint64_t> ends;
  std::vector<std::uint32_t> counts;
  for (const TensorSpec& tensor : layout.tensors()) {
    begin_.push_back(tensor.range.begin);
    ends.push_back(tensor.range.end);
    counts.push_back(
        static_cast<std::uint32_t>((tensor.range.size() + kChunkFloats - 1) / kChunkFloats));
  }
  begin_.insert(begin_.end(), ends.begin(), ends.end());
  for (bool more = true; more;) {
    more = false;
    std::vector<std::uint32_t>& level = levels_.emplace_back(1, 0U);
    for (std::uint32_t& count : counts) {
      level.push_back(level.back() + count);
      more = more || count > 1;
      count = (count + 1) / 2;
    }
  }
}

void CudaHasher::take_memory() {
  if (nodes_.size() > 0) return;
  std::vector<std::uint32_t> levels;
  for (const auto& level : levels_) levels.insert(levels.end(), level.begin(), level.end());
  device_begin_ = DeviceArray<std::uint64_t>(begin_.size(), "hashes");
  device_levels_ = DeviceArray<std::uint32_t>(levels.size(), "hashes");
  nodes_ = DeviceArray<std::uint32_t>(8 * std::size_t{levels_[0].back()}, "hashes");
  next_nodes_ = DeviceArray<std::uint32_t>(nodes_.size(), "hashes");
  hashes_ = PinnedArray<Blake3Hash>(begin_.size() / 2);
  check_cuda(cudaMemcpy(device_begin_.data(), begin_.data(), begin_.size() * sizeof(std::uint64_t),
                        cudaMemcpyDefault),
             "hashing");
  check_cuda(cudaMemcpy(device_levels_.data(), levels.data(), levels.size() * sizeof(std::uint32_t),
                        cudaMemcpyDefault),
             "hashing");
}

void CudaHasher::enqueue(const float* parameters, cudaStream_t stream) {
  take_memory();
  const auto tensors = static_cast<unsigned>(begin_.size() / 2);
  const auto level_at = [&](std::size_t level) {
    return device_levels_.data() + level * (tensors + 1);
  };
  chunks_kernel<<<cuda::blocks_for(levels_[0].back(), kThreads), kThreads, 0, stream>>>(
      tensors, device_begin_.data(), device_begin_.data() + tensors, level_at(0), parameters,
      nodes_.data());
  cuda::check_launch("hashing");
  std::uint32_t* from = nodes_.data();
  std::uint32_t* to = next_nodes_.data();
  for (std::size_t level = 1; level < levels_.size(); ++level) {
    parents_kernel<<<cuda::blocks_for(levels_[level].back(), kThreads), kThreads, 0, stream>>>(
        tensors, level_at(level - 1), level_at(level), from, to);
    cuda::check_launch("hashing");
    std::swap(from, to);
  }
  check_cuda(cudaMemcpyAsync(hashes_.data(), from, tensors * sizeof(Blake3Hash), cudaMemcpyDefault,
                             stream),
             "hashing");
}

std::vector<Blake3Hash> CudaHasher::result() const {
  return {hashes_.data(), hashes_.data() + hashes_.size()};
}

}  // namespace lockstep
