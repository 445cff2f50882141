// Branches, exchanges within a warp, barriers of warps, blocks and clusters, and asynchronous
// copies.
#include <algorithm>

#include "machine.h"

namespace ptx {

void Machine::complete(MemoryBarrier& barrier) {
  if (barrier.arrivals > 0 || barrier.bytes != 0) return;
  barrier.done = barrier.arriving = joined(barrier.done, barrier.arriving);
  barrier.arrivals = barrier.expected;
  ++barrier.phase;
  progress = time;
}

void Machine::try_block_barrier(Block& block) {
  int live = 0;
  for (const auto& warp : block.warps) live += warp->live != 0;
  if (live == 0 || block.waiting < live) return;
  Knowledge all;
  for (const auto& warp : block.warps) {
    if (!warp->at_barrier) continue;
    sync_lanes(*warp);
    all = joined(all, release(*warp, kAll));
  }
  for (const auto& warp : block.warps) {
    if (!warp->at_barrier) continue;
    warp->knowledge = all;
    warp->synced = ++warp->clock;
    warp->at_barrier = false;
  }
  block.waiting = 0;
  progress = time;
}

void Machine::try_cluster_barrier(Cluster& cluster) {
  if (cluster.live == 0 || cluster.arrived < cluster.live) return;
  cluster.done = cluster.arriving;
  cluster.arrived = 0;
  ++cluster.phase;
  progress = time;
  for (const auto& block : cluster.blocks) {
    for (const auto& warp : block->warps) warp->at_cluster = false;
  }
}

void Machine::leave(Warp& warp, uint32_t lanes) {
  Block& block = *warp.block;
  Cluster& cluster = *block.cluster;
  const int count = __builtin_popcount(lanes);
  if (warp.cluster_arrived & lanes)
    fault(warp, "exits between arriving at a cluster's barrier and waiting");
  warp.live &= ~lanes;
  block.live -= count;
  cluster.live -= static_cast<uint32_t>(count);
  progress = time;
  if (block.live == 0 && block.in_flight > 0) {
    fault(warp, "the block exits while copies to its shared memory are on their way");
  }
  try_block_barrier(block);
  try_cluster_barrier(cluster);
}

namespace {

uint32_t mask_of(Warp& w, int32_t slot, uint32_t lanes) {
  return w.reg<uint32_t>(slot)[__builtin_ctz(lanes)];
}

// --- within a warp

enum class Shuffle { kXor, kUp, kDown, kIndex };
template <Shuffle kWhat>
Outcome shuffle(Machine& m, Warp& w, const Instruction& i, uint32_t lanes) {
  const uint32_t members = mask_of(w, i.s[3], lanes);
  if (!m.together(w, lanes, members)) return Outcome::kApart;
  const uint32_t* x = w.reg<uint32_t>(i.s[0]);
  const uint32_t *by = w.reg<uint32_t>(i.s[1]), *clamps = w.reg<uint32_t>(i.s[2]);
  uint32_t out[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    if (!(lanes >> l & 1)) continue;
    const int segment = static_cast<int>(clamps[l] >> 8 & 31),
              clamp = static_cast<int>(clamps[l] & 31);
    const int most = (l & segment) | (clamp & ~segment), least = l & segment,
              b = static_cast<int>(by[l] & 31);
    int from = kWhat == Shuffle::kXor    ? l ^ b
               : kWhat == Shuffle::kUp   ? l - b
               : kWhat == Shuffle::kDown ? l + b
                                         : (b & ~segment) | least;
    const bool valid = kWhat == Shuffle::kUp ? from >= most : from <= most;
    if (!valid) from = l;
    if (!(lanes >> from & 1))
      m.fault(w, "shfl.sync reads lane " + std::to_string(from) + ", which does not take part", l);
    out[l] = x[from];
  }
  uint32_t* to = w.reg<uint32_t>(i.d[0]);
  for (int l = 0; l < kLanes; ++l) {
    if (lanes >> l & 1) to[l] = out[l];
  }
  if ((w.live & ~lanes) == 0) w.exchanged = ++w.clock;
  return Outcome::kNext;
}

template <typename F>
Outcome reduce(Machine& m, Warp& w, const Instruction& i, uint32_t lanes, F combine) {
  if (!m.together(w, lanes, mask_of(w, i.s[1], lanes))) return Outcome::kApart;
  const auto* x = w.reg<int32_t>(i.s[0]);
  int32_t all = x[__builtin_ctz(lanes)];
  for (int l = __builtin_ctz(lanes) + 1; l < kLanes; ++l) {
    if (lanes >> l & 1) all = combine(all, x[l]);
  }
  for (int l = 0; l < kLanes; ++l) {
    if (lanes >> l & 1) w.reg<int32_t>(i.d[0])[l] = all;
  }
  return Outcome::kNext;
}

Outcome ballot(Machine& m, Warp& w, const Instruction& i, uint32_t lanes) {
  if (!m.together(w, lanes, mask_of(w, i.s[1], lanes))) return Outcome::kApart;
  const uint32_t bits = *w.reg<uint32_t>(i.s[0]) & lanes;
  for (int l = 0; l < kLanes; ++l) {
    if (lanes >> l & 1) w.reg<uint32_t>(i.d[0])[l] = bits;
  }
  return Outcome::kNext;
}

Outcome sync_warp(Machine& m, Warp& w, const Instruction& i, uint32_t lanes) {
  if (!m.together(w, lanes, mask_of(w, i.s[0], lanes))) return Outcome::kApart;
  m.sync_lanes(w);
  return Outcome::kYield;
}

// --- of blocks and clusters

Outcome sync_block(Machine& m, Warp& w, const Instruction& i, uint32_t lanes) {
  if (!m.together(w, lanes, kAll)) return Outcome::kApart;
  if (w.reg<uint32_t>(i.s[0])[0] != 0) m.fault(w, "a barrier of another number than 0");
  w.at_barrier = true;
  ++w.block->waiting;
  m.try_block_barrier(*w.block);
  return Outcome::kBlocked;
}

Outcome arrive_cluster(Machine& m, Warp& w, const Instruction&, uint32_t lanes) {
  Cluster& cluster = *w.block->cluster;
  if (w.cluster_arrived & lanes) m.fault(w, "arrives twice at a cluster's barrier");
  cluster.arriving = joined(cluster.arriving, m.release(w, lanes));
  w.cluster_arrived |= lanes;
  for (int l = 0; l < kLanes; ++l) {
    if (lanes >> l & 1) w.cluster_phase[l] = cluster.phase;
  }
  cluster.arrived += static_cast<uint32_t>(__builtin_popcount(lanes));
  m.try_cluster_barrier(cluster);
  return Outcome::kNext;
}
Outcome wait_cluster(Machine& m, Warp& w, const Instruction&, uint32_t lanes) {
  const Cluster& cluster = *w.block->cluster;
  if ((w.cluster_arrived & lanes) != lanes)
    m.fault(w, "waits at a cluster's barrier before it has arrived");
  if (w.cluster_phase[__builtin_ctz(lanes)] == cluster.phase) {
    w.at_cluster = (w.live & ~w.cluster_arrived) == 0;  // else other lanes have yet to arrive
    return Outcome::kBlockedHere;
  }
  for (int l = 0; l < kLanes; ++l) {
    if (lanes >> l & 1) m.acquire(w, l, cluster.done);
  }
  if (lanes == w.live) m.sync_lanes(w);
  w.cluster_arrived &= ~lanes;
  return Outcome::kYield;
}

// --- mbarriers

uint64_t base_of(Warp& w, const Instruction& i, int lane) {
  return w.reg<uint32_t>(i.s[0])[lane] + static_cast<uint64_t>(i.offset);
}
MemoryBarrier& barrier_at(Machine& m, Warp& w, int lane, uint64_t address) {
  Block* owner;
  m.resolve(w, lane, kShared, address, 8, false, &owner);
  const auto found = owner->barriers.find(address % kWindow);
  if (found == owner->barriers.end())
    m.fault(w, "an mbarrier that was not initialised", lane, address);
  return found->second;
}

Outcome init_barrier(Machine& m, Warp& w, const Instruction& i, uint32_t lanes) {
  for (int l = 0; l < kLanes; ++l) {
    if (!(lanes >> l & 1)) continue;
    const uint64_t address = base_of(w, i, l);
    Block* owner;
    unsigned char* to = m.resolve(w, l, kShared, address, 8, true, &owner);
    for (int n = 0; n < 8; n += 4) m.access(w, l, owner, address + n, 4, true, false, Report::kAll);
    std::memset(to, 0, 8);
    MemoryBarrier& barrier = owner->barriers[address % kWindow] = {};
    barrier.arrivals = barrier.expected = w.reg<uint32_t>(i.s[1])[l];
  }
  return Outcome::kNext;
}

// A use of the barrier itself: its initialisation must come before.
void touch(Machine& m, Warp& w, int lane, uint64_t address) {
  for (int n = 0; n < 8; n += 4)
    m.access(w, lane, w.block, address + n, 4, false, true, Report::kAll);
}

Outcome arrive_expecting(Machine& m, Warp& w, const Instruction& i, uint32_t lanes) {
  for (int l = 0; l < kLanes; ++l) {
    if (!(lanes >> l & 1)) continue;
    const uint64_t address = base_of(w, i, l);
    MemoryBarrier& barrier = barrier_at(m, w, l, address);
    touch(m, w, l, address);
    if (barrier.arrivals == 0) m.fault(w, "one arrival too many at an mbarrier", l, address);
    barrier.bytes += w.reg<uint32_t>(i.s[1])[l];
    barrier.arriving = joined(barrier.arriving, m.release(w, 1u << l));
    --barrier.arrivals;
    m.complete(barrier);
  }
  return Outcome::kYield;
}

template <bool kCluster>
Outcome try_wait(Machine& m, Warp& w, const Instruction& i, uint32_t lanes) {
  uint32_t done = 0;
  for (int l = 0; l < kLanes; ++l) {
    if (!(lanes >> l & 1)) continue;
    const uint64_t address = base_of(w, i, l);
    MemoryBarrier& barrier = barrier_at(m, w, l, address);
    touch(m, w, l, address);
    const uint32_t parity = w.reg<uint32_t>(i.s[1])[l] & 1;
    if ((barrier.phase & 1) == parity) continue;
    uint32_t& seen = barrier.seen[w.number * kLanes + l];
    if (barrier.phase == seen)
      m.fault(w,
              "waits for a phase of an mbarrier that it has waited for before: the parity is wrong",
              l, address);
    seen = barrier.phase;
    m.acquire(w, l, barrier.done, !kCluster);
    done |= 1u << l;
  }
  uint32_t& to = *w.reg<uint32_t>(i.d[0]);
  to = (to & ~lanes) | done;
  return Outcome::kYield;
}

// --- copies

template <int kVector>
Outcome store_async(Machine& m, Warp& w, const Instruction& i, uint32_t lanes) {
  for (int l = 0; l < kLanes; ++l) {
    if (!(lanes >> l & 1)) continue;
    Transfer t{};
    t.address = base_of(w, i, l);
    t.barrier = w.reg<uint32_t>(i.s[1])[l];
    t.bytes = 4 * kVector;
    m.resolve(w, l, kSharedCluster, t.address, t.bytes, true, &t.to);
    if (m.block_at(w, t.barrier) != t.to)
      m.fault(w, "st.async to one block that signals another", l, t.barrier);
    for (int n = 0; n < kVector; ++n) {
      std::memcpy(t.data + 4 * n, w.reg<uint32_t>(i.s[2 + n]) + l, 4);
    }
    m.send(w, l, t);
  }
  return Outcome::kYield;
}

Outcome bulk_copy(Machine& m, Warp& w, const Instruction& i, uint32_t lanes) {
  for (int l = 0; l < kLanes; ++l) {
    if (!(lanes >> l & 1)) continue;
    const uint32_t bytes = w.reg<uint32_t>(i.s[2])[l];
    Transfer t{};
    t.address = w.reg<uint32_t>(i.s[0])[l];
    t.source = w.reg<uint64_t>(i.s[1])[l];
    t.barrier = w.reg<uint32_t>(i.s[3])[l];
    t.bulk = true;
    if (bytes % 16 || bytes == 0)
      m.fault(w, "a bulk copy of " + std::to_string(bytes) + " bytes", l, t.source);
    Block* owner;
    m.resolve(w, l, kGlobal, t.source, 16, true, &owner);
    m.resolve(w, l, kGlobal, t.source + bytes - 16, 16, true, &owner);
    m.resolve(w, l, kShared, t.address + bytes - 16, 16, true, &owner);
    m.resolve(w, l, kShared, t.address, 16, true, &t.to);
    barrier_at(m, w, l, t.barrier);
    // in pieces, each of which lands on its own
    for (uint32_t at = 0; at < bytes;) {
      Transfer piece = t;
      piece.bytes = std::min<uint32_t>(bytes - at, 16 * (1 + m.random() % 64));
      piece.address += at;
      piece.source += at;
      m.send(w, l, piece);
      at += piece.bytes;
    }
    m.counts.global_sectors_read += (t.source % 32 + bytes + 31) / 32;
    for (uint64_t n = t.source / 32; n * 32 < t.source + bytes; ++n) m.sectors[0].insert(n);
    for (const Watch& watch : watched) {
      for (uint32_t b = 0; watch.bytes && b < bytes; ++b) {
        if (t.source + b - watch.begin < watch.bytes) ++watch.loads[t.source + b - watch.begin];
      }
    }
  }
  return Outcome::kYield;
}

Outcome fence_proxies(Machine&, Warp& w, const Instruction&, uint32_t lanes) {
  ++w.clock;
  for (int l = 0; l < kLanes; ++l) {
    if (lanes >> l & 1) w.fenced[l] = w.clock;
  }
  return Outcome::kNext;
}

Outcome map_address(Machine& m, Warp& w, const Instruction& i, uint32_t lanes) {
  for (int l = 0; l < kLanes; ++l) {
    if (!(lanes >> l & 1)) continue;
    const uint32_t rank = w.reg<uint32_t>(i.s[1])[l];
    if (rank >= w.block->cluster->blocks.size())
      m.fault(w, "mapa to rank " + std::to_string(rank), l);
    w.reg<uint32_t>(i.d[0])[l] =
        static_cast<uint32_t>(w.reg<uint32_t>(i.s[0])[l] % kWindow + (rank + 1) * kWindow);
  }
  return Outcome::kNext;
}

}  // namespace

const std::vector<Operation>& synchronisation() {
  static const std::vector<Operation> all = {
      {"bra", nullptr},
      {"ret", nullptr},
      {"exit", nullptr},
      {"nanosleep.u32",
       [](Machine&, Warp&, const Instruction&, uint32_t) { return Outcome::kYield; }},
      {"shfl.sync.bfly.b32", shuffle<Shuffle::kXor>},
      {"shfl.sync.up.b32", shuffle<Shuffle::kUp>},
      {"shfl.sync.down.b32", shuffle<Shuffle::kDown>},
      {"shfl.sync.idx.b32", shuffle<Shuffle::kIndex>},
      {"redux.sync.add.s32",
       [](Machine& m, Warp& w, const Instruction& i, uint32_t lanes) {
         return reduce(m, w, i, lanes, [](int32_t a, int32_t b) {
           return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
         });
       }},
      {"redux.sync.max.s32",
       [](Machine& m, Warp& w, const Instruction& i, uint32_t lanes) {
         return reduce(m, w, i, lanes, [](int32_t a, int32_t b) { return std::max(a, b); });
       }},
      {"vote.sync.ballot.b32", ballot},
      {"bar.warp.sync", sync_warp},
      {"bar.sync", sync_block},
      {"barrier.cluster.arrive.release", arrive_cluster},
      {"barrier.cluster.wait.acquire", wait_cluster},
      {"mbarrier.init.b64", init_barrier},
      // others see it after the barrier of the cluster that follows
      {"fence.mbarrier_init.release.cluster",
       [](Machine&, Warp&, const Instruction&, uint32_t) { return Outcome::kNext; }},
      {"mbarrier.arrive.expect_tx.b64", arrive_expecting},
      {"mbarrier.try_wait.parity.b64", try_wait<false>},
      {"mbarrier.try_wait.parity.acquire.cluster.b64", try_wait<true>},
      {"st.async.v1.b32", store_async<1>},
      {"st.async.v4.b32", store_async<4>},
      {"cp.async.bulk.global", bulk_copy},
      {"fence.proxy.async.shared::cta", fence_proxies},
      {"mapa.shared::cluster.u32", map_address},
  };
  return all;
}

}  // namespace ptx
