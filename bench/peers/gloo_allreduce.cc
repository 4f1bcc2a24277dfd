// Gloo's all-reduce over loopback TCP: gloo_allreduce N ring|bcube BYTES... | --serve FOLDER
#include <gloo/allreduce.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <filesystem>

#include "bench/common.h"

namespace {

using Algorithm = gloo::AllreduceOptions::Algorithm;

class GlooAllreduce final : public bench::Subject {
 public:
  GlooAllreduce(int rank, int ranks, Algorithm algorithm, const std::string& folder,
                bench::Team& team)
      : Subject(rank, ranks), algorithm_(algorithm), team_(team) {
    gloo::transport::tcp::attr where;
    where.iface = "lo";
    where.ai_family = AF_INET;
    auto device = gloo::transport::tcp::CreateDevice(where);
    gloo::rendezvous::FileStore store(folder);
    context_ = std::make_shared<gloo::rendezvous::Context>(rank, ranks);
    context_->setTimeout(std::chrono::seconds(60));
    context_->connectFullMesh(store, device);
  }

  std::function<void()> prepare(float* data, std::size_t count) override {
    auto options = std::make_shared<gloo::AllreduceOptions>(context_);
    options->setAlgorithm(algorithm_);
    options->setOutput(data, count);
    options->setReduceFunction([](void* out, const void* a, const void* b, std::size_t n) {
      gloo::sum<float>(out, a, b, n);
    });
    return [options] { gloo::allreduce(*options); };
  }
  void barrier() override { team_.barrier(); }
  void maximum(std::vector<double>& values) override { team_.maximum(rank(), values); }

 private:
  const Algorithm algorithm_;
  bench::Team& team_;
  std::shared_ptr<gloo::rendezvous::Context> context_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) bench::fail("usage: gloo_allreduce N ring|bcube BYTES... | --serve FOLDER");
  const int ranks = std::stoi(argv[1]);
  const Algorithm algorithm = std::string(argv[2]) == "ring" ? Algorithm::RING : Algorithm::BCUBE;
  char folder[] = "/tmp/gloo-XXXXXX";
  if (::mkdtemp(folder) == nullptr) bench::fail("mkdtemp");
  bench::Team team(ranks);
  const int code = bench::fork_ranks(ranks, [&](int rank) {
    bench::Commands commands({argv + 3, argv + argc}, rank);
    GlooAllreduce subject(rank, ranks, algorithm, folder, team);
    bench::measure_all(subject, commands);
  });
  std::filesystem::remove_all(folder);
  return code;
}
