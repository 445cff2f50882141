// The host machine itself: a cluster that sums what bulk copies brought, block by block, and
// exchanges the sums of its blocks.
#include "cuda/device/primitives.cuh"

#include <random>

#include "cuda/device/block_sum.cuh"

namespace fastrl::cuda {
namespace {

constexpr int kThreads = 32, kPart = 64;

// What must not go unnoticed.
enum class Fault {
  kNone,
  kEarlyFill,  // a stage is filled while it is still being read
  kNoWait,     // the sums of other blocks are read without waiting for them
  kOldPhase,   // or with a wait for the phase before
  kArmedTwice,
  kEarlyExit,  // a block exits while others send to it
};

struct SumParams {
  const float* x;
  float* out;
  unsigned* done;
  Fault fault;
};

struct SumShared {
  alignas(128) float stage[2][kPart];
  Sum scratch[kThreads / kWarp];
  alignas(16) float partials[2][16][4];
  ByteBarrier full[2], exchanged[2];
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
    for (ByteBarrier& barrier : s.full) init(&barrier);
    for (ByteBarrier& barrier : s.exchanged) init(&barrier);
  }
  sync_cluster();
  if (t == 0) {
    load(0);
    load(1);
  }
  for (int i = 0; i < rows; ++i) {
    wait(&s.full[i % 2], i / 2 % 2);
    if (p.fault == Fault::kEarlyFill && t == 0 && i + 2 < rows) load(i + 2);
    const Sum own{s.stage[i % 2][t] + s.stage[i % 2][t + kThreads], 0.0f};
    const float sum = sum_block<kThreads>(own, s.scratch).total();
    if (t == 0) {
      ByteBarrier* exchanged = &s.exchanged[i % 2];
      arm(exchanged, size * 16);
      if (p.fault == Fault::kArmedTwice) arm(exchanged, size * 16);
      for (unsigned to = 0; to < size; ++to) {
        send16({{float_to_bits(sum)}}, s.partials[i % 2][rank], exchanged, to);
      }
      if (p.fault == Fault::kEarlyExit && rank == 1) return;
      if (p.fault != Fault::kNoWait) {
        wait<true>(exchanged, (i / 2 + (p.fault == Fault::kOldPhase)) % 2);
      }
    }
    if (p.fault == Fault::kEarlyExit && rank == 1) return;
    if (t == 0 && rank == 0) {
      float total = 0;
      for (unsigned from = 0; from < size; ++from) total += s.partials[i % 2][from][0];
      p.out[first + i] = total;
    }
    sync_block();
    if (p.fault != Fault::kEarlyFill && t == 0 && i + 2 < rows) load(i + 2);
  }
  if (t == 0) add_acquire_release(p.done, 1);
}

bool test_cluster(unsigned size, Fault fault) {
  const int clusters = 3, rows = clusters * 4;
  std::mt19937 random(size);
  std::vector<float> out(rows);
  // bulk copies are of aligned vectors
  std::vector<Vec16> memory(rows * size * kPart / 4);
  float* const x = reinterpret_cast<float*>(memory.data());
  for (size_t i = 0; i < 4 * memory.size(); ++i) x[i] = static_cast<float>(random() % 1024) / 1024;
  unsigned done = 0;
  const SumParams params{x, out.data(), &done, fault};
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

// With an argument, the number of a fault.
int main(int argc, char** argv) {
  const auto fault = static_cast<fastrl::cuda::Fault>(argc > 1 ? std::atoi(argv[1]) : 0);
  for (const unsigned size : {1u, 2u, 4u}) {
    if (!fastrl::cuda::test_cluster(size, fault)) return 1;
  }
  return 0;
}
