#include "numerics/running_statistics.h"

#include <algorithm>
#include <cstring>

namespace gluon_syncbn {
namespace {

bool same(const Batch& a, const Batch& b) {
  return a.count == b.count && a.channels.size() == b.channels.size() &&
         std::memcmp(a.channels.data(), b.channels.data(),
                     a.channels.size() * sizeof(Statistics)) == 0;
}

}  // namespace

template <typename P, typename F>
void RunningState::update_average(size_t count, const F& batch_value, double momentum,
                                  size_t channels, P* running, Virtual* state) {
  const auto next = [&](double value, size_t i, size_t c) {
    return static_cast<P>(moving_average(value, batch_value(i, c), momentum));
  };
  if (count == 1) {
    for (size_t c = 0; c < channels; ++c) running[c] = next(running[c], 0, c);
    return;
  }
  if (state->each.size() != count * channels ||
      !std::equal(state->mean.begin(), state->mean.end(), running)) {
    state->each.clear();
    for (size_t i = 0; i < count; ++i) {
      state->each.insert(state->each.end(), running, running + channels);
    }
  }
  state->mean.resize(channels);
  for (size_t c = 0; c < channels; ++c) {
    P sum = 0;
    for (size_t j = 0; j < count; ++j) {
      // In the order of add_n.
      const size_t i = count <= 4 ? count - 1 - j : j;
      const P value = next(state->each[i * channels + c], i, c);
      state->each[i * channels + c] = value;
      sum = j == 0 ? value : sum + value;
    }
    running[c] = sum / static_cast<P>(count);
    state->mean[c] = running[c];
  }
}

template <typename P>
void RunningState::update(const std::vector<BatchPtr>& batches, const RunningRule& rule,
                          const RunningArrays<P>& arrays) {
  const std::lock_guard<std::mutex> lock(mutex_);
  double momentum = rule.momentum;
  if (rule.cumulative) {
    *arrays.num_batches += 1;
    momentum = cumulative_momentum(*arrays.num_batches);
  }
  const size_t channels = batches[0]->channels.size();
  update_average(
      batches.size(), [&](size_t i, size_t c) { return batches[i]->channels[c].mean; }, momentum,
      channels, arrays.mean, &mean_);
  update_average(
      batches.size(),
      [&](size_t i, size_t c) {
        return running_variance(batches[i]->channels[c], batches[i]->count, rule.unbiased);
      },
      momentum, channels, arrays.variance, &variance_);
}

template void RunningState::update(const std::vector<BatchPtr>&, const RunningRule&,
                                   const RunningArrays<float>&);
template void RunningState::update(const std::vector<BatchPtr>&, const RunningRule&,
                                   const RunningArrays<double>&);

void RunningState::restart(bool variance) {
  const std::lock_guard<std::mutex> lock(mutex_);
  (variance ? variance_ : mean_) = Virtual();
}

bool RunningState::is_recomputed(int64_t node, int64_t call, const std::vector<BatchPtr>& batches) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Computed& last = computed_[node];
  const auto equal = [](const BatchPtr& a, const BatchPtr& b) { return same(*a, *b); };
  if (last.call != call &&
      std::equal(last.batches.begin(), last.batches.end(), batches.begin(), batches.end(), equal)) {
    return true;
  }
  last = {call, batches};
  return false;
}

void RunningState::on_backward(int64_t node, int64_t call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto last = computed_.find(node);
  if (last != computed_.end() && last->second.call == call) computed_.erase(last);
}

void RunningStates::keep(int64_t layer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  kept_.insert(layer);
}

void RunningStates::forget(int64_t layer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  kept_.erase(layer);
  states_.erase(states_.lower_bound({layer, ""}), states_.lower_bound({layer + 1, ""}));
}

std::shared_ptr<RunningState> RunningStates::of(int64_t layer, const std::string& device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!kept_.count(layer)) return std::make_shared<RunningState>();
  std::shared_ptr<RunningState>& state = states_[{layer, device}];
  if (!state) state = std::make_shared<RunningState>();
  return state;
}

void RunningStates::restart(int64_t layer, bool variance) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto state = states_.lower_bound({layer, ""}); state != states_.lower_bound({layer + 1, ""});
       ++state) {
    state->second->restart(variance);
  }
}

}  // namespace gluon_syncbn
