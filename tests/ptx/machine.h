// A machine that executes PTX: warps of 32 lanes, blocks, clusters, and the order of their memory.
//
// A seed chooses what a GPU leaves open: which warp goes on and for how long, which lanes of a
// divergent warp do, when asynchronous copies land, and errors of approximate instructions.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace ptx {

constexpr int kLanes = 32;
constexpr uint32_t kAll = 0xffffffffu;
constexpr int kNowhere = 0x7fffffff;
constexpr int kRow = 256;              // bytes of a register of 64 bits, of all lanes
constexpr uint64_t kWindow = 1 << 20;  // addresses of a block's shared memory: (rank + 1) windows

// decode.py has the same.
struct Instruction {
  int32_t operation, guard, negated;
  int32_t d[4], s[6], extra[4];
  int64_t offset;
  int32_t file, line;
};
enum Space { kParam, kGlobal, kShared, kSharedCluster };
enum Special {
  kTid,
  kCtaid = 3,
  kNtid = 6,
  kNctaid,
  kLaneid = 10,
  kRank,
  kRanks,
  kShared64,
  kShared32
};

struct Kernel {
  const Instruction* code;
  int32_t length, register_bytes;
  const unsigned char* constants;
};

struct Launch {
  const Kernel* kernel;
  uint32_t grid[3], threads, cluster, shared_bytes;
  const unsigned char* parameters;
  uint64_t seed;
  uint64_t* executed;  // how often warps have run each instruction
  int32_t resident;    // clusters that run side by side
};

// What a launch has cost.
struct Counts {
  uint64_t global_sectors_read, global_sectors_written, requests, bank_conflicts;
  uint64_t shared_accesses, async_bytes_in_flight;
  uint64_t different_sectors_read, different_sectors_written;
};

// What the kernel did that it must not do.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Which accesses of which threads come before: of a key, those whose clock is less.
using Known = std::vector<std::pair<uint32_t, uint64_t>>;
using Knowledge = std::shared_ptr<const Known>;
Knowledge joined(const Knowledge& a, const Knowledge& b);
uint64_t known(const Knowledge& knowledge, uint32_t key);

// An access to a word: who, when, which of its bytes.
struct Stamp {
  uint32_t thread = 0;  // 32 times the warp's number, counted from 1, plus the lane
  uint32_t bytes : 4 = 0, atomic : 1 = 0, async : 1 = 0, vector : 1 = 0;
  uint64_t clock = 0;
};
struct Cell {
  Stamp write, read[2];
};
// The last accesses to the words of a piece of memory.
class Cells {
 public:
  Cell& at(uint64_t word) {
    if (!last_ || word >> 8 != last_page_) {
      auto& page = pages_[word >> 8];
      if (!page) page = std::make_unique<std::array<Cell, 256>>();
      last_ = page.get();
      last_page_ = word >> 8;
    }
    return (*last_)[word & 255];
  }

 private:
  std::array<Cell, 256>* last_ = nullptr;
  uint64_t last_page_ = 0;
  std::unordered_map<uint64_t, std::unique_ptr<std::array<Cell, 256>>> pages_;
};

struct MemoryBarrier {
  uint32_t arrivals = 0, expected = 0, phase = 0;
  int64_t bytes = 0;
  Knowledge arriving, done;
  std::map<uint32_t, uint32_t> seen;  // phases that a thread has waited for
};

struct Cluster;
struct Block;

struct Fragment {  // lanes that are at the same instruction
  int32_t pc;
  uint32_t lanes;
  bool apart = false;  // it waits for others there
};

struct Warp {
  Block* block = nullptr;
  uint32_t number = 0;  // from 1 on, in the launch
  int index = 0;        // in the block
  uint32_t live = 0;
  std::vector<Fragment> fragments;
  std::vector<unsigned char> registers;
  const unsigned char* constants = nullptr;
  uint64_t clock = 2, synced = 1;  // the clock of its last barrier
  uint64_t exchanged = 1;          // and of the last shuffle of all lanes
  Knowledge knowledge, of_lane[kLanes];
  uint64_t fenced[kLanes] = {};  // clock of the last fence between the proxies
  uint32_t cluster_arrived = 0;
  uint64_t cluster_phase[kLanes] = {};
  bool at_barrier = false, at_cluster = false;
  int32_t pc = 0;  // of what it executes

  template <typename T>
  T* reg(int32_t slot) {
    unsigned char* base = slot >= 0 ? registers.data() + slot
                                    : const_cast<unsigned char*>(constants) + (-1 - slot) * kRow;
    return reinterpret_cast<T*>(base);
  }
};

struct Block {
  Cluster* cluster;
  uint32_t index[3], rank;
  std::vector<unsigned char> shared;
  Cells cells;
  std::map<uint64_t, MemoryBarrier> barriers;
  std::vector<std::unique_ptr<Warp>> warps;
  int waiting = 0, live = 0;
  int64_t in_flight = 0;          // bytes on their way to its shared memory
  std::vector<uint32_t> numbers;  // of its warps and transfers
};

struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  uint32_t arrived = 0, live = 0;  // threads
  Knowledge arriving, done;
  uint64_t phase = 0;
};

// Which accesses out of order are faults at once.
enum class Report { kNothing, kRaces, kAll };

// Bytes on their way to shared memory.
struct Transfer {
  uint64_t due;
  Block* to;
  uint64_t address, barrier, source;  // source: in global memory, or 0 where `data` has the bytes
  uint32_t bytes, number;             // the number of its own "warp"
  unsigned char data[16];
  Knowledge before;
  bool bulk;
  Warp* from;
  int32_t pc;
};

// kBlocked: goes on behind this instruction; kBlockedHere: at it; kApart: once other lanes are
// here.
enum class Outcome { kNext, kYield, kBlocked, kBlockedHere, kApart };

class Machine;
using Handler = Outcome (*)(Machine&, Warp&, const Instruction&, uint32_t lanes);
struct Operation {
  const char* name;
  Handler run;
};
const std::vector<Operation>& arithmetic();
const std::vector<Operation>& conversions();
const std::vector<Operation>& memory_operations();
const std::vector<Operation>& synchronisation();

// The tensors of the process, which a kernel may reach.
struct Allocation {
  uint64_t begin = 0, bytes = 0;
};
Allocation allocation_of(uint64_t address);
// Counts of the loads and stores of each byte of some memory.
struct Watch {
  uint64_t begin = 0, bytes = 0;
  unsigned char *loads = nullptr, *stores = nullptr;
};
extern Watch watched[2];
// Words that nobody wrote, at even and odd places: NaN as float32 and as bfloat16.
constexpr uint32_t kUnwritten[2] = {0x7fc0dead, 0x7fe1beef};

class Machine {
 public:
  explicit Machine(const Launch& launch);
  void run();

  // --- for operations
  const Launch& launch;
  Counts counts{};
  std::unordered_set<uint64_t> sectors[2];  // read and written at least once
  uint64_t time = 0, progress = 0;
  uint64_t random();
  double error(uint64_t operation, uint64_t bits) const;  // in [-1, 1], the same each time
  [[noreturn]] void fault(const Warp& warp, const std::string& what, int lane = -1,
                          uint64_t address = 0);
  bool together(const Warp& warp, uint32_t lanes, uint32_t wanted);

  // order.cpp
  Knowledge release(Warp& warp, uint32_t lanes);
  void acquire(Warp& warp, int lane, const Knowledge& knowledge, bool only_block = false);
  void sync_lanes(Warp& warp);
  bool heard_of(const Warp& warp, int lane, const Block& block);
  // Notes an access to one word, and returns which of its bytes are out of order, or 16 for those
  // of a load that nobody has written.
  uint32_t access(Warp& warp, int lane, Block* owner, uint64_t address, uint32_t bytes, bool store,
                  bool atomic, Report report, const void* value = nullptr);
  void send(Warp& warp, int lane, Transfer transfer);

  // memory.cpp
  unsigned char* resolve(Warp& warp, int lane, int space, uint64_t address, uint32_t bytes,
                         bool store, Block** owner);
  Block* block_at(Warp& warp, uint64_t address);

  // synchronisation.cpp
  void complete(MemoryBarrier& barrier);
  void leave(Warp& warp, uint32_t lanes);
  void try_block_barrier(Block& block);
  void try_cluster_barrier(Cluster& cluster);

  std::unordered_map<uint64_t, Knowledge> released;  // at an address in global memory
  uint32_t next_number = 1;
  std::vector<Block*> block_of{nullptr};  // of a warp's number

 private:
  void start_cluster();
  void step(Warp& warp);
  std::string state();
  void land(Transfer& transfer);

  Warp* runnable();
  const std::vector<Operation> operations_;
  Cells global_;
  Allocation last_;
  std::vector<Transfer> transfers_;
  std::vector<std::unique_ptr<Cluster>> resident_;
  std::vector<uint32_t> order_;  // in which clusters start
  uint64_t state_;
};

const std::vector<Operation>& all_operations();

}  // namespace ptx
