// Matrix products of training shapes: ours beside every BLAS that is installed, in turn, one run.
// usage: matmul [--threads N] [--seconds S] [--best] [--rate]     --rate: the 2048^3 product only,
// as JSON
#include "lockstep/model/cpu/matmul.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/float_buffer.h"
#include "lockstep/base/random.h"
#include "lockstep/model/cpu/matmul_kernel.h"

namespace {

using namespace lockstep;
using Clock = std::chrono::steady_clock;

struct Multiplier {
  std::string name;
  std::function<void(const Product&)> multiply;
};

// The C interface of BLAS: order, transpositions, sizes, alpha, a, lda, b, ldb, beta, c, ldc.
using Cblas = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int,
                       float, float*, int);
using Dnnl = int (*)(char, char, std::int64_t, std::int64_t, std::int64_t, float, const float*,
                     std::int64_t, const float*, std::int64_t, float, float*, std::int64_t);

void* symbol(const char* library, const char* name) {
  void* handle = ::dlopen(library, RTLD_NOW | RTLD_LOCAL);
  return handle ? ::dlsym(handle, name) : nullptr;
}

// Opened at run time, because they define the same names.
void add_libraries(std::vector<Multiplier>& all) {
  for (const auto& [name, library] : {std::pair{"OpenBLAS", "libopenblas.so.0"},
                                      {"BLIS", "libblis.so.4"},
                                      {"MKL", "libmkl_rt.so"}}) {
    if (const auto sgemm = reinterpret_cast<Cblas>(symbol(library, "cblas_sgemm"))) {
      all.push_back({name, [sgemm](const Product& p) {
                       sgemm(101, p.a.transposed ? 112 : 111, p.b.transposed ? 112 : 111,
                             static_cast<int>(p.rows), static_cast<int>(p.cols),
                             static_cast<int>(p.depth), 1, p.a.data, static_cast<int>(p.a.stride),
                             p.b.data, static_cast<int>(p.b.stride), 0, p.out,
                             static_cast<int>(p.out_stride));
                     }});
    }
  }
  for (const char* library : {"libdnnl.so.2", "libdnnl.so.3"}) {
    if (const auto sgemm = reinterpret_cast<Dnnl>(symbol(library, "dnnl_sgemm"))) {
      all.push_back({"oneDNN", [sgemm](const Product& p) {
                       const auto wide = [](std::size_t n) { return static_cast<std::int64_t>(n); };
                       sgemm(p.a.transposed ? 'T' : 'N', p.b.transposed ? 'T' : 'N', wide(p.rows),
                             wide(p.cols), wide(p.depth), 1, p.a.data, wide(p.a.stride), p.b.data,
                             wide(p.b.stride), 0, p.out, wide(p.out_stride));
                     }});
    }
  }
}

struct Case {
  std::string what;
  Product product;
};

struct Layer {
  const char* name;
  std::size_t tokens, in, out;
};

// Every layer's three products: forward, gradient of the input, gradient of the weights.
std::vector<Case> cases_of(const std::vector<Layer>& layers) {
  std::vector<Case> cases;
  for (const auto& [name, tokens, in, out] : layers) {
    cases.push_back({fmt::format("{} forward", name),
                     {.rows = tokens,
                      .cols = out,
                      .depth = in,
                      .a = {nullptr, in},
                      .b = {nullptr, in, true},
                      .out = nullptr,
                      .out_stride = out}});
    cases.push_back({fmt::format("{} dx", name),
                     {.rows = tokens,
                      .cols = in,
                      .depth = out,
                      .a = {nullptr, out},
                      .b = {nullptr, in},
                      .out = nullptr,
                      .out_stride = in}});
    cases.push_back({fmt::format("{} dw", name),
                     {.rows = out,
                      .cols = in,
                      .depth = tokens,
                      .a = {nullptr, out, true},
                      .b = {nullptr, in},
                      .out = nullptr,
                      .out_stride = in}});
  }
  return cases;
}

FloatBuffer noise(std::size_t size, std::uint64_t stream) {
  FloatBuffer buffer(size);
  for (std::size_t i = 0; i < size; ++i) buffer.data()[i] = random_f32(1, stream, i) - 0.5F;
  return buffer;
}

double gflops(const Product& p, double seconds) {
  return 2e-9 * static_cast<double>(p.rows) * static_cast<double>(p.cols) *
         static_cast<double>(p.depth) / seconds;
}

// GFLOP/s of each, from the median (or the best) time of calls made in turn.
std::vector<double> measure(const std::vector<Multiplier>& all, Product product, double seconds,
                            bool best) {
  const FloatBuffer a = noise(product.rows * product.depth, 1);
  const FloatBuffer b = noise(product.depth * product.cols, 2);
  const FloatBuffer out(product.rows * product.cols);
  std::vector<float> expected;
  product.a.data = a.data();
  product.b.data = b.data();
  product.out = out.data();
  std::vector<std::vector<double>> times(all.size());
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  for (int round = 0; round < 4 || Clock::now() < end; ++round) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto start = Clock::now();
      all[i].multiply(product);
      const std::chrono::duration<double> took = Clock::now() - start;
      if (round > 0) {
        times[i].push_back(took.count());
        continue;
      }
      const std::span<float> got = out.span();
      if (i == 0) expected.assign(got.begin(), got.end());
      for (std::size_t j = 0; j < got.size(); ++j) {
        if (!(std::abs(got[j] - expected[j]) < 1e-3F)) {
          fmt::print(stderr, "{}: element {} is {}, {} says {}\n", all[i].name, j, got[j],
                     all[0].name, expected[j]);
          std::exit(1);
        }
      }
    }
  }
  std::vector<double> rates;
  for (auto& samples : times) {
    std::ranges::sort(samples);
    rates.push_back(gflops(product, samples[best ? 0 : samples.size() / 2]));
  }
  return rates;
}

}  // namespace

int main(int argc, char** argv) {
  int threads = 1;
  double seconds = 1;
  bool rate_only = false;
  bool best = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    if (flag == "--best") {
      best = true;
    } else if (flag == "--rate") {
      rate_only = true;
    } else if (flag == "--threads" && i + 1 < argc) {
      threads = std::atoi(argv[++i]);
    } else if (flag == "--seconds" && i + 1 < argc) {
      seconds = std::atof(argv[++i]);
    } else {
      fmt::print(stderr, "usage: matmul [--threads N] [--seconds S] [--best] [--rate]\n");
      return 2;
    }
  }
  const std::string count = std::to_string(threads);
  for (const char* name :
       {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS", "MKL_NUM_THREADS"}) {
    ::setenv(name, count.c_str(), 1);
  }

  ::setenv("OMP_WAIT_POLICY", "passive", 1);  // waiting threads would take the next one's cores

  ThreadPool pool(threads);
  Matmul ours(pool, Precision::kF32);
  std::vector<Multiplier> all = {{"ours", [&](const Product& p) { ours(p); }}};
  add_libraries(all);

  const Product cube = {.rows = 2048,
                        .cols = 2048,
                        .depth = 2048,
                        .a = {nullptr, 2048},
                        .b = {nullptr, 2048},
                        .out = nullptr,
                        .out_stride = 2048};
  std::vector<Case> cases = {{"2048^3", cube}};
  if (!rate_only) {
    const auto layers = cases_of({{"tiny qkv 256>512", 2048, 256, 512},
                                  {"tiny o 256>256", 2048, 256, 256},
                                  {"tiny gate_up 256>1536", 2048, 256, 1536},
                                  {"tiny down 768>256", 2048, 768, 256},
                                  {"tiny head 256>4096", 2048, 256, 4096},
                                  {"small qkv 512>1536", 2048, 512, 1536},
                                  {"small o 512>512", 2048, 512, 512},
                                  {"small gate_up 512>2816", 2048, 512, 2816},
                                  {"small down 1408>512", 2048, 1408, 512},
                                  {"small head 512>8192", 2048, 512, 8192}});
    cases.insert(cases.end(), layers.begin(), layers.end());
    fmt::print("GFLOP/s, f32, {} threads\n{:<30}", threads, "");
    for (const Multiplier& multiplier : all) fmt::print("{:>10}", multiplier.name);
    fmt::print("\n");
  }
  for (const Case& one : cases) {
    const std::vector<double> rates = measure(all, one.product, seconds, best);
    if (rate_only) {
      for (std::size_t i = 0; i < all.size(); ++i) {
        fmt::print("{{\"library\": \"{}\", \"threads\": {}, \"gflops\": {:.2f}}}\n", all[i].name,
                   threads, rates[i]);
      }
      continue;
    }
    fmt::print("{:<30}", one.what);
    for (const double rate : rates) fmt::print("{:>10.1f}", rate);
    fmt::print("\n");
    std::fflush(stdout);
  }
  return 0;
}
