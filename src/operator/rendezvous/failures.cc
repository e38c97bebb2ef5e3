// What happens when something fails. A step goes through all layers, so the step of this process
// fails as a whole, with the text of its first failure. From then until it recovers, each call in
// training ends at once, with zeros. docs/design.md, "After an error", has the table of events.
//
// Each call that ends with the failure reports it to MXNet. So MXNet skips what depends on its
// zeros, in backward and in the Trainer too.
#include <algorithm>
#include <utility>

#include "rendezvous/rendezvous.h"
#include "rendezvous/state.h"
#include "threads/waits.h"

namespace gluon_syncbn {
namespace {

// A device that waits for a call which is never made must have waited so long before Python goes on
// without it: it may just have arrived, with the others on their way.
constexpr Seconds kSettled{0.05};

std::string skipped(const std::string& device) {
  return "An earlier operation on " + device +
         " has failed, and MXNet runs nothing that depends on it. Its error comes before this one, "
         "or mx.nd.waitall() raises it.";
}

}  // namespace

void State::stop(const std::string& text) {
  step.fail(text);
  has_failed = step.has_failed();
  for (const LayerPtr& layer : all()) {
    layer->end_meetings(step.why());
    layer->messages.end_waits(step.why());
  }
  note_event();
}

void State::note_event() {
  ++events;
  quiet_looks = 0;
  changed.notify_all();
}

void State::fail(const std::string& text) {
  stop(text);
  throw Error(step.why());
}

void State::fail_without(const Layer& layer, const Layer::Key& key, const Meeting& meeting,
                         const std::string& why) {
  stop(layer.title(key) + ": " + layer.arrivals_text(meeting) + where_missing_wait(layer, meeting) +
       "\n" + why);
}

template <typename IsAbsent>
std::optional<State::Waiting> State::waits_for(const std::set<int64_t>& layers,
                                               const IsAbsent& is_absent) const {
  for (const LayerPtr& layer : all()) {
    if (!layers.count(layer->id)) continue;
    for (const auto& [key, meeting] : layer->meetings) {
      std::set<std::string> absent;
      for (const std::string& device : layer->missing(*meeting)) {
        if (is_absent(*layer, device)) absent.insert(device);
      }
      if (!layer->lacks(*meeting, absent).empty()) return Waiting{layer, key, meeting};
    }
  }
  return std::nullopt;
}

void State::end_without_backward(const Layer& layer) {
  for (const auto& [key, meeting] : layer.meetings) {
    if (key.direction != Direction::kBackward) continue;
    std::set<std::string> gone;
    for (const std::string& device : layer.missing(*meeting)) {
      if (!calls.may_go_backward({layer.id, device}, key.node, key.sequence)) gone.insert(device);
    }
    const std::string device = layer.lacks(*meeting, gone);
    if (!device.empty()) return fail_without(layer, key, *meeting, gone_text(device));
  }
}

std::string State::stuck() const {
  std::set<std::string> waiting;
  for (const LayerPtr& layer : all()) {
    for (const auto& entry : layer->meetings) {
      for (const Meeting::Arrival& arrival : entry.second->arrivals) waiting.insert(arrival.device);
    }
  }
  std::string queued;
  for (const LayerPtr& layer : all()) {
    for (const auto& entry : layer->meetings) {
      const std::vector<std::string> missing = layer->missing(*entry.second);
      if (missing.empty()) return "";
      for (const std::string& device : missing) {
        const Calls::Standing is = calls.standing({layer->id, device}, entry.second->opened);
        if (is != Calls::Standing::kQueued) return "";
        if (waiting.count(device)) continue;
        if (!is_cpu(device)) return "";
        queued = device;
      }
    }
  }
  if (queued.empty()) {
    return "All devices wait for each other, in different calls: they call layers in different "
           "orders; or the losses of several devices were added up on one of them, and MXNet fuses "
           "what waits for one device with what another needs: give autograd.backward the list of "
           "the losses; or " +
           workspaces_text();
  }
  return queued + " has been called, and MXNet cannot run the call, as " + workspaces_text();
}

void Rendezvous::fail(const LayerPtr& layer, const std::string& text) {
  {
    const State::Lock lock(state_->mutex);
    state_->stop(text);
  }
  if (layer) state_->observer.failed(layer->id, text);
}

void Rendezvous::reported(const LayerPtr& layer, const std::string& device) const {
  state_->observer.reports(layer->id, device);
}

void Rendezvous::check_step() const {
  const State::Lock lock(state_->mutex);
  if (!state_->step.runs()) throw Error(state_->step.why());
}

void Rendezvous::recover() {
  const State::Lock lock(state_->mutex);
  state_->step.recover();
  state_->calls.forget();
  state_->has_failed = state_->step.has_failed();
  for (const LayerPtr& layer : state_->all()) {
    layer->align_calls();
    layer->messages.resume();
    if (!layer->config.spans_processes) continue;
    // Each process has counted its own calls.
    layer->first_calls.clear();
    ++layer->configuration;
  }
}

void Rendezvous::after_fork() { recover(); }

void Rendezvous::close(const std::string& reason) {
  const State::Lock lock(state_->mutex);
  std::string text = reason;
  for (const LayerPtr& layer : state_->all()) {
    if (layer->meetings.empty()) continue;
    const auto& [key, meeting] = *layer->meetings.begin();
    text = "The process ended before " + layer->title(key) + " was complete. " +
           layer->arrivals_text(*meeting);
  }
  state_->stop(text);
  state_->step.end(text);
  state_->has_failed = false;
}

std::string Rendezvous::failure() const {
  const State::Lock lock(state_->mutex);
  return state_->step.has_failed() ? state_->step.why() : "";
}

const std::atomic<int>& Rendezvous::has_failed() const { return state_->has_failed; }

Calls::Ticket Rendezvous::ask(int64_t layer, const std::string& device, Calls::Of what) {
  const State::Lock lock(state_->mutex);
  return state_->calls.ask({layer, device}, what);
}

void Rendezvous::answer(Calls::Ticket ticket, bool is_skipped) {
  const State::Lock lock(state_->mutex);
  const auto place = state_->calls.answer(ticket);
  state_->note_event();
  if (!place) return;
  const auto& [id, device] = *place;
  const LayerPtr layer = state_->find(id);
  if (!is_skipped || !layer || !state_->step.runs()) return;
  if (!layer->config.spans_processes && layer->config.meeting_size() < 2) return;
  const auto is_absent = [absent = device](const Layer&, const std::string& missing) {
    return missing == absent;
  };
  if (const auto in = state_->waits_for({id}, is_absent)) {
    state_->fail_without(*in->layer, in->key, *in->meeting, skipped(device));
  } else {
    state_->stop("SyncBatchNorm '" + layer->config.name + "': " + skipped(device));
  }
}

Calls::Ticket Rendezvous::next_ticket() const {
  const State::Lock lock(state_->mutex);
  return state_->calls.next();
}

void Rendezvous::settle(const std::set<int64_t>& layers, Calls::Ticket from,
                        const std::string& why) {
  State::Lock lock(state_->mutex);
  const Calls::Ticket to = state_->calls.next();
  double timeout = 0;
  for (const int64_t id : layers) {
    const LayerPtr layer = state_->find(id);
    if (layer) timeout = std::max(timeout, layer->config.timeout_seconds);
  }
  Patience patience(timeout);
  const Interruption interruption;
  const auto is_not_made = [&](const Layer& layer, const std::string& device) {
    return state_->calls.standing({layer.id, device}, from) == Calls::Standing::kNotMade;
  };
  bool is_quiet = false;
  while (state_->step.runs() && !patience.is_over() && !abandoned) {
    const auto in = state_->waits_for(layers, is_not_made);
    if (state_->calls.have_ended(layers, from, to) || (in && is_quiet)) {
      if (in && !why.empty()) state_->fail_without(*in->layer, in->key, *in->meeting, why);
      return;
    }
    const int64_t events = state_->events;
    const Waited waited = wait_until(&lock, &state_->changed, kSettled.count(), interruption,
                                     [&] { return events != state_->events; });
    if (waited == Waited::kInterrupted) state_->stop("Interrupted.");
    is_quiet = waited == Waited::kTimeIsUp;
  }
}

void Rendezvous::drop(const LayerPtr& layer, const CallId& id, const std::string& device) {
  const State::Lock lock(state_->mutex);
  state_->calls.drop({layer->id, device}, id.node, id.sequence);
  state_->end_without_backward(*layer);
}

}  // namespace gluon_syncbn
