// Which exchanges belong to which step, where MXNet runs the calls of a step after Python has ended
// it.
#include <string>

#include "check.h"
#include "processes/step_record.h"

namespace gluon_syncbn {
namespace {

constexpr int64_t kFirst = 1, kSecond = 2;

struct Fixture {
  StepRecord record;

  void note(int64_t layer, bool is_backward, int64_t sequence, int64_t node = 0) {
    ProcessCall call{};
    call.layer = layer;
    call.node = node;
    call.sequence = sequence;
    call.is_backward = is_backward;
    record.note(call);
  }
  void forward(int64_t layer, int64_t sequence) { note(layer, false, sequence); }
  void backward(int64_t layer, int64_t sequence) { note(layer, true, sequence); }

  int64_t end(const std::vector<int64_t>& kept = {}) { return record.end({kFirst, kSecond}, kept); }
  void enter(int64_t layer, int64_t step) {
    for (const bool is_backward : {false, true}) record.enter(layer, is_backward, step);
  }

  // "F1 B1.2": a forward of layer 1, and the backward of its last call but one.
  std::string of(int64_t step) const {
    std::string text;
    for (const StepRecord::Exchange& one : record.of(step)) {
      text += (text.empty() ? "" : " ") + std::string(one.is_backward ? "B" : "F") +
              std::to_string(one.layer);
      if (one.is_backward && one.ago != 1) text += "." + std::to_string(one.ago);
    }
    return text;
  }
};

TEST(passes_keep_their_order) {
  Fixture f;
  f.forward(kFirst, 0);
  f.forward(kFirst, 1);
  f.backward(kFirst, 1);
  f.backward(kFirst, 0);
  f.forward(kSecond, 0);
  f.backward(kSecond, 0);
  CHECK_EQ(f.of(f.end()), "F1 F1 B1 B1.2 F2 B2");
}

TEST(calls_run_after_their_step_has_ended) {
  Fixture f;
  f.forward(kFirst, 0);
  const int64_t first = f.end();
  // The first layer is in the next step, before the second has been called in this one.
  f.backward(kFirst, 0);
  f.enter(kFirst, first + 1);
  f.forward(kFirst, 1);
  f.forward(kSecond, 0);
  f.backward(kSecond, 0);
  f.enter(kSecond, first + 1);
  f.forward(kSecond, 1);
  CHECK_EQ(f.of(first), "F1 B1 F2 B2");
  CHECK_EQ(f.of(f.end({first})), "F1 F2");
}

TEST(a_backward_in_the_step_after_its_forward) {
  Fixture f;
  f.forward(kFirst, 0);
  const int64_t first = f.end();
  f.enter(kFirst, first + 1);
  f.backward(kFirst, 0);
  CHECK_EQ(f.of(first), "F1");
  CHECK_EQ(f.of(f.end({first})), "B1");
}

// As where two Trainers step after one pass. Steps that are not kept are forgotten.
TEST(a_step_without_exchanges_is_the_one_before) {
  Fixture f;
  f.forward(kFirst, 0);
  const int64_t first = f.end();
  f.enter(kFirst, first + 1);
  const int64_t second = f.end({first});
  CHECK_EQ(f.of(second), "F1");
  f.enter(kFirst, second + 1);
  f.forward(kFirst, 1);
  f.end({second});
  CHECK_EQ(f.of(second), "F1");
  f.end();
  CHECK_EQ(f.of(second), "");
}

}  // namespace
}  // namespace gluon_syncbn

int main() { return check::run_all("step_record"); }
