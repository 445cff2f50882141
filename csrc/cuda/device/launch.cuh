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
      // the limit belongs to the kernel, not the launch: another thread must never find it lower
      int device = 0, most = 0;
      status = cudaGetDevice(&device);
      if (status == kSuccess) {
        status = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
      }
      if (status == kSuccess) {
        status = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
      }
    }
    if (status == kSuccess && shape.shared_bytes > 8 * 1024) {
      // as much as L1 can spare, or fewer blocks may run at once than are counted below
      status = cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                    cudaSharedmemCarveoutMaxShared);
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

// How many clusters of this shape the device holds at once; 0 if it cannot hold any. Code that was
// compiled for a GPU before sm_90 runs on every newer one, but it has no clusters: kernels with
// clusters are empty there.
template <typename Params>
Status ask_resident_clusters(void (*kernel)(Params), LaunchShape shape, const DeviceLimits& limits,
                             int* clusters) {
  *clusters = 0;
  cudaFuncAttributes attributes{};
  const Status known = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  if (known != kSuccess || attributes.ptxVersion < 90) return known;
  if (shape.shared_bytes > static_cast<size_t>(limits.shared_per_block)) return kSuccess;
  shape.blocks = shape.cluster;
  Configured<Params> configured(kernel, shape, nullptr);
  if (configured.status != kSuccess) return configured.status;
  if (shape.cluster > 1) {
    return cudaOccupancyMaxActiveClusters(clusters, kernel, &configured.config);
  }
  const Status status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      clusters, kernel, static_cast<int>(shape.threads), shape.shared_bytes);
  *clusters *= limits.sms;
  return status;
}

// The same, with the last answer cached, since launches in a training loop repeat. A failure counts
// as 0 and is not cached, since it may be temporary.
template <typename Params>
int resident_clusters(void (*kernel)(Params), const LaunchShape& shape,
                      const DeviceLimits& limits) {
  struct Answer {
    void (*kernel)(Params);
    int device;
    unsigned cluster;
    size_t shared_bytes;
    int clusters;
  };
  static thread_local Answer last{};
  int device = 0, clusters = 0;
  Status status = cudaGetDevice(&device);
  if (status == kSuccess && last.kernel == kernel && last.device == device &&
      last.cluster == shape.cluster && last.shared_bytes == shape.shared_bytes) {
    return last.clusters;
  }
  if (status == kSuccess) status = ask_resident_clusters(kernel, shape, limits, &clusters);
  if (status != kSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  last = {kernel, device, shape.cluster, shape.shared_bytes, clusters};
  return clusters;
}

}  // namespace fastrl::cuda
