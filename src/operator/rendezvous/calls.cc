// Which calls belong together, and who takes part in them.
#include <utility>

#include "rendezvous/rendezvous.h"
#include "rendezvous/state.h"

namespace gluon_syncbn {

void Rendezvous::set_active_devices(const std::vector<std::string>& devices) {
  const State::Lock lock(state_->mutex);
  state_->active =
      devices.empty() ? nullptr : std::make_shared<const std::vector<std::string>>(devices);
  for (const LayerPtr& layer : state_->all()) layer->align_calls();
}

void Rendezvous::set_joined(bool joined) {
  const State::Lock lock(state_->mutex);
  state_->joined = joined;
}

bool Rendezvous::has_data(const LayerPtr& layer) const {
  const State::Lock lock(state_->mutex);
  return !state_->joined || (layer && layer->config.exchanges());
}

CallId Rendezvous::next_call(const LayerPtr& layer, const std::string& device, int64_t node) {
  State::Lock lock(state_->mutex);
  state_->check_open(layer);
  const LayerConfig& config = layer->config;
  // An error on one device reaches all at once, so that no other device waits for it.
  const auto fail = [&](const std::string& text) { state_->fail(&lock, layer.get(), text); };
  if (!state_->unreported.empty()) {
    const std::string text = std::exchange(state_->unreported, "");
    fail("An earlier step had failed, which was found before a fork. " + text);
  }
  if (!config.config_error.empty()) fail(config.config_error);
  const bool is_known = !config.devices.empty();
  const auto devices = [&] {
    return std::to_string(config.devices.size()) + " (" + comma_separated(config.devices) + ")";
  };
  if (is_known && config.meeting_size() > config.devices.size()) {
    fail("SyncBatchNorm '" + config.name + "' was made with num_devices=" +
         std::to_string(config.num_devices) + ", but the devices of its parameters are " +
         devices() + ". Leave num_devices out, or initialize the net on all devices.");
  }
  if (is_known && !contains(config.devices, device)) {
    fail("SyncBatchNorm '" + config.name + "' was called on " + device + ", but its devices are " +
         devices() +
         ". Initialize the net on every device in use, or name them all in its SyncGroup.");
  }
  if (const auto& flush = layer->flushes[Direction::kForward]; flush.passed.count(device)) {
    throw Error("SyncBatchNorm '" + config.name + "' was called on " + device +
                " after an error of MXNet, and operations of the step that failed are still under "
                "way on " +
                flush.pending.begin()->first + ": call mx.nd.waitall() first.");
  }
  if (const auto late = layer->late.find(node); late != layer->late.end()) {
    if (late->second.erase(device)) throw layer->failed_before();
    if (!layer->draining.count(device)) layer->late.erase(late);
  }
  if (layer->draining.count(device)) throw layer->failed_before();
  const ActiveDevices active = layer->active_here(state_->active);
  if (active && !contains(*active, device)) {
    fail("SyncBatchNorm '" + config.name + "' was called on " + device +
         ", but the active devices of this step are " + comma_separated(*active) +
         ": name it in gluon_syncbn.participants.");
  }
  const size_t most = is_known ? config.num_devices : config.meeting_size();
  if (most && layer->forward_calls.size() == most && !layer->forward_calls.count(device)) {
    if (!config.num_devices) {
      fail("SyncBatchNorm '" + config.name + "' was called on " +
           layer->forward_calls.begin()->first + " and on " + device +
           " by a graph that has parameters of its own, so the number of devices is unknown. Call "
           "gluon_syncbn.convert_sync_batchnorm(net), which lets the graph of a SymbolBlock "
           "synchronize on the graph's parameters, or make the layer with num_devices or with a "
           "SyncGroup that names the devices.");
    }
    fail("SyncBatchNorm '" + config.name + "' was made with num_devices=" +
         std::to_string(config.num_devices) + ", and after as many others " + device +
         " came too. Leave num_devices out, or name the devices that take part in a SyncGroup.");
  }
  auto& calls = layer->forward_calls[device];
  const int64_t sequence = calls.insert({node, layer->first_calls[node]}).first->second++;
  const CallId id{layer->epoch, node, sequence, active};
  if (!config.notice.empty() && !std::exchange(state_->has_noticed, true)) {
    const auto warn = state_->observer.warn;
    const std::string notice = config.notice;
    lock.unlock();
    if (warn) warn(notice);
  }
  return id;
}

Members Rendezvous::members_of(const LayerPtr& layer, const CallId& id,
                               const std::string& device) const {
  const State::Lock lock(state_->mutex);
  state_->check_open(layer);
  if (id.epoch != layer->epoch) throw layer->failed_before();
  std::vector<std::string> devices = layer->group_of(device, id.active);
  const size_t count = id.active ? devices.size() : layer->config.meeting_size();
  return {count, std::move(devices), layer->config.exchanges()};
}

}  // namespace gluon_syncbn
