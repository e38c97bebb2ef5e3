// Replays transcripts of what is known of a step: transcripts/*.txt, an event per line and, where
// it has one, " -> " and its answer. Layers are L0, L1; # begins a comment.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "check.h"
#include "rendezvous/step.h"

namespace gluon_syncbn {
namespace {

class Replay {
 public:
  explicit Replay(const std::filesystem::path& path) {
    std::ifstream file(path);
    std::string line;
    for (int number = 1; std::getline(file, line); ++number) {
      if (line.empty() || line[0] == '#') continue;
      check::context = path.filename().string() + ":" + std::to_string(number) + ": " + line;
      const size_t arrow = std::min(line.find(" -> "), line.size());
      in_ = std::istringstream(line.substr(0, arrow));
      const std::string answer = answer_of(word());
      CHECK_SAY(!in_.fail() && word().empty(), "the event is malformed");
      CHECK_EQ(answer, arrow < line.size() ? line.substr(arrow + 4) : "");
    }
  }

 private:
  std::string answer_of(const std::string& event) {
    if (event == "fail") return step_.fail(text()) ? "first" : "later";
    if (event == "end") return step_.end(text()), "";
    if (event == "recover") return step_.recover(), "";
    if (event == "step") {
      if (step_.runs()) return "runs" + step_.why();
      return (step_.has_failed() ? "failed: " : "ended: ") + step_.why();
    }
    if (event == "forget") return calls_.forget(), "";
    if (event == "look") return calls_.look(), "";
    if (event == "answer") {
      const auto place = calls_.answer(number());
      return place ? "L" + std::to_string(place->first) + " " + place->second : "forgotten";
    }
    if (event == "ended") {  // ended L0 L1 from 0 to 3
      std::set<int64_t> layers;
      std::string next = word();
      for (; next[0] == 'L'; next = word()) layers.insert(std::stoll(next.substr(1)));
      const int64_t from = number();
      word();
      return yes(calls_.have_ended(layers, from, number()));
    }
    char name = 0;  // L0
    in_ >> name;
    const int64_t layer = number();
    const Calls::Place place{layer, word()};
    if (event == "ask") {
      const bool is_all = word() == "all";
      const int64_t next = calls_.next();
      const int64_t ticket = calls_.ask(place, is_all ? Calls::Of::kAll : Calls::Of::kGradients);
      CHECK_EQ(ticket, next);
      return std::to_string(ticket);
    }
    if (event == "open") return yes(calls_.has_open(place));
    if (event == "standing") {  // standing L0 cpu(1) since 0
      word();
      const char* const names[] = {"unknown", "not made", "queued"};
      return names[static_cast<int>(calls_.standing(place, number()))];
    }
    const int64_t node = number(), call = number();  // begin L0 cpu(1) 0 3
    if (event == "begin") return calls_.begin(place, node, call), "";
    if (event == "drop") return calls_.drop(place, node, call), "";
    if (event == "backward") return yes(calls_.may_go_backward(place, node, call));
    return "no such event";
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
  std::string text() {
    std::string next;
    in_ >> std::quoted(next);
    return next;
  }
  static std::string yes(bool is) { return is ? "yes" : "no"; }

  std::istringstream in_;
  Step step_;
  Calls calls_;
};

TEST(transcripts) {
  // As the Makefile names it: the tests run where they were compiled.
  std::vector<std::filesystem::path> paths;
  const auto folder = std::filesystem::path(__FILE__).parent_path() / "transcripts";
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  for (const auto& path : paths) Replay replay(path);
  CHECK(!paths.empty());
}

}  // namespace
}  // namespace gluon_syncbn

int main() { return check::run_all("step"); }
