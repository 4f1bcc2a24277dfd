#include "lockstep/model/cuda/products.h"

#include <cublasLt.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <vector>

#include "lockstep/base/cuda/runtime.h"
#include "lockstep/base/error.h"
#include "lockstep/base/index.h"

namespace lockstep {
namespace {

constexpr std::size_t kWorkspace = std::size_t{64} << 20;
constexpr std::uint32_t kAlignment = 16;
constexpr int kProposals = 12;

void check(cublasStatus_t status, const char* operation) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(ErrorCode::kDevice,
              fmt::format("cuBLASLt: {}: {}", operation, cublasLtGetStatusString(status)));
}

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

// Which of the algorithms that cuBLASLt proposes for a product is the fastest: measured once per
// shape on an H200 (bench/cuda_products), never at run time, so that the bits of a product do not
// depend on timing. 0, the library's own choice, for all others.
std::size_t preferred_proposal(const CudaProducts::Call& call) {
  static const bool measured = cublasLtGetVersion() == kMeasuredVersion;
  if (!measured) return 0;
  const auto found = std::ranges::find_if(kChoices, [&](const Choice& choice) {
    return choice.kind == call.kind && choice.tokens == call.tokens && choice.ins == call.ins &&
           choice.outs == call.outs;
  });
  return found == kChoices.end() ? 0 : found->proposal;
}

using Shape = std::tuple<Kind, std::size_t, std::size_t, std::size_t, std::size_t, bool>;

// Row-major matrices are the transposes of the column-major ones that the library thinks in, so
// out = left · right becomes outᵀ = rightᵀ · leftᵀ.
struct Transposed {
  cublasOperation_t a, b;
  std::size_t m, n;
  struct Matrix {
    std::size_t rows, cols, stride;
  } a_size, b_size;
  std::size_t out_stride;
};

std::size_t outs_stride(const CudaProducts::Call& call) {
  return call.outs_stride > 0 ? call.outs_stride : call.outs;
}

Transposed transposed(const CudaProducts::Call& call) {
  const std::size_t tokens = call.tokens;
  const std::size_t ins = call.ins;
  const std::size_t outs = call.outs;
  const std::size_t stride = outs_stride(call);
  switch (call.kind) {
    case Kind::kForward:
      return {CUBLAS_OP_T, CUBLAS_OP_N, outs, tokens, {ins, outs, ins}, {ins, tokens, ins}, stride};
    case Kind::kInputs:
      return {CUBLAS_OP_N, CUBLAS_OP_N, ins, tokens, {ins, outs, ins}, {outs, tokens, stride}, ins};
    case Kind::kWeights: break;
  }
  return {CUBLAS_OP_N, CUBLAS_OP_T, ins, outs, {ins, tokens, ins}, {outs, tokens, stride}, ins};
}

// Descriptors of one shape and the algorithms for it.
struct Plan {
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, out = nullptr;
  std::vector<cublasLtMatmulHeuristicResult_t> proposals;

  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    for (cublasLtMatrixLayout_t layout : {a, b, out}) cublasLtMatrixLayoutDestroy(layout);
    cublasLtMatmulDescDestroy(product);
  }
};

}  // namespace

struct CudaProducts::State {
  explicit State(Precision precision)
      : type(precision == Precision::kBf16 ? CUDA_R_16BF : CUDA_R_32F),
        workspace(kWorkspace, "the workspace of matrix products") {
    check(cublasLtCreate(&handle), "starting");
  }
  ~State() {
    plans.clear();
    if (!cuda_given_up()) cublasLtDestroy(handle);
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  Plan& plan(const Call& call);
  void run(const Call& call, const Plan& plan, const cublasLtMatmulAlgo_t& algorithm,
           cudaStream_t stream);

  cudaDataType_t type;
  cublasLtHandle_t handle = nullptr;
  DeviceMemory workspace;
  std::map<Shape, Plan> plans;
};

Plan& CudaProducts::State::plan(const Call& call) {
  const Shape shape{call.kind, call.tokens,       call.ins,
                    call.outs, outs_stride(call), call.add != nullptr};
  if (const auto found = plans.find(shape); found != plans.end()) return found->second;
  const Transposed sizes = transposed(call);
  Plan& plan = plans[shape];
  check(cublasLtMatmulDescCreate(&plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing");
  check(cublasLtMatmulDescSetAttribute(plan.product, CUBLASLT_MATMUL_DESC_TRANSA, &sizes.a,
                                       sizeof(sizes.a)),
        "describing");
  check(cublasLtMatmulDescSetAttribute(plan.product, CUBLASLT_MATMUL_DESC_TRANSB, &sizes.b,
                                       sizeof(sizes.b)),
        "describing");
  const auto layout = [](cublasLtMatrixLayout_t& made, cudaDataType_t kind,
                         const Transposed::Matrix& size) {
    check(cublasLtMatrixLayoutCreate(&made, kind, size.rows, size.cols,
                                     static_cast<std::int64_t>(size.stride)),
          "describing");
  };
  layout(plan.a, type, sizes.a_size);
  layout(plan.b, type, sizes.b_size);
  layout(plan.out, call.kind == Kind::kWeights ? CUDA_R_32F : type,
         {sizes.m, sizes.n, sizes.out_stride});

  cublasLtMatmulPreference_t preference = nullptr;
  check(cublasLtMatmulPreferenceCreate(&preference), "describing");
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t name, auto value) {
    check(cublasLtMatmulPreferenceSetAttribute(preference, name, &value, sizeof(value)),
          "describing");
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspace);
  // Sums that are split are added up by a second pass in one order, never in place.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         std::uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  for (const auto matrix :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    prefer(matrix, kAlignment);
  }
  std::array<cublasLtMatmulHeuristicResult_t, kProposals> found;
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle, plan.product, plan.a, plan.b, plan.out, plan.out,
                                     preference, kProposals, found.data(), &count);
  cublasLtMatmulPreferenceDestroy(preference);
  check(status, "choosing an algorithm");
  for (int i = 0; i < count; ++i) {
    if (found[index_of(i)].state == CUBLAS_STATUS_SUCCESS) {
      plan.proposals.push_back(found[index_of(i)]);
    }
  }
  if (plan.proposals.empty()) {
    throw Error(ErrorCode::kDevice, fmt::format("cuBLASLt has no product of {} x {} x {}",
                                                call.tokens, call.ins, call.outs));
  }
  return plan;
}

void CudaProducts::State::run(const Call& call, const Plan& plan,
                              const cublasLtMatmulAlgo_t& algorithm, cudaStream_t stream) {
  const float one = 1.0F;
  const float kept = call.add != nullptr ? 1.0F : 0.0F;
  const void* addend = call.add != nullptr ? call.add : call.out;
  check(cublasLtMatmul(handle, plan.product, &one, call.right, plan.a, call.left, plan.b, &kept,
                       addend, plan.out, call.out, plan.out, &algorithm, workspace.data(),
                       workspace.bytes(), stream),
        "multiplying");
}

CudaProducts::CudaProducts(Precision precision) : state_(std::make_unique<State>(precision)) {}

CudaProducts::~CudaProducts() = default;

void CudaProducts::operator()(const Call& call, cudaStream_t stream) {
  const Plan& plan = state_->plan(call);
  const std::size_t rank = std::min(preferred_proposal(call), plan.proposals.size() - 1);
  state_->run(call, plan, plan.proposals[rank].algo, stream);
}

std::vector<float> CudaProducts::time_algorithms(const Call& call, cudaStream_t stream,
                                                 int repeats) {
  const Plan& plan = state_->plan(call);
  const CudaEvent begin = make_timer_event();
  const CudaEvent end = make_timer_event();
  std::vector<float> times;
  for (const cublasLtMatmulHeuristicResult_t& proposal : plan.proposals) {
    state_->run(call, plan, proposal.algo, stream);
    check_cuda(cudaEventRecord(begin.get(), stream), "timing");
    for (int i = 0; i < repeats; ++i) state_->run(call, plan, proposal.algo, stream);
    check_cuda(cudaEventRecord(end.get(), stream), "timing");
    check_cuda(cudaEventSynchronize(end.get()), "timing");
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()), "timing");
    times.push_back(milliseconds / static_cast<float>(repeats));
  }
  return times;
}

}  // namespace lockstep
