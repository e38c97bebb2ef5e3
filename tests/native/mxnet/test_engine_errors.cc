// Simultaneous errors of several devices, in an engine that, like MXNet's, records the error of an
// operation on the thread that ran it.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "check.h"
#include "mxnet/engine_errors.h"
#include "threads.h"

namespace gluon_syncbn {
namespace {

// Runs its tasks in order.
class Worker {
 public:
  ~Worker() {
    push(nullptr);
    thread_.join();
  }
  void push(std::function<void()> task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

 private:
  std::function<void()> next() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return !tasks_.empty(); });
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    return task;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_{[this] {
    while (const auto task = next()) task();
  }};
};

// The list of errors. Two threads must not append at the same time.
struct ErrorList {
  std::atomic<int> now{0}, most{0}, size{0};

  void note(bool counts = true) {
    const int together = ++now;
    if (together > most) most = together;
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(100);
    while (std::chrono::steady_clock::now() < end) {
    }
    --now;
    size += counts;
  }
} errors;

// An array whose operations run one after the other. The engine frees it.
class Array {
 public:
  // `forget` is called after the operation.
  void push(Worker* worker, std::function<void()> run, std::function<void()> forget = [] {}) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back({worker, std::move(run), std::move(forget)});
    if (waiting_.size() == 1) start();
  }

  bool is_idle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return waiting_.empty();
  }

  std::string error;

 private:
  struct Operation {
    Worker* worker;
    std::function<void()> run, forget;
  };

  void start() {
    const Operation& operation = waiting_.front();
    operation.worker->push([this, run = operation.run, forget = operation.forget] {
      run();
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        waiting_.pop_front();
        if (!waiting_.empty()) start();
      }
      forget();
    });
  }

  std::mutex mutex_;
  std::deque<Operation> waiting_;
};

constexpr int kDevices = 6;

struct Engine {
  std::mutex mutex;
  std::vector<std::unique_ptr<Array>> arrays;
  std::atomic<int> freed{0};
  Worker devices[kDevices], prioritized[4];
  std::atomic<unsigned> next{0};

  Engine() {
    mxnet.engine_push_sync = [](void (*run)(void*, void*), void* argument, void (*deleter)(void*),
                                const void*, Handle*, int, Handle* written, int,
                                const void* property, int, const char*) {
      Array* const array = static_cast<Array*>(written[0]);
      CHECK_EQ(*static_cast<const int*>(property), kCpuPrioritized);
      const auto attempt = [=] {
        try {
          if (array->error.empty()) run(nullptr, argument);
        } catch (const dmlc::Error& error) {
          array->error = error.what();
          errors.note(!array->error.empty());
        }
      };
      Worker* const worker = &Engine::engine->prioritized[Engine::engine->next++ % 4];
      array->push(worker, attempt, [=] { deleter(argument); });
      return 0;
    };
    mxnet.ndarray_create = [](const uint32_t*, uint32_t, int, int, int, int, Handle* array) {
      *array = Engine::engine->create();
      return 0;
    };
    // Like MXNet's, it returns at once if nothing is pending.
    mxnet.ndarray_wait_to_read = [](Handle array) {
      CHECK(static_cast<Array*>(array)->is_idle());
      return -1;
    };
    mxnet.ndarray_free = [](Handle) { return ++engine->freed, 0; };
  }

  Array* create() {
    const std::lock_guard<std::mutex> lock(mutex);
    arrays.push_back(std::make_unique<Array>());
    return arrays.back().get();
  }

  static Engine* engine;
};

Engine* Engine::engine = nullptr;

std::string device(int d) { return "cpu(" + std::to_string(d) + ")"; }

// What MXNet and the layer do when the call of a device fails. The callback reports the error and
// returns. MXNet ends the operator on the device's thread, with the error of the output. Then the
// running statistics get another error, on the first device's thread.
void fail(Engine* engine, int d, double at_work) {
  engine->devices[d].push([=] { sleep(at_work); });
  Array* const output = engine->create();
  report_error(output, device(d), "no data on " + device(d));
  sleep(0.001);
  output->push(&engine->devices[d], [=] {
    CHECK_EQ(output->error, "no data on " + device(d));
    output->error.clear();
    errors.note();
    engine->devices[0].push([] {
      await_turn_for_error();
      errors.note();
    });
  });
}

// Returns whether they did.
bool errors_come_one_at_a_time() {
  constexpr int kRounds = 15;
  const auto begin = std::chrono::steady_clock::now();
  int freed = 0;
  {
    Engine engine;
    Engine::engine = &engine;
    for (int round = 0; round < kRounds; ++round) {
      check::context = "round " + std::to_string(round);
      in_threads(kDevices, [&](int d) { fail(&engine, d, round % 3 ? 0 : 0.007 * d); });
    }
    // The next error drains the last one.
    Array* const output = engine.create();
    report_error(output, "cpu(1)", "the last");
    sleep(0.1);
    freed = engine.freed;
  }
  check::context = "";
  CHECK_EQ(errors.size.exchange(0), 3 * kRounds * kDevices + 1);
  CHECK(freed >= kRounds * kDevices);
  // Errors waited no longer than the devices were busy.
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  CHECK(took.count() < 10);
  forget_errors();
  return errors.most.exchange(0) == 1;
}

}  // namespace
}  // namespace gluon_syncbn

int main() {
  // A thread of a busy machine may lose its core just when it has its turn, but not each time.
  bool came = false;
  for (int i = 0; i < 3 && !came; ++i) came = gluon_syncbn::errors_come_one_at_a_time();
  CHECK(came);
  return check::finish("engine_errors");
}
