// The kernels of mshadow that MXNet runs outside of operators (to fill arrays, and to add them in a
// KVStore), for the host. write_map_plans.py lists them. libmxnet.so has their machine code only.
#include <mshadow/tensor.h>

#include <string>
#include <unordered_map>

#include "ptxsim.h"

namespace {

template <typename Saver, int, typename To, typename From, typename... More>
void run(void** arguments) {
  To to = *static_cast<To*>(arguments[0]);
  const auto shape = *static_cast<mshadow::Shape<2>*>(arguments[2]);
  const From from = *static_cast<From*>(arguments[3]);
  for (mshadow::index_t y = 0; y < shape[0]; ++y) {
    for (mshadow::index_t x = 0; x < shape[1]; ++x) {
      Saver::Save(to.REval(y, x), from.Eval(y, x));
    }
  }
}
template <typename Saver, int, int, typename To, typename From>
void run(void** arguments) {
  run<Saver, 0, To, From>(arguments);
}

using Function = void (*)(void**);
const std::pair<const char*, Function> kMapPlans[] = {
#include "map_plans.inc"
};

bool run_on_host(const std::string& kernel, void** arguments) {
  static const std::unordered_map<std::string, Function> functions(std::begin(kMapPlans),
                                                                   std::end(kMapPlans));
  // Random numbers come from the host's generators: see operators.cc.
  if (kernel.find("rand_generator_seed_kernel") != kernel.npos) return true;
  const auto found = functions.find(kernel);
  if (found == functions.end()) return false;
  found->second(arguments);
  return true;
}

const bool ready = [] {
  ptxsim::run_others_on_host(run_on_host);
  return true;
}();

}  // namespace
