// The simulator on small kernels: what they compute, and what it stops at; and orders of streams.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "launch.h"
#include "streams.h"

namespace ptxsim {
namespace {

constexpr int kThreads = 64;

// A kernel of one block of 64 threads, with an array of a word per thread. %r1 is the thread's
// number and %rd1 the address of its word; %p1 is true for the first 40 threads.
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
  shl.b32 %r2, %r1, 2;
  mov.u32 %r3, shared;
  add.s32 %r4, %r3, %r2;
  xor.b32 %r5, %r4, 4;
)" + body +
         "\n  ret;\n}\n";
}

std::vector<uint32_t> run_kernel(const std::string& body) {
  Memory memory;
  void* array = memory.allocate(kThreads * sizeof(uint32_t), 0);
  const auto kernels = parse(kernel_of(body));
  void* arguments[] = {&array};
  std::mt19937 random(1);
  run({kernels.at("test"), {1, 1, 1}, {kThreads, 1, 1}, arguments, 0, true}, memory, &random);
  const auto* const values = static_cast<const uint32_t*>(array);
  return {values, values + kThreads};
}

// What the simulator says when it stops at the kernel.
std::string message_of(const std::string& body) {
  int ends[2];
  if (pipe(ends)) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    run_kernel(body);
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

template <typename F>
void check_values(const std::string& body, const F& expected) {
  const std::vector<uint32_t> values = run_kernel(body);
  for (uint32_t i = 0; i < kThreads; ++i) {
    CHECK_SAY(values[i] == static_cast<uint32_t>(expected(i)),
              body << " gives thread " << i << " " << values[i]);
  }
}

void check_stops(const std::string& body, const std::string& words) {
  const std::string text = message_of(body);
  CHECK_SAY(text.find(words) != text.npos, body << " gives \"" << text << "\", not " << words);
}

void test_values() {
  check_values("st.global.u32 [%rd1], %r1;", [](uint32_t i) { return i; });
  check_values("mov.u32 %r6, 7; @%p1 mov.u32 %r6, 9; st.global.u32 [%rd1], %r6;",
               [](uint32_t i) { return i < 40 ? 9 : 7; });
  check_values("shfl.sync.bfly.b32 %r6|%p2, %r1, 5, 31, -1; st.global.u32 [%rd1], %r6;",
               [](uint32_t i) { return i ^ 5; });
  check_values("vote.sync.ballot.b32 %r6, %p1, -1; st.global.u32 [%rd1], %r6;",
               [](uint32_t i) { return i < 32 ? 0xffffffffu : 0xffu; });
  check_values(
      "cvt.rn.f32.u32 %f1, %r1; fma.rn.f32 %f1, %f1, 0f40000000, 0f3F800000;"
      "cvt.rzi.s32.f32 %r6, %f1; st.global.u32 [%rd1], %r6;",
      [](uint32_t i) { return 2 * i + 1; });
  // Lanes that were apart meet again.
  check_values(
      "mov.u32 %r6, 1; @%p1 bra $first; mov.u32 %r6, 2; $first: "
      "shfl.sync.bfly.b32 %r6|%p2, %r6, 16, 31, -1; st.global.u32 [%rd1], %r6;",
      [](uint32_t i) { return (i ^ 16) < 40 ? 1 : 2; });
  check_values(
      "st.shared.u32 [%r4], %r1; bar.sync 0; ld.shared.u32 %r6, [%r5];"
      "st.global.u32 [%rd1], %r6;",
      [](uint32_t i) { return i ^ 1; });
}

void test_stops() {
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
  check_stops("add.rz.f32 %f1, %f2, %f3;", "this PTX is not supported");
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

void test_streams() {
  std::string eager, waited;
  for (int i = 0; i < 40; ++i) eager += "abcd";
  CHECK(done_in(nullptr) == eager + " 0");
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

}  // namespace
}  // namespace ptxsim

int main() {
  ptxsim::test_values();
  ptxsim::test_stops();
  ptxsim::test_streams();
  return check::finish("ptxsim");
}
