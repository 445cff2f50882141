// What must come before what: races, reads of memory that nobody wrote, asynchronous copies.
#include <algorithm>

#include "machine.h"

namespace ptx {

// --- who knows what

Knowledge joined(const Knowledge& a, const Knowledge& b) {
  if (!a || a == b) return b;
  if (!b) return a;
  Known both;
  both.reserve(a->size() + b->size());
  auto i = a->begin(), j = b->begin();
  while (i != a->end() || j != b->end()) {
    if (j == b->end() || (i != a->end() && i->first < j->first)) {
      both.push_back(*i++);
    } else if (i == a->end() || j->first < i->first) {
      both.push_back(*j++);
    } else {
      both.emplace_back(i->first, std::max(i->second, j->second));
      ++i, ++j;
    }
  }
  return std::make_shared<const Known>(std::move(both));
}
uint64_t known(const Knowledge& knowledge, uint32_t key) {
  if (!knowledge) return 0;
  const auto at = std::lower_bound(knowledge->begin(), knowledge->end(), key,
                                   [](const auto& one, uint32_t k) { return one.first < k; });
  return at != knowledge->end() && at->first == key ? at->second : 0;
}

namespace {

// Keys: 64 times a warp's number, plus 32 for all of its lanes, or plus the lane.
constexpr uint32_t kWhole = 32;
uint32_t key_of(uint32_t number, uint32_t lane) { return number * 64 + lane; }
bool covers(const Knowledge& knowledge, const Stamp& stamp) {
  if (!knowledge) return false;
  const uint32_t number = stamp.thread / kLanes, lane = stamp.thread % kLanes;
  return known(knowledge, key_of(number, kWhole)) > stamp.clock ||
         known(knowledge, key_of(number, lane)) > stamp.clock;
}
bool before(const Warp& warp, int lane, const Stamp& stamp) {
  if (stamp.thread == 0) return true;
  if (stamp.thread / kLanes == warp.number) {
    return static_cast<int>(stamp.thread % kLanes) == lane || stamp.clock < warp.synced;
  }
  return covers(warp.knowledge, stamp) || covers(warp.of_lane[lane], stamp);
}
std::string name_of(const Machine& machine, const Stamp& stamp) {
  if (stamp.async) return "an asynchronous copy";
  const Block* block = machine.block_of[stamp.thread / kLanes];
  if (!block) return "a block that has exited";
  for (const auto& warp : block->warps) {
    if (warp->number != stamp.thread / kLanes) continue;
    const uint32_t thread = warp->index * kLanes + stamp.thread % kLanes;
    return "block " + std::to_string(block->index[0]) + " thread " + std::to_string(thread);
  }
  return "a thread";
}

}  // namespace

// All that the lanes have seen and done, for whom it is handed to.
Knowledge Machine::release(Warp& warp, uint32_t lanes) {
  Known own;
  const bool whole = (lanes & warp.live) == warp.live;
  for (int l = 0; l < kLanes; ++l) {
    if (!whole && lanes >> l & 1) own.emplace_back(key_of(warp.number, l), warp.clock + 1);
  }
  own.emplace_back(key_of(warp.number, kWhole), whole ? warp.clock + 1 : warp.synced);
  Knowledge all = joined(warp.knowledge, std::make_shared<const Known>(std::move(own)));
  for (int l = 0; l < kLanes; ++l) {
    if (lanes >> l & 1 && warp.of_lane[l]) all = joined(all, warp.of_lane[l]);
  }
  ++warp.clock;
  return all;
}

// `only_block`: of a scope that ends at the block.
void Machine::acquire(Warp& warp, int lane, const Knowledge& knowledge, bool only_block) {
  if (!knowledge) return;
  Knowledge taken = knowledge;
  if (only_block) {
    Known near;
    for (const auto& one : *knowledge) {
      if (block_of[one.first / 64] == warp.block) near.push_back(one);
    }
    taken = std::make_shared<const Known>(std::move(near));
  }
  warp.of_lane[lane] = joined(warp.of_lane[lane], taken);
}

// What one lane knows, the whole warp knows from here on.
void Machine::sync_lanes(Warp& warp) {
  for (Knowledge& one : warp.of_lane) {
    if (one) warp.knowledge = joined(warp.knowledge, one);
    one = nullptr;
  }
  warp.synced = ++warp.clock;
}

// Whether a thread of that block has told this one of itself.
bool Machine::heard_of(const Warp& warp, int lane, const Block& block) {
  return std::any_of(block.warps.begin(), block.warps.end(), [&](const auto& other) {
    const uint32_t key = key_of(other->number, kWhole);
    return known(warp.knowledge, key) > 0 || known(warp.of_lane[lane], key) > 0;
  });
}

uint32_t Machine::access(Warp& warp, int lane, Block* owner, uint64_t address, uint32_t bytes,
                         bool store, bool atomic, Report report, const void* value) {
  const uint64_t place = owner ? address % kWindow : address;
  const uint64_t first = place & ~uint64_t{3};
  const auto* memory =
      owner ? owner->shared.data() + first : reinterpret_cast<const unsigned char*>(first);
  Cell& cell = (owner ? owner->cells : global_).at(first >> 2);
  Stamp stamp;
  stamp.thread = warp.number * kLanes + lane;
  stamp.bytes = ((1u << bytes) - 1) << (place - first) & 15;
  stamp.atomic = atomic;
  stamp.vector = report != Report::kAll;
  stamp.clock = warp.clock;
  const auto conflict = [&](const Stamp& other) -> uint32_t {
    const uint32_t both = other.bytes & stamp.bytes;
    return both && !(other.atomic && atomic) && !before(warp, lane, other) ? both : 0;
  };
  const char* wrong = nullptr;
  uint32_t which = conflict(cell.write);
  const Stamp* other = &cell.write;
  if (which) {
    // several threads may store one value, as Triton's do with what all of them have
    const bool same = value && std::memcmp(value, memory + (place - first), bytes) == 0;
    if (!same)
      wrong = store ? "race: stores over what was stored by " : "race: loads what was stored by ";
    // a word at the end of a row has some of the next one too, which then must not matter
    if (!store && which != stamp.bytes && !owner) return which;
  }
  for (const Stamp& read : cell.read) {
    if (!store || !conflict(read)) continue;
    const bool mine = read.thread / kLanes == warp.number;
    const bool beside = !owner && !mine && block_of[read.thread / kLanes] != warp.block &&
                        (read.vector || conflict(read) != read.bytes);
    if (beside || (mine && read.clock < warp.exchanged)) continue;
    other = &read, which = conflict(read), wrong = "race: stores over what was loaded by ";
  }
  if (wrong && report != Report::kNothing)
    fault(warp, wrong + name_of(*this, *other), lane, address);
  if (!wrong && (!store || atomic)) {
    uint32_t word;
    std::memcpy(&word, memory, 4);
    if (word == kUnwritten[first >> 2 & 1]) wrong = "loads what nobody has written";
    if (wrong && report == Report::kAll) fault(warp, wrong, lane, address);
  }
  if (store) {
    cell.write = stamp;
    if (!atomic) cell.read[0] = cell.read[1] = Stamp{};
  } else {
    const Stamp& old = cell.read[0];
    const bool replaced = old.thread / kLanes == warp.number || before(warp, lane, old);
    cell.read[replaced ? 0 : 1] = stamp;
  }
  return !wrong ? 0 : which ? which : 16;
}

// --- asynchronous copies

void Machine::send(Warp& warp, int lane, Transfer transfer) {
  transfer.number = next_number++;
  block_of.push_back(warp.block);
  warp.block->numbers.push_back(transfer.number);
  transfer.before = release(warp, 1u << lane);
  transfer.from = &warp;
  transfer.pc = warp.pc;
  transfer.due = time + random() % (random() % 4 == 0 ? 4000 : 60);
  transfer.to->in_flight += transfer.bytes;
  uint64_t bytes = 0;
  for (const Transfer& one : transfers_) bytes += one.bytes;
  counts.async_bytes_in_flight = std::max(counts.async_bytes_in_flight, bytes + transfer.bytes);
  transfers_.push_back(std::move(transfer));
}

void Machine::land(Transfer& t) {
  Warp& warp = *t.from;
  warp.pc = t.pc;
  Block& to = *t.to;
  if (to.live == 0) fault(warp, "an asynchronous copy reaches a block that has exited");
  Stamp stamp;
  stamp.thread = t.number * kLanes;
  stamp.bytes = 15;
  stamp.async = 1;
  stamp.clock = 1;
  const auto check = [&](const Stamp& other, const char* what, uint64_t address) {
    if (other.thread != 0 && !covers(t.before, other) && other.thread / kLanes != t.number) {
      fault(warp, std::string("race: an asynchronous copy ") + what + name_of(*this, other), -1,
            address);
    }
  };
  for (uint32_t n = 0; n < t.bytes; n += 4) {
    const uint64_t at = t.address % kWindow + n;
    Cell& cell = to.cells.at(at >> 2);
    check(cell.write, "overwrites what was stored by ", t.address + n);
    for (const Stamp& read : cell.read)
      check(read, "overwrites what was loaded by ", t.address + n);
    if (t.bulk && cell.write.thread != 0 && !cell.write.async) {
      const Block* block = block_of[cell.write.thread / kLanes];
      for (const auto& writer : block ? block->warps : to.warps) {
        if (writer->number == cell.write.thread / kLanes &&
            writer->fenced[cell.write.thread % kLanes] <= cell.write.clock) {
          fault(warp,
                "a bulk copy overwrites what " + name_of(*this, cell.write) +
                    " stored, without fence.proxy.async in between",
                -1, t.address + n);
        }
      }
    }
    cell = Cell{};
    cell.write = stamp;
    if (t.source) {
      Cell& from = global_.at((t.source + n) >> 2);
      check(from.write, "loads what was stored by ", t.source + n);
      from.read[from.read[0].thread == 0 || covers(t.before, from.read[0]) ? 0 : 1] = stamp;
      uint32_t word;
      std::memcpy(&word, reinterpret_cast<const void*>(t.source + n), 4);
      if (word == kUnwritten[(t.source + n) >> 2 & 1]) {
        fault(warp, "a bulk copy loads what nobody has written", -1, t.source + n);
      }
      std::memcpy(to.shared.data() + at, &word, 4);
    } else {
      std::memcpy(to.shared.data() + at, t.data + n, 4);
    }
  }
  to.in_flight -= t.bytes;
  const auto barrier = to.barriers.find(t.barrier % kWindow);
  if (barrier == to.barriers.end())
    fault(warp, "an asynchronous copy signals no mbarrier", -1, t.barrier);
  check(to.cells.at(t.barrier % kWindow >> 2).write, "signals an mbarrier initialised by ",
        t.barrier);
  MemoryBarrier& signalled = barrier->second;
  signalled.arriving = joined(signalled.arriving,
                              std::make_shared<const Known>(Known{{key_of(t.number, kWhole), 2}}));
  // the signal of st.async is a release of the cluster's scope, also of what came before it
  if (!t.bulk) signalled.arriving = joined(signalled.arriving, t.before);
  barrier->second.bytes -= t.bytes;
  complete(barrier->second);
  progress = time;
}

}  // namespace ptx
