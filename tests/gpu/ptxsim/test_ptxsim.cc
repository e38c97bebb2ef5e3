// What the simulator stops at, on small kernels that no test of the real ones would have; and
// orders of streams.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "streams.h"
#include "warp.h"

namespace ptxsim {
namespace {

constexpr int kThreads = 64;

// A kernel of one block of 64 threads, with an array of a word per thread. %r1 is the thread's
// number and %rd1 the address of its word; %p1 is true for the first 40 threads, and %p2
// for the others.
std::string kernel_of(const std::string& body) {
  return R"(.version 7.0
.target sm_75
.visible .entry test(.param .u64 test_param_0)
.maxntid 64, 1, 1
{
  .reg .pred %p<9>;
  .reg .b32 %r<9>;
  .reg .f32 %f<9>;
  .reg .b64 %rd<9>;
  .shared .align 4 .b8 shared[256];
  ld.param.u64 %rd2, [test_param_0];
  cvta.to.global.u64 %rd3, %rd2;
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd4, %r1, 4;
  add.s64 %rd1, %rd3, %rd4;
  setp.lt.u32 %p1, %r1, 40;
  setp.ge.u32 %p2, %r1, 40;
  shl.b32 %r2, %r1, 2;
  mov.u32 %r3, shared;
  add.s32 %r4, %r3, %r2;
  xor.b32 %r5, %r4, 4;
)" + body +
         "\n  ret;\n}\n";
}

// Each on a stream of its own, with the same array.
void run_kernels(const std::vector<std::string>& bodies,
                 const std::function<void(const std::string&)>& report) {
  Races races(report);
  Memory memory(&races);
  void* array = memory.allocate(kThreads * sizeof(uint32_t), 0);
  void* arguments[] = {&array};
  Streams streams(nullptr, &races);
  for (const std::string& body : bodies) {
    const auto kernels = parse(kernel_of(body));
    const Kernel& kernel = kernels.at("test");
    streams.queue(streams.create(0, false), 0, body.c_str(), [&] {
      run({kernel, {1, 1, 1}, kThreads, parameters_of(kernel, arguments), 0, true}, memory,
          nullptr);
    });
  }
}

// What the simulator says when it stops at the kernel.
std::string message_of(const std::string& body) {
  int ends[2];
  if (pipe(ends)) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    run_kernels({body}, stop);
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char buffer[512];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof(buffer))) > 0;) text.append(buffer, n);
  close(ends[0]);
  waitpid(child, nullptr, 0);
  return text;
}

void check_stops(const std::string& body, const std::string& words) {
  const std::string text = message_of(body);
  CHECK_SAY(text.find(words) != text.npos, body << " gives \"" << text << "\", not " << words);
}

TEST(it_stops_at_errors) {
  check_stops("st.global.u32 [%rd1+4], %r1;", "an access outside of all arrays");
  check_stops("st.global.u32 [%rd1+2], %r1;", "an access at an odd address");
  check_stops("st.shared.u32 [%r4+4], %r1;", "an access outside of the array");
  check_stops("@%p1 bra $end; bar.sync 0; $end:", "a barrier that not all threads reach");
  check_stops("@%p1 bra $end; shfl.sync.bfly.b32 %r6, %r1, 1, 31, -1; $end:",
              "a shuffle or barrier that not all its lanes reach");
  check_stops("@%p1 ret; bar.warp.sync -1;", "a named lane has ended");
  check_stops("st.shared.u32 [%r4], %r1; ld.shared.u32 %r6, [%r5];",
              "a race in shared memory with thread");
  check_stops("add.ftz.f32 %f1, %f2, %f3;", "this PTX is not supported");
  check_stops("ld.global.s32 %r6, [%rd1];", "this PTX is not supported");
}

// Work on two streams of device 0 and one of device 1, which waits for what the first has done.
std::string done_in(const char* order) {
  Races races(stop);
  Streams streams(order, &races);
  std::string done;
  const auto write = [&done](char c) { return [&done, c] { done += c; }; };
  void* const first = streams.create(0, true);
  void* const second = streams.create(0, false);
  void* const other = streams.create(1, true);
  for (int i = 0; i < 40; ++i) {
    streams.queue(first, 0, "work", write('a'));
    const Mark mark = streams.record(first, 0);
    streams.queue(first, 0, "work", write('b'));
    streams.queue(second, 0, "work", write('c'));
    streams.wait(other, 1, mark);
    streams.queue(other, 1, "work", write('d'));
  }
  streams.finish(other, 1);
  done += ' ';
  streams.queue(nullptr, 0, "work", write('0'));
  streams.destroy(second);
  return done;
}

TEST(streams_work_in_an_order) {
  std::string waited;
  // What the wait asks for, what the null stream waits for, and the rest when its stream ends.
  for (int i = 0; i < 40; ++i) waited += i ? "bad" : "ad";
  CHECK(done_in("late") == waited + " b0" + std::string(40, 'c'));
  std::set<std::string> orders;
  for (int seed = 0; seed < 20; ++seed) {
    const std::string done = done_in(std::to_string(seed).c_str());
    orders.insert(done);
    CHECK(done == done_in(std::to_string(seed).c_str()));
    CHECK(done.size() == 4 * 40 + 2);
    int a = 0, b = 0, d = 0;
    for (const char c : done) {
      a += c == 'a';
      b += c == 'b';
      d += c == 'd';
      CHECK(d <= a && b <= a && a <= b + 1);
      CHECK(c != ' ' || d == 40);
      CHECK(c != '0' || b == 40);
    }
  }
  CHECK(orders.size() > 10);
}

// Steps of a program for races: a stream and what is done on it. "Aw1" writes to array 1, "Ar1"
// reads it, "Am2" records event 2, "Av2" waits for it, "As" is a synchronization of the host with
// the stream, "Ad" with its device. "Af1" gives array 1 back, and "Ax" destroys the stream.
using Steps = std::vector<std::string>;
constexpr int kArrays = 2;

Steps steps_of(const std::string& text) {
  std::istringstream words(text);
  return {std::istream_iterator<std::string>(words), {}};
}

// A waits for the null stream N of its device, B does not; C is on another device.
int device_of(char stream) { return stream == 'C'; }

// What the simulator reports, or "".
std::string race_in(const Steps& steps, const char* order) {
  Races races([](const std::string& text) { throw std::runtime_error(text); });
  Memory memory(&races);
  Streams streams(order, &races);
  std::map<char, void*> handles{{'A', streams.create(0, true)},
                                {'B', streams.create(0, false)},
                                {'C', streams.create(1, true)},
                                {'N', nullptr}};
  std::vector<void*> arrays;
  for (int i = 0; i < kArrays; ++i) arrays.push_back(memory.allocate(8, 0));
  std::map<char, Mark> marks;
  try {
    for (const std::string& step : steps) {
      void* const stream = handles.at(step[0]);
      const int device = device_of(step[0]);
      const char what = step[1], which = step.c_str()[2];
      void* const array = which ? arrays[(which - '0') % kArrays] : nullptr;
      if (what == 'w' || what == 'r') {
        streams.queue(stream, device, step.c_str(),
                      [&memory, array, what] { memory.access(array, 4, what == 'w'); });
      }
      if (what == 'm') marks[which] = streams.record(stream, device);
      if (what == 'v') streams.wait(stream, device, marks.at(which));
      if (what == 's') streams.finish(stream, device);
      if (what == 'd') streams.finish_device(device);
      if (what == 'x') streams.destroy(stream);
      if (what == 'f') {
        streams.act("giving it back");
        memory.release(array);
      }
    }
    for (int device = 0; device < 2; ++device) streams.finish_device(device);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

// Whether steps race, by the definition: of two accesses to an array, one of which writes, there is
// no path from one to the other; or a read has no write before it.
bool is_race(const Steps& steps) {
  const auto is_access = [](const std::string& s) { return s[1] == 'w' || s[1] == 'r'; };
  const auto is_host = [](const std::string& s) { return s[1] == 's' || s[1] == 'd'; };
  const auto is_before = [](char a, char b) {
    return a == b || (a == 'A' && b == 'N') || (a == 'N' && b == 'A');
  };
  const size_t count = steps.size();
  std::vector<std::set<size_t>> before(count);
  for (size_t j = 0; j < count; ++j) {
    bool record_found = false;
    for (size_t i = j; i-- > 0;) {
      const std::string &a = steps[i], &b = steps[j];
      const bool of_device = b[1] == 'd' && device_of(a[0]) == device_of(b[0]);
      const bool recorded = b[1] == 'v' && a[1] == 'm' && a[2] == b[2] && !record_found;
      record_found = record_found || recorded;
      if (!is_host(a) && !is_before(a[0], b[0]) && !of_device && !recorded) continue;
      before[j].insert(i);
      before[j].insert(before[i].begin(), before[i].end());
    }
    if (!is_access(steps[j])) continue;
    bool is_written = false;
    for (size_t i = 0; i < j; ++i) {
      if (!is_access(steps[i]) || steps[i][2] != steps[j][2]) continue;
      const bool writes = steps[i][1] == 'w';
      if (!before[j].count(i) && (writes || steps[j][1] == 'w')) return true;
      is_written = is_written || writes;
    }
    if (steps[j][1] == 'r' && !is_written) return true;
  }
  return false;
}

TEST(races_of_streams) {
  const std::string of_first = " is not ordered with the write by Aw0 (stream 1 of device 0)";
  // What is reported, or "".
  const std::pair<const char*, std::string> cases[] = {
      {"Aw0 Bw0", "a write by Bw0 (stream 2 of device 0) of byte 0 of 8" + of_first},
      {"Aw0 Cr0", "a read by Cr0 (stream 3 of device 1) of byte 0 of 8" + of_first},
      {"Aw0 Af0", "a write by giving it back (the host) of byte 0 of 8" + of_first},
      {"Aw0 As Ar0 Br0 Cr0 Cm0 Nv0 Nw0",
       "a write by Nw0 (the null stream of device 0) of byte 0 of 8 is not ordered with the read "
       "by Br0 (stream 2 of device 0)"},
      {"Ar1", "a read by Ar1 (stream 1 of device 0) of byte 0 of 8, which nobody has written"},
      {"Aw0 As Af0", ""},
      {"Aw0 Ax Ns Bw0", ""},
      {"Bw0 Bx Nd Cw0", ""},
  };
  for (const auto& [steps, report] : cases) CHECK_EQ(race_in(steps_of(steps), ""), report);

  // Memory at the place of other memory that an operation was queued for.
  Races watched([](const std::string& text) { throw std::runtime_error(text); });
  Clock clock;
  const Operation early = watched.add("early", watched.add_timeline("a stream"), &clock);
  const Shadow later = watched.watch(0x1000, 8, false);
  watched.start(early);
  CHECK_THROWS(std::runtime_error, watched.access(later, 0x1000, 4, true),
               "memory was given back that is used by early (a stream)");

  // Random programs.
  int races = 0;
  constexpr int kPrograms = 3000;
  for (int seed = 0; seed < kPrograms; ++seed) {
    std::mt19937 random(seed);
    const auto draw = [&](size_t count) { return random() % count; };
    std::string text = draw(4) ? "Aw0 Aw1 As" : "";
    for (size_t i = 0, recorded = 0, count = 3 + draw(25); i < count; ++i) {
      const char what = "rrrwmmvvvsd"[draw(draw(3) ? 9 : 11)];
      const size_t which = draw(kArrays);
      if (what == 'v' && !(recorded >> which & 1)) continue;
      if (what == 'm') recorded |= size_t{1} << which;
      const char step[] = {' ', "ABCN"[draw(4)], what, static_cast<char>('0' + which), '\0'};
      text += step;
    }
    const Steps steps = steps_of(text);
    const bool expected = is_race(steps);
    races += expected;
    for (const std::string& order : {std::string(), std::string("late"), std::to_string(seed)}) {
      const std::string found = race_in(steps, order.c_str());
      CHECK_SAY(found.empty() != expected, "seed " << seed << ", order " << order << ": " << text
                                                   << " gives \"" << found << "\"");
    }
  }
  CHECK_SAY(races > kPrograms / 10 && races < kPrograms * 9 / 10, races << " races");
}

// Two kernels on streams that nothing orders, by the words that their lanes access.
std::string race_of_kernels(const std::string& first, const std::string& second) {
  try {
    run_kernels({first, second}, [](const std::string& text) { throw std::runtime_error(text); });
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

TEST(races_of_kernels) {
  const std::string low = "@%p1 st.global.u32 [%rd1], %r1;",
                    high = "@%p2 st.global.u32 [%rd1], %r1;";
  CHECK_EQ(race_of_kernels(low, high), "");
  CHECK_EQ(race_of_kernels(low, "@%p1 ld.global.u16 %r6, [%rd1];"),
           "a read by @%p1 ld.global.u16 %r6, [%rd1]; (stream 2 of device 0) of byte 0 of 256 is "
           "not ordered with the write by " +
               low + " (stream 1 of device 0)");
  CHECK(race_of_kernels(low, "st.global.u16 [%rd1+2], %r1;").find("of byte 2 of") !=
        std::string::npos);
  CHECK(race_of_kernels(low, "ld.global.u32 %r6, [%rd3+252];")
            .find("byte 252 of 256, which nobody has written") != std::string::npos);
  CHECK_EQ(race_of_kernels(low + "@%p1 ld.global.u32 %r6, [%rd1];", high), "");
}

}  // namespace
}  // namespace ptxsim

int main() { return check::run_all("ptxsim"); }
