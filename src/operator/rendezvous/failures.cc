// What happens when something fails. A step goes through all layers, so the step of this process
// fails as a whole, with the text of its first failure. From then until Python has raised it, each
// call that would meet others ends at once, with zeros. docs/design.md, "After an error", has the
// table of events.
//
// At most one call of a step reports an error to MXNet, because MXNet's engine appends errors to a
// list without a lock. What depends on that call is skipped, in backward and in the Trainer too.
#include <algorithm>
#include <utility>

#include "mxnet/waits.h"
#include "rendezvous/rendezvous.h"
#include "rendezvous/state.h"

namespace gluon_syncbn {

bool State::end_step(Step to, const std::string& text) {
  const bool was_running = step == Step::kRunning;
  if (was_running) failure = text;
  step = std::max(step, to);
  for (const LayerPtr& layer : all()) {
    layer->end_meetings(failure);
    layer->messages.end_waits(failure);
  }
  changed.notify_all();
  return was_running;
}

void State::end_step_of_calls(Step to, const std::string& text) {
  if (step == Step::kRunning) {
    for (const LayerPtr& layer : all()) {
      if (layer->meetings.empty()) continue;
      layer->meetings.begin()->second->is_first_failure = true;
      break;
    }
  }
  end_step(to, text);
}

void State::fail(const std::string& text) {
  if (!end_step(Step::kFailed, text)) throw Error(failure);
  throw Error(text, true);
}

void State::fail_without(const Layer& layer, const Layer::Key& key, const Meeting& meeting,
                         const std::string& why) {
  end_step(Step::kFailed, layer.title(key) + ": " + layer.arrivals_text(meeting) +
                              where_missing_wait(layer, meeting) + "\n" + why);
}

namespace {

std::string skipped(const std::string& device) {
  return "An earlier operation on " + device +
         " has failed, and MXNet runs nothing that depends on it. Its error comes before this one, "
         "or "
         "mx.nd.waitall() raises it.";
}

}  // namespace

bool Rendezvous::fail(const LayerPtr& layer, const std::string& text) {
  const bool is_first = fail(text);
  tell(layer, text);
  return is_first;
}

bool Rendezvous::fail(const std::string& text) {
  const State::Lock lock(state_->mutex);
  return state_->end_step(Step::kFailed, text);
}

void Rendezvous::tell(const LayerPtr& layer, const std::string& text) const {
  if (layer) state_->observer.failed(layer->id, text);
}

void Rendezvous::unreachable(int64_t id, const std::string& device) {
  const State::Lock lock(state_->mutex);
  if (state_->step != Step::kRunning) return;
  for (const LayerPtr& layer : state_->all()) {
    for (const auto& [key, meeting] : layer->meetings) {
      if (meeting->id != id || layer->lacks(*meeting, {device}).empty()) continue;
      state_->fail_without(*layer, key, *meeting, skipped(device));
      return;
    }
  }
}

void Rendezvous::resume() {
  const State::Lock lock(state_->mutex);
  if (state_->step == Step::kEnded) return;
  state_->step = Step::kRunning;
  for (const LayerPtr& layer : state_->all()) {
    layer->align_calls();
    layer->messages.resume();
    if (!layer->config.spans_processes) continue;
    // Each process has counted its own calls.
    layer->first_calls.clear();
    ++layer->configuration;
  }
}

void Rendezvous::after_fork() { resume(); }

void Rendezvous::close(const std::string& reason) {
  const State::Lock lock(state_->mutex);
  std::string text = reason;
  for (const LayerPtr& layer : state_->all()) {
    if (layer->meetings.empty()) continue;
    const auto& [key, meeting] = *layer->meetings.begin();
    text = "The process ended before " + layer->title(key) + " was complete. " +
           layer->arrivals_text(*meeting);
  }
  state_->end_step_of_calls(Step::kEnded, text);
}

std::string Rendezvous::failure() const {
  const State::Lock lock(state_->mutex);
  return state_->step == Step::kFailed ? state_->failure : "";
}

void Rendezvous::add(const FlushPtr& flush, int64_t id) {
  const State::Lock lock(state_->mutex);
  const LayerPtr layer = state_->find(id);
  const double timeout = layer ? layer->config.timeout_seconds : 0;
  flush->timeout_seconds = std::max(flush->timeout_seconds, timeout);
  ++flush->pending;
}

void Rendezvous::passed(const FlushPtr& flush, int64_t id, Direction direction,
                        const std::string& device) {
  const State::Lock lock(state_->mutex);
  flush->passed[{id, direction}].insert(device);
  --flush->pending;
  state_->changed.notify_all();
}

void Rendezvous::finish(const FlushPtr& flush, const std::string& why) {
  State::Lock lock(state_->mutex);
  // Ends the step if a call waits for a device where all calls have ended, or been skipped. Returns
  // whether it has.
  const auto ends_in_vain = [&] {
    for (const auto& [place, devices] : flush->passed) {
      const LayerPtr layer = state_->find(place.first);
      if (!layer) continue;
      for (const auto& [key, meeting] : layer->meetings) {
        const std::string device =
            key.direction == place.second ? layer->lacks(*meeting, devices) : "";
        if (device.empty()) continue;
        state_->fail_without(*layer, key, *meeting, why.empty() ? skipped(device) : why);
        return true;
      }
    }
    return false;
  };
  Patience patience(flush->timeout_seconds);
  const Interruption interruption;
  while (flush->pending > 0 && !patience.is_over() && !abandoned) {
    const Waited waited =
        wait_until(&lock, &state_->changed, patience.slice(kSlice).count(), interruption,
                   [&] { return flush->pending == 0 || ends_in_vain(); });
    if (waited == Waited::kInterrupted) state_->end_step_of_calls(Step::kFailed, "Interrupted.");
  }
}

}  // namespace gluon_syncbn
