#pragma once

#include <cudnn.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace lockstep {

using CudnnDims = std::array<std::int64_t, 4>;

// Owner of a descriptor of cuDNN's graph interface.
class CudnnDescriptor {
 public:
  explicit CudnnDescriptor(cudnnBackendDescriptorType_t type);

  cudnnBackendDescriptor_t get() const { return raw_.get(); }
  template <typename Value>
  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const Value* values,
           std::int64_t count = 1) {
    set_bytes(name, type, count, values);
  }
  void set(cudnnBackendAttributeName_t name, const CudnnDescriptor& other);
  void finalize();
  // False where cuDNN does not support what is described.
  bool try_finalize();

 private:
  void set_bytes(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                 std::int64_t count, const void* values);

  struct Free {
    void operator()(cudnnBackendDescriptor_t raw) const { cudnnBackendDestroyDescriptor(raw); }
  };
  std::unique_ptr<std::remove_pointer_t<cudnnBackendDescriptor_t>, Free> raw_;
};

// A graph of operations on tensors of four dimensions, and the plan that runs it as fused kernels.
// Ids are those of tensors in memory; tensors without one exist only inside of the kernels.
class CudnnGraph {
 public:
  using Tensor = const CudnnDescriptor*;

  explicit CudnnGraph(cudnnHandle_t handle) : handle_(handle) {}

  Tensor in_memory(std::int64_t id, cudnnDataType_t type, const CudnnDims& dims,
                   const CudnnDims& strides);
  Tensor scalar(std::int64_t id);  // f32, handed over by value
  Tensor inner(cudnnDataType_t type, const CudnnDims& dims, const CudnnDims& strides);

  void pointwise(cudnnPointwiseMode_t mode, Tensor x, Tensor b, Tensor out, Tensor choice = nullptr,
                 cudnnDataType_t math = CUDNN_DATA_FLOAT, std::int64_t axis = -1);
  void product(Tensor a, Tensor b, Tensor out);
  void reduce(cudnnReduceTensorOp_t op, Tensor x, Tensor out);
  void reshape(Tensor x, Tensor out);

  // Chooses the first plan that cuDNN supports and that gives the same bits every time. False when
  // there is none.
  bool build();
  std::int64_t workspace_bytes() const;
  void run(const std::vector<std::int64_t>& ids, const std::vector<void*>& pointers,
           void* workspace);

 private:
  Tensor keep(std::unique_ptr<CudnnDescriptor> tensor);
  void add(std::unique_ptr<CudnnDescriptor> operation);

  cudnnHandle_t handle_;
  std::int64_t next_inner_ = 1000;
  std::vector<std::unique_ptr<CudnnDescriptor>> parts_;  // tensors and what operations refer to
  std::vector<std::unique_ptr<CudnnDescriptor>> operations_;
  std::unique_ptr<CudnnDescriptor> graph_, config_, plan_;
};

void check_cudnn(cudnnStatus_t status, const char* operation);

}  // namespace lockstep
