#include "lockstep/model/cuda/cudnn_graph.h"

#include <fmt/format.h>

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/index.h"

namespace lockstep {
namespace {

constexpr std::int64_t kAlignment = 16;
constexpr std::int64_t kMostConfigs = 16;

void set_tensor(CudnnDescriptor& tensor, std::int64_t id, cudnnDataType_t type,
                const CudnnDims& dims, const CudnnDims& strides) {
  tensor.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, &id);
  tensor.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, &type);
  tensor.set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, dims.data(), 4);
  tensor.set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, strides.data(), 4);
  tensor.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, &kAlignment);
}

// Whether the engine of a configuration says that its sums come in no fixed order.
bool varies(const CudnnDescriptor& config) {
  const CudnnDescriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  cudnnBackendDescriptor_t raw = engine.get();
  std::int64_t count = 0;
  check_cudnn(cudnnBackendGetAttribute(config.get(), CUDNN_ATTR_ENGINECFG_ENGINE,
                                       CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &raw),
              "asking for an engine");
  std::array<cudnnBackendNumericalNote_t, CUDNN_NUMERICAL_NOTE_TYPE_COUNT> notes{};
  check_cudnn(cudnnBackendGetAttribute(engine.get(), CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                                       CUDNN_TYPE_NUMERICAL_NOTE, CUDNN_NUMERICAL_NOTE_TYPE_COUNT,
                                       &count, notes.data()),
              "asking an engine");
  return std::find(notes.begin(), notes.begin() + count, CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) !=
         notes.begin() + count;
}

}  // namespace

void check_cudnn(cudnnStatus_t status, const char* operation) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  std::array<char, 512> detail{};
  cudnnGetLastErrorString(detail.data(), detail.size());
  throw Error(ErrorCode::kDevice, fmt::format("cuDNN: {}: {} ({})", operation,
                                              cudnnGetErrorString(status), detail.data()));
}

CudnnDescriptor::CudnnDescriptor(cudnnBackendDescriptorType_t type) {
  cudnnBackendDescriptor_t raw = nullptr;
  check_cudnn(cudnnBackendCreateDescriptor(type, &raw), "making a descriptor");
  raw_.reset(raw);
}

void CudnnDescriptor::set(cudnnBackendAttributeName_t name, const CudnnDescriptor& other) {
  cudnnBackendDescriptor_t raw = other.get();
  set_bytes(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &raw);
}

void CudnnDescriptor::set_bytes(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                                std::int64_t count, const void* values) {
  check_cudnn(cudnnBackendSetAttribute(get(), name, type, count, values), "describing a graph");
}

void CudnnDescriptor::finalize() {
  check_cudnn(cudnnBackendFinalize(get()), "finishing a description");
}

bool CudnnDescriptor::try_finalize() { return cudnnBackendFinalize(get()) == CUDNN_STATUS_SUCCESS; }

CudnnGraph::Tensor CudnnGraph::keep(std::unique_ptr<CudnnDescriptor> tensor) {
  tensor->finalize();
  return parts_.emplace_back(std::move(tensor)).get();
}

void CudnnGraph::add(std::unique_ptr<CudnnDescriptor> operation) {
  operation->finalize();
  operations_.push_back(std::move(operation));
}

CudnnGraph::Tensor CudnnGraph::in_memory(std::int64_t id, cudnnDataType_t type,
                                         const CudnnDims& dims, const CudnnDims& strides) {
  auto tensor = std::make_unique<CudnnDescriptor>(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  set_tensor(*tensor, id, type, dims, strides);
  return keep(std::move(tensor));
}

CudnnGraph::Tensor CudnnGraph::scalar(std::int64_t id) {
  auto tensor = std::make_unique<CudnnDescriptor>(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  set_tensor(*tensor, id, CUDNN_DATA_FLOAT, {1, 1, 1, 1}, {1, 1, 1, 1});
  const bool by_value = true;
  tensor->set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, &by_value);
  return keep(std::move(tensor));
}

CudnnGraph::Tensor CudnnGraph::inner(cudnnDataType_t type, const CudnnDims& dims,
                                     const CudnnDims& strides) {
  auto tensor = std::make_unique<CudnnDescriptor>(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  set_tensor(*tensor, next_inner_++, type, dims, strides);
  const bool is_virtual = true;
  tensor->set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, &is_virtual);
  return keep(std::move(tensor));
}

void CudnnGraph::pointwise(cudnnPointwiseMode_t mode, Tensor x, Tensor b, Tensor out, Tensor choice,
                           cudnnDataType_t math, std::int64_t axis) {
  auto kind = std::make_unique<CudnnDescriptor>(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  kind->set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, &mode);
  kind->set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, &math);
  if (axis >= 0) kind->set(CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, &axis);
  auto operation = std::make_unique<CudnnDescriptor>(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  operation->set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, *keep(std::move(kind)));
  operation->set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, *x);
  if (b != nullptr) operation->set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, *b);
  if (choice != nullptr) operation->set(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, *choice);
  operation->set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, *out);
  add(std::move(operation));
}

void CudnnGraph::product(Tensor a, Tensor b, Tensor out) {
  auto kind = std::make_unique<CudnnDescriptor>(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
  const cudnnDataType_t sums = CUDNN_DATA_FLOAT;
  kind->set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, &sums);
  auto operation = std::make_unique<CudnnDescriptor>(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
  operation->set(CUDNN_ATTR_OPERATION_MATMUL_DESC, *keep(std::move(kind)));
  operation->set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, *a);
  operation->set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, *b);
  operation->set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, *out);
  add(std::move(operation));
}

void CudnnGraph::reduce(cudnnReduceTensorOp_t op, Tensor x, Tensor out) {
  auto kind = std::make_unique<CudnnDescriptor>(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
  const cudnnDataType_t sums = CUDNN_DATA_FLOAT;
  kind->set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, &op);
  kind->set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, &sums);
  auto operation = std::make_unique<CudnnDescriptor>(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
  operation->set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, *keep(std::move(kind)));
  operation->set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, *x);
  operation->set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, *out);
  add(std::move(operation));
}

void CudnnGraph::reshape(Tensor x, Tensor out) {
  auto operation = std::make_unique<CudnnDescriptor>(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
  operation->set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, *x);
  operation->set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, *out);
  add(std::move(operation));
}

bool CudnnGraph::build() {
  graph_ = std::make_unique<CudnnDescriptor>(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  std::vector<cudnnBackendDescriptor_t> raw;
  for (const auto& operation : operations_) raw.push_back(operation->get());
  graph_->set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, raw.data(),
              static_cast<std::int64_t>(raw.size()));
  graph_->set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, &handle_);
  if (!graph_->try_finalize()) return false;

  CudnnDescriptor heuristics(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, *graph_);
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, &mode);
  if (!heuristics.try_finalize()) return false;
  std::vector<std::unique_ptr<CudnnDescriptor>> configs;
  raw.clear();
  for (std::int64_t i = 0; i < kMostConfigs; ++i) {
    configs.push_back(std::make_unique<CudnnDescriptor>(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR));
    raw.push_back(configs.back()->get());
  }
  std::int64_t count = 0;
  check_cudnn(
      cudnnBackendGetAttribute(heuristics.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                               CUDNN_TYPE_BACKEND_DESCRIPTOR, kMostConfigs, &count, raw.data()),
      "choosing an engine");
  for (std::int64_t i = 0; i < std::min(count, kMostConfigs); ++i) {
    auto& config = configs[index_of(i)];
    if (varies(*config)) continue;
    auto plan = std::make_unique<CudnnDescriptor>(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    plan->set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, &handle_);
    plan->set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, *config);
    if (!plan->try_finalize()) continue;
    config_ = std::move(config);
    plan_ = std::move(plan);
    return true;
  }
  return false;
}

std::int64_t CudnnGraph::workspace_bytes() const {
  std::int64_t bytes = 0;
  std::int64_t count = 0;
  check_cudnn(cudnnBackendGetAttribute(plan_->get(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                       CUDNN_TYPE_INT64, 1, &count, &bytes),
              "asking for the size of the workspace");
  return bytes;
}

void CudnnGraph::run(const std::vector<std::int64_t>& ids, const std::vector<void*>& pointers,
                     void* workspace) {
  CudnnDescriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  const auto count = static_cast<std::int64_t>(ids.size());
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, ids.data(), count);
  pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, pointers.data(), count);
  pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, &workspace);
  pack.finalize();
  check_cudnn(cudnnBackendExecute(handle_, plan_->get(), pack.get()), "attention");
}

}  // namespace lockstep
