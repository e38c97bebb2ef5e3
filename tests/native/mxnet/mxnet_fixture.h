// A fake of MXNet's arrays and engine, and a fake store.
#ifndef GLUON_SYNCBN_TESTS_MXNET_FIXTURE_H_
#define GLUON_SYNCBN_TESTS_MXNET_FIXTURE_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "mxnet/c_api.h"

namespace gluon_syncbn {

// An array whose readers wait until it is written.
struct FakeArray {
  std::mutex mutex;
  bool pending = false;
  std::string error;
  std::vector<std::function<void()>> readers;
  std::vector<int> shape;
  void* data = nullptr;

  void start() {
    const std::lock_guard<std::mutex> lock(mutex);
    pending = true;
  }

  void write(const std::string& new_error = "") {
    std::vector<std::function<void()>> ready;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      pending = false;
      error = new_error;
      ready.swap(readers);
    }
    for (const auto& run : ready) run();
  }

  void read(std::function<void()> run) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (pending) {
        readers.push_back(std::move(run));
        return;
      }
    }
    run();
  }

  bool is_read() {
    const std::lock_guard<std::mutex> lock(mutex);
    return !readers.empty();
  }

  // Runs and frees the readers that still wait.
  ~FakeArray() { write(); }
};

inline FakeArray* fake(Handle array) { return static_cast<FakeArray*>(array); }

inline thread_local std::string last_error;

inline void use_fake_mxnet() {
  mxnet.engine_push_sync = [](void (*run)(void*, void*), void* argument, void (*deleter)(void*),
                              const void*, Handle* read, int, Handle*, int, const void*, int,
                              const char*) {
    fake(read[0])->read([=] {
      run(nullptr, argument);
      deleter(argument);
    });
    return 0;
  };
  mxnet.ndarray_wait_to_read = [](Handle array) {
    const std::lock_guard<std::mutex> lock(fake(array)->mutex);
    last_error = fake(array)->error;
    return last_error.empty() ? 0 : -1;
  };
  mxnet.ndarray_get_shape = [](Handle array, int* ndim, const int** shape) {
    *ndim = static_cast<int>(fake(array)->shape.size());
    *shape = fake(array)->shape.data();
    return 0;
  };
  mxnet.ndarray_get_data = [](Handle array, void** data) {
    *data = fake(array)->data;
    return 0;
  };
  mxnet.last_error = [] { return last_error.c_str(); };
}

// Adds the slots of `ranks` processes as the server of a KVStore does: in float32, by key, when all
// have arrived. The thread of the last one writes the result.
class FakeServer {
 public:
  explicit FakeServer(size_t ranks) : ranks_(ranks) {}

  // One process.
  struct Client {
    FakeServer* server;
    // Calls in progress: now, the maximum, and those for a key that was in progress already.
    std::atomic<int> now{0}, most{0}, doubled{0};
    std::mutex mutex;
    bool refuses = false;
  };

  static int pushpull(Handle kvstore, uint32_t, const int* keys, uint32_t, const int*,
                      Handle* arrays, Handle*, int) {
    Client* const client = static_cast<Client*>(kvstore);
    if (client->refuses) {
      last_error = "no such server";
      return -1;
    }
    {
      const std::lock_guard<std::mutex> lock(client->mutex);
      client->most = std::max<int>(client->most, ++client->now);
    }
    client->server->add(client, keys[0], fake(arrays[0]));
    const std::lock_guard<std::mutex> lock(client->mutex);
    --client->now;
    return 0;
  }

 private:
  void add(Client* client, int key, FakeArray* array) {
    array->start();
    std::map<Client*, FakeArray*> parts;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::map<Client*, FakeArray*>& sum = sums_[key];
      if (!sum.emplace(client, array).second) ++client->doubled;
      if (sum.size() < ranks_) return;
      parts.swap(sum);
    }
    size_t size = 1;
    for (const int axis : array->shape) size *= static_cast<size_t>(axis);
    std::vector<float> total(size);
    for (const auto& part : parts) {
      const float* const values = static_cast<const float*>(part.second->data);
      for (size_t i = 0; i < size; ++i) total[i] += values[i];
    }
    for (const auto& part : parts) {
      std::copy(total.begin(), total.end(), static_cast<float*>(part.second->data));
      part.second->write();
    }
  }

  const size_t ranks_;
  std::mutex mutex_;
  std::map<int, std::map<Client*, FakeArray*>> sums_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_TESTS_MXNET_FIXTURE_H_
