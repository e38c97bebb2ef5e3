// Runs each pass of the CUDA kernels on the simulator, and prints its counts, one line of JSON per
// pass, dtype and layout, on small data. See counts.py.
#include <cstdio>
#include <string>

#include "cuda/device_fixture.h"
#include "ptxsim.h"

namespace gluon_syncbn {
namespace {

struct Layout {
  std::string name;
  View view;
};
const Layout kLayouts[] = {
    {"planes 56x56", {32, 2, 56 * 56}},           {"planes 28x28", {32, 4, 28 * 28}},
    {"planes 14x14", {32, 16, 14 * 14}},          {"planes 7x7", {32, 64, 7 * 7}},
    {"rows 56x56x64", {56 * 56, 64, 1, 56 * 56}}, {"rows 7x7x512", {8 * 7 * 7, 512, 1, 7 * 7}},
};

void print(const std::string& pass, const char* dtype, const std::string& layout, uint64_t values,
           const ptxsim::Counts& c) {
  std::printf(
      "{\"row\": \"%s | %s | %s\", \"values\": %lu, \"instructions\": %lu, \"doubles\": %lu, "
      "\"load_sectors\": %lu, \"unique_load_sectors\": %lu, \"store_sectors\": %lu, "
      "\"unique_store_sectors\": %lu}\n",
      pass.c_str(), dtype, layout.c_str(), values, c.instructions, c.doubles, c.load_sectors,
      c.unique_load_sectors, c.store_sectors, c.unique_store_sectors);
}

// Runs a pass and prints the counts of its main kernel, and of the one that adds records.
template <typename F>
void count(const char* pass, const char* dtype, const Layout& layout, const F& run) {
  ptxsim::take_counts();
  MUST(run());
  for (const ptxsim::LaunchCounts& launch : ptxsim::take_counts()) {
    const bool folds = launch.kernel.find("fold") != std::string::npos;
    print((folds ? "fold, " : "") + std::string(pass), dtype, layout.name,
          static_cast<uint64_t>(layout.view.size()), launch.counts);
  }
}

template <typename T>
void count_passes(const char* dtype, const Layout& layout) {
  using A = Arithmetic<T>;
  const View& view = layout.view;
  const int64_t size = view.size();
  const CudaKernels& kernels = cuda_backend()->kernels(Type<T>::kDType);
  const Problem<T> p(view, 3);
  DeviceArray<T> x(p.x.data(), size), dy(p.dy.data(), size), other(p.dy.data(), size);
  DeviceArray<T> result(p.x.data(), size), second(p.x.data(), size);
  const std::vector<Statistics> standard(static_cast<size_t>(view.C), {0, 0, 1, 1});
  DeviceArray<Statistics> statistics(standard.data(), view.C);
  // What their values are has no influence on the counts.
  const int64_t coefficients_size = kernels.coefficients_size(view.C);
  const std::vector<A> ones(static_cast<size_t>(std::max(coefficients_size, 3 * view.C)), A{1});
  DeviceArray<A> coefficients(ones.data(), coefficients_size / static_cast<int64_t>(sizeof(A)));
  DeviceArray<A> parameters(ones.data(), view.C);
  DeviceArray<Gate<A>> gates(reinterpret_cast<const Gate<A>*>(ones.data()), view.C);
  DeviceArray<ChannelSums> work(kernels.work_size(view)), sums(view.C);
  const ForBackward kept{statistics.data(), nullptr, gates.data()};

  ForwardShard forward;
  forward.view = view;
  forward.x = x.data();
  forward.gamma = forward.beta = parameters.data();
  forward.y = result.data();
  ForwardShard with_residual = forward;
  with_residual.residual = other.data();
  BackwardShard backward;
  backward.view = view;
  backward.dy = dy.data();
  backward.x = x.data();
  backward.gamma = backward.beta = parameters.data();
  backward.dx = result.data();
  BackwardShard relu = backward;
  relu.epilogue = {Activation::kRelu, 0, 0};
  BackwardShard relu_of_sum = relu;
  relu_of_sum.y = other.data();
  relu_of_sum.dresidual = second.data();

  count("sums forward", dtype, layout, [&] {
    return kernels.forward_sums(view, x.data(), work.data(), sums.data(), the_stream());
  });
  const auto count_sums = [&](const char* pass, const BackwardShard& shard) {
    count(pass, dtype, layout, [&] {
      return kernels.backward_sums(shard, kept, 0, work.data(), sums.data(), the_stream());
    });
  };
  count_sums("sums backward", backward);
  count_sums("sums backward, relu", relu);
  const auto count_y = [&](const char* pass, const ForwardShard& shard) {
    count(pass, dtype, layout,
          [&] { return kernels.normalize(shard, coefficients.data(), the_stream()); });
  };
  const auto count_dx = [&](const char* pass, const BackwardShard& shard) {
    count(pass, dtype, layout,
          [&] { return kernels.input_gradient(shard, coefficients.data(), the_stream()); });
  };
  count_y("y", forward);
  count_y("y, residual", with_residual);
  count_dx("dx", backward);
  count_dx("dx, relu, residual", relu_of_sum);
  MUST(cuda().synchronize(the_stream()));
}

}  // namespace
}  // namespace gluon_syncbn

int main() {
  using namespace gluon_syncbn;
  for (const Layout& layout : kLayouts) {
    count_passes<float>("float32", layout);
    count_passes<Half>("float16", layout);
    count_passes<BFloat16>("bfloat16", layout);
    count_passes<double>("float64", layout);
  }
  return check::failed > 0;
}
