// Launches, and the properties of the device that they depend on. No torch.
#pragma once

namespace fastrl::cuda {

inline Status device_limits(DeviceLimits* limits) {
  int device = 0;
  Status status = cudaGetDevice(&device);
  const auto get = [&](int* value, cudaDeviceAttr attribute) {
    if (status == kSuccess) status = cudaDeviceGetAttribute(value, attribute, device);
  };
  get(&limits->major, cudaDevAttrComputeCapabilityMajor);
  get(&limits->sms, cudaDevAttrMultiProcessorCount);
  get(&limits->shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  get(&limits->shared_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  get(&limits->l2_bytes, cudaDevAttrL2CacheSize);
  return status;
}

// A launch configuration of the runtime, with the attribute that it points to.
template <typename Params>
class Configured {
 public:
  using Kernel = void (*)(Params);

  Configured(Kernel kernel, const LaunchShape& shape, Stream stream) {
    const void* function = reinterpret_cast<const void*>(kernel);
    if (shape.shared_bytes > 48 * 1024) {
      status = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shape.shared_bytes));
    }
    if (status == kSuccess && shape.cluster > 8) {
      status = cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    }
    config.gridDim = dim3(shape.blocks);
    config.blockDim = dim3(shape.threads);
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = stream;
    cluster_.id = cudaLaunchAttributeClusterDimension;
    cluster_.val.clusterDim.x = shape.cluster;
    cluster_.val.clusterDim.y = cluster_.val.clusterDim.z = 1;
    config.attrs = &cluster_;
    config.numAttrs = shape.cluster > 1 ? 1 : 0;
  }
  Configured(const Configured&) = delete;

  Status status = kSuccess;
  cudaLaunchConfig_t config{};

 private:
  cudaLaunchAttribute cluster_{};
};

template <typename Params>
Status launch(void (*kernel)(Params), const LaunchShape& shape, const Params& params,
              Stream stream) {
  Configured<Params> configured(kernel, shape, stream);
  if (configured.status != kSuccess) return configured.status;
  return cudaLaunchKernelEx(&configured.config, kernel, params);
}

// Whether the code of a kernel was compiled for sm_90 or later. PTX for an older GPU runs on every
// newer one, but it has no clusters: kernels with clusters are empty there.
template <typename Params>
bool knows_clusters(void (*kernel)(Params)) {
  cudaFuncAttributes attributes{};
  const void* function = reinterpret_cast<const void*>(kernel);
  return cudaFuncGetAttributes(&attributes, function) == kSuccess && attributes.ptxVersion >= 90;
}

// How many clusters of this shape the device holds at once; 0 if it cannot hold any.
template <typename Params>
int ask_resident_clusters(void (*kernel)(Params), LaunchShape shape, int device) {
  if (!knows_clusters(kernel)) {
    (void)cudaGetLastError();
    return 0;
  }
  shape.blocks = shape.cluster;
  Configured<Params> configured(kernel, shape, nullptr);
  int clusters = 0;
  if (configured.status == kSuccess && shape.cluster > 1) {
    configured.status = cudaOccupancyMaxActiveClusters(&clusters, kernel, &configured.config);
  } else if (configured.status == kSuccess) {
    int sms = 0, blocks = 0;
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    configured.status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &blocks, kernel, static_cast<int>(shape.threads), shape.shared_bytes);
    clusters = sms * blocks;
  }
  if (configured.status != kSuccess) {
    (void)cudaGetLastError();  // a shape that does not fit is an answer, not an error
    return 0;
  }
  return clusters;
}

// The same, with the last answer kept: launches in a training loop repeat.
template <typename Params>
int resident_clusters(void (*kernel)(Params), const LaunchShape& shape, const DeviceLimits&) {
  struct Answer {
    void (*kernel)(Params);
    int device;
    unsigned cluster;
    size_t shared_bytes;
    int clusters;
  };
  static thread_local Answer last{};
  int device = 0;
  if (cudaGetDevice(&device) != kSuccess) return 0;
  if (last.kernel != kernel || last.device != device || last.cluster != shape.cluster ||
      last.shared_bytes != shape.shared_bytes) {
    last = {kernel, device, shape.cluster, shape.shared_bytes,
            ask_resident_clusters(kernel, shape, device)};
  }
  return last.clusters;
}

}  // namespace fastrl::cuda
