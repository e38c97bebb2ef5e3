// Compares the bits of the kernels' results for different splits, threads and alignments.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/kernels_fixture.h"
#include "cpu/thread_pool.h"

namespace gluon_syncbn {
namespace {

// The results in Arithmetic<T>, before they are rounded to T.
template <typename T>
using Wide = Results<Arithmetic<T>>;

// Rows begin..end, which must be whole samples.
View part_of(View view, int64_t begin, int64_t end) {
  view.N = end - begin;
  return view;
}

// Adds the sums of rows begin..end.
template <typename T>
void add_part(const Problem<T>& p, const std::vector<Statistics>& s, int64_t begin, int64_t end,
              Sums* forward, Sums* backward) {
  const View view = part_of(p.view, begin, end);
  const int64_t at = begin * view.C * view.S;
  Sums part(static_cast<size_t>(view.C));
  kernels<T>().forward_sums(view, p.x.data() + at, part.data());
  for (int64_t c = 0; c < view.C; ++c) (*forward)[c].add(part[c]);
  BackwardShard shard = backward_shard<T>(p, nullptr);
  shard.view = view;
  shard.dy = p.dy.data() + at;
  shard.x = p.x.data() + at;
  shard.sums = part.data();
  kernels<T>().backward_sums(shard, s.data());
  for (int64_t c = 0; c < view.C; ++c) (*backward)[c].add(part[c]);
}

// forward_alone and backward_alone, written in place, or added to another array.
template <typename T>
void check_alone(const Problem<T>& p, const Results<T>& r) {
  const Kernels& k = kernels<T>();
  for (const bool in_place : {false, true}) {
    Array<T> y = in_place ? p.x : p.dy, dx = p.dy;
    const WriteMode mode = in_place ? WriteMode::kWrite : WriteMode::kAdd;
    ForwardShard forth = forward_shard(p, y.data(), mode);
    if (in_place) forth.x = y.data();
    BackwardShard back = backward_shard(p, dx.data(), mode);
    if (in_place) back.dy = dx.data();
    Sums sums(static_cast<size_t>(p.view.C));
    back.sums = sums.data();
    std::vector<Statistics> s(static_cast<size_t>(p.view.C));
    k.forward_alone(forth, kEpsilon, s.data());
    k.backward_alone(back, s.data());
    CHECK(std::memcmp(s.data(), r.s.data(), s.size() * sizeof(s[0])) == 0);
    CHECK(y == (in_place ? r.y : p.dy.plus(r.y)) && y.guards_intact());
    CHECK(dx == (in_place ? r.dx : p.dy.plus(r.dx)) && dx.guards_intact());
    CHECK(rounded(sums) == rounded(r.gradient_sums));
  }
}

// All ways to split the samples at up to `max_borders` borders.
template <typename T>
void check_splits(const Problem<T>& p, const Results<T>& r, int64_t max_borders = 4) {
  const int64_t samples = p.view.N / p.view.R, inner = std::min(samples - 1, max_borders);
  for (int64_t cuts = 0; cuts < int64_t{1} << inner; ++cuts) {
    std::vector<int64_t> borders{0};
    for (int64_t i = 0; i < inner; ++i) {
      if (cuts >> i & 1) borders.push_back(samples * (i + 1) / (inner + 1) * p.view.R);
    }
    borders.push_back(p.view.N);
    Sums forward(static_cast<size_t>(p.view.C)), backward = forward;
    for (size_t i = borders.size() - 1; i > 0; --i) {
      add_part(p, r.s, borders[i - 1], borders[i], &forward, &backward);
    }
    CHECK(rounded(forward) == rounded(r.sums));
    CHECK(rounded(backward) == rounded(r.gradient_sums));
  }
}

// 16-bit data give the rounded results of the same values in float. (For float and double, both are
// the same.)
template <typename T>
void check_rounding(const Results<T>& r, const Wide<T>& wide) {
  CHECK(rounded(r.sums) == rounded(wide.sums));
  CHECK(rounded(r.gradient_sums) == rounded(wide.gradient_sums));
  CHECK(r.y == Array<T>::rounded(wide.y));
  CHECK(r.dx == Array<T>::rounded(wide.dx));
  CHECK(r.constant_dx == Array<T>::rounded(wide.constant_dx));
}

// In place, added to the array, and without gamma.
template <typename T>
void check_write_modes(const Problem<T>& p, const Results<T>& r) {
  const Kernels& k = kernels<T>();
  const Sums zeros(static_cast<size_t>(p.view.C));
  const auto forward = [&](const Array<T>& from, Array<T>* to, WriteMode mode) {
    ForwardShard shard = forward_shard(p, to->data(), mode);
    shard.x = from.data();
    k.forward(shard, r.s.data());
  };
  const auto backward = [&](const Array<T>& from, Array<T>* to, WriteMode mode) {
    BackwardShard shard = backward_shard(p, to->data(), mode);
    shard.dy = from.data();
    k.backward(shard, r.s.data(), r.gradient_sums.data(), p.count());
  };
  const auto backward_constant = [&](const Array<T>& from, Array<T>* to, WriteMode mode) {
    BackwardShard shard = backward_shard(p, to->data(), mode);
    shard.dy = from.data();
    k.backward(shard, r.s.data(), zeros.data(), 0);
  };
  const auto check = [&](const auto& kernel, const Array<T>& from, const Array<T>& result) {
    Array<T> in_place = from, sum = p.dy;
    kernel(in_place, &in_place, WriteMode::kWrite);
    CHECK(in_place == result && in_place.guards_intact());
    kernel(from, &sum, WriteMode::kAdd);
    CHECK(sum == p.dy.plus(result) && sum.guards_intact());
  };
  check(forward, p.x, r.y);
  check(backward, p.dy, r.dx);
  check(backward_constant, p.dy, r.constant_dx);

  Problem<T> with_ones = p;
  std::fill_n(with_ones.gamma.data(), p.view.C, Arithmetic<T>{1});
  Array<T> y(p.view.size()), dx(p.view.size());
  ForwardShard forth = forward_shard(p, y.data());
  BackwardShard back = backward_shard(p, dx.data());
  forth.gamma = back.gamma = nullptr;
  k.forward(forth, r.s.data());
  k.backward(back, r.s.data(), r.gradient_sums.data(), p.count());
  const Results<T> ones(with_ones);
  CHECK(y == ones.y && dx == ones.dx);
}

template <typename T>
void check_view(View view) {
  check::context = name_of<T>(view, 100);
  const Problem<T> p(view, 100);
  const Results<T> r(p);
  const Wide<T> wide(p.widened());
  check_rounding(r, wide);
  check_splits(p, r);
  check_alone(p, r);
  check_write_modes(p, r);
  for (const int64_t shift : {1, 2, 3}) r.check_same_bits(Results<T>(p.shifted(shift), shift));
}

template <typename T>
void results_are_independent_of_splits_write_modes_and_alignment() {
  for (const int64_t S : {1, 2, 15, 16, 17}) {
    for (const int64_t C : {1, 3, 63, 64, 65, 130}) {
      for (const int64_t N : {1, 5}) check_view<T>({N, C, S});
    }
  }
  for (const int64_t S : {2047, 2048, 2049, 5000}) {
    for (const int64_t N : {1, 3}) {
      for (const int64_t C : {1, 3}) check_view<T>({N, C, S});
    }
  }
  // Rows longer than a chunk.
  for (const int64_t C : {2048, 2049, 5000}) check_view<T>({3, C, 1});
  // Channels last.
  for (const int64_t C : {1, 3, 7, 8, 9, 21, 63, 64, 65, 130}) {
    for (const int64_t R : {2, 7, 66, 300}) check_view<T>({3 * R, C, 1, R});
  }
  for (const int64_t C : {511, 512, 513, 1100}) check_view<T>({3 * 9, C, 1, 9});
  for (const int64_t R : {2047, 2048, 2049, 5000}) check_view<T>({2 * R, 3, 1, R});
  // A last block of one channel.
  check_view<T>({2 * 5, 32257, 1, 5});
}

// The arrays are large enough for four threads, the last for 32. Threads divide the channels, or
// the samples if there are few channels.
template <typename T>
void results_are_independent_of_threads() {
  for (const View view : {View{5, 1, 27001}, View{3, 2, 22000}, View{45000, 3, 1},
                          View{1100, 130, 1}, View{4, 130, 260}, View{40, 64, 49},
                          View{45000, 3, 1, 5000}, View{600, 700, 1, 100}, View{4, 64, 4100}}) {
    check::context = name_of<T>(view, 1000);
    const Problem<T> p(view, 1000);
    set_num_threads(1);
    const Results<T> r(p);
    for (const int threads : {2, 3, 4, 32}) {
      set_num_threads(threads);
      r.check_same_bits(Results<T>(p));
      check_alone(p, r);
    }
    check_splits(p, r, 2);
  }
  set_num_threads(2);
}

}  // namespace
}  // namespace gluon_syncbn

int main() {
  using namespace gluon_syncbn;
  set_num_threads(2);
  for_each_type([](auto zero) {
    results_are_independent_of_splits_write_modes_and_alignment<decltype(zero)>();
    results_are_independent_of_threads<decltype(zero)>();
  });
  return check::finish("kernels_bits");
}
