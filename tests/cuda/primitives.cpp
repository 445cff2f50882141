// The host machine itself: a cluster that sums what a bulk copy brought, block by block.
#include "cuda/device/primitives.cuh"
#include "cuda/device/block_sum.cuh"
#include "host/program.h"

namespace fastrl::cuda {
namespace {

constexpr int kThreads = 32, kPart = 64;

struct SumParams {
  const float* x;
  float* out;
  unsigned* done;
  bool racy;  // fills a stage that is still being read, which ThreadSanitizer must see
};

struct SumShared {
  alignas(128) float stage[2][kPart];
  Sum scratch[kThreads / kWarp];
  float partials[2][16];
  BulkBarrier full[2];
};

// Sums row i of x, of which each block of the cluster has a part, in the two stages by turns.
__global__ void sum_kernel(const __grid_constant__ SumParams p) {
  SumShared& s = *shared_memory<SumShared>();
  const int t = thread_index();
  const unsigned rank = cluster_rank(), size = cluster_size();
  const int rows = 4, first = static_cast<int>(block_index() / size) * rows;
  const auto load = [&](int i) {
    arm(&s.full[i % 2], kPart * 4);
    bulk_load(s.stage[i % 2], p.x + ((first + i) * size + rank) * kPart, kPart * 4, &s.full[i % 2]);
  };
  if (t == 0) {
    init(&s.full[0]);
    init(&s.full[1]);
  }
  sync_cluster();
  if (t == 0) {
    load(0);
    load(1);
  }
  for (int i = 0; i < rows; ++i) {
    wait(&s.full[i % 2], i / 2 % 2);
    if (p.racy && t == 0 && i + 2 < rows) load(i + 2);
    const Sum own{s.stage[i % 2][t] + s.stage[i % 2][t + kThreads], 0.0f};
    const float sum = sum_block<kThreads>(own, s.scratch).total();
    if (t == 0) {
      for (unsigned to = 0; to < size; ++to) store_remote(&s.partials[i % 2][rank], to, sum);
    }
    sync_cluster();
    if (t == 0 && rank == 0) {
      float total = 0;
      for (unsigned from = 0; from < size; ++from) total += s.partials[i % 2][from];
      p.out[first + i] = total;
    }
    if (!p.racy && t == 0 && i + 2 < rows) load(i + 2);
  }
  if (t == 0) add_acquire_release(p.done, 1);
}

bool test_cluster(unsigned size, bool racy) {
  const int clusters = 3, rows = clusters * 4;
  host::Random random(size);
  std::vector<float> x(rows * size * kPart), out(rows);
  host::AlignedCopy aligned(x.size() * 4);
  for (float& value : x) value = random.uniform();
  std::memcpy(aligned.data(), x.data(), x.size() * 4);
  unsigned done = 0;
  const SumParams params{reinterpret_cast<float*>(aligned.data()), out.data(), &done, racy};
  launch(sum_kernel, {clusters * size, kThreads, size, sizeof(SumShared)}, params, 0);
  bool ok = done == clusters * size;
  for (int row = 0; row < rows; ++row) {
    double want = 0;
    for (size_t i = 0; i < size * kPart; ++i) want += x[row * size * kPart + i];
    ok &= std::fabs(out[row] - want) < 1e-4;
  }
  return ok;
}

}  // namespace
}  // namespace fastrl::cuda

int main(int argc, char**) {
  using fastrl::cuda::test_cluster;
  if (argc > 1) return test_cluster(2, true) ? 0 : 1;
  return test_cluster(1, false) && test_cluster(2, false) && test_cluster(4, false) ? 0 : 1;
}
