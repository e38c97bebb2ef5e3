#include "warp.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace ptxsim {
namespace {

template <typename F>
void for_lanes(uint32_t lanes, const F& f) {
  for (uint32_t rest = lanes; rest; rest &= rest - 1) f(std::countr_zero(rest));
}

int first_of(uint32_t lanes) { return std::countr_zero(lanes); }

bool needs_all(Op op) {
  return op == Op::kBlockBarrier || op == Op::kWarpBarrier || op == Op::kShuffle || op == Op::kVote;
}

// The registers of a warp. Only constants have values yet.
uint64_t* registers_of(const Kernel& kernel, size_t index) {
  while (kernel.register_files.size() <= index) {
    const size_t size = static_cast<size_t>(kernel.registers) * kLanes;
    std::unique_ptr<uint64_t[]> file(new uint64_t[size]);
    for (const auto& [number, value] : kernel.constants) {
      std::fill_n(file.get() + static_cast<size_t>(number) * kLanes, kLanes, value);
    }
    kernel.register_files.push_back(std::move(file));
  }
  return kernel.register_files[index].get();
}

}  // namespace

Warp::Warp(Block* block, int index)
    : block_(*block),
      index_(index),
      registers_(registers_of(block->launch.kernel, static_cast<size_t>(index))) {}

void Warp::start() {
  const Kernel& kernel = block_.launch.kernel;
  alive_ = kAllLanes;
  waiting_ = 0;
  waits_for_block_ = false;
  phase_ = 1;
  go_to(kAllLanes, 0);
  for (const auto& [number, name] : kernel.specials) {
    for (int l = 0; l < kLanes; ++l) {
      values(number)[l] = special(name, static_cast<unsigned>(index_ * kLanes + l));
    }
  }
}

uint64_t Warp::special(const std::string& name, unsigned thread) const {
  if (name == "%tid.x") return thread;
  if (name == "%ntid.x") return block_.launch.threads;
  if (name == "%ctaid.x") return block_.place.x;
  if (name == "%ctaid.y") return block_.place.y;
  if (name == "%nctaid.x") return block_.launch.grid.x;
  stop("the register " + name + " is not supported");
}

void Warp::refuse(const std::string& what, const Instruction* i, int lane) const {
  const auto number = [](auto n) { return std::to_string(n); };
  stop(what + ": block (" + number(block_.place.x) + ", " + number(block_.place.y) + "), thread " +
       number(index_ * kLanes + lane) + ", in " + block_.launch.kernel.name +
       (i ? ", line " + number(i->line) + ": " + i->text : ""));
}

void Warp::go_to(uint32_t lanes, int place) {
  for_lanes(lanes, [&](int l) { next_[l] = place; });
}

void Warp::pass_barrier() {
  waits_for_block_ = false;
  for_lanes(alive_, [&](int l) { ++next_[l]; });
}

void Warp::advance() {
  while (alive_ && !waits_for_block_) {
    const uint32_t ready = alive_ & ~waiting_;
    if (!ready) {
      wait_for_block();
      return;
    }
    int place = next_[first_of(ready)];
    for_lanes(ready, [&](int l) { place = std::min(place, next_[l]); });
    uint32_t lanes = 0;
    for_lanes(ready, [&](int l) { lanes |= next_[l] == place ? 1u << l : 0; });
    run(lanes, place);
  }
}

// All lanes wait: at the same barrier, or for lanes that will not come.
void Warp::wait_for_block() {
  const int first = first_of(alive_);
  const Instruction& i = block_.launch.kernel.code[next_[first]];
  bool together = alive_ == kAllLanes && i.op == Op::kBlockBarrier;
  for_lanes(alive_, [&](int l) { together = together && next_[l] == next_[first]; });
  if (!together) {
    refuse(i.op == Op::kBlockBarrier ? "a barrier that not all threads reach"
                                     : "a shuffle or barrier that not all its lanes reach",
           &i, first);
  }
  waiting_ = 0;
  waits_for_block_ = true;
}

// From `place` on, as long as these lanes stay together and no others can join them.
void Warp::run(uint32_t lanes, int place) {
  const Kernel& kernel = block_.launch.kernel;
  const bool all = lanes == alive_;
  for (;; ++place) {
    const Instruction& i = kernel.code[place];
    const uint32_t active = guarded(i, lanes);
    count(i, place, active);
    if (i.op == Op::kBranch) {
      branch(i, lanes, active, place);
      return;
    }
    if (i.op == Op::kReturn) {
      alive_ &= ~active;
      go_to(lanes, place + 1);
      return;
    }
    if (needs_all(i.op)) {
      if (!meet(i, lanes, active, place) || lanes != alive_) return;
    } else if (i.op == Op::kCompute) {
      i.compute(i, registers_, active);
    } else if (i.op == Op::kLoadParameter) {
      load_parameter(i, active);
    } else if (active) {
      access(i, active);
    }
    if (!all && kernel.has_label[place + 1]) {
      go_to(lanes, place + 1);
      return;
    }
  }
}

// Those of the lanes for which the guard holds.
uint32_t Warp::guarded(const Instruction& i, uint32_t lanes) {
  if (i.guard < 0) return lanes;
  const uint64_t* const guard = values(i.guard);
  uint32_t active = 0;
  for_lanes(lanes, [&](int l) { active |= guard[l] ? 1u << l : 0; });
  return active;
}

void Warp::count(const Instruction& i, int place, uint32_t active) {
  Counts& counts = block_.counts;
  counts.instructions += kLanes;
  if (i.computes_double) counts.doubles += kLanes;
  if (active || i.op == Op::kBranch) ++block_.launch.kernel.ran[place];
}

void Warp::branch(const Instruction& i, uint32_t lanes, uint32_t active, int place) {
  go_to(active, i.target);
  go_to(lanes & ~active, place + 1);
}

// A shuffle, vote or barrier, which the lanes that it names do together. Otherwise they wait.
bool Warp::meet(const Instruction& i, uint32_t lanes, uint32_t active, int place) {
  if (active != lanes) refuse("a shuffle or barrier under a predicate", &i);
  go_to(lanes, place);
  waiting_ |= lanes;
  if (i.op == Op::kBlockBarrier) return false;
  uint32_t here = 0;
  for_lanes(waiting_, [&](int l) { here |= next_[l] == place ? 1u << l : 0; });
  const int first = first_of(lanes);
  const auto named = static_cast<uint32_t>(values(i.operands[0])[first]);
  if ((named & lanes) != lanes) refuse("a lane does not name itself", &i, first);
  if (named & ~alive_) refuse("a named lane has ended", &i, first);
  if ((here & named) != named) return false;
  if (i.op == Op::kShuffle) shuffle(i, named);
  if (i.op == Op::kVote) vote(i, named);
  waiting_ &= ~named;
  go_to(named, place + 1);
  ++phase_;
  return named == lanes;
}

void Warp::shuffle(const Instruction& i, uint32_t lanes) {
  uint64_t before[kLanes];
  std::copy_n(values(i.operands[1]), kLanes, before);
  const uint64_t *const by = values(i.operands[2]), *const clamp = values(i.operands[3]);
  uint64_t* const to = values(i.results[0]);
  for_lanes(lanes, [&](int l) {
    if (clamp[l] != kLanes - 1) refuse("a shuffle within segments is not supported", &i, l);
    const int from = l ^ static_cast<int>(by[l] & 31);
    if (!(lanes >> from & 1)) refuse("the value of a lane that is missing", &i, l);
    to[l] = before[from];
  });
  // Whether `from` was in range.
  if (i.results.size() > 1) for_lanes(lanes, [&](int l) { values(i.results[1])[l] = 1; });
}

void Warp::vote(const Instruction& i, uint32_t lanes) {
  uint32_t ballot = 0;
  for_lanes(lanes, [&](int l) { ballot |= values(i.operands[1])[l] ? 1u << l : 0; });
  const bool result = i.any ? ballot != 0 : ballot == lanes;
  for_lanes(lanes, [&](int l) { values(i.results[0])[l] = result; });
}

void Warp::load_parameter(const Instruction& i, uint32_t active) {
  for_lanes(active, [&](int l) {
    const uint64_t at = values(i.operands[0])[l] + static_cast<uint64_t>(i.offset);
    const uint64_t bytes = static_cast<uint64_t>(i.width()) * i.type.size;
    if (at + bytes > block_.launch.parameters.size()) refuse("no parameter is there", &i, l);
    load(i, l, block_.launch.parameters.data() + at);
  });
}

void Warp::access(const Instruction& i, uint32_t active) {
  const int bytes = i.type.size * i.width();
  uint64_t addresses[kLanes];
  const uint64_t* const base = values(i.operands[0]);
  // Addresses of shared memory have 32 bits.
  const uint64_t mask = i.space == Space::kShared ? 0xffffffffu : ~uint64_t{0};
  for_lanes(active,
            [&](int l) { addresses[l] = (base[l] + static_cast<uint64_t>(i.offset)) & mask; });
  for_lanes(active, [&](int l) {
    char* const at = place_of(i, l, addresses[l], bytes);
    i.op == Op::kLoad ? load(i, l, at) : store(i, l, at);
  });
  if (i.space != Space::kGlobal) return;
  note_access(addresses, active, bytes, i.op == Op::kStore);
  if (block_.launch.counted) count_access(i, addresses, active);
}

// Lanes access neighbouring values, mostly, or the same one.
void Warp::note_access(const uint64_t* addresses, uint32_t active, int bytes, bool writes) {
  uint64_t begin = 0, end = 0;
  const auto note = [&] {
    if (!last_.holds(begin, bytes))
      block_.memory.allows(begin, bytes, block_.launch.device, &last_);
    block_.memory.races().access(*last_.shadow, begin, end - begin, writes);
  };
  for_lanes(active, [&](int l) {
    const uint64_t address = addresses[l];
    if (begin <= address && address + bytes <= end) return;
    if (address != end) {
      if (end) note();
      begin = address;
    }
    end = address + bytes;
  });
  note();
}

char* Warp::place_of(const Instruction& i, int lane, uint64_t address, int bytes) {
  if (address % bytes) refuse("an access at an odd address", &i, lane);
  if (i.space == Space::kShared) {
    if (!block_.shared.holds(address, bytes)) refuse("an access outside of the array", &i, lane);
    const bool writes = i.op != Op::kLoad;
    const int other = block_.shared.touch(index_ * kLanes + lane, phase_, address, bytes, writes);
    if (other >= 0)
      refuse("a race in shared memory with thread " + std::to_string(other), &i, lane);
    return block_.shared.at(address);
  }
  const bool allowed = last_.holds(address, bytes) ||
                       block_.memory.allows(address, bytes, block_.launch.device, &last_);
  if (!allowed) refuse("an access outside of all arrays", &i, lane);
  return reinterpret_cast<char*>(address);
}

void Warp::load(const Instruction& i, int lane, const char* from) {
  const int bytes = i.type.size;
  for (size_t n = 0; n < i.results.size(); ++n) {
    uint64_t value = 0;
    std::memcpy(&value, from + n * bytes, bytes);
    values(i.results[n])[lane] = value;
  }
}

void Warp::store(const Instruction& i, int lane, char* to) {
  const int bytes = i.type.size;
  for (size_t n = 1; n < i.operands.size(); ++n) {
    std::memcpy(to + (n - 1) * bytes, &values(i.operands[n])[lane], bytes);
  }
}

void Warp::count_access(const Instruction& i, const uint64_t* addresses, uint32_t active) {
  Counts& counts = block_.counts;
  constexpr uint64_t kSector = 32;
  std::vector<uint64_t> sectors;
  for_lanes(active, [&](int l) { sectors.push_back(addresses[l] / kSector); });
  std::sort(sectors.begin(), sectors.end());
  sectors.erase(std::unique(sectors.begin(), sectors.end()), sectors.end());
  const bool loads = i.op == Op::kLoad;
  (loads ? counts.load_sectors : counts.store_sectors) += sectors.size();
  std::vector<uint64_t>& all = loads ? block_.loaded : block_.stored;
  all.insert(all.end(), sectors.begin(), sectors.end());
}

}  // namespace ptxsim
