// Loads, stores and atomics: where they may reach, and what they cost.
#include <algorithm>

#include "machine.h"

namespace ptx {

Watch watched[2];

Block* Machine::block_at(Warp& warp, uint64_t address) {
  const uint64_t window = address / kWindow;
  const auto& blocks = warp.block->cluster->blocks;
  return window >= 1 && window <= blocks.size() ? blocks[window - 1].get() : nullptr;
}

unsigned char* Machine::resolve(Warp& warp, int lane, int space, uint64_t address, uint32_t bytes,
                                bool store, Block** owner) {
  if (address % bytes != 0) {
    fault(warp, "misaligned access of " + std::to_string(bytes) + " bytes", lane, address);
  }
  if (space == kShared || space == kSharedCluster) {
    Block* block = block_at(warp, address);
    const uint64_t offset = address % kWindow;
    const bool mine = block && (space == kSharedCluster || block == warp.block);
    if (!mine || offset + bytes > block->shared.size()) {
      fault(warp, "access outside of shared memory", lane, address);
    }
    if (block->live == 0) fault(warp, "access to a block that has exited", lane, address);
    if (block != warp.block && !heard_of(warp, lane, *block)) {
      fault(warp, "access to a block that may not run yet", lane, address);
    }
    *owner = block;
    return block->shared.data() + offset;
  }
  *owner = nullptr;
  const uint64_t slack = store || bytes < 4 ? 0 : 15;  // the 16 bytes that hold a tensor's end
  const auto inside = [&](const Allocation& a) {
    return a.bytes > 0 && address >= (a.begin & ~slack) &&
           address + bytes <= ((a.begin + a.bytes + slack) & ~slack);
  };
  if (!inside(last_)) last_ = allocation_of(address);
  if (!inside(last_)) last_ = allocation_of(address | 15);
  if (!inside(last_)) {
    fault(warp, std::string(store ? "store" : "load") + " outside of any tensor", lane, address);
  }
  return reinterpret_cast<unsigned char*>(address);
}

namespace {

uint64_t address_of(Warp& w, const Instruction& i, int lane) {
  const uint64_t base =
      i.extra[3] == 64 ? w.reg<uint64_t>(i.s[0])[lane] : w.reg<uint32_t>(i.s[0])[lane];
  return base + static_cast<uint64_t>(i.offset);
}

void count(Machine& m, const Instruction& i, const uint64_t* addresses, uint32_t lanes,
           uint32_t bytes, bool store) {
  uint64_t units[kLanes];
  if (i.extra[0] == kGlobal) {
    int n = 0;
    for (int l = 0; l < kLanes; ++l) {
      if (lanes >> l & 1) units[n++] = addresses[l] / 32;
    }
    std::sort(units, units + n);
    const auto unique = static_cast<uint64_t>(std::unique(units, units + n) - units);
    (store ? m.counts.global_sectors_written : m.counts.global_sectors_read) += unique;
    m.sectors[store].insert(units, units + unique);
    ++m.counts.requests;
    for (const Watch& watch : watched) {
      if (!watch.bytes) continue;
      for (int l = 0; l < kLanes; ++l) {
        // lanes of a warp that load the same address load it once
        bool again = false;
        for (int k = 0; k < l; ++k) again |= (lanes >> k & 1) && addresses[k] == addresses[l];
        for (uint32_t b = 0; lanes >> l & 1 && !again && b < bytes; ++b) {
          const uint64_t at = addresses[l] + b - watch.begin;
          if (at < watch.bytes) ++(store ? watch.stores : watch.loads)[at];
        }
      }
    }
    return;
  }
  // a group of lanes at a time reads or writes 128 bytes
  const int group = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
  for (int begin = 0; begin < kLanes; begin += group) {
    uint64_t words[kLanes * 4];
    int n = 0, most = 1, of_bank[kLanes] = {};
    for (int l = begin; l < begin + group; ++l) {
      for (uint32_t b = 0; lanes >> l & 1 && b < std::max(bytes, 4u); b += 4) {
        words[n++] = (addresses[l] + b) / 4;
      }
    }
    std::sort(words, words + n);
    n = static_cast<int>(std::unique(words, words + n) - words);
    for (int k = 0; k < n; ++k) most = std::max(most, ++of_bank[words[k] % kLanes]);
    m.counts.bank_conflicts += static_cast<uint64_t>(most - 1);
  }
  ++m.counts.shared_accesses;
}

// Bytes that the load need not have got may be anything.
void spoil(Machine& m, unsigned char* word, uint32_t which) {
  const uint64_t other = which ? m.random() : 0;
  for (int n = 0; n < 4; ++n) {
    if (which & 16 || which >> n & 1) word[n] = static_cast<unsigned char>(other >> 8 * n);
  }
}

// kRelaxed: whole and without a race, but it says nothing of other memory.
enum class Order { kWeak, kRelaxed, kOrdered };

template <int kVector, Order kOrder = Order::kWeak>
Outcome load(Machine& m, Warp& w, const Instruction& i, uint32_t lanes) {
  constexpr bool atomic = kOrder != Order::kWeak;
  const int space = i.extra[0];
  const uint32_t bytes = static_cast<uint32_t>(i.extra[1]), whole = bytes * kVector;
  uint64_t addresses[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    if (!(lanes >> l & 1)) continue;
    const uint64_t address = addresses[l] = address_of(w, i, l);
    unsigned char data[16];
    if (space == kParam) {
      std::memcpy(data, m.launch.parameters + address, whole);
    } else {
      Block* owner;
      const unsigned char* from = m.resolve(w, l, space, address, whole, false, &owner);
      std::memcpy(data, from, whole);
      if (whole == 16) {
        // some of a vector may lie beside a row, or in shared memory all of it: no value matters
        bool any = false;
        for (int n = 0; n < 4; ++n) {
          const uint32_t bad =
              m.access(w, l, owner, address + 4 * n, 4, false, false, Report::kNothing);
          any |= bad < 15;
          spoil(m, data + 4 * n, bad);
        }
        if (!any) {
          const Report report = space == kGlobal ? Report::kAll : Report::kRaces;
          m.access(w, l, owner, address, 4, false, false, report);
        }
      } else {
        for (uint32_t n = 0; n < whole; n += 4) {
          const uint32_t size = std::min(whole, 4u);
          const uint32_t bad =
              m.access(w, l, owner, address + n, size, false, atomic, Report::kAll);
          spoil(m, data + n, size == 4 ? bad : 0);
        }
      }
      if (kOrder == Order::kOrdered) {
        const auto found = m.released.find(address);
        if (found != m.released.end()) m.acquire(w, l, found->second);
      }
    }
    for (int n = 0; n < kVector; ++n) {
      if (i.d[n] == kNowhere) continue;
      uint64_t x = 0;
      std::memcpy(&x, data + n * bytes, bytes);
      if (i.extra[2] < 0 && bytes < 8 && x >> (8 * bytes - 1) & 1) x |= ~uint64_t{0} << 8 * bytes;
      const int width = i.extra[2] < 0 ? -i.extra[2] : i.extra[2];
      if (width == 64) {
        w.reg<uint64_t>(i.d[n])[l] = x;
      } else if (width == 32) {
        w.reg<uint32_t>(i.d[n])[l] = static_cast<uint32_t>(x);
      } else {
        w.reg<uint16_t>(i.d[n])[l] = static_cast<uint16_t>(x);
      }
    }
  }
  if (space != kParam) count(m, i, addresses, lanes, whole, false);
  return atomic ? Outcome::kYield : Outcome::kNext;
}

template <int kVector, Order kOrder = Order::kWeak>
Outcome store(Machine& m, Warp& w, const Instruction& i, uint32_t lanes) {
  constexpr bool atomic = kOrder != Order::kWeak;
  const uint32_t bytes = static_cast<uint32_t>(i.extra[1]), whole = bytes * kVector;
  uint64_t addresses[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    if (!(lanes >> l & 1)) continue;
    const uint64_t address = addresses[l] = address_of(w, i, l);
    Block* owner;
    unsigned char* to = m.resolve(w, l, i.extra[0], address, whole, true, &owner);
    unsigned char data[16];
    for (int n = 0; n < kVector; ++n) {
      const int width = i.extra[2];
      const uint64_t x = width == 64   ? w.reg<uint64_t>(i.s[1 + n])[l]
                         : width == 32 ? w.reg<uint32_t>(i.s[1 + n])[l]
                                       : w.reg<uint16_t>(i.s[1 + n])[l];
      std::memcpy(data + n * bytes, &x, bytes);
    }
    for (uint32_t n = 0; n < whole; n += 4) {
      m.access(w, l, owner, address + n, std::min(whole, 4u), true, atomic, Report::kAll, data + n);
    }
    if (kOrder == Order::kOrdered) m.released[address] = m.release(w, 1u << l);
    if (kOrder == Order::kRelaxed) m.released.erase(address);
    std::memcpy(to, data, whole);
  }
  m.progress = m.time;
  count(m, i, addresses, lanes, whole, true);
  return Outcome::kNext;
}

enum class Atomic { kAdd, kMax, kSwap };
template <typename T, Atomic kWhat, bool kOrdered>
Outcome atomic(Machine& m, Warp& w, const Instruction& i, uint32_t lanes) {
  uint64_t addresses[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    if (!(lanes >> l & 1)) continue;
    const uint64_t address = addresses[l] = address_of(w, i, l);
    Block* owner;
    unsigned char* at = m.resolve(w, l, i.extra[0], address, sizeof(T), true, &owner);
    for (uint32_t n = 0; n < sizeof(T); n += 4) {
      m.access(w, l, owner, address + n, 4, true, true, Report::kAll);
    }
    if (kOrdered) {
      Knowledge& here = m.released[address];
      m.acquire(w, l, here);
      here = joined(here, m.release(w, 1u << l));
    }
    T old;
    std::memcpy(&old, at, sizeof(T));
    const T given = w.reg<T>(i.s[1])[l];
    T now = old + given;
    if (kWhat == Atomic::kMax) now = std::max(old, given);
    if (kWhat == Atomic::kSwap) now = old == given ? w.reg<T>(i.s[2])[l] : old;
    std::memcpy(at, &now, sizeof(T));
    if (i.d[0] != kNowhere) w.reg<T>(i.d[0])[l] = old;
  }
  m.progress = m.time;
  count(m, i, addresses, lanes, sizeof(T), true);
  return Outcome::kYield;
}

// Matrices of 8 rows of 16 bytes, whose addresses 8 lanes each give: lane l gets word l % 4 of row
// l / 4 of each.
template <int kMatrices, bool kStore>
Outcome move_matrices(Machine& m, Warp& w, const Instruction& i, uint32_t lanes) {
  if (!m.together(w, lanes, kAll)) return Outcome::kApart;
  uint32_t found[kMatrices * kLanes];
  uint64_t addresses[kLanes] = {};
  for (int row = 0; row < 8 * kMatrices; ++row) {
    Block* owner;
    const uint64_t address = addresses[row] = address_of(w, i, row);
    unsigned char* place = m.resolve(w, row, kShared, address, 16, kStore, &owner);
    for (int n = 0; n < 4; ++n) {
      const int lane = (4 * row + n) % kLanes;
      const uint32_t* value = found + 4 * row + n;
      if (kStore) std::memcpy(found + 4 * row + n, w.reg<uint32_t>(i.s[1 + row / 8]) + lane, 4);
      m.access(w, lane, owner, address + 4 * n, 4, kStore, false, Report::kAll,
               kStore ? value : nullptr);
    }
    kStore ? std::memcpy(place, found + 4 * row, 16) : std::memcpy(found + 4 * row, place, 16);
  }
  for (int n = 0; n < kMatrices && !kStore; ++n) {
    std::memcpy(w.reg<uint32_t>(i.d[n]), found + n * kLanes, kLanes * sizeof(uint32_t));
  }
  count(m, i, addresses, static_cast<uint32_t>((uint64_t{1} << 8 * kMatrices) - 1), 16, kStore);
  return Outcome::kNext;
}

}  // namespace

const std::vector<Operation>& memory_operations() {
  static const std::vector<Operation> all = {
      {"ld.v1", load<1>},
      {"ld.v2", load<2>},
      {"ld.v4", load<4>},
      {"st.v1", store<1>},
      {"st.v2", store<2>},
      {"st.v4", store<4>},
      {"ld.relaxed.v1", load<1, Order::kRelaxed>},
      {"ld.acquire.v1", load<1, Order::kOrdered>},
      {"st.relaxed.v1", store<1, Order::kRelaxed>},
      {"st.release.v1", store<1, Order::kOrdered>},
      {"atom.add.u32", atomic<uint32_t, Atomic::kAdd, false>},
      {"atom.add.u64", atomic<uint64_t, Atomic::kAdd, false>},
      {"atom.max.u32", atomic<uint32_t, Atomic::kMax, false>},
      {"atom.cas.b32", atomic<uint32_t, Atomic::kSwap, false>},
      {"atom.acq_rel.add.u32", atomic<uint32_t, Atomic::kAdd, true>},
      {"ldmatrix.sync.m8n8.x1.b16", move_matrices<1, false>},
      {"ldmatrix.sync.m8n8.x2.b16", move_matrices<2, false>},
      {"ldmatrix.sync.m8n8.x4.b16", move_matrices<4, false>},
      {"stmatrix.sync.m8n8.x1.b16", move_matrices<1, true>},
      {"stmatrix.sync.m8n8.x2.b16", move_matrices<2, true>},
      {"stmatrix.sync.m8n8.x4.b16", move_matrices<4, true>},
  };
  return all;
}

}  // namespace ptx
