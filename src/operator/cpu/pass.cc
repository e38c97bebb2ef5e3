// The kernels compute sums, y and dx; what is left is small, a value or a few for each channel: the
// statistics from the sums of all, the running statistics, and the gradients of gamma and beta.
#include "cpu/pass.h"

#include <utility>

#include "cpu/kernels.h"

namespace gluon_syncbn {
namespace {

template <typename F>
void write_values(const Result& result, DType dtype, int64_t size, const F& value) {
  if (!result.to) return;
  for (int64_t i = 0; i < size; ++i) write_parameter(dtype, result.to, i, value(i), result.add);
}

class CpuForward : public Pass {
 public:
  explicit CpuForward(const ForwardTask& task)
      : task_(task),
        kernels_(cpu_kernels(task.dtype)),
        C_(task.parts[0].view.C),
        batches_(static_cast<int64_t>(task.parts.size())),
        statistics_(new Statistics[static_cast<size_t>(batches_ * C_)],
                    std::default_delete<Statistics[]>()) {}

  PassSums sums() override {
    const ForwardShard& shard = task_.parts[0];
    PassSums own{C_, count_of(shard), std::vector<ChannelSums>(static_cast<size_t>(C_)), {}};
    if (own.count > 0) kernels_.forward_sums(shard.view, shard.x, own.on_host.data());
    return own;
  }

  void finish(const PassSums& all) override {
    for (int64_t c = 0; c < C_; ++c) {
      statistics_.get()[c] = batch_statistics(all.on_host[c], all.count, task_.epsilon);
    }
    normalize();
    write({all.count, all.count, 1});
  }

  void alone() override {
    if (task_.from_batch) {
      for (int64_t b = 0; b < batches_; ++b) {
        kernels_.forward_alone(task_.parts[b], task_.epsilon, statistics_.get() + b * C_);
      }
    } else {
      for (int64_t c = 0; c < C_; ++c) {
        statistics_.get()[c] =
            given_statistics(parameter(task_.dtype, task_.running[0], c),
                             parameter(task_.dtype, task_.running[1], c), task_.epsilon);
      }
      normalize();
    }
    write(counts_of(task_.parts));
  }

 private:
  void normalize() {
    if (task_.parts[0].y) kernels_.forward(task_.parts[0], statistics_.get());
  }

  // Last, as a forward that fails must leave the running statistics alone.
  void write(const BatchCounts& counts) {
    if (task_.from_batch && task_.updates && counts.first > 0) {
      update_running(task_.dtype, task_.running, task_.rule, C_, batches_, counts,
                     statistics_.get());
    }
    const auto repeated = [&](double Statistics::* member) {
      return [=](int64_t i) { return statistics_.get()[i % (batches_ * C_)].*member; };
    };
    write_values(task_.mean, DType::kFloat64, task_.rows * C_, repeated(&Statistics::mean));
    write_values(task_.inv_std, DType::kFloat64, task_.rows * C_, repeated(&Statistics::inv_std));
    *task_.kept = {{statistics_.get()}, statistics_};
  }

  const ForwardTask task_;
  const Kernels& kernels_;
  const int64_t C_, batches_;
  const std::shared_ptr<Statistics> statistics_;
};

class CpuBackward : public Pass {
 public:
  explicit CpuBackward(const BackwardTask& task)
      : task_(task),
        kernels_(cpu_kernels(task.dtype)),
        C_(task.parts[0].view.C),
        own_(static_cast<size_t>(C_)),
        dgamma_(own_.size()),
        dbeta_(own_.size()) {
    for (BackwardShard& part : task_.parts) part.sums = own_.data();
  }

  PassSums sums() override {
    const BackwardShard& shard = task_.parts[0];
    if (count_of(shard) > 0) kernels_.backward_sums(shard, task_.kept.statistics);
    return {C_, count_of(shard), own_, {}};
  }

  void finish(const PassSums& all) override {
    if (count_of(task_.parts[0]) > 0) {
      input_gradient(all.on_host.data(), all.count);
      add_gradients(0);
    }
    write();
  }

  void alone() override {
    for (size_t b = 0; b < task_.parts.size(); ++b) {
      const BackwardShard& part = task_.parts[b];
      const Statistics* const statistics = task_.kept.statistics + static_cast<int64_t>(b) * C_;
      if (task_.from_batch) {
        kernels_.backward_alone(part, statistics);
      } else {
        kernels_.backward_sums(part, statistics);
        input_gradient(std::vector<ChannelSums>(own_.size()).data(), 0);
      }
      add_gradients(static_cast<int64_t>(b));
    }
    write();
  }

 private:
  void input_gradient(const ChannelSums* all, double count) {
    const BackwardShard& shard = task_.parts[0];
    if (shard.dx || shard.dresidual) kernels_.backward(shard, task_.kept.statistics, all, count);
  }

  // Those of a batch, whose sums are in own_.
  void add_gradients(int64_t batch) {
    const BackwardShard& part = task_.parts[0];
    for (int64_t c = 0; c < C_; ++c) {
      // The second sum is of dy * (x - mean), or, where z is found from y, of dy * (z - beta),
      // which has the factor inv_std * gamma already.
      const double gamma =
          part.gamma ? effective_gamma(parameter(task_.dtype, part.gamma, c), part.epilogue) : 1;
      const double inv_std =
          part.from_y() ? 1 / gamma : task_.kept.statistics[batch * C_ + c].inv_std;
      dgamma_[c] += own_[c].second.value() * inv_std;
      dbeta_[c] += own_[c].first.value();
    }
  }

  void write() {
    // A gamma that is fixed is null.
    const bool is_fixed = !task_.parts[0].gamma;
    write_values(task_.dgamma, task_.dtype, C_,
                 [&](int64_t c) { return is_fixed ? 0 : dgamma_[c]; });
    write_values(task_.dbeta, task_.dtype, C_, [&](int64_t c) { return dbeta_[c]; });
  }

  BackwardTask task_;
  const Kernels& kernels_;
  const int64_t C_;
  // The sums of a part, and the gradients of all parts.
  std::vector<ChannelSums> own_;
  std::vector<double> dgamma_, dbeta_;
};

}  // namespace

void update_running(DType dtype, void* const (&running)[3], const RunningRule& rule, int64_t C,
                    int64_t batches, const BatchCounts& counts, const Statistics* statistics) {
  const auto [mean, variance, num_batches] = running;
  double momentum = rule.momentum;
  if (num_batches) {
    write_parameter(dtype, num_batches, 0, 1, true);
    momentum = cumulative_momentum(parameter(dtype, num_batches, 0));
  }
  for (int64_t c = 0; c < C; ++c) {
    const auto batch = BatchMeans::of(batches, counts, rule.unbiased,
                                      [&](int64_t b) { return statistics[b * C + c]; });
    const auto update = [&](void* array, double value) {
      const double before = parameter(dtype, array, c);
      write_parameter(dtype, array, c, moving_average(before, value, momentum));
    };
    update(mean, batch.mean);
    update(variance, batch.variance);
  }
}

std::unique_ptr<Pass> cpu_pass(const ForwardTask& task) {
  return std::make_unique<CpuForward>(task);
}

std::unique_ptr<Pass> cpu_pass(const BackwardTask& task) {
  return std::make_unique<CpuBackward>(task);
}

}  // namespace gluon_syncbn
