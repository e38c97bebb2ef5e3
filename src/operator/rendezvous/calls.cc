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

void Rendezvous::set_joined(bool joined, bool must_have_samples) {
  const State::Lock lock(state_->mutex);
  state_->joined = joined;
  state_->must_have_samples = must_have_samples;
}

bool Rendezvous::has_data(const LayerPtr& layer) const {
  const State::Lock lock(state_->mutex);
  return !state_->joined || (layer && layer->config.spans_processes);
}

CallId Rendezvous::next_call(const LayerPtr& layer, const std::string& device, int64_t node) {
  State::Lock lock(state_->mutex);
  state_->check_open(layer);
  state_->check_configuration(&lock, layer.get(), device);
  layer->check_step(device, node);
  const ActiveDevices active = layer->active_here(state_->active);
  state_->check_participants(&lock, layer.get(), device, active);
  auto& calls = layer->forward_calls[device];
  const int64_t sequence = calls.insert({node, layer->first_calls[node]}).first->second++;
  const CallId id{layer->epoch, node, sequence, active};
  if (!layer->config.notice.empty() && !std::exchange(state_->has_noticed, true)) {
    const std::string notice = layer->config.notice;
    lock.unlock();
    warn(notice);
  }
  return id;
}

// An error on one device reaches all at once, so that no other device waits for it.
void State::check_configuration(Lock* lock, Layer* layer, const std::string& device) {
  const LayerConfig& config = layer->config;
  if (!unreported.empty()) {
    const std::string text = std::exchange(unreported, "");
    fail(lock, layer, "An earlier step had failed, which was found before a fork. " + text);
  }
  if (!config.config_error.empty()) fail(lock, layer, config.config_error);
  if (config.devices.empty()) return;
  const auto devices = [&] {
    return std::to_string(config.devices.size()) + " (" + comma_separated(config.devices) + ")";
  };
  if (config.meeting_size() > config.devices.size()) {
    fail(lock, layer,
         "SyncBatchNorm '" + config.name + "' was made with num_devices=" +
             std::to_string(config.num_devices) + ", but the devices of its parameters are " +
             devices() + ". Leave num_devices out, or initialize the net on all devices.");
  }
  if (!contains(config.devices, device)) {
    fail(lock, layer,
         "SyncBatchNorm '" + config.name + "' was called on " + device + ", but its devices are " +
             devices() +
             ". Initialize the net on every device in use, or name them all in its SyncGroup.");
  }
}

void Layer::check_step(const std::string& device, int64_t node) {
  if (const auto& flush = flushes[Direction::kForward]; flush.passed.count(device)) {
    throw Error("SyncBatchNorm '" + config.name + "' was called on " + device +
                " after an error of MXNet, and operations of the step that failed are still under "
                "way on " +
                flush.pending.begin()->first + ": call mx.nd.waitall() first.");
  }
  if (const auto last = late.find(node); last != late.end()) {
    if (last->second.erase(device)) throw failed_before();
    if (!draining.count(device)) late.erase(last);
  }
  if (draining.count(device)) throw failed_before();
}

void State::check_participants(Lock* lock, Layer* layer, const std::string& device,
                               const ActiveDevices& active) {
  const LayerConfig& config = layer->config;
  if (active && !contains(*active, device)) {
    fail(lock, layer,
         "SyncBatchNorm '" + config.name + "' was called on " + device +
             ", but the active devices of this step are " + comma_separated(*active) +
             ": name it in gluon_syncbn.participants.");
  }
  const auto& calls = layer->forward_calls;
  const size_t most = config.devices.empty() ? config.meeting_size() : config.num_devices;
  if (!most || calls.size() != most || calls.count(device)) return;
  if (!config.num_devices) {
    fail(lock, layer,
         "SyncBatchNorm '" + config.name + "' was called on " + calls.begin()->first + " and on " +
             device +
             " by a graph that has parameters of its own, so the number of devices is unknown. "
             "Call gluon_syncbn.convert_sync_batchnorm(net), which lets the graph of a SymbolBlock "
             "synchronize on the graph's parameters, or make the layer with num_devices or with a "
             "SyncGroup that names the devices.");
  }
  fail(lock, layer,
       "SyncBatchNorm '" + config.name +
           "' was made with num_devices=" + std::to_string(config.num_devices) + ", and " + device +
           " arrived after as many others. Leave num_devices out, or name the devices that take "
           "part in a SyncGroup.");
}

Members Rendezvous::members_of(const LayerPtr& layer, const CallId& id,
                               const std::string& device) const {
  const State::Lock lock(state_->mutex);
  state_->check_open(layer);
  if (id.epoch != layer->epoch) throw layer->failed_before();
  std::vector<std::string> devices = layer->group_of(device, id.active);
  const size_t count = id.active ? devices.size() : layer->config.meeting_size();
  return {count, std::move(devices), layer->config.spans_processes};
}

}  // namespace gluon_syncbn
