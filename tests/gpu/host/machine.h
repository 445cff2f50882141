// A CPU that pretends to be a GPU: one thread of the system per CUDA thread, blocks and clusters as
// groups of them, a bulk copy in a separate thread. Slow, and as racy as the kernel is.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#endif

#ifndef FASTRL_HOST_WARP
#define FASTRL_HOST_WARP 8
#endif

namespace fastrl::cuda::host {

constexpr int kLanes = FASTRL_HOST_WARP;
constexpr int kClustersAtOnce = 2;
constexpr auto kPatience = std::chrono::seconds(60);

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "host machine: %s\n", what);
  std::fflush(stderr);
  std::abort();
}
inline void require(bool ok, const char* what) {
  if (!ok) fail(what);
}

inline std::atomic<uint64_t> progress{0};

// Sleeps while *at is `seen`. Not by std::atomic::wait: its internal state is shared by unrelated
// barriers, which would order them and hide races from ThreadSanitizer.
inline void sleep_while(const std::atomic<uint32_t>& at, uint32_t seen) {
  for (int turn = 0; at.load(std::memory_order_acquire) == seen; ++turn) {
#if defined(__linux__)
    if (turn >= 4) {
      syscall(SYS_futex, &at, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
      continue;
    }
#endif
    std::this_thread::yield();
  }
}
inline void wake_all([[maybe_unused]] std::atomic<uint32_t>& at) {
#if defined(__linux__)
  syscall(SYS_futex, &at, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
}

class Barrier {
 public:
  explicit Barrier(unsigned threads) : threads_(threads) {}
  void wait() {
    const uint32_t generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      progress.fetch_add(1, std::memory_order_relaxed);
      generation_.fetch_add(1, std::memory_order_release);
      wake_all(generation_);
      return;
    }
    sleep_while(generation_, generation);
  }
  bool met() const { return generation_.load(std::memory_order_relaxed) != 0; }

 private:
  const unsigned threads_;
  std::atomic<unsigned> arrived_{0};
  std::atomic<uint32_t> generation_{0};
};

struct Warp {
  Barrier barrier{kLanes};
  uint64_t slots[2][kLanes];
};

// Performs the bulk copies of a block one after the other, in one thread.
class CopyEngine {
 public:
  ~CopyEngine() {
    if (!thread_.joinable()) return;
    submit(nullptr);
    thread_.join();
  }
  void submit(std::function<void()> copy) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    queue_.push_back(std::move(copy));
    filled_.notify_one();
  }

 private:
  void run() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      filled_.wait(lock, [this] { return !queue_.empty(); });
      const std::function<void()> copy = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (!copy) return;
      copy();
      progress.fetch_add(1, std::memory_order_relaxed);
    }
  }
  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<std::function<void()>> queue_;
  std::thread thread_;
};

struct Block {
  Block(unsigned threads, size_t shared_bytes)
      : barrier(threads),
        running(threads),
        warps(threads / kLanes),
        // exactly as much as was asked for, so that AddressSanitizer sees a step beyond it
        memory(new (std::align_val_t(128)) unsigned char[shared_bytes + (shared_bytes == 0)]),
        shared(memory.get()) {
    std::memset(shared, 0xff, shared_bytes);  // NaN in every format
  }

  struct Release {
    void operator()(unsigned char* p) const { ::operator delete[](p, std::align_val_t(128)); }
  };
  Barrier barrier;
  std::atomic<unsigned> running;  // threads that have not exited
  std::vector<Warp> warps;
  std::unique_ptr<unsigned char, Release> memory;
  unsigned char* const shared;
  CopyEngine copies;  // ends before the memory that it copies to
};

struct Cluster {
  explicit Cluster(const LaunchShape& shape) : barrier(shape.threads * shape.cluster) {
    for (unsigned i = 0; i < shape.cluster; ++i) {
      blocks.push_back(std::make_unique<Block>(shape.threads, shape.shared_bytes));
    }
  }
  Barrier barrier;
  std::vector<std::unique_ptr<Block>> blocks;
};

// The place of the running thread.
struct Here {
  const LaunchShape* shape;
  Cluster* cluster;
  Block* block;
  Warp* warp;
  unsigned block_index, rank;
  int thread, lane;
  int parity = 0;  // two sets of slots: a shuffle needs one barrier, not two
};
inline thread_local Here here{};

// A launch that makes no progress has threads waiting at different barriers.
class Watchdog {
 public:
  Watchdog() : thread_([this] { run(); }) {}
  ~Watchdog() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      done_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (uint64_t seen = progress.load(); !done_; seen = progress.load()) {
      changed_.wait_for(lock, kPatience, [this] { return done_; });
      require(done_ || progress.load() != seen, "no progress: threads wait at different barriers");
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::thread thread_;
};

// Runs body() once per thread of the launch; a few clusters at a time, in the order of the grid.
template <typename Body>
void run(const LaunchShape& shape, const Body& body) {
  require(shape.threads % kLanes == 0, "a block must consist of whole warps");
  require(shape.cluster >= 1 && shape.blocks % shape.cluster == 0, "the grid must hold clusters");
  const Watchdog watchdog;
  std::atomic<unsigned> next{0};
  const auto serve = [&] {
    for (unsigned id;
         (id = next.fetch_add(1, std::memory_order_relaxed)) < shape.blocks / shape.cluster;) {
      Cluster cluster(shape);
      std::vector<std::thread> threads;
      for (unsigned rank = 0; rank < shape.cluster; ++rank) {
        for (int t = 0; t < static_cast<int>(shape.threads); ++t) {
          threads.emplace_back([&, rank, t] {
            Block* block = cluster.blocks[rank].get();
            here = {
                &shape, &cluster, block,     &block->warps[t / kLanes], id * shape.cluster + rank,
                rank,   t,        t % kLanes};
            body();
            block->running.fetch_sub(1);
          });
        }
      }
      for (std::thread& thread : threads) thread.join();
      progress.fetch_add(1, std::memory_order_relaxed);
    }
  };
  std::vector<std::thread> servers;
  for (int i = 0; i < kClustersAtOnce; ++i) servers.emplace_back(serve);
  for (std::thread& server : servers) server.join();
}

}  // namespace fastrl::cuda::host
