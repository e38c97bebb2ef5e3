// The kernels of mshadow that MXNet runs outside of operators (to fill arrays, and to add them in a
// KVStore), for the host. write_map_plans.py lists them. libmxnet.so has their machine code only.
#include <sstream>
#include <string>
#include <type_traits>
#include <unordered_map>

// For the operands of expressions.
#define private public
#include <mshadow/tensor.h>
#undef private

#include "ptxsim.h"

// A KVStore copies with it when it adds more than four arrays.
namespace mxnet::op::mshadow_op {
struct identity {
  template <typename T>
  static T Map(T a) {
    return a;
  }
};
}  // namespace mxnet::op::mshadow_op

namespace {

using mshadow::expr::Plan;
using ptxsim::Access;

// Tells the simulator what is read and written. It does not know what other expressions than these
// read, such as slices and sums.
struct Watch {
  mshadow::Shape<2> shape;
  Access access;

  template <typename F>
  void for_all(const F& f) const {
    for (mshadow::index_t y = 0; y < shape[0]; ++y) {
      for (mshadow::index_t x = 0; x < shape[1]; ++x) f(y, x);
    }
  }
  template <typename To>
  void writes(To to) const {
    for_all([&](auto y, auto x) { access(&to.REval(y, x), sizeof(to.REval(y, x)), true); });
  }
  template <typename From>
  void reads(const From& from) const {
    if constexpr (std::is_reference_v<decltype(from.Eval(0, 0))>) {
      for_all([&](auto y, auto x) { access(&from.Eval(y, x), sizeof(from.Eval(y, x)), false); });
    }
  }
  template <typename F, typename A, typename B, typename T, int type>
  void reads(const Plan<mshadow::expr::BinaryMapExp<F, A, B, T, type>, T>& from) const {
    reads(from.lhs_);
    reads(from.rhs_);
  }
  template <typename F, typename A, typename T, int type>
  void reads(const Plan<mshadow::expr::UnaryMapExp<F, A, T, type>, T>& from) const {
    reads(from.src_);
  }
  template <typename T, typename Other, typename A, int type>
  void reads(const Plan<mshadow::expr::TypecastExp<T, Other, A, type>, T>& from) const {
    reads(from.src_);
  }
};

template <typename Saver, int, typename To, typename From, typename... More>
void run(void** arguments, Access access) {
  To to = *static_cast<To*>(arguments[0]);
  const From from = *static_cast<From*>(arguments[3]);
  const Watch watch{*static_cast<mshadow::Shape<2>*>(arguments[2]), access};
  watch.reads(from);
  watch.writes(to);
  watch.for_all([&](auto y, auto x) { Saver::Save(to.REval(y, x), from.Eval(y, x)); });
}
template <typename Saver, int, int, typename To, typename From>
void run(void** arguments, Access access) {
  run<Saver, 0, To, From>(arguments, access);
}

using Function = void (*)(void**, Access);
const std::pair<const char*, Function> kMapPlans[] = {
#include "map_plans.inc"
};

bool run_on_host(const std::string& kernel, void** arguments, Access access) {
  static const std::unordered_map<std::string, Function> functions(std::begin(kMapPlans),
                                                                   std::end(kMapPlans));
  // Random numbers come from the host's generators: see operators.cc.
  if (kernel.find("rand_generator_seed_kernel") != kernel.npos) return true;
  const auto found = functions.find(kernel);
  if (found == functions.end()) return false;
  found->second(arguments, access);
  return true;
}

const bool ready = [] {
  ptxsim::run_others_on_host(run_on_host);
  return true;
}();

}  // namespace
