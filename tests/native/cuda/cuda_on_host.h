// Runs unchanged CUDA kernels on the host: blocks sequentially, and the threads of a block as
// fibers, which switch where they wait for each other. Undefined behaviour stops the program: an
// unaligned vector, a barrier that not all threads reach, a shuffle with lanes missing.
#ifndef GLUON_SYNCBN_TESTS_CUDA_ON_HOST_H_
#define GLUON_SYNCBN_TESTS_CUDA_ON_HOST_H_

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <tuple>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
extern "C" void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom,
                                                size_t* size);
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
// One block runs at a time.
#define __shared__ static

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_host {

// swapcontext() spends most of its time on saving signal masks, and jumps do not. But
// AddressSanitizer supports only swapcontext().
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kJumps = false;
#else
constexpr bool kJumps = true;
#endif

constexpr unsigned kLanes = 32;

[[noreturn]] inline void stop(const char* what) {
  std::fprintf(stderr, "cuda_on_host: %s (block %u, %u, thread %u)\n", what, blockIdx.x, blockIdx.y,
               threadIdx.x);
  std::abort();
}

// Per multiprocessor, of every kernel.
inline int resident_blocks = 2;

class Block {
 public:
  static Block*& current() {
    static Block* block = nullptr;
    return block;
  }

  void run(unsigned threads, const std::function<void()>& kernel) {
    kernel_ = &kernel;
    fibers_.resize(threads);
    warps_.assign((threads + kLanes - 1) / kLanes, {});
    block_ = {};
    alive_ = threads;
    current() = this;
    for (unsigned i = 0; i < threads; ++i) start(i);
    while (alive_ > 0) {
      moved_ = false;
      for (unsigned i = 0; i < threads; ++i) {
        if (!fibers_[i].done) resume(i);
      }
      if (!moved_) stop("threads wait for each other forever");
    }
    current() = nullptr;
  }

  void wait_for_block() {
    // Threads that have ended count as missing.
    if (alive_ != fibers_.size()) stop("a barrier that not all threads reach");
    wait(&block_, [this] { return alive_; });
  }

  template <typename V>
  V exchange(V value, unsigned from) {
    Warp& warp = warps_[threadIdx.x / kLanes];
    static_assert(sizeof(V) <= sizeof(double));
    std::memcpy(&warp.slots[threadIdx.x % kLanes], &value, sizeof(V));
    const auto all = [] { return kLanes; };
    wait(&warp.barrier, all);
    std::memcpy(&value, &warp.slots[from], sizeof(V));
    wait(&warp.barrier, all);
    return value;
  }

 private:
  static constexpr size_t kStack = 128 << 10;

  struct Barrier {
    size_t arrived = 0;
    uint64_t generation = 0;
  };
  struct Warp {
    Barrier barrier;
    double slots[kLanes];
  };
  struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    jmp_buf place;
    bool started = false, done = false;
  };

  // Returns when another fiber switches back.
  static void change(ucontext_t* from, jmp_buf& from_place, ucontext_t* to, jmp_buf& to_place,
                     bool to_started) {
    if (!kJumps) {
      swapcontext(from, to);
    } else if (_setjmp(from_place) == 0) {
      if (to_started) _longjmp(to_place, 1);
      setcontext(to);
    }
  }

  template <typename F>
  void wait(Barrier* barrier, const F& expected) {
    moved_ = true;
    const uint64_t generation = barrier->generation;
    if (++barrier->arrived == expected()) {
      barrier->arrived = 0;
      ++barrier->generation;
      return;
    }
    while (barrier->generation == generation) give_way();
    moved_ = true;
  }

  void start(unsigned i) {
    Fiber& fiber = fibers_[i];
    fiber.stack.resize(kStack);
    fiber.started = fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(&Block::enter), 0);
  }

  static void enter() {
    Block& block = *current();
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &block.home_bottom_, &block.home_size_);
#endif
    (*block.kernel_)();
    block.fibers_[threadIdx.x].done = true;
    --block.alive_;
    block.moved_ = true;
    block.give_way();
  }

  void resume(unsigned i) {
    threadIdx = dim3(i, 0, 0);
    Fiber& fiber = fibers_[i];
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, fiber.stack.data(), fiber.stack.size());
#endif
    const bool started = fiber.started;
    fiber.started = true;
    change(&home_, home_place_, &fiber.context, fiber.place, started);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  }

  void give_way() {
    Fiber& fiber = fibers_[threadIdx.x];
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(fiber.done ? nullptr : &fake_stack, home_bottom_, home_size_);
#endif
    change(&fiber.context, fiber.place, &home_, home_place_, true);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, &home_bottom_, &home_size_);
#endif
  }

  const std::function<void()>* kernel_ = nullptr;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  Barrier block_;
  size_t alive_ = 0;
  bool moved_ = false;
  ucontext_t home_;
  jmp_buf home_place_;
#if defined(__SANITIZE_ADDRESS__)
  const void* home_bottom_ = nullptr;
  size_t home_size_ = 0;
#endif
};

// Runs a kernel and returns after it. One at a time. `together`: its threads wait for each other.
inline void run(dim3 grid, unsigned threads, bool together, const std::function<void()>& function) {
  static Block block;
  gridDim = grid;
  blockDim = dim3(threads);
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      blockIdx = dim3(x, y, 0);
      if (together) {
        block.run(threads, function);
      } else {
        for (unsigned i = 0; i < threads; ++i) {
          threadIdx = dim3(i, 0, 0);
          function();
        }
      }
    }
  }
}

// Adds work to a stream.
void enqueue(void* stream, std::function<void()> work);
// Overloaded below for arguments of kernels that are checked at the launch.
template <typename V>
void inspect(void* /*stream*/, const V& /*argument*/) {}

template <typename F, typename... Arguments>
void launch(dim3 grid, unsigned threads, void* stream, bool together, const F& kernel,
            const Arguments&... arguments) {
  (inspect(stream, arguments), ...);
  enqueue(stream, [=, all = std::make_tuple(arguments...)] {
    run(grid, threads, together, [&] { std::apply(kernel, all); });
  });
}

}  // namespace cuda_on_host

inline void __syncthreads() {
  cuda_on_host::Block* const block = cuda_on_host::Block::current();
  if (!block) cuda_on_host::stop("a barrier in a kernel that was started without");
  block->wait_for_block();
}

inline void __syncwarp() {
  cuda_on_host::Block* const block = cuda_on_host::Block::current();
  if (!block) cuda_on_host::stop("a barrier in a kernel that was started without");
  block->exchange(0, threadIdx.x % cuda_on_host::kLanes);
}

template <typename V>
V __shfl_xor_sync(unsigned lanes, V value, int mask) {
  cuda_on_host::Block* const block = cuda_on_host::Block::current();
  if (!block) cuda_on_host::stop("a shuffle in a kernel that was started without");
  if (lanes != 0xffffffffu) cuda_on_host::stop("a shuffle with lanes missing");
  return block->exchange(value, (threadIdx.x ^ static_cast<unsigned>(mask)) % cuda_on_host::kLanes);
}

// Whether the predicate holds on all lanes.
inline bool __all_sync(unsigned lanes, bool predicate) {
  bool all = predicate;
  for (int mask = cuda_on_host::kLanes / 2; mask > 0; mask /= 2) {
    const bool other = __shfl_xor_sync(lanes, all, mask);
    all = all && other;
  }
  return all;
}
inline bool __any_sync(unsigned lanes, bool predicate) { return !__all_sync(lanes, !predicate); }

inline int64_t __mul64hi(int64_t a, int64_t b) {
  return static_cast<int64_t>((static_cast<__int128>(a) * b) >> 64);
}

inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, unsigned bits) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  return static_cast<uint32_t>(both >> (bits & 31));
}

namespace gluon_syncbn {

struct Words;
struct ChannelSums;
struct SumsTask;
struct SumsOfDevices;
struct ForwardFinish;
struct BackwardFinish;

// What is checked at the launch.
void inspect(void* stream, const SumsTask& task);
void inspect(void* stream, ChannelSums* const& sums);
void inspect(void* stream, const SumsOfDevices& sums);
void inspect(void* stream, const ForwardFinish& task);
void inspect(void* stream, const BackwardFinish& task);
Words checked_load(const void* p);
void checked_store(void* p, const Words& words);
int last_launch_error();

}  // namespace gluon_syncbn

#define SBN_LAUNCH(kernel, grid, stream, ...) \
  cuda_on_host::launch(                       \
      grid, kThreads, stream, false, [](const auto&... all) { kernel(all...); }, __VA_ARGS__)
#define SBN_LAUNCH_TOGETHER(kernel, grid, stream, ...) \
  cuda_on_host::launch(                                \
      grid, kThreads, stream, true, [](const auto&... all) { kernel(all...); }, __VA_ARGS__)
#define SBN_RESIDENT(kernel) cuda_on_host::resident_blocks

#endif  // GLUON_SYNCBN_TESTS_CUDA_ON_HOST_H_
