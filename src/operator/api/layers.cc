#include "api/layers.h"

#include <signal.h>

#include <cstring>
#include <string>
#include <vector>

#include "cuda/backend.h"
#include "cuda/device.h"
#include "mxnet/engine_errors.h"
#include "mxnet/api.h"
#include "layer/process.h"
#include "layer/property.h"
#include "api/channels.h"
#include "cpu/thread_pool.h"
#include "mxnet/watch.h"

namespace gluon_syncbn {
namespace {

// What an exchange between processes has to say at most.
constexpr int kMostErrorText = 1 << 13;

// What went wrong, or nothing.
std::string exchange_over(Line* line, const Message& message, std::vector<double>* all) {
  try {
    line->exchange(message.title, message.timeout_seconds, message.values.data(), all->data());
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

// A device that takes part again: see gluon_syncbn_settle.
struct Settlement {
  int64_t layer, generation;
  std::string device, text;
  Handle marker = nullptr;

  ~Settlement() {
    if (marker) mxnet.ndarray_free(marker);
  }
};

// An operation on a device's arrays that the engine skips where they hold an error.
struct Look {
  int64_t layer, generation;
  Direction direction;
  std::string device;
  bool has_run = false;

  ~Look() {
    if (!has_run) process.all_reduce->lose(layer, generation, direction, device);
  }
};

// Handles SIGINT, after whoever did so before.
struct sigaction previous_interrupt_action;

void on_interrupt(int signal, siginfo_t* info, void* context) {
  AllReduce::interrupt();
  if (previous_interrupt_action.sa_flags & SA_SIGINFO) {
    previous_interrupt_action.sa_sigaction(signal, info, context);
  } else if (previous_interrupt_action.sa_handler != SIG_DFL &&
             previous_interrupt_action.sa_handler != SIG_IGN) {
    previous_interrupt_action.sa_handler(signal);
  }
}

}  // namespace
}  // namespace gluon_syncbn

using namespace gluon_syncbn;

const char* gluon_syncbn_version() { return GLUON_SYNCBN_VERSION; }

int gluon_syncbn_register(void* const* api, const char* word, int naive_engine, int onednn,
                          void (*warn)(const char*), void (*failed)(int64_t, int64_t, const char*),
                          void (*waits)(int64_t, int64_t, int), gluon_syncbn_exchange exchange) {
  std::memcpy(&mxnet, api, sizeof(mxnet));
  process.word = word;
  process.naive_engine = naive_engine != 0;
  process.onednn = onednn != 0;
  Observer observer;
  observer.warn = [warn](const std::string& text) { warn(text.c_str()); };
  observer.failed = [failed](int64_t layer, int64_t generation, const std::string& text) {
    failed(layer, generation, text.c_str());
  };
  observer.waits = [waits](int64_t layer, int64_t generation, Direction direction) {
    waits(layer, generation, direction == Direction::kBackward);
  };
  observer.exchange = [exchange](const Message& message, std::vector<double>* all) {
    const auto size = static_cast<int64_t>(message.values.size());
    const LinePtr line = lines().find(message.layer, message.key);
    if (line && line->size() == size) return exchange_over(line.get(), message, all);
    char error[kMostErrorText] = "";
    const int status = exchange(message.layer, message.key.c_str(), message.title.c_str(),
                                message.channels, message.values.data(), size, all->data(),
                                static_cast<int64_t>(all->size()), error, kMostErrorText);
    return status == 0 ? std::string() : std::string(error[0] ? error : "The exchange failed.");
  };
  if (!process.all_reduce) process.all_reduce = new AllReduce;
  if (!process.running_states) process.running_states = new RunningStates;
  process.all_reduce->observe(observer);
  return mxnet.custom_op_register("GluonSyncBatchNorm", create_property);
}

void gluon_syncbn_after_fork() {
  lines().clear();
  abandon_thread_pool();
  abandon_cuda_memory();
  forget_errors();
  process.all_reduce->start_over();
}

void gluon_syncbn_tell_next(const char* text) { process.all_reduce->tell_next(text); }

void gluon_syncbn_configure(int64_t layer, const char* name, const char* const* devices,
                            int num_devices, int expected, int group_size, double timeout_seconds,
                            int processes, int first_rank, int end_rank, const char* misfit) {
  // Its store may be another one from now on.
  lines().forget(layer);
  LayerConfig config;
  config.name = name;
  config.devices.assign(devices, devices + num_devices);
  config.num_devices = static_cast<size_t>(expected);
  config.group_size = static_cast<size_t>(group_size);
  config.timeout_seconds = timeout_seconds;
  config.processes = static_cast<size_t>(processes);
  config.first_rank = static_cast<size_t>(first_rank);
  config.end_rank = static_cast<size_t>(end_rank);
  config.misfit = misfit;
  for (const std::string& device : config.devices) config.has_gpus |= gpu_of(device) >= 0;
  process.all_reduce->configure(layer, config);
  process.running_states->keep(layer);
}

void gluon_syncbn_set_present(const char* const* devices, int num_devices) {
  process.all_reduce->set_present({devices, devices + num_devices});
}

void gluon_syncbn_set_absent(int absent) { process.all_reduce->set_absent(absent != 0); }

void gluon_syncbn_give_up(const char* reason) { process.all_reduce->give_up(reason); }

void gluon_syncbn_forget(int64_t layer) {
  lines().forget(layer);
  process.all_reduce->forget(layer);
  process.running_states->forget(layer);
}

void gluon_syncbn_restart(int64_t layer, int variance) {
  process.running_states->restart(layer, variance != 0);
}

int gluon_syncbn_settle(int64_t layer, int64_t generation, const char* device, void** arrays,
                        int num_arrays, const char* text) {
  // The naive engine keeps no error in arrays.
  if (num_arrays == 0 || process.naive_engine) {
    process.all_reduce->settle(layer, generation, device);
    return 0;
  }
  auto* settlement = new Settlement{layer, generation, device, text};
  const uint32_t one = 1;
  int status = mxnet.ndarray_create(&one, 1, kCpuContext.device_type, kCpuContext.device_id, 1, 0,
                                    &settlement->marker);
  // MXNet clears an error where somebody waits for it, and then everywhere. The error of the failed
  // step is the user's, so it is replaced in these arrays by one of our own, which the marker holds
  // too. Waiting for the marker clears that one.
  std::vector<Handle> written(arrays, arrays + num_arrays);
  written.push_back(settlement->marker);
  const auto replace = [](void*, void* argument) {
    await_turn_for_error();
    throw dmlc::Error(static_cast<Settlement*>(argument)->text);
  };
  const auto clear = [](void*, void* argument) {
    const Settlement& s = *static_cast<Settlement*>(argument);
    mxnet.ndarray_wait_to_read(s.marker);
    process.all_reduce->settle(s.layer, s.generation, s.device);
  };
  if (status == 0) {
    status = mxnet.engine_push_sync(replace, settlement, nullptr, &kCpuContext, nullptr, 0,
                                    written.data(), num_arrays + 1, &kNoSkip, 0,
                                    "SyncBatchNormReplaceError");
  }
  if (status == 0) {
    // Runs after `replace`, which writes the same arrays, and frees the settlement of both.
    status = mxnet.engine_push_sync(
        clear, settlement, [](void* s) { delete static_cast<Settlement*>(s); }, &kCpuContext,
        nullptr, 0, arrays, num_arrays, &kNoSkip, 0, "SyncBatchNormClearError");
  } else {
    delete settlement;
  }
  return status;
}

int gluon_syncbn_look_for_error(int64_t layer, int64_t generation, int backward, const char* device,
                                void** arrays, int num_arrays) {
  const Direction direction = backward ? Direction::kBackward : Direction::kForward;
  return mxnet.engine_push_sync([](void*, void* look) { static_cast<Look*>(look)->has_run = true; },
                                new Look{layer, generation, direction, device},
                                [](void* look) { delete static_cast<Look*>(look); }, &kCpuContext,
                                arrays, num_arrays, nullptr, 0, &kCpuPrioritized, 0,
                                "SyncBatchNormLook");
}

void gluon_syncbn_close(const char* reason) {
  process.all_reduce->close(reason);
  Watch::close();
}

void gluon_syncbn_release() { release_cuda_memory(); }

const char* gluon_syncbn_cuda() { return cuda_backend() ? cuda_backend()->description : nullptr; }

int gluon_syncbn_waiting() { return process.all_reduce->waiting(); }

double gluon_syncbn_stuck_seconds() { return process.all_reduce->stuck_seconds(); }

int gluon_syncbn_catch_interrupts() {
  struct sigaction action{};
  action.sa_sigaction = on_interrupt;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  struct sigaction current{};
  sigaction(SIGINT, nullptr, &current);
  if (current.sa_flags & SA_SIGINFO && current.sa_sigaction == on_interrupt) return 0;
  return sigaction(SIGINT, nullptr, &previous_interrupt_action) ||
         sigaction(SIGINT, &action, nullptr);
}
