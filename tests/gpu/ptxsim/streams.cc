#include "streams.h"

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "ptx.h"

namespace ptxsim {

Streams::Streams(const char* order, Races* races)
    : races_(races), host_{races->add_timeline("the host")} {
  set_order(order);
}

void Streams::set_order(const char* order) {
  for (auto& [handle, each] : streams_) do_all(&each);
  random_.reset();
  calls_left_ = 0;
  idle_device_ = -1;
  defers_ = order && *order;
  if (!defers_ || std::string(order) == "late") return;
  char* end;
  const unsigned long seed = std::strtoul(order, &end, 10);
  if (*end) stop(std::string("an order of streams is 'late' or a number, not ") + order);
  random_.emplace(static_cast<unsigned>(seed));
}

void* Streams::create(int device, bool blocking) {
  last_handle_ += 16;
  const std::string name = "stream " + std::to_string(last_handle_ / 16 - 0x100) + " of device ";
  const uint32_t timeline = races_->add_timeline(name + std::to_string(device));
  void* const handle = reinterpret_cast<void*>(last_handle_);
  streams_[handle] = {device, blocking, {}, {timeline}};
  return handle;
}

bool Streams::destroy(void* stream) {
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return false;
  Stream& old = found->second;
  do_all(&old);
  join(&gone_[old.device], old.timeline.clock);
  if (old.blocking) join(&null_of(old.device).clock, old.timeline.clock);
  streams_.erase(found);
  return true;
}

std::optional<int> Streams::device_of(void* stream) const {
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return {};
  return found->second.device;
}

Streams::Timeline& Streams::null_of(int device) {
  const auto [found, is_new] = nulls_.try_emplace(device);
  const std::string name = "the null stream of device " + std::to_string(device);
  if (is_new) found->second.number = races_->add_timeline(name);
  return found->second;
}

Streams::Timeline& Streams::order(void* stream, int device) {
  Stream* const own = stream ? &streams_.at(stream) : nullptr;
  Timeline& timeline = own ? own->timeline : null_of(device);
  join(&timeline.clock, host_.clock);
  if (own && own->blocking) join(&timeline.clock, null_of(device).clock);
  if (own) return timeline;
  for (const auto& [handle, each] : streams_) {
    if (each.device == device && each.blocking) join(&timeline.clock, each.timeline.clock);
  }
  return timeline;
}

void Streams::queue(void* stream, int device, const char* name, std::function<void()> work) {
  Timeline& timeline = order(stream, device);
  push(stream, device,
       {std::move(work), nullptr, races_->add(name, timeline.number, &timeline.clock)});
}

void Streams::act(const char* name) {
  races_->start(races_->add(name, host_.number, &host_.clock));
}

Mark Streams::record(void* stream, int device) {
  const Mark mark{stream, std::make_shared<bool>(false), order(stream, device).clock};
  push(stream, device, {[passed = mark.passed] { *passed = true; }});
  return mark;
}

void Streams::wait(void* stream, int device, const Mark& mark) {
  join(&order(stream, device).clock, mark.clock);
  push(stream, device, {[=, this] { reach(mark); }, mark.passed});
}

void Streams::push(void* stream, int device, Item item) {
  if (defers_ && stream) {
    streams_.at(stream).items.push_back(std::move(item));
    do_some();
  } else {
    catch_up(stream, device);
    run(item);
  }
}

// A mark of a null stream has been passed when it was made, and a stream does its work before it
// is destroyed. So there is a stream as long as its mark has not been passed.
void Streams::reach(const Mark& mark) {
  while (!*mark.passed) do_next(&streams_.at(mark.stream));
}

void Streams::catch_up(void* stream, int device) {
  if (stream) return do_all(&streams_.at(stream));
  for (auto& [handle, each] : streams_) {
    if (each.device == device && each.blocking) do_all(&each);
  }
}

void Streams::finish(void* stream, int device) {
  catch_up(stream, device);
  join(&host_.clock, order(stream, device).clock);
}

void Streams::finish_device(int device) {
  finish(nullptr, device);
  join(&host_.clock, gone_[device]);
  for (auto& [handle, each] : streams_) {
    if (each.device == device) finish(handle, device);
  }
}

void Streams::run(const Item& item) {
  if (item.operation.number) races_->start(item.operation);
  item.work();
}

void Streams::do_next(Stream* stream) {
  const Item item = std::move(stream->items.front());
  stream->items.pop_front();
  run(item);
}

void Streams::do_all(Stream* stream) {
  while (!stream->items.empty()) do_next(stream);
}

int Streams::draw(int count) {
  return static_cast<int>((*random_)() % static_cast<unsigned>(count));
}

Streams::Stream* Streams::draw_busy() {
  std::vector<Stream*> busy;
  for (auto& [handle, each] : streams_) {
    if (!each.items.empty() && each.device != idle_device_) busy.push_back(&each);
  }
  return busy.empty() ? nullptr : busy[static_cast<size_t>(draw(static_cast<int>(busy.size())))];
}

// Some streams do a part of their work, as far as no event holds them back. How often this happens,
// and which device does nothing at all, changes from time to time.
void Streams::do_some() {
  if (!random_) return;
  if (--calls_left_ < 0) {
    constexpr int kPercents[] = {0, 0, 3, 10, 30, 100};
    calls_left_ = draw(60);
    percent_ = kPercents[draw(6)];
    idle_device_ = -1;
    const Stream* const chosen = draw_busy();
    if (chosen && draw(2)) idle_device_ = chosen->device;
  }
  if (draw(100) >= percent_) return;
  for (int rounds = 1 + draw(3); rounds > 0; --rounds) {
    Stream* const chosen = draw_busy();
    if (!chosen) return;
    for (int items = 1 + draw(5); items > 0 && !chosen->items.empty(); --items) {
      const Item& next = chosen->items.front();
      if (next.needs && !*next.needs) break;
      do_next(chosen);
    }
  }
}

}  // namespace ptxsim
