// How a failed step ends, and what may begin after it: a device takes part again once all that it
// had begun before the error has passed.
#include <algorithm>
#include <utility>

#include "rendezvous/rendezvous.h"
#include "rendezvous/state.h"

namespace gluon_syncbn {

void Rendezvous::fail(const LayerPtr& layer, const CallId& id, Direction direction,
                      const std::string& device, const std::string& text) {
  State::Lock lock(state_->mutex);
  if (!layer || !state_->closed.empty() || id.epoch != layer->epoch) return;
  state_->end_step(&lock, layer.get(), text, device,
                   direction == Direction::kForward ? &id : nullptr);
}

void Rendezvous::give_up(const std::string& reason) {
  State::Lock lock(state_->mutex);
  state_->given_up = reason;
  if (reason.empty() || !state_->closed.empty()) return;
  std::vector<std::pair<LayerPtr, std::string>> waiting;
  for (const LayerPtr& layer : state_->all()) {
    if (layer->open.empty()) continue;
    waiting.emplace_back(layer, layer->title(layer->open.begin()->first) + ": " + reason);
  }
  for (const auto& [layer, text] : waiting) {
    state_->end_step(&lock, layer.get(), text);
    lock.lock();
  }
}

void Rendezvous::unreachable(int64_t id, int64_t epoch, Direction direction,
                             const std::string& device) {
  const State::Lock lock(state_->mutex);
  const LayerPtr layer = state_->find(id);
  if (layer && layer->epoch == epoch) layer->give_up_on({device}, direction);
}

void Rendezvous::begin_flush(int64_t id, Direction direction,
                             const std::vector<std::string>& devices) {
  const State::Lock lock(state_->mutex);
  const LayerPtr layer = state_->find(id);
  if (!layer) return;
  Layer::Flush& flush = layer->flushes[direction];
  for (const std::string& device : devices) {
    ++flush.pending[device];
    flush.passed.erase(device);
  }
}

void Rendezvous::end_flush(int64_t id, Direction direction, const std::string& device) {
  const State::Lock lock(state_->mutex);
  const LayerPtr layer = state_->find(id);
  if (!layer) return;
  Layer::Flush& flush = layer->flushes[direction];
  if (flush.pending.count(device) && --flush.pending[device] > 0) return;
  flush.pending.erase(device);
  flush.passed.insert(device);
  layer->give_up_on(flush.passed, direction);
  if (flush.pending.empty()) flush.passed.clear();
}

double Rendezvous::flushing() const {
  const State::Lock lock(state_->mutex);
  double longest = 0;
  for (const LayerPtr& layer : state_->all()) {
    for (const auto& entry : layer->flushes) {
      if (!entry.second.pending.empty()) longest = std::max(longest, layer->config.timeout_seconds);
    }
  }
  return longest;
}

void Rendezvous::drain(int64_t id, int64_t epoch, const std::string& device) {
  const State::Lock lock(state_->mutex);
  const LayerPtr layer = state_->find(id);
  if (layer && layer->epoch == epoch) layer->draining.erase(device);
}

void Rendezvous::report_next(const std::string& text) {
  const State::Lock lock(state_->mutex);
  state_->unreported = text;
}

void Rendezvous::after_fork() {
  const State::Lock lock(state_->mutex);
  for (const LayerPtr& layer : state_->all()) {
    layer->start_epoch("It began before this process was forked.");
    layer->draining.clear();
    layer->flushes.clear();
  }
}

void Rendezvous::close(const std::string& reason) {
  const State::Lock lock(state_->mutex);
  state_->closed = reason;
  for (const LayerPtr& layer : state_->all()) {
    if (layer->open.empty()) continue;
    const auto& [key, meeting] = *layer->open.begin();
    state_->closed = "The process ended before " + layer->title(key) + " was complete. " +
                     layer->arrivals_text(*meeting);
    layer->fail(state_->closed);
  }
  for (const LayerPtr& layer : state_->all())
    layer->messages.start_epoch(LayerMessages::kClosed, state_->closed);
}

}  // namespace gluon_syncbn
