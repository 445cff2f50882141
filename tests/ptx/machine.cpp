// Runs a launch: clusters side by side, their warps by turns, asynchronous copies when they are
// due.
#include "machine.h"

#include <algorithm>
#include <numeric>

namespace ptx {

namespace {
constexpr uint64_t kPatience = 3'000'000;  // instructions without a store, a barrier or an exit
constexpr uint64_t kWindowOfStarts = 8;
uint64_t mixed(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}
enum : int { kBranch, kReturn };  // where synchronisation() begins
}  // namespace

const std::vector<Operation>& all_operations() {
  static const std::vector<Operation> all = [] {
    std::vector<Operation> found = synchronisation();
    for (const auto* some : {&memory_operations(), &arithmetic(), &conversions()}) {
      found.insert(found.end(), some->begin(), some->end());
    }
    return found;
  }();
  return all;
}

Machine::Machine(const Launch& given)
    : launch(given), operations_(all_operations()), state_(mixed(given.seed + 1)) {
  const uint32_t clusters = given.grid[0] * given.grid[1] * given.grid[2] / given.cluster;
  order_.resize(clusters);
  std::iota(order_.rbegin(), order_.rend(), 0);  // the next one is at the end
  if (given.seed % 2) {                          // blocks may start in any order
    for (size_t n = 0; n + 1 < clusters; ++n) {
      const size_t last = clusters - 1 - n;
      std::swap(order_[last],
                order_[last - random() % std::min<size_t>(last + 1, kWindowOfStarts)]);
    }
  }
}

uint64_t Machine::random() {
  state_ += 0x9e3779b97f4a7c15;
  return mixed(state_);
}
double Machine::error(uint64_t operation, uint64_t bits) const {
  const uint64_t hash = mixed(bits * 0x9e3779b97f4a7c15 + operation + launch.seed * 1000003);
  return static_cast<double>(hash >> 11) / static_cast<double>(1ull << 52) - 1;
}

void Machine::fault(const Warp& warp, const std::string& what, int lane, uint64_t address) {
  const Instruction& i = launch.kernel->code[warp.pc];
  std::string text = std::to_string(i.file) + ":" + std::to_string(i.line) + "|" + what +
                     "|block " + std::to_string(warp.block->index[0]);
  if (lane >= 0) text += " thread " + std::to_string(warp.index * kLanes + lane);
  if (address) {
    char digits[32];
    std::snprintf(digits, sizeof(digits), " address 0x%llx",
                  static_cast<unsigned long long>(address));
    text += digits;
  }
  throw Fault(text);
}

bool Machine::together(const Warp& warp, uint32_t lanes, uint32_t wanted) {
  if (lanes & ~wanted) fault(warp, "a lane takes part that its mask leaves out");
  return (wanted & warp.live & ~lanes) == 0;
}

void Machine::start_cluster() {
  const Kernel& kernel = *launch.kernel;
  auto cluster = std::make_unique<Cluster>();
  const uint32_t first = order_.back() * launch.cluster;
  order_.pop_back();
  for (uint32_t rank = 0; rank < launch.cluster; ++rank) {
    auto block = std::make_unique<Block>();
    const uint32_t linear = first + rank, x = launch.grid[0], y = launch.grid[1];
    block->cluster = cluster.get();
    block->rank = rank;
    block->index[0] = linear % x, block->index[1] = linear / x % y,
    block->index[2] = linear / x / y;
    block->shared.resize((launch.shared_bytes + 15) / 16 * 16);
    for (size_t n = 0; n < block->shared.size(); n += 8) {
      std::memcpy(block->shared.data() + n, kUnwritten, 8);
    }
    for (uint32_t begin = 0; begin < launch.threads; begin += kLanes) {
      auto warp = std::make_unique<Warp>();
      const uint32_t count = std::min<uint32_t>(kLanes, launch.threads - begin);
      warp->block = block.get();
      warp->number = next_number++;
      block_of.push_back(block.get());
      block->numbers.push_back(warp->number);
      warp->index = static_cast<int>(begin) / kLanes;
      warp->live = count == kLanes ? kAll : (1u << count) - 1;
      warp->fragments = {{0, warp->live}};
      warp->registers.assign(static_cast<size_t>(kernel.register_bytes) + kRow, 0xa5);
      warp->constants = kernel.constants;
      const uint32_t rows[] = {0,
                               0,
                               0,
                               block->index[0],
                               block->index[1],
                               block->index[2],
                               launch.threads,
                               x,
                               y,
                               launch.grid[2],
                               0,
                               rank,
                               launch.cluster};
      for (int row = 0; row < kShared64; ++row) {
        std::fill_n(warp->reg<uint32_t>(row * kRow), kLanes, rows[row]);
      }
      std::iota(warp->reg<uint32_t>(kTid * kRow), warp->reg<uint32_t>(kTid * kRow) + kLanes, begin);
      std::iota(warp->reg<uint32_t>(kLaneid * kRow), warp->reg<uint32_t>(kLaneid * kRow) + kLanes,
                0);
      std::fill_n(warp->reg<uint64_t>(kShared64 * kRow), kLanes, (rank + 1) * kWindow);
      std::fill_n(warp->reg<uint32_t>(kShared32 * kRow), kLanes,
                  static_cast<uint32_t>((rank + 1) * kWindow));
      block->live += static_cast<int>(count);
      block->warps.push_back(std::move(warp));
    }
    cluster->live += launch.threads;
    cluster->blocks.push_back(std::move(block));
  }
  resident_.push_back(std::move(cluster));
}

Warp* Machine::runnable() {
  const auto can_run = [](const Warp& warp) {
    return warp.live && !warp.at_barrier && !warp.at_cluster;
  };
  const Cluster& some = *resident_[random() % resident_.size()];
  const Block& block = *some.blocks[random() % some.blocks.size()];
  Warp* found = block.warps[random() % block.warps.size()].get();
  if (can_run(*found)) return found;
  std::vector<Warp*> all;
  for (const auto& cluster : resident_) {
    for (const auto& one : cluster->blocks) {
      for (const auto& warp : one->warps) {
        if (can_run(*warp)) all.push_back(warp.get());
      }
    }
  }
  return all.empty() ? nullptr : all[random() % all.size()];
}

// Lets a warp go on for a while.
void Machine::step(Warp& w) {
  std::vector<Fragment>& all = w.fragments;
  int64_t turns = 1 + static_cast<int64_t>(random() % (random() % 16 == 0 ? 2000 : 100));
  while (turns > 0 && w.live) {
    // lanes at the same instruction go on together; else most often those that are behind
    size_t chosen = 0;
    if (all.size() > 1) {
      std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.pc < b.pc; });
      for (size_t n = all.size() - 1; n > 0; --n) {
        if (all[n].pc != all[n - 1].pc) continue;
        all[n - 1].lanes |= all[n].lanes;
        all[n - 1].apart = false;
        all.erase(all.begin() + static_cast<std::ptrdiff_t>(n));
      }
      while (chosen < all.size() && all[chosen].apart) ++chosen;
      const size_t other = random() % all.size();
      if (random() % 8 == 0 && !all[other].apart) chosen = other;
    }
    if (chosen == all.size() || all[chosen].apart) {
      w.pc = all[0].pc;
      fault(w, "not all lanes of the mask come here");
    }
    bool again = true;
    while (again && turns-- > 0) {
      again = all.size() == 1;
      Fragment& f = all[chosen];
      const Instruction& i = launch.kernel->code[f.pc];
      uint32_t lanes = f.lanes;
      if (i.guard >= 0) {
        const uint32_t bits = *w.reg<uint32_t>(i.guard);
        lanes &= i.negated ? ~bits : bits;
      }
      ++time;
      ++launch.executed[f.pc];
      if (lanes == 0) {
        ++f.pc;
        continue;
      }
      w.pc = f.pc;
      if (i.operation == kBranch) {
        const auto target = static_cast<int32_t>(i.offset);
        if (lanes == f.lanes) {
          f.pc = target;
        } else {
          f.lanes &= ~lanes;
          ++f.pc;
          all.push_back({target, lanes});
          again = false;
        }
        continue;
      }
      if (i.operation <= kReturn + 1) {
        f.lanes &= ~lanes;
        ++f.pc;
        if (f.lanes == 0) all.erase(all.begin() + static_cast<std::ptrdiff_t>(chosen));
        for (Fragment& one : all) one.apart = false;
        leave(w, lanes);
        break;
      }
      switch (operations_[static_cast<size_t>(i.operation)].run(*this, w, i, lanes)) {
        case Outcome::kNext:
          ++f.pc;
          break;
        case Outcome::kYield:
          ++f.pc;
          turns = std::min(turns, static_cast<int64_t>(random() % 8));
          break;
        case Outcome::kBlocked:
          ++f.pc;
          return;
        case Outcome::kBlockedHere:
          return;
        case Outcome::kApart:
          f.apart = true;
          if (all.size() == 1) fault(w, "not all lanes of the mask come here");
          break;
      }
    }
  }
}

void Machine::run() {
  while (!order_.empty() || !resident_.empty()) {
    while (!order_.empty() && resident_.size() < static_cast<size_t>(launch.resident))
      start_cluster();
    for (size_t n = 0; n < transfers_.size();) {
      if (transfers_[n].due > time) {
        ++n;
        continue;
      }
      Transfer due = std::move(transfers_[n]);
      transfers_[n] = std::move(transfers_.back());
      transfers_.pop_back();
      land(due);
    }
    if (Warp* warp = runnable()) {
      step(*warp);
      Cluster* cluster = warp->block->cluster;
      if (cluster->live == 0) {
        for (const auto& block : cluster->blocks) {
          for (uint32_t number : block->numbers) block_of[number] = nullptr;
        }
        std::erase_if(resident_, [&](const auto& one) { return one.get() == cluster; });
      }
    } else if (!transfers_.empty()) {
      time =
          std::min_element(transfers_.begin(), transfers_.end(), [](const auto& a, const auto& b) {
            return a.due < b.due;
          })->due;
    } else {
      throw Fault("0:0|deadlock|" + state());
    }
    if (time - progress > kPatience) throw Fault("0:0|nothing moves any more|" + state());
  }
}

// Where warps wait.
std::string Machine::state() {
  std::string text;
  for (const auto& cluster : resident_) {
    for (const auto& block : cluster->blocks) {
      for (const auto& warp : block->warps) {
        if (!warp->live || text.size() > 500) continue;
        const Instruction& i = launch.kernel->code[warp->pc];
        text += "block " + std::to_string(block->index[0]) + " warp " +
                std::to_string(warp->index) + " at " +
                operations_[static_cast<size_t>(i.operation)].name + " of line " +
                std::to_string(i.line) + "; ";
      }
    }
  }
  return text;
}

}  // namespace ptx

extern "C" {

const char* ptx_operation(int number) {
  const auto& all = ptx::all_operations();
  return number < static_cast<int>(all.size()) ? all[static_cast<size_t>(number)].name : nullptr;
}

// 0, or 1 with "FILE:LINE|what|where" in `message`.
int ptx_run(const ptx::Launch* launch, ptx::Counts* counts, char* message, size_t size) {
  ptx::Machine machine(*launch);
  try {
    machine.run();
    machine.counts.different_sectors_read = machine.sectors[0].size();
    machine.counts.different_sectors_written = machine.sectors[1].size();
    *counts = machine.counts;
    return 0;
  } catch (const std::exception& fault) {
    std::snprintf(message, size, "%s", fault.what());
    return 1;
  }
}

void ptx_watch(int place, uint64_t begin, uint64_t bytes, unsigned char* loads,
               unsigned char* stores) {
  ptx::watched[place] = {begin, bytes, loads, stores};
}

}  // extern "C"
