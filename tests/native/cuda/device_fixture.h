// The results of the CUDA kernels for a problem.
#ifndef GLUON_SYNCBN_TESTS_DEVICE_FIXTURE_H_
#define GLUON_SYNCBN_TESTS_DEVICE_FIXTURE_H_

#include "cpu/kernels_fixture.h"
#include "cuda/backend.h"

namespace gluon_syncbn {

inline const CudaRuntime& cuda() { return cuda_backend()->runtime; }

inline void must(int error, int line) {
  CHECK_SAY(error == 0, "at line " << line << ": " << cuda().error_name(error));
}
#define MUST(call) must(call, __LINE__)

inline Stream the_stream() {
  static const Stream stream = [] {
    Stream created = nullptr;
    MUST(cuda().create_stream(&created));
    return created;
  }();
  return stream;
}

// A shift above this is that of all arrays. Up to it, they differ.
constexpr int64_t kAlike = 8;
inline int64_t shift_by(int64_t shift, int64_t more) {
  return shift == 0 || shift > kAlike ? shift : shift + more;
}

// Values on the device between guard zones of NaN, `shift` values after a multiple of 16 bytes.
// Each array has a NaN of its own, as results of guards are NaN too. for_all: page-locked memory,
// which all devices can access.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t size, int64_t shift = 0, bool for_all = false)
      : size_(size),
        shift_(shift),
        for_all_(for_all),
        host_(static_cast<size_t>(kGuard + shift + size + kBehind)) {
    static unsigned arrays = 0;
    auto* const memory = reinterpret_cast<unsigned char*>(host_.data());
    const auto low = static_cast<unsigned char>(0xc0 | arrays++ % 64);
    for (size_t i = 0; i < bytes(); ++i) memory[i] = i % 2 ? 0xff : low;
    MUST((for_all ? cuda().malloc_host : cuda().malloc)(&memory_, bytes()));
    upload_all();
  }
  DeviceArray(const T* values, int64_t size, int64_t shift = 0, bool for_all = false)
      : DeviceArray(size, shift, for_all) {
    set(values);
  }
  DeviceArray(const DeviceArray&) = delete;
  ~DeviceArray() { MUST((for_all_ ? cuda().free_host : cuda().free)(memory_)); }

  T* data() { return static_cast<T*>(memory_) + kGuard + shift_; }

  void set(const T* values) {
    std::memcpy(static_cast<void*>(host_.data() + kGuard + shift_), values,
                static_cast<size_t>(size_) * sizeof(T));
    upload_all();
  }

  // The values after all queued work. Checks that the guards are unchanged.
  std::vector<T> get() {
    std::vector<T> now(host_.size());
    MUST(cuda().copy_to_host(now.data(), memory_, bytes(), the_stream()));
    MUST(cuda().synchronize(the_stream()));
    const size_t begin = static_cast<size_t>(kGuard + shift_), end = begin + size_;
    const auto guards = [&](size_t from, size_t to) {
      return std::memcmp(now.data() + from, host_.data() + from, (to - from) * sizeof(T)) == 0;
    };
    CHECK(guards(0, begin) && guards(end, now.size()));
    return {now.begin() + begin, now.begin() + end};
  }

 private:
  static constexpr int64_t kGuard = 64;
  // The simulator sees an access behind the memory, also one that reads what nobody uses.
#if defined(SBN_REAL_CUDA)
  static constexpr int64_t kBehind = kGuard;
#else
  static constexpr int64_t kBehind = 0;
#endif

  size_t bytes() const { return host_.size() * sizeof(T); }
  void upload_all() {
    MUST(cuda().copy_to_device(memory_, host_.data(), bytes(), the_stream()));
    MUST(cuda().synchronize(the_stream()));
  }

  int64_t size_, shift_;
  bool for_all_;
  std::vector<T> host_;
  void* memory_ = nullptr;
};

template <typename T>
bool same_bits(const std::vector<T>& a, const Array<T>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Runs the kernels on one problem, in arrays of a given alignment.
template <typename T>
class OnDevice {
 public:
  using A = Arithmetic<T>;

  explicit OnDevice(const Problem<T>& p, int64_t shift = 0)
      : p_(p),
        x(p.x.data(), p.view.size(), shift),
        dy(p.dy.data(), p.view.size(), shift_by(shift, 1)),
        gamma(p.gamma.data(), p.view.C),
        beta(p.beta.data(), p.view.C) {}

  const CudaKernels& kernels() const { return cuda_backend()->kernels(Type<T>::kDType); }

  // The sums of rows begin..end.
  Sums forward_sums(int64_t begin, int64_t end) {
    View view = p_.view;
    view.N = end - begin;
    DeviceArray<ChannelSums> work(kernels().work_size(view)), sums(view.C);
    MUST(kernels().forward_sums(view, x.data() + begin * view.C * view.S, work.data(), sums.data(),
                                the_stream()));
    return sums.get();
  }
  Sums forward_sums() { return forward_sums(0, p_.view.N); }

  // Without an activation and a residual.
  Sums backward_sums(const std::vector<Statistics>& s) {
    return backward_sums(backward_shard(nullptr), s);
  }

  Sums backward_sums(const BackwardShard& shard, const std::vector<Statistics>& s) {
    Start start(*this, shard, s);
    DeviceArray<ChannelSums> work(kernels().work_size(shard.view)), sums(shard.view.C);
    MUST(kernels().backward_sums(shard, start.kept, 0, work.data(), sums.data(), the_stream()));
    return sums.get();
  }

  std::vector<Statistics> statistics(const Sums& on_host, double count) {
    DeviceArray<ChannelSums> sums(on_host.data(), p_.view.C);
    DeviceArray<Statistics> s(p_.view.C);
    ForwardFinish finish(forward_shard(nullptr), 1, {s.data()});
    finish.beta = beta.data();
    finish.epsilon = kEpsilon;
    finish.sums = {1, {sums.data()}};
    finish.counts = {count, count, 1};
    MUST(kernels().finish_forward(finish, the_stream()));
    return s.get();
  }

  // Of the whole problem, without an activation and a residual.
  ForwardShard forward_shard(T* y, WriteMode mode = WriteMode::kWrite) {
    return here(gluon_syncbn::forward_shard(p_, y, mode));
  }
  BackwardShard backward_shard(T* dx, WriteMode mode = WriteMode::kWrite) {
    BackwardShard shard = here(gluon_syncbn::backward_shard(p_, dx, mode));
    shard.dy = dy.data();
    return shard;
  }

  void forward(const ForwardShard& shard, const std::vector<Statistics>& s) {
    DeviceArray<Statistics> statistics(s.data(), p_.view.C);
    DeviceArray<char> coefficients(kernels().coefficients_size(p_.view.C));
    ForwardFinish finish(shard, 1, {statistics.data()});
    finish.beta = shard.beta;
    finish.coefficients = coefficients.data();
    MUST(kernels().finish_forward(finish, the_stream()));
    MUST(kernels().normalize(shard, coefficients.data(), the_stream()));
    MUST(cuda().synchronize(the_stream()));
  }

  // Writes dx and dresidual, with the statistics of the batch or, if `all` is null, constant ones,
  // and returns {dgamma, dbeta}.
  std::pair<std::vector<A>, std::vector<A>> backward(const BackwardShard& shard,
                                                     const std::vector<Statistics>& s,
                                                     const Sums& own, const Sums* all,
                                                     double count) {
    const int64_t C = p_.view.C;
    Start start(*this, shard, s);
    DeviceArray<char> coefficients(kernels().coefficients_size(C));
    DeviceArray<ChannelSums> own_sums(own.data(), C), all_sums(all ? all->data() : own.data(), C);
    DeviceArray<A> dgamma(p_.beta.data(), C), dbeta(p_.beta.data(), C);
    const bool adds = shard.mode == WriteMode::kAdd;
    BackwardFinish finish(shard, 1, start.kept);
    finish.own_sums = own_sums.data();
    finish.sums = {all ? 1 : 0, {all_sums.data()}};
    finish.counts = {count, count, 1};
    finish.gated = is_gated(shard);
    finish.coefficients = coefficients.data();
    finish.dgamma = dgamma.data();
    finish.dbeta = dbeta.data();
    finish.add_dgamma = finish.add_dbeta = adds;
    MUST(kernels().finish_backward(finish, the_stream()));
    MUST(kernels().input_gradient(shard, coefficients.data(), the_stream()));
    return {dgamma.get(), dbeta.get()};
  }

 private:
  template <typename Shard>
  Shard here(Shard shard) {
    shard.x = x.data();
    shard.gamma = gamma.data();
    shard.beta = beta.data();
    return shard;
  }

  const Problem<T>& p_;

  // What a forward leaves to a backward.
  struct Start {
    DeviceArray<Statistics> statistics, of_z;
    DeviceArray<Gate<A>> gates;
    ForBackward kept;

    Start(const OnDevice& device, const BackwardShard& shard, const std::vector<Statistics>& s)
        : statistics(s.data(), shard.view.C), of_z(shard.view.C), gates(shard.view.C) {
      const bool activates = shard.epilogue.activation != Activation::kNone;
      kept = {statistics.data(), shard.from_y() ? of_z.data() : nullptr,
              activates ? gates.data() : nullptr};
      ForwardFinish finish(shard, 1, kept);
      finish.beta = shard.beta;
      finish.reads_y = shard.y != nullptr;
      MUST(device.kernels().finish_forward(finish, the_stream()));
    }
  };

 public:
  DeviceArray<T> x, dy;
  DeviceArray<A> gamma, beta;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_TESTS_DEVICE_FIXTURE_H_
