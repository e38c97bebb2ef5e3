// Replays transcripts of steps: transcripts/*.txt, an event per line and, where it has one, " -> "
// and its answer: the parts between " | ", each of which it has, or with a ! has not. # begins a
// comment.
//
//   layer L0 cpu(0) cpu(1) timeout 2     makes or reconfigures it; also "any 2", "processes 2"
//   number a L0 cpu(0)                   a forward call has its number, and is called a from now on
//   forward a, backward a                it begins; call a L0 cpu(0): number and forward
//   again b a                            the forward call a is made again, and called b
//   settle s 0 "why" L0 L1               Python settles layers from ticket 0 on, and is called s
//   ended a -> done                      how what has begun has ended
//   waits a                              it has not, after a moment
//   looks 8                              who waits has seen so often that no thread runs
//
// Each runs in a process of its own, as some wait for one in which no thread runs.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <map>
#include <set>
#include <sstream>

#include "rendezvous/rendezvous_fixture.h"
#include "threads/waits.h"

namespace gluon_syncbn {
namespace {

class Replay {
 public:
  explicit Replay(const std::filesystem::path& path) {
    Observer observer;
    // All call waiting(), which would deadlock if a lock were held.
    observer.warn = [this](const std::string&) { rendezvous_.waiting(); };
    observer.failed = [this](int64_t, const std::string&) {
      rendezvous_.waiting();
      ++failures_;
    };
    observer.waits = [this](int64_t layer, const std::string& device) {
      if (probes_ == "none") return;
      const Calls::Ticket ticket = rendezvous_.ask(layer, device, Calls::Of::kAll);
      if (probes_ == "end") rendezvous_.answer(ticket, false);
    };
    observer.may_run = [this] {
      ++looks_;
      return may_run_.load();
    };
    rendezvous_.observe(observer);
    std::ifstream file(path);
    std::string line;
    for (int number = 1; std::getline(file, line); ++number) {
      if (line.empty() || line[0] == '#') continue;
      const std::string where = path.filename().string() + ":" + std::to_string(number) + ": ";
      replay(where, line);
    }
    rendezvous_.fail(nullptr, "the end of the transcript");
  }

 private:
  struct Running {
    LayerPtr layer;
    std::string device;
    CallId id;
    std::unique_ptr<Background> thread;
  };

  void replay(const std::string& where, const std::string& line) {
    const size_t arrow = std::min(line.find(" -> "), line.size());
    in_ = std::istringstream(line.substr(0, arrow));
    const std::string answer = answer_of(word());
    CHECK_SAY(!in_.fail() && word().empty(), where + "the event is malformed");
    const std::string expected = arrow < line.size() ? line.substr(arrow + 4) : "";
    bool fits = answer.empty() == expected.empty();
    for (size_t from = 0; from < expected.size();) {
      const size_t end = std::min(expected.find(" | ", from), expected.size());
      const bool has_not = expected[from] == '!';
      const std::string part = expected.substr(from + has_not, end - from - has_not);
      fits = fits && contains(answer, part) != has_not;
      from = end + 3;
    }
    CHECK_SAY(fits, where + line + " -- is: " + answer);
  }

  std::string answer_of(const std::string& event) {
    if (event == "recover") return rendezvous_.recover(), "";
    if (event == "close") return rendezvous_.close(text()), "";
    if (event == "interrupt") return ++interrupts, "";
    if (event == "abandon") return abandoned = true, "";
    if (event == "probes") return probes_ = word(), "";  // Of who waits: none, wait, end.
    if (event == "may") return may_run_ = word() == "run", "";
    if (event == "pause") return sleep(static_cast<double>(number())), "";
    if (event == "busy") return busy(static_cast<double>(number())), "";
    if (event == "looks") return look(number()), "";
    if (event == "failures") return std::to_string(failures_);
    if (event == "step") {
      const std::string why = rendezvous_.failure();
      CHECK_EQ(rendezvous_.has_failed(), !why.empty());
      return why.empty() ? "runs" : why;
    }
    if (event == "fail") {
      const LayerPtr layer = rendezvous_.find(number_of('L'));
      return rendezvous_.fail(layer, text()), "";
    }
    if (event == "answer" || event == "skipped") {
      return rendezvous_.answer(number(), event == "skipped"), "";
    }
    if (event == "layer") return configure(), "";
    if (event == "forget") return rendezvous_.forget(number_of('L')), "";
    if (event == "ask") {
      const int64_t layer = number_of('L');
      const std::string device = word();
      const bool is_all = word() == "all";
      return std::to_string(
          rendezvous_.ask(layer, device, is_all ? Calls::Of::kAll : Calls::Of::kGradients));
    }
    Running& one = running_[word()];
    if (event == "settle") return settle(&one), "";
    if (event == "waits") return sleep(0.15), one.thread->has_ended() ? "it has ended" : "";
    if (event == "ended") {
      const std::string error = one.thread->error();
      CHECK_SAY(one.thread->seconds() < 3 * kSoon, "late");
      return error.empty() ? "done" : error;
    }
    if (event == "drop") {
      CallId id = one.id;
      id.sequence += in_.eof() ? 0 : number();  // Of a later call: drop a 1.
      return rendezvous_.drop(one.layer, id, one.device), "";
    }
    if (event == "again") {
      const Running& first = running_[word()];
      one.layer = first.layer;
      one.device = first.device;
      one.id = first.id;
    }
    if (event == "number" || event == "call") {
      one.layer = rendezvous_.find(number_of('L'));
      one.device = word();
      try {
        one.id = rendezvous_.next_call(one.layer, one.device);
      } catch (const Error& error) {
        return error.what();
      }
    }
    if (event != "number") {
      const auto direction = event == "backward" ? Direction::kBackward : Direction::kForward;
      start(&one, direction);
    }
    return "";
  }

  void configure() {
    const int64_t id = number_of('L');
    std::vector<std::string> devices;
    std::string next = word();
    for (; contains(next, "pu("); next = word()) devices.push_back(next);
    LayerConfig config = config_of(devices);
    for (; !next.empty(); next = word()) {
      if (next == "timeout") in_ >> config.timeout_seconds;
      if (next == "any") config.num_devices = static_cast<size_t>(number());
      if (next == "processes") config.end_rank = static_cast<size_t>(number());
      config.spans_processes = config.end_rank > 1;
    }
    rendezvous_.configure(id, config);
  }

  // Returns when the call waits, or all that it has completed have ended.
  void start(Running* one, Direction direction) {
    const LayerPtr layer = one->layer;
    one->thread =
        std::make_unique<Background>([this, layer, id = one->id, device = one->device, direction] {
          rendezvous_.reduce(layer, id, direction, device, "float32", on_host(Sums(2), 1));
        });
    const auto calls = [this] {
      return std::count_if(running_.begin(), running_.end(), [](const auto& entry) {
        const Running& each = entry.second;
        return each.layer && each.thread && !each.thread->has_ended();
      });
    };
    while (rendezvous_.waiting() != calls()) sleep(0.001);
  }

  void look(int64_t times) {
    while (looks_ < times && rendezvous_.failure().empty()) sleep(0.1);
  }

  static void busy(double seconds) {
    for (const auto start = Clock::now(); seconds_since(start) < seconds;) {
    }
  }

  void settle(Running* one) {
    const Calls::Ticket from = number();
    const std::string why = text();
    std::set<int64_t> layers;
    while (!in_.eof()) layers.insert(number_of('L'));
    one->thread = std::make_unique<Background>([=] { rendezvous_.settle(layers, from, why); });
  }

  std::string word() {
    std::string next;
    if (!in_.eof()) in_ >> next;
    return next;
  }
  int64_t number() {
    int64_t next = 0;
    in_ >> next;
    return next;
  }
  int64_t number_of(char kind) {
    char name = 0;
    in_ >> name;
    CHECK_EQ(name, kind);
    return number();
  }
  std::string text() {
    std::string next;
    in_ >> std::quoted(next);
    return next;
  }

  std::istringstream in_;
  Rendezvous rendezvous_;
  std::atomic<int> failures_{0}, looks_{0};
  std::atomic<bool> may_run_{false};
  std::string probes_ = "none";
  std::map<std::string, Running> running_;
};

TEST(transcripts) {
  // As the Makefile names it: the tests run where they were compiled.
  std::vector<std::filesystem::path> paths;
  const auto folder = std::filesystem::path(__FILE__).parent_path() / "transcripts";
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<pid_t> pids;
  for (const auto& path : paths) {
    pids.push_back(fork());
    if (pids.back() != 0) continue;
    alarm(90);
    {
      Replay replay(path);
    }
    _exit(check::failed > 0);
  }
  for (size_t i = 0; i < pids.size(); ++i) {
    int status = -1;
    waitpid(pids[i], &status, 0);
    CHECK_SAY(status == 0, paths[i].filename().string());
  }
  CHECK(!paths.empty());
}

}  // namespace
}  // namespace gluon_syncbn

int main() { return check::run_all("transcripts", 120); }
