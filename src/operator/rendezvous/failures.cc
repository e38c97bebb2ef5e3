// What happens when something fails. A step goes through all layers, so the step of this process
// fails as a whole, with the text of its first failure. From then until it recovers, each call in
// training ends at once, with zeros. docs/design.md, "After an error", has the table of events.
//
// Each call that ends with the failure reports it to MXNet. So MXNet skips what depends on its
// zeros, in backward and in the Trainer too.
#include <algorithm>

#include "processes/text.h"
#include "rendezvous/rendezvous.h"
#include "threads/waits.h"

namespace gluon_syncbn {
namespace {

// A device that waits for a call which is never made must have waited so long before Python goes on
// without it: it may just have arrived, with the others on their way.
constexpr double kSettledSeconds = 0.05;

std::string skipped(const std::string& device) {
  return "An earlier operation on " + device +
         " has failed, and MXNet runs nothing that depends on it. Its error comes before this one, "
         "or mx.nd.waitall() raises it.";
}

}  // namespace

void Rendezvous::stop(const std::string& text) {
  step_.fail(text);
  has_failed_ = step_.has_failed();
  for (const LayerPtr& layer : all()) {
    layer->end_meetings(step_.why());
    layer->messages.end_waits(step_.why());
  }
  note_event();
}

void Rendezvous::stop_and_throw(const std::string& text) {
  stop(text);
  throw Error(step_.why());
}

void Rendezvous::stop_without(const Waiting& waiting, const std::string& why) {
  const auto& [layer, key, meeting, device] = waiting;
  stop(layer->title(key) + ": " + layer->arrivals_text(*meeting) +
       where_missing_wait(*layer, *meeting) + "\n" + why);
}

void Rendezvous::note_event() {
  ++events_;
  quiet_looks_ = 0;
  changed_.notify_all();
}

std::optional<Rendezvous::Waiting> Rendezvous::waits_for(const std::set<int64_t>& layers,
                                                         const IsAbsent& is_absent) const {
  for (const LayerPtr& layer : all()) {
    if (!layers.count(layer->id)) continue;
    for (const auto& [key, meeting] : layer->meetings) {
      std::set<std::string> absent;
      for (const std::string& device : layer->missing(*meeting)) {
        if (is_absent(*layer, key, device)) absent.insert(device);
      }
      const std::string device = layer->lacks(*meeting, absent);
      if (!device.empty()) return Waiting{layer, key, meeting, device};
    }
  }
  return std::nullopt;
}

void Rendezvous::stop_without_backward(const Layer& layer) {
  const auto has_gone = [&](const Layer&, const Layer::Key& key, const std::string& device) {
    return key.direction == Direction::kBackward &&
           !calls_.may_go_backward({layer.id, device}, key.node, key.sequence);
  };
  const auto in = waits_for({layer.id}, has_gone);
  if (in) stop_without(*in, gone_text(in->lacks));
}

std::string Rendezvous::where_missing_wait(const Layer& layer, const Meeting& meeting) const {
  for (const LayerPtr& other : all()) {
    for (const auto& [key, waiting] : other->meetings) {
      const std::vector<std::string> awaited = other->missing(*waiting);
      if (waiting.get() == &meeting || awaited.empty()) continue;
      for (const std::string& device : layer.missing(meeting)) {
        if (!waiting->has(device)) continue;
        return " " + device + " waits for " + comma_separated(awaited) + " in " +
               other->title(key) + ".";
      }
    }
  }
  return "";
}

void Rendezvous::fail(const LayerPtr& layer, const std::string& text) {
  {
    const Lock lock(mutex_);
    stop(text);
  }
  if (layer) observer_.failed(layer->id, text);
}

void Rendezvous::check_step() const {
  const Lock lock(mutex_);
  if (!step_.runs()) throw Error(step_.why());
}

void Rendezvous::recover() {
  const Lock lock(mutex_);
  step_.recover();
  calls_.forget();
  has_failed_ = step_.has_failed();
  for (const LayerPtr& layer : all()) {
    layer->align_calls();
    layer->messages.resume();
    if (!layer->config.spans_processes) continue;
    // Each process has counted its own calls.
    layer->first_calls.clear();
    ++layer->configuration;
  }
}

void Rendezvous::close(const std::string& reason) {
  const Lock lock(mutex_);
  std::string text = reason;
  for (const LayerPtr& layer : all()) {
    if (layer->meetings.empty()) continue;
    const auto& [key, meeting] = *layer->meetings.begin();
    text = "The process ended before " + layer->title(key) + " was complete. " +
           layer->arrivals_text(*meeting);
  }
  stop(text);
  step_.end(text);
  has_failed_ = false;
}

std::string Rendezvous::failure() const {
  const Lock lock(mutex_);
  return step_.has_failed() ? step_.why() : "";
}

Calls::Ticket Rendezvous::ask(int64_t layer, const std::string& device, Calls::Of what) {
  const Lock lock(mutex_);
  return calls_.ask({layer, device}, what);
}

void Rendezvous::answer(Calls::Ticket ticket, bool is_skipped) {
  const Lock lock(mutex_);
  const auto place = calls_.answer(ticket);
  note_event();
  if (!place || !is_skipped || !step_.runs()) return;
  const LayerPtr layer = find_locked(place->first);
  if (!layer || !layer->meets()) return;
  const auto is_skipped_one = [&](const Layer&, const Layer::Key&, const std::string& missing) {
    return missing == place->second;
  };
  const std::string why = skipped(place->second);
  if (const auto in = waits_for({layer->id}, is_skipped_one)) {
    stop_without(*in, why);
  } else {
    stop("SyncBatchNorm '" + layer->config.name + "': " + why);
  }
}

Calls::Ticket Rendezvous::next_ticket() const {
  const Lock lock(mutex_);
  return calls_.next();
}

void Rendezvous::settle(const std::set<int64_t>& layers, Calls::Ticket from,
                        const std::string& why) {
  Lock lock(mutex_);
  const Calls::Ticket to = calls_.next();
  double timeout = 0;
  for (const LayerPtr& layer : all()) {
    if (layers.count(layer->id)) timeout = std::max(timeout, layer->config.timeout_seconds);
  }
  Patience patience(timeout);
  const Interruption interruption;
  const auto is_not_made = [&](const Layer& layer, const Layer::Key&, const std::string& device) {
    return calls_.standing({layer.id, device}, from) == Calls::Standing::kNotMade;
  };
  bool is_quiet = false;
  while (step_.runs() && !patience.is_over() && !abandoned) {
    const auto in = waits_for(layers, is_not_made);
    if (calls_.have_ended(layers, from, to) || (in && is_quiet)) {
      if (in && !why.empty()) stop_without(*in, why);
      return;
    }
    const int64_t events = events_;
    const Waited waited = wait_until(&lock, &changed_, kSettledSeconds, interruption,
                                     [&] { return events != events_; });
    if (waited == Waited::kInterrupted) stop("Interrupted.");
    is_quiet = waited == Waited::kTimeIsUp;
  }
}

void Rendezvous::drop(const LayerPtr& layer, const CallId& id, const std::string& device) {
  const Lock lock(mutex_);
  calls_.drop({layer->id, device}, id.node, id.sequence);
  stop_without_backward(*layer);
}

}  // namespace gluon_syncbn
