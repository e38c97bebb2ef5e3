#include "processes/step_record.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

namespace gluon_syncbn {
namespace {

// A loop may never end a step.
constexpr size_t kMost = 100000;

}  // namespace

void StepRecord::note(const ProcessCall& call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Position& at = positions_.insert({call.layer, {step_, step_, {}}}).first->second;
  int64_t& calls = at.calls[call.node];
  if (!call.is_backward) {
    calls = call.sequence + 1;
    // A layer whose gamma and beta are not trained has no array that would say so.
    at.backward_step = std::max(at.backward_step, at.forward_step);
  }
  auto& exchanges = exchanges_[call.is_backward ? at.backward_step : at.forward_step];
  exchanges.push_back({call.layer, call.is_backward, call.node, calls - call.sequence});
  if (exchanges.size() > kMost) exchanges.pop_front();
}

int64_t StepRecord::end(const std::vector<int64_t>& layers, const std::vector<int64_t>& kept) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::map<int64_t, Position> positions;
  for (const int64_t layer : layers) {
    const auto found = positions_.find(layer);
    positions[layer] = found == positions_.end() ? Position{step_, step_, {}} : found->second;
  }
  positions_ = std::move(positions);
  // The exchanges of the step that ends may be yet to come.
  std::set<int64_t> known{step_};
  for (const int64_t step : kept) {
    if (const auto found = find(step); found != exchanges_.end()) known.insert(found->first);
  }
  for (auto entry = exchanges_.begin(); entry != exchanges_.end();) {
    entry = known.count(entry->first) ? std::next(entry) : exchanges_.erase(entry);
  }
  return step_++;
}

void StepRecord::enter(int64_t layer, bool is_backward, int64_t step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = positions_.find(layer);
  if (found == positions_.end()) return;
  int64_t& now = is_backward ? found->second.backward_step : found->second.forward_step;
  now = std::max(now, step);
}

StepRecord::Exchanges::const_iterator StepRecord::find(int64_t step) const {
  const auto after = exchanges_.upper_bound(step);
  return after == exchanges_.begin() ? exchanges_.end() : std::prev(after);
}

std::vector<StepRecord::Exchange> StepRecord::of(int64_t step) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = find(step);
  if (found == exchanges_.end()) return {};
  return {found->second.begin(), found->second.end()};
}

}  // namespace gluon_syncbn
