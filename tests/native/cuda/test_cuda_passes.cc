// Forward and backward of several devices, in threads of their own: their results, their waits and
// their memory. On a GPU, which SBN_REAL_CUDA says, the devices are streams of one.
#include <condition_variable>
#include <mutex>
#include <thread>

#include "cuda/device_fixture.h"
#include "cuda/pass.h"
#if !defined(SBN_REAL_CUDA)
#include "ptxsim.h"
#endif

namespace gluon_syncbn {
namespace {

// What passes have cost; known of the simulator only.
struct Cost {
  int waits = 0, uploads = 0, stream_waits = 0;

  Cost operator-(const Cost& other) const {
    return {waits - other.waits, uploads - other.uploads, stream_waits - other.stream_waits};
  }
};
#if defined(SBN_REAL_CUDA)
constexpr bool kReal = true;
Cost cost() { return {}; }
#else
constexpr bool kReal = false;
Cost cost() {
  const auto calls = [](const char* name) { return static_cast<int>(ptxsim_calls(name)); };
  return {calls("cudaStreamSynchronize"), calls("copies to a device"),
          calls("cudaStreamWaitEvent")};
}
#endif

// Where the devices of one pass meet.
template <typename V>
class Meeting {
 public:
  explicit Meeting(size_t size) : all_(size) {}

  std::vector<V> meet(size_t rank, const V& mine) {
    std::unique_lock<std::mutex> lock(mutex_);
    all_[rank] = mine;
    ++arrived_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return arrived_ >= all_.size(); });
    return all_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<V> all_;
  size_t arrived_ = 0;
};

enum class Way { kPeers, kCopies, kHost };

// Runs the pass of one device of several.
template <typename Task>
void run_pass(int gpu, const std::vector<int>& gpus, const Task& task, Way way, size_t rank,
              Meeting<PassSums>* place) {
  const auto pass = gpu_pass(gpu, way == Way::kHost ? std::vector<int>() : gpus, task);
  if (gpus.size() == 1 && way != Way::kHost) return pass->alone();
  const PassSums own = pass->sums();
  PassSums all{own.C, 0, Sums(own.on_host.size()), {}};
  for (const PassSums& each : place->meet(rank, own)) {
    all.count += each.count;
    for (size_t c = 0; c < all.on_host.size(); ++c) all.on_host[c].add(each.on_host[c]);
    all.on_gpus.insert(all.on_gpus.end(), each.on_gpus.begin(), each.on_gpus.end());
  }
  pass->finish(all);
}

// What all devices have computed: y and dx of the batch, and the statistics of each device.
template <typename A>
struct Results {
  std::vector<A> y, dx;
  std::vector<std::vector<A>> running;
  std::vector<std::vector<double>> saved;
  Cost cost;

  bool operator==(const Results& other) const {
    const auto same = [](const auto& a, const auto& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
    };
    return same(y, other.y) && same(dx, other.dx) && same(running[0], other.running[0]) &&
           same(saved[0], other.saved[0]);
  }
};

// A forward of one device, whose running statistics are means, variances and a number of batches.
template <typename A>
ForwardTask forward_task(const ForwardShard& shard, A* running, const RunningRule& rule,
                         Kept* kept) {
  const int64_t C = shard.view.C;
  ForwardTask task;
  task.dtype = Type<A>::kDType;
  task.what = "data";
  task.epsilon = kEpsilon;
  task.parts = {shard};
  void* const arrays[] = {running, running + C, rule.cumulative ? running + 2 * C : nullptr};
  std::copy_n(arrays, 3, task.running);
  task.rule = rule;
  task.kept = kept;
  return task;
}

// Two steps of a layer whose batch is split over the devices.
template <typename A>
Results<A> train(const Problem<A>& p, Way way, const std::vector<int>& gpus,
                 const RunningRule& rule) {
  const View view = p.view;
  const size_t devices = gpus.size();
  // Page-locked memory, of which each device has a part.
  const auto shared = [](const auto* values, int64_t size) {
    using T = std::decay_t<decltype(*values)>;
    return std::make_unique<DeviceArray<T>>(values, size, 0, true);
  };
  const auto x = shared(p.x.data(), view.size()), dy = shared(p.dy.data(), view.size());
  const auto y = shared(p.x.data(), view.size()), dx = shared(p.x.data(), view.size());
  const auto gamma = shared(p.gamma.data(), view.C), beta = shared(p.beta.data(), view.C);
  std::vector<std::unique_ptr<DeviceArray<A>>> running, gradients;
  std::vector<std::unique_ptr<DeviceArray<double>>> saved;
  const std::vector<A> start(static_cast<size_t>(2 * view.C + 1), A{2});
  const std::vector<double> zeros(static_cast<size_t>(2 * view.C));
  for (size_t i = 0; i < devices; ++i) {
    running.push_back(shared(start.data(), 2 * view.C + 1));
    gradients.push_back(shared(start.data(), 2 * view.C));
    saved.push_back(shared(zeros.data(), 2 * view.C));
  }
  const Cost before = cost();
  for (int step = 0; step < 2; ++step) {
    Meeting<PassSums> forward(devices), backward(devices);
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < devices; ++rank) {
      threads.emplace_back([&, rank] {
        const auto begin = static_cast<int64_t>(view.N / view.R * rank / devices) * view.R;
        const auto end = static_cast<int64_t>(view.N / view.R * (rank + 1) / devices) * view.R;
        View part = view;
        part.N = end - begin;
        const int64_t at = begin * view.C * view.S;
        // Of a device without samples nothing is computed.
        const auto result = [&](auto* values) { return part.N > 0 ? values + at : nullptr; };
        const auto here = [&](auto shard) {
          shard.view = part;
          shard.x = x->data() + at;
          shard.gamma = gamma->data();
          shard.beta = beta->data();
          return shard;
        };
        const ForwardShard forth = here(forward_shard(p, result(y->data())));
        Kept kept;
        ForwardTask task = forward_task(forth, running[rank]->data(), rule, &kept);
        task.mean = {saved[rank]->data(), false};
        task.inv_std = {saved[rank]->data() + view.C, false};
        run_pass(gpus[rank], gpus, task, way, rank, &forward);
        BackwardShard back = here(backward_shard(p, result(dx->data())));
        back.dy = dy->data() + at;
        BackwardTask back_task;
        back_task.dtype = task.dtype;
        back_task.what = "data";
        back_task.parts = {back};
        back_task.kept = kept;
        back_task.dgamma.to = gradients[rank]->data();
        back_task.dbeta.to = gradients[rank]->data() + view.C;
        run_pass(gpus[rank], gpus, back_task, way, rank, &backward);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  const Cost after = cost();
  Results<A> results{y->get(), dx->get(), {}, {}, after - before};
  for (size_t i = 0; i < devices; ++i) {
    results.running.push_back(running[i]->get());
    results.saved.push_back(saved[i]->get());
    CHECK(results.running[i] == results.running[0] && results.saved[i] == results.saved[0]);
  }
  return results;
}

// Those of each way, so that what is known of one's access to the others is not in another's way.
std::vector<int> gpus_of(Way way, size_t count) {
  std::vector<int> gpus(count);
  for (size_t i = 0; i < count && !kReal; ++i) gpus[i] = 10 * static_cast<int>(way) + i;
  return gpus;
}

template <typename A>
void check_ways() {
  const RunningRule rules[] = {{0.9, false, false}, {0.5, false, true}, {0, true, true}};
  for (const View& view :
       {View{8, 3, 49}, View{9, 300, 1}, View{5 * 12, 7, 1, 12}, View{2, 3, 49}}) {
    const Problem<A> p(view, 3);
    for (const RunningRule& rule : rules) {
      const Results<A> one = train(p, Way::kHost, gpus_of(Way::kHost, 1), rule);
      for (const size_t devices : {1, 2, 3, 5}) {
        for (const Way way : {Way::kPeers, Way::kCopies, Way::kHost}) {
          if (kReal && way == Way::kCopies) continue;
#if !defined(SBN_REAL_CUDA)
          ptxsim_set_peers(way == Way::kPeers ? "" : "none");
#endif
          check::context = name_of<A>(view, 3) + ", " + std::to_string(devices) + " devices, way " +
                           std::to_string(static_cast<int>(way));
          const Results<A> results = train(p, way, gpus_of(way, devices), rule);
          CHECK(results == one);
          if (kReal) continue;
          const bool on_host = way == Way::kHost;
          const int passes = 4 * static_cast<int>(devices);
          const int others = on_host ? 0 : static_cast<int>(devices) - 1;
          CHECK_EQ(results.cost.waits, passes * (on_host ? 2 : 1));
          CHECK_EQ(results.cost.uploads, on_host ? passes : 0);
          CHECK_EQ(results.cost.stream_waits, passes * others);
        }
      }
    }
  }
}

TEST(results_do_not_depend_on_where_sums_meet) {
  check_ways<float>();
  check_ways<double>();
}

// The chunks of virtual devices: y and dx of each on its own, and running statistics that follow
// the mean, all with the bits of the CPU's passes.
template <typename A>
void check_virtual_devices() {
  const View view{7, 300, 5};
  const Problem<A> p(view, 3);
  for (const RunningRule& rule : {RunningRule{0.9, false, true}, RunningRule{0, true, false}}) {
    check::context = name_of<A>(view, 3) + (rule.cumulative ? ", cumulative" : "");
    const std::vector<A> start(static_cast<size_t>(2 * view.C + 1), A{2});
    const std::vector<double> zeros(static_cast<size_t>(3 * view.C));
    OnDevice<A> device(p);
    DeviceArray<A> y(p.x.data(), view.size()), running(start.data(), 2 * view.C + 1);
    DeviceArray<double> mean(zeros.data(), 3 * view.C);
    Kept kept;
    ForwardShard whole = device.forward_shard(y.data());
    whole.gamma = nullptr;
    ForwardTask task = forward_task(whole, running.data(), rule, &kept);
    task.parts.clear();
    task.rows = 3;
    task.mean = {mean.data(), false};
    const int64_t sizes[] = {3, 2, 2};
    std::vector<Statistics> expected;
    for (int64_t b = 0, begin = 0; b < 3; begin += sizes[b++]) {
      const int64_t at = begin * view.C * view.S;
      ForwardShard part = whole;
      part.view.N = sizes[b];
      part.x = device.x.data() + at;
      part.y = y.data() + at;
      task.parts.push_back(part);
      const Sums sums = device.forward_sums(begin, begin + sizes[b]);
      for (const ChannelSums& each : sums) {
        expected.push_back(batch_statistics(each, count_of(part), kEpsilon));
      }
    }
    gpu_pass(0, {}, task)->alone();
    const std::vector<A> now = running.get();
    const std::vector<double> means = mean.get();
    for (size_t i = 0; i < expected.size(); ++i) CHECK_EQ(means[i], expected[i].mean);
    const double momentum = rule.cumulative ? cumulative_momentum(3) : rule.momentum;
    for (int64_t c = 0; c < view.C; ++c) {
      double mean_sum = 0, variance_sum = 0;
      for (int64_t b = 0; b < 3; ++b) {
        const Statistics& s = expected[b * view.C + c];
        mean_sum += s.mean;
        variance_sum += running_variance(s, static_cast<double>(sizes[b] * view.S), rule.unbiased);
      }
      CHECK_EQ(now[c], static_cast<A>(moving_average(2, mean_sum / 3, momentum)));
      CHECK_EQ(now[view.C + c], static_cast<A>(moving_average(2, variance_sum / 3, momentum)));
    }
    CHECK_EQ(now.back(), rule.cumulative ? 3 : 2);
    Array<A> normalized(view.size());
    for (int64_t b = 0, begin = 0; b < 3; begin += sizes[b++]) {
      const int64_t at = begin * view.C * view.S;
      ForwardShard part = forward_shard(p, normalized.data() + at);
      part.view = task.parts[b].view;
      part.x = p.x.data() + at;
      part.gamma = nullptr;
      kernels<A>().forward(part, expected.data() + b * view.C);
    }
    CHECK(same_bits(y.get(), normalized));
  }
}

TEST(virtual_devices_are_batches_of_one_pass) {
  check_virtual_devices<float>();
  check_virtual_devices<double>();
}

// As in a process that has no data left, among others that have none: only the sums of all say so.
TEST(running_statistics_do_not_follow_a_batch_without_values) {
  using A = float;
  const View view{4, 3, 5};
  const Problem<A> p(view, 3);
  const std::vector<A> start(static_cast<size_t>(2 * view.C + 1), A{2});
  OnDevice<A> device(p);
  DeviceArray<A> y(p.x.data(), view.size()), running(start.data(), 2 * view.C + 1);
  const ForwardShard shard = device.forward_shard(y.data());
  for (const bool updates : {false, true}) {
    for (const double count : {0.0, 20.0}) {
      check::context = std::string(updates ? "updates" : "no updates") + " with a count of " +
                       std::to_string(count);
      running.set(start.data());
      Kept kept;
      ForwardTask task = forward_task(shard, running.data(), RunningRule{0, true, false}, &kept);
      task.updates = updates;
      const auto pass = gpu_pass(0, {}, task);
      PassSums all = pass->sums();
      CHECK_EQ(all.count, 20);
      all.count = count;
      if (count == 0) all.on_host = Sums(all.on_host.size());
      pass->finish(all);
      CHECK_EQ(running.get() == start, !updates || count == 0);
    }
  }
}

#if !defined(SBN_REAL_CUDA)
// If a call of CUDA fails before they are written.
TEST(a_forward_that_fails_leaves_the_running_statistics_alone) {
  using A = float;
  const View view{4, 300, 5};
  const Problem<A> p(view, 3);
  const std::vector<A> start(static_cast<size_t>(2 * view.C + 1), A{2});
  OnDevice<A> device(p);
  DeviceArray<A> y(p.x.data(), view.size()), running(2 * view.C + 1);
  const ForwardShard shard = device.forward_shard(y.data());
  int failures = 0;
  for (const bool on_host : {false, true}) {
    for (const RunningRule& rule : {RunningRule{0.9, false, false}, RunningRule{0, true, true}}) {
      for (const char* function :
           {"cudaMemcpyAsync", "cudaMalloc", "cudaHostAlloc", "cudaStreamCreateWithFlags"}) {
        bool fails = true;
        for (int calls = 0; fails; ++calls) {
          check::context = std::string(function) + ", call " + std::to_string(calls);
          running.set(start.data());
          release_cuda_memory();
          Kept kept;
          const ForwardTask task = forward_task(shard, running.data(), rule, &kept);
          ptxsim_fail_next(function, calls);
          try {
            const auto pass = gpu_pass(0, {}, task);
            on_host ? pass->finish(pass->sums()) : pass->alone();
            fails = false;
          } catch (const std::runtime_error&) {
            ++failures;
          }
          ptxsim_fail_next(function, -1);
          const std::vector<A> now = running.get();
          CHECK_EQ(now == start, fails);
          CHECK_EQ(now.back(), !fails && rule.cumulative ? 3 : 2);
        }
      }
    }
  }
  CHECK(failures >= 12);
}

// The result is read right after.
TEST(a_failed_result_is_cleared) {
  const std::vector<float> values(70, 3.0f);
  DeviceArray<float> y(values.data(), 70);
  clear_on_gpu(0, y.data(), 70 * sizeof(float));
  CHECK(y.get() == std::vector<float>(70));
}

// By MXNet's variable, as peers hang or corrupt data on some machines.
TEST(peer_access_can_be_switched_off) {
  ptxsim_set_peers("");
  const Problem<float> p({8, 3, 49}, 3);
  const Results<float> one = train(p, Way::kHost, gpus_of(Way::kHost, 1), {});
  int gpu = 40;
  for (const char* value : {"0", "false", "1", "true", ""}) {
    check::context = std::string("MXNET_ENABLE_GPU_P2P=") + value;
    const bool off = value[0] == '0' || value[0] == 'f';
    setenv("MXNET_ENABLE_GPU_P2P", value, 1);
    release_cuda_memory();
    CHECK(train(p, off ? Way::kCopies : Way::kPeers, {gpu, gpu + 1}, {}) == one);
    CHECK_EQ(ptxsim_calls("cudaHostAlloc") > ptxsim_calls("cudaFreeHost"), off);
    gpu += 2;
  }
  unsetenv("MXNET_ENABLE_GPU_P2P");
}

#endif

}  // namespace
}  // namespace gluon_syncbn

int main() {
  if (!gluon_syncbn::cuda_backend()) return 1;
  return check::run_all("cuda_passes");
}
