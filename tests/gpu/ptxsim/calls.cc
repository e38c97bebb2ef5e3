#include <dlfcn.h>
#include <execinfo.h>

#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>

#include "state.h"

namespace ptxsim {
namespace {

thread_local bool last_is_ours = true;

bool is_ours(const Dl_info& module) {
  const std::string path = module.dli_fname, name = path.substr(path.rfind('/') + 1);
  return name.rfind("lib", 0) != 0 || name.rfind("libgluon_syncbn", 0) == 0;
}

// The function, and the addresses in `module` that the call came through, the innermost first.
std::string site_of(const std::string& function, const void* caller, const Dl_info& module) {
  constexpr int kMost = 24, kDepth = 2;
  void* frames[kMost];
  const int count = backtrace(frames, kMost);
  std::ostringstream site;
  site << function << std::hex;
  int i = 0, depth = 0;
  while (i < count && frames[i] != caller) ++i;
  for (; i < count && depth < kDepth; ++i) {
    Dl_info each;
    if (!dladdr(frames[i], &each) || each.dli_fbase != module.dli_fbase) continue;
    // The instruction after the call may be another function's.
    site << " 0x" << static_cast<char*>(frames[i]) - static_cast<char*>(module.dli_fbase) - 1;
    ++depth;
  }
  return site.str();
}

}  // namespace

Calls::Calls() : sites_(std::getenv("PTXSIM_SITES")), dropped_(std::getenv("PTXSIM_DROP")) {}

std::optional<int> Calls::enter(const std::string& function, void* caller) {
  Dl_info module;
  last_is_ours = dladdr(caller, &module) && is_ours(module);
  if (!last_is_ours) return {};
  if (sites_ || dropped_) {
    const std::string site = site_of(function, caller, module);
    static std::set<std::string> known;
    if (sites_ && known.insert(site).second) std::ofstream(sites_, std::ios::app) << site << "\n";
    if (dropped_ && site == dropped_) return 0;
  }
  const auto left = left_.find(function);
  if (left != left_.end() && left->second >= 0 && left->second-- == 0) {
    constexpr int kOutOfMemory = 2, kIllegalAddress = 700;
    return function.find("lloc") != function.npos ? kOutOfMemory : kIllegalAddress;
  }
  ++counts_[function];
  return {};
}

void Calls::add(const std::string& name, uint64_t count) {
  if (last_is_ours) counts_[name] += count;
}

uint64_t Calls::count(const std::string& name) const {
  return counts_.count(name) ? counts_.at(name) : 0;
}

}  // namespace ptxsim
