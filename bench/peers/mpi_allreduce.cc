// MPI_Allreduce of Open MPI or MPICH: mpirun -n N mpi_allreduce BYTES... | --serve FOLDER
// In place, unless APART is set: HAN of Open MPI 4.1 crashes with MPI_IN_PLACE.
#include <mpi.h>

#include "bench/common.h"

namespace {

class MpiAllreduce final : public bench::Subject {
 public:
  using Subject::Subject;

  std::function<void()> prepare(float* data, std::size_t count) override {
    if (std::getenv("APART") != nullptr) {
      // The input is the same every time: it is kept from the first, which is not timed.
      return [data, count, input = std::make_shared<std::vector<float>>()] {
        if (input->empty()) input->assign(data, data + count);
        MPI_Allreduce(input->data(), data, static_cast<int>(count), MPI_FLOAT, MPI_SUM,
                      MPI_COMM_WORLD);
      };
    }
    return [data, count = static_cast<int>(count)] {
      MPI_Allreduce(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    };
  }
  void barrier() override { MPI_Barrier(MPI_COMM_WORLD); }
  void maximum(std::vector<double>& values) override {
    MPI_Allreduce(MPI_IN_PLACE, values.data(), static_cast<int>(values.size()), MPI_DOUBLE, MPI_MAX,
                  MPI_COMM_WORLD);
  }
};

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  int ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  bench::Commands commands({argv + 1, argv + argc}, rank);
  MpiAllreduce subject(rank, ranks);
  bench::measure_all(subject, commands);
  MPI_Finalize();
}
