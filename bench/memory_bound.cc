// What memory alone needs for an all-reduce of N ranks through shared memory: N buffers are read
// once and all are overwritten with the sum, by as many threads as ranks have cores, nobody waits.
// usage: memory_bound N BYTES... | --serve FOLDER;  memory_bound rates
#include <thread>

#include "bench/common.h"

namespace {

unsigned threads_for(unsigned most) { return std::min(most, std::thread::hardware_concurrency()); }

// Calls body(begin, end) for one part of [0, count) on every thread.
template <typename Body>
void in_parallel(unsigned threads, std::size_t count, const Body& body) {
  std::vector<std::thread> others;
  const auto part = [&](unsigned i) { body(count * i / threads, count * (i + 1) / threads); };
  for (unsigned i = 1; i < threads; ++i) others.emplace_back(part, i);
  part(0);
  for (std::thread& other : others) other.join();
}

class MemoryBound final : public bench::Subject {
 public:
  explicit MemoryBound(unsigned buffers) : Subject(0, 1), buffers_(buffers) {}

  std::function<void()> prepare(float* data, std::size_t count) override {
    rest_.clear();
    std::vector<float*> all = {data};
    while (all.size() < buffers_) {
      rest_.push_back(bench::allocate(count * sizeof(float)));
      all.push_back(rest_.back().get());
    }
    return [this, all, count] {
      in_parallel(threads_for(buffers_), count,
                  [&](std::size_t begin, std::size_t end) { reduce(all, begin, end); });
    };
  }
  void barrier() override {}
  void maximum(std::vector<double>&) override {}
  bool computes_sum() const override { return false; }

 private:
  // In blocks that stay in the first-level cache.
  static void reduce(const std::vector<float*>& all, std::size_t begin, std::size_t end) {
    constexpr std::size_t kBlock = 512;
    float sum[kBlock];
    for (; begin < end; begin += kBlock) {
      const std::size_t count = std::min(kBlock, end - begin);
      std::copy_n(all[0] + begin, count, sum);
      for (std::size_t k = 1; k < all.size(); ++k) {
        const float* from = all[k] + begin;
        for (std::size_t i = 0; i < count; ++i) sum[i] += from[i];
      }
      for (float* to : all) std::copy_n(sum, count, to + begin);
    }
  }

  const unsigned buffers_;
  std::vector<bench::Floats> rest_;
};

// GB/s of the buffer, for people: copying and adding, with one thread and with all cores.
void print_rates() {
  constexpr std::size_t kCount = std::size_t{256} << 18;  // 256 MiB
  const bench::Floats a = bench::allocate(kCount * sizeof(float));
  const bench::Floats b = bench::allocate(kCount * sizeof(float));
  const auto rate = [&](unsigned threads, const auto& body) {
    double best = 1e9;
    for (int i = 0; i < 7; ++i) {
      const double start = bench::now();
      in_parallel(threads, kCount, body);
      best = std::min(best, bench::now() - start);
    }
    return kCount * sizeof(float) / best / 1e9;
  };
  for (const unsigned threads : {1U, threads_for(~0U)}) {
    const double copied = rate(threads, [&](std::size_t begin, std::size_t end) {
      std::memcpy(a.get() + begin, b.get() + begin, (end - begin) * sizeof(float));
    });
    const double added = rate(threads, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) a.get()[i] += b.get()[i];
    });
    std::printf("memory, 256 MiB, %u threads: copy %.1f GB/s, add %.1f GB/s\n", threads, copied,
                added);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "rates") {
    print_rates();
    return 0;
  }
  if (argc < 3) bench::fail("usage: memory_bound N BYTES... | --serve FOLDER, or rates");
  bench::Commands commands({argv + 2, argv + argc}, 0);
  MemoryBound subject(static_cast<unsigned>(std::stoi(argv[1])));
  bench::measure_all(subject, commands);
}
