// What Python calls for layers and for the process. Where the answer depends on work that MXNet has
// not finished, an operation pushed to its engine gives it, as that runs after the earlier ones.
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "api/declare.h"
#include "call/call.h"
#include "call/globals.h"
#include "cpu/pass.h"
#include "cpu/thread_pool.h"
#include "cuda/device.h"
#include "mxnet/array_wait.h"
#include "mxnet/operations.h"
#include "processes/outcome.h"
#include "processes/route.h"
#include "processes/transports.h"
#include "threads/waits.h"

namespace gluon_syncbn {
namespace {

Direction direction_of(int backward) {
  return backward ? Direction::kBackward : Direction::kForward;
}

// Handles SIGINT, then calls the previous handler.
struct sigaction previous_interrupt_action;

void on_interrupt(int signal, siginfo_t* info, void* context) {
  interrupts.fetch_add(1, std::memory_order_relaxed);
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

// See Observer. The last returns a route of routes.cc for messages of `size` values.
SBN_CALLBACK(void, gluon_syncbn_on_warning, (const char* text, Outcome* outcome));
SBN_CALLBACK(void, gluon_syncbn_on_failure, (int64_t layer, const char* text, Outcome* outcome));
SBN_CALLBACK(void, gluon_syncbn_on_wait, (int64_t layer, const char* device, Outcome* outcome));
SBN_CALLBACK(void, gluon_syncbn_on_report, (int64_t layer, const char* device, Outcome* outcome));
SBN_CALLBACK(int, gluon_syncbn_on_may_run, (Outcome* outcome));
SBN_CALLBACK(RoutePtr*, gluon_syncbn_on_open,
             (int64_t layer, int backward, int64_t node, const char* title, int64_t channels,
              int64_t size, Outcome* outcome));

namespace {

void warn(const std::string& text) {
  Outcome outcome;
  gluon_syncbn_on_warning(text.c_str(), &outcome);
  if (!outcome.succeeded) std::cerr << text + " (" + outcome.error + ")\n";
}

Observer observer_of_python() {
  Observer observer;
  observer.warn = warn;
  observer.failed = [](int64_t layer, const std::string& text) {
    Outcome outcome;
    gluon_syncbn_on_failure(layer, text.c_str(), &outcome);
    if (!outcome.succeeded) {
      warn("An error of a layer could not be passed on to other processes: " + outcome.error);
    }
  };
  observer.waits = [](int64_t layer, const std::string& device) {
    Outcome outcome;
    gluon_syncbn_on_wait(layer, device.c_str(), &outcome);
    if (outcome.succeeded) return;
    globals.rendezvous->fail(nullptr,
                             "A layer cannot tell which calls have been made: " + outcome.error);
  };
  observer.reports = [](int64_t layer, const std::string& device) {
    Outcome outcome;
    // If it does not succeed, the report counts as recorded after a moment.
    gluon_syncbn_on_report(layer, device.c_str(), &outcome);
  };
  observer.may_run = [] {
    Outcome outcome;
    const int may = gluon_syncbn_on_may_run(&outcome);
    return may || !outcome.succeeded;
  };
  observer.open = [](const ProcessCall& call, int64_t channels, int64_t size) {
    Outcome outcome;
    const RoutePtr* const route = gluon_syncbn_on_open(
        call.layer, call.is_backward, call.node, call.title.c_str(), channels, size, &outcome);
    if (!outcome.succeeded) throw std::runtime_error(outcome.error);
    return *route;
  };
  return observer;
}

}  // namespace

// The version of the package that this library was built for.
SBN_API(const char*, gluon_syncbn_version, ()) { return GLUON_SYNCBN_VERSION; }

// Registers the operator of this name. `api`: the functions of mxnet/c_api.h in order.
// `process_uuid` keeps graphs of other processes from finding the layers of this one. Returns the
// result of MXCustomOpRegister.
SBN_API(int, gluon_syncbn_register,
        (void* const* api, const char* op_type, const char* process_uuid, int naive_engine,
         int onednn)) {
  std::memcpy(&mxnet, api, sizeof(mxnet));
  globals.uuid = process_uuid;
  globals.naive_engine = naive_engine != 0;
  globals.onednn = onednn != 0;
  if (!globals.rendezvous) {
    globals.rendezvous = new Rendezvous;
    globals.rendezvous->observe(observer_of_python());
  }
  return mxnet.custom_op_register(op_type, create_operator);
}

// Call this in the child of a fork, at which no call may have been waiting. Drops the threads and
// GPU memory, which the child cannot use.
SBN_API(void, gluon_syncbn_after_fork, ()) {
  abandon_thread_pool();
  abandon_cuda_memory();
  globals.rendezvous->recover();
}

// See LayerConfig.
SBN_API(void, gluon_syncbn_configure,
        (int64_t layer, const char* name, const char* const* devices, int device_count,
         int num_devices, int group_size, double timeout, int spans_processes, int first_rank,
         int end_rank, const char* config_error, const char* notice)) {
  LayerConfig config;
  config.name = name;
  config.devices.assign(devices, devices + device_count);
  config.num_devices = static_cast<size_t>(num_devices);
  config.group_size = static_cast<size_t>(group_size);
  config.timeout_seconds = timeout;
  config.spans_processes = spans_processes != 0;
  config.first_rank = static_cast<size_t>(first_rank);
  config.end_rank = static_cast<size_t>(end_rank);
  config.config_error = config_error;
  config.notice = notice;
  globals.rendezvous->configure(layer, config);
}

// See Rendezvous.
SBN_API(void, gluon_syncbn_set_active_devices, (const char* const* devices, int num_devices)) {
  globals.rendezvous->set_active_devices({devices, devices + num_devices});
}

SBN_API(void, gluon_syncbn_set_joined, (int joined)) {
  globals.rendezvous->set_joined(joined != 0);
}

// Ends a step: see StepRecord. `written`: for each layer an array that its forward calls write, and
// one that its backward calls write; null if there is none.
SBN_API(int64_t, gluon_syncbn_end_step,
        (const int64_t* layers, void* const* written, int num_layers, const int64_t* kept,
         int num_kept)) {
  const int64_t step =
      globals.rendezvous->record().end({layers, layers + num_layers}, {kept, kept + num_kept});
  for (int i = 0; i < num_layers; ++i) {
    for (const bool is_backward : {false, true}) {
      void* array = written[2 * i + is_backward];
      // Without a forward array there is no call yet. Backward calls then follow those forward.
      if (!array && is_backward) continue;
      const auto enter = [=, layer = layers[i]](bool) {
        globals.rendezvous->record().enter(layer, is_backward, step + 1);
      };
      array ? when_passed(array, false, "SyncBatchNormStep", enter) : enter(false);
    }
  }
  return step;
}

// The exchanges of a step: see StepRecord::of. Writes at most `capacity` of them, and returns how
// many there are.
SBN_API(int64_t, gluon_syncbn_exchanges, (int64_t step, int64_t* to, int64_t capacity)) {
  const std::vector<StepRecord::Exchange> all = globals.rendezvous->record().of(step);
  const auto size = static_cast<int64_t>(all.size());
  for (int64_t i = 0; i < std::min(size, capacity); ++i) {
    const StepRecord::Exchange& one = all[static_cast<size_t>(i)];
    const int64_t row[4] = {one.layer, one.is_backward, one.node, one.ago};
    std::copy(row, row + 4, to + 4 * i);
  }
  return size;
}

// See Rendezvous::take_part and update_running, and status_of. The running statistics of C
// channels, in the memory of the host, follow a forward.
SBN_API(int, gluon_syncbn_take_part,
        (int64_t layer, int is_backward, int64_t node, int64_t ago, int64_t C, int is_float64,
         double momentum, int is_unbiased, void* const* running)) {
  return status_of([&] {
    const PassSums all = globals.rendezvous->take_part(globals.rendezvous->find(layer),
                                                       direction_of(is_backward), node, ago, C);
    if (is_backward) return 0;
    std::vector<Statistics> statistics;
    for (const ChannelSums& sums : all.on_host) {
      statistics.push_back(batch_statistics(sums, all.count, 0));
    }
    const RunningRule rule{momentum, running[2] != nullptr, is_unbiased != 0};
    update_running(is_float64 ? DType::kFloat64 : DType::kFloat32,
                   {running[0], running[1], running[2]}, rule, C, 1, {all.count, all.count, 1},
                   statistics.data());
    return 0;
  });
}

SBN_API(void, gluon_syncbn_forget, (int64_t layer)) { globals.rendezvous->forget(layer); }

// See Rendezvous.
SBN_API(void, gluon_syncbn_fail, (const char* text)) { globals.rendezvous->fail(nullptr, text); }

SBN_API(void, gluon_syncbn_recover, ()) { globals.rendezvous->recover(); }

// Not 0 while the step has failed.
SBN_API(const void*, gluon_syncbn_has_failed, ()) { return &globals.rendezvous->has_failed(); }

// Empty while the step has not failed.
SBN_API(const char*, gluon_syncbn_failure, ()) {
  text_for_python = globals.rendezvous->failure();
  return text_for_python.c_str();
}

// See text_for_python.
SBN_API(const char*, gluon_syncbn_text, ()) { return text_for_python.c_str(); }

// Ends a function of Python that C++ has called. error: null if it has succeeded.
SBN_API(void, gluon_syncbn_conclude, (Outcome* outcome, const char* error)) {
  outcome->succeeded = !error;
  if (error) outcome->error = error;
}

// Pushes a probe of a layer on a device, see Calls, at its running mean or at what a backward call
// writes.
SBN_API(void, gluon_syncbn_probe, (int64_t layer, const char* device, void* array, int is_mean)) {
  const Calls::Ticket ticket =
      globals.rendezvous->ask(layer, device, is_mean ? Calls::Of::kAll : Calls::Of::kGradients);
  when_passed(array, is_mean, "SyncBatchNormProbe",
              [ticket](bool skipped) { globals.rendezvous->answer(ticket, skipped); });
}

// See Reports.
SBN_API(void, gluon_syncbn_expect_report, (void* array)) { reports.expect(array); }

SBN_API(int64_t, gluon_syncbn_next_ticket, ()) { return globals.rendezvous->next_ticket(); }

SBN_API(void, gluon_syncbn_settle,
        (const int64_t* layers, int num_layers, int64_t from, const char* why)) {
  globals.rendezvous->settle({layers, layers + num_layers}, from, why);
}

SBN_API(int, gluon_syncbn_holds_error, (void* array)) { return holds_error(array); }

// Something in MXNet waits in vain.
SBN_API(void, gluon_syncbn_abandon, ()) { abandoned = true; }

SBN_API(int, gluon_syncbn_is_abandoned, ()) { return abandoned; }

// Call this when the process ends: all waits end with an error.
SBN_API(void, gluon_syncbn_close, (const char* reason)) {
  globals.rendezvous->close(reason);
  process_ends = true;
}

// Frees the streams and the memory kept for the next calls on GPUs.
SBN_API(void, gluon_syncbn_release, ()) { release_cuda_memory(); }

// The compiler version and the architectures of the CUDA kernels; null if there are no kernels.
SBN_API(const char*, gluon_syncbn_cuda, ()) {
  return cuda_backend() ? cuda_backend()->description : nullptr;
}

// See peer_access.
SBN_API(int, gluon_syncbn_peer_access, ()) { return peer_access(); }

// See Rendezvous.
SBN_API(double, gluon_syncbn_stuck_seconds, ()) { return globals.rendezvous->stuck_seconds(); }

// Makes Ctrl-C end waits too. The previous handler is still called.
SBN_API(int, gluon_syncbn_catch_interrupts, ()) {
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
