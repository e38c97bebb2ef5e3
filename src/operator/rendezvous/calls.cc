// Which calls belong together, and who takes part in them. Each device counts its forward calls, so
// a call's id needs no communication; a device that should not be in the step is found here, before
// any other waits for it.
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
  return !state_->joined || (layer && layer->config.spans_processes);
}

CallId Rendezvous::next_call(const LayerPtr& layer, const std::string& device, int64_t node) {
  CallId id;
  id.node = node;
  std::string notice;
  try {
    const State::Lock lock(state_->mutex);
    const LayerConfig& config = layer->config;
    id.active = layer->active_here(state_->active);
    id.configuration = layer->configuration;
    id.meets = config.spans_processes || config.meeting_size() > 1;
    state_->check_call(*layer, id);
    state_->check_configuration(*layer, device);
    state_->check_participants(*layer, device, id.active);
    auto& calls = layer->forward_calls[device];
    id.sequence = calls.insert({node, layer->first_calls[node]}).first->second++;
    state_->calls.begin({layer->id, device}, node, id.sequence);
    if (!config.notice.empty() && !std::exchange(state_->has_noticed, true)) notice = config.notice;
  } catch (const Error& error) {
    state_->observer.failed(layer->id, error.what());
    throw;
  }
  if (!notice.empty()) warn(notice);
  return id;
}

void State::check_call(const Layer& layer, const CallId& id) {
  if (!step.runs()) throw Error(step.why());
  if (id.configuration == layer.configuration) return;
  fail("SyncBatchNorm '" + layer.config.name +
       "' goes backward through a call of a step that has failed, or before its devices "
       "changed: they are " +
       comma_separated(layer.config.devices) + ".");
}

// An error on one device reaches all at once, so that no other device waits for it.
void State::check_configuration(const Layer& layer, const std::string& device) {
  const LayerConfig& config = layer.config;
  if (!config.config_error.empty()) fail(config.config_error);
  if (config.devices.empty()) return;
  const auto devices = [&] {
    return std::to_string(config.devices.size()) + " (" + comma_separated(config.devices) + ")";
  };
  if (config.meeting_size() > config.devices.size()) {
    fail("SyncBatchNorm '" + config.name + "' was made with num_devices=" +
         std::to_string(config.num_devices) + ", but the devices of its parameters are " +
         devices() + ". Leave num_devices out, or initialize the net on all devices.");
  }
  if (!contains(config.devices, device)) {
    fail("SyncBatchNorm '" + config.name + "' was called on " + device + ", but its devices are " +
         devices() +
         ". Initialize the net on every device in use, or name them all in its SyncGroup.");
  }
}

void State::check_participants(const Layer& layer, const std::string& device,
                               const ActiveDevices& active) {
  const LayerConfig& config = layer.config;
  if (active && !contains(*active, device)) {
    fail("SyncBatchNorm '" + config.name + "' was called on " + device +
         ", but the active devices of this step are " + comma_separated(*active) +
         ": name it in gluon_syncbn.participants.");
  }
  const auto& calls = layer.forward_calls;
  const size_t most = config.devices.empty() ? config.meeting_size() : config.num_devices;
  if (!most || calls.size() != most || calls.count(device)) return;
  if (!config.num_devices) {
    fail("SyncBatchNorm '" + config.name + "' was called on " + calls.begin()->first + " and on " +
         device +
         " by a graph that has parameters of its own, so the number of devices is unknown. "
         "Call gluon_syncbn.convert_sync_batchnorm(net), which lets the graph of a SymbolBlock "
         "synchronize on the graph's parameters, or make the layer with num_devices or with a "
         "SyncGroup that names the devices.");
  }
  fail("SyncBatchNorm '" + config.name +
       "' was made with num_devices=" + std::to_string(config.num_devices) + ", and " + device +
       " arrived after as many others. Leave num_devices out, or name the devices that take "
       "part in a SyncGroup.");
}

Members Rendezvous::members_of(const LayerPtr& layer, const CallId& id,
                               const std::string& device) const {
  const State::Lock lock(state_->mutex);
  std::vector<std::string> devices = layer->group_of(device, id.active);
  const size_t count = id.active ? devices.size() : layer->config.meeting_size();
  return {count, std::move(devices), layer->config.spans_processes};
}

}  // namespace gluon_syncbn
