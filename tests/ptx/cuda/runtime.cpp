// What csrc/cuda and nvcc's host code ask of CUDA's runtime: launches go to a function of Python.
#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <string>

namespace {

using Launched = int (*)(const char* kernel, unsigned blocks, unsigned threads, unsigned cluster,
                         unsigned shared_bytes, void** parameters);
Launched launched = nullptr;
std::string failure;
int major = 9, sms = 132;

struct Function {
  std::string name;
  int shared_bytes = 48 << 10;  // what a launch may ask for
};
std::map<const void*, Function>& functions() {
  static auto& all = *new std::map<const void*, Function>;
  return all;
}

constexpr int kSharedPerBlock = 227 << 10, kSharedPerSm = 228 << 10, kOfSystem = 1 << 10;
int blocks_per_sm(int threads, size_t shared) {
  const int by_shared = kSharedPerSm / static_cast<int>(shared + kOfSystem);
  const int by_threads = 2048 / threads;
  return by_shared < by_threads ? by_shared : by_threads;
}

}  // namespace

extern "C" {

void ptx_on_launch(Launched function) { launched = function; }
void ptx_failure(const char* what) { failure = what; }
// A device with so many SMs, from sm_90 on with clusters.
void ptx_device(int major_version, int count) { major = major_version, sms = count; }

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  functions()[host].name = name;
}
// Of launches in triple angle brackets, which csrc/cuda has none of.
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaErrorNotSupported; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) {
  return cudaErrorNotSupported;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaErrorNotSupported;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** arguments) {
  const Function& kernel = functions().at(function);
  if (config->dynamicSmemBytes > static_cast<size_t>(kernel.shared_bytes)) {
    return cudaErrorInvalidValue;
  }
  unsigned cluster = 1;
  for (unsigned n = 0; n < config->numAttrs; ++n) {
    if (config->attrs[n].id == cudaLaunchAttributeClusterDimension) {
      cluster = config->attrs[n].val.clusterDim.x;
    }
  }
  if (config->gridDim.x == 0 || config->gridDim.x % cluster != 0)
    return cudaErrorInvalidConfiguration;
  return launched(kernel.name.c_str(), config->gridDim.x, config->blockDim.x, cluster,
                  static_cast<unsigned>(config->dynamicSmemBytes), arguments)
             ? cudaErrorLaunchFailure
             : cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value > kSharedPerBlock) return cudaErrorInvalidValue;
    functions().at(function).shared_bytes = value;
  }
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*,
                                           const cudaLaunchConfig_t* config) {
  const int blocks =
      sms * blocks_per_sm(static_cast<int>(config->blockDim.x), config->dynamicSmemBytes);
  *clusters = blocks / static_cast<int>(config->attrs[0].val.clusterDim.x);
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads,
                                                          size_t shared) {
  *blocks = blocks_per_sm(threads, shared);
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks,
                                                                   const void* function,
                                                                   int threads, size_t shared,
                                                                   unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = major;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = sms;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = kSharedPerBlock;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = kSharedPerSm;
      return cudaSuccess;
    case cudaDevAttrL2CacheSize:
      *value = 50 << 20;
      return cudaSuccess;
    default:
      return cudaErrorInvalidValue;
  }
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaMemsetAsync(void* memory, int byte, size_t bytes, cudaStream_t) {
  std::memset(memory, byte, bytes);
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? failure.c_str() : "it was refused";
}

}  // extern "C"
