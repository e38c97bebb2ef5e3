// Loaded after libmxnet.so, this lets MXNet's own operators compute on GPU contexts with the
// functions that it has for the CPU: libmxnet.so has machine code of its kernels only, and the
// memory of simulated GPUs is memory of the host. The engine's workers, streams, storage, copies
// and autograd remain those for GPUs.
//
// The wheel was compiled by GCC 4.8: so this needs -D_GLIBCXX_USE_CXX11_ABI=0, and functions that
// libmxnet.so is to call need OldFunction.
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_map>

// For the values of attributes: what nnvm::Op::set_attr takes is not an OldFunction.
#define private public
#include <nnvm/op.h>
#undef private
#include <mxnet/base.h>
#include <mxnet/engine.h>
#include <mxnet/op_attr_types.h>
#include <mxnet/resource.h>

#include "ptxsim.h"

namespace {

using mxnet::Context;
using mxnet::FCompute;
using mxnet::FStatefulCompute;
using mxnet::OpContext;
using mxnet::OpReqType;
using mxnet::OpStatePtr;
using mxnet::Resource;
using mxnet::ResourceRequest;
using mxnet::TBlob;
using Blobs = std::vector<TBlob>;
using Reqs = std::vector<OpReqType>;

Blobs on_host(const Blobs& blobs) {
  Blobs result;
  for (const TBlob& b : blobs) {
    result.emplace_back(b.dptr_, b.shape_, int{mshadow::cpu::kDevMask}, b.type_flag_, 0);
  }
  return result;
}

// Each thread has a manager of its own, and creates resources in the engine: so those of the main
// thread are taken, which mx.random.seed seeds.
const Resource& random_of_host(ResourceRequest::Type type) {
  const auto take = [](ResourceRequest::Type wanted) {
    const Resource r = mxnet::ResourceManager::Get()->Request(Context::CPU(), wanted);
    mxnet::Engine::Get()->WaitForVar(r.var);
    return r;
  };
  static const Resource random = take(ResourceRequest::kRandom);
  static const Resource parallel = take(ResourceRequest::kParallelRandom);
  return type == ResourceRequest::kRandom ? random : parallel;
}

// Random numbers come from generators that all devices share.
std::mutex random_mutex;

void* stream_of(const OpContext& ctx) {
  // The handle is the stream's first member.
  return ctx.run_ctx.stream ? *static_cast<void**>(ctx.run_ctx.stream) : nullptr;
}

// Tells the simulator of an operator that did not fail. Inputs count as read and outputs as
// written, even if it needs a part only.
void watch(const nnvm::Op* op, const nnvm::NodeAttrs* attrs, const OpContext& ctx, const Blobs& in,
           const Reqs& req, const Blobs& out) {
  static const auto& mutated = nnvm::Op::GetAttr<nnvm::FMutateInputs>("FMutateInputs");
  std::vector<PtxsimArray> arrays;
  const auto add = [&](const TBlob& b, bool writes) {
    arrays.push_back({b.dptr_, b.Size() * mshadow::mshadow_sizeof(b.type_flag_), writes});
  };
  for (const TBlob& b : in) add(b, false);
  if (attrs && mutated.count(op)) {
    for (const uint32_t i : mutated[op](*attrs)) add(in.at(i), true);
  }
  for (size_t i = 0; i < out.size(); ++i) {
    if (req[i] == mxnet::kAddTo) add(out[i], false);
    if (req[i] != mxnet::kNullOp) add(out[i], true);
  }
  ptxsim_work_on_host(op->name.c_str(), stream_of(ctx), arrays.data(), arrays.size());
}

// The function of an operator for GPUs, from `body`, that for the CPU. That gets a context of the
// CPU, with memory of the GPU where work space is asked for.
template <typename F>
F on_gpu(const F& body, const nnvm::Op* op) {
  // `first` is the operator's attributes, or its state.
  return [body, op](const auto& first, const OpContext& ctx, const Blobs& in, const Reqs& req,
                    const Blobs& out) {
    // The simulator does what was queued before.
    ptxsim_work_on_host(op->name.c_str(), stream_of(ctx), nullptr, 0);
    static mshadow::Stream<mshadow::cpu>* const stream = new mshadow::Stream<mshadow::cpu>;
    OpContext host = ctx;
    host.run_ctx.ctx = Context::CPU();
    host.run_ctx.stream = stream;
    host.run_ctx.aux_stream = nullptr;
    std::unique_lock<std::mutex> lock(random_mutex, std::defer_lock);
    for (Resource& r : host.requested) {
      if (r.req.type == ResourceRequest::kTempSpace) continue;
      if (!lock.owns_lock()) lock.lock();
      r = random_of_host(r.req.type);
    }
    body(first, host, on_host(in), req, on_host(out));
    const nnvm::NodeAttrs* attrs = nullptr;
    if constexpr (std::is_same_v<F, FCompute>) attrs = &first;
    watch(op, attrs, ctx, in, req, out);
  };
}

// A std::function of GCC 4.8. It passes arguments by value where later ones pass references.
template <typename R, typename... A>
struct OldFunction {
  void* functor[2];
  bool (*manager)(void**, void* const*, int);
  R (*invoker)(void* const*, A...);

  R operator()(A... a) const { return invoker(functor, a...); }
};
bool manage(void** to, void* const* from, int operation) {
  // Get a type, get a pointer, clone, destroy: what is behind the pointer stays.
  if (operation == 1 || operation == 2) *to = *from;
  return false;
}
using OldCreate = OldFunction<OpStatePtr, const nnvm::NodeAttrs&, Context,
                              const mxnet::ShapeVector&, const std::vector<int>&>;
using OldRequest =
    OldFunction<std::vector<ResourceRequest>, const nnvm::NodeAttrs&, int, mxnet::DispatchMode>;
OpStatePtr create_for_host(void* const* functor, const nnvm::NodeAttrs& attrs, Context,
                           const mxnet::ShapeVector& shapes, const std::vector<int>& types) {
  return (**reinterpret_cast<OldCreate* const*>(functor))(attrs, Context::CPU(), shapes, types);
}
std::vector<ResourceRequest> request_for_host(void* const* functor, const nnvm::NodeAttrs& attrs,
                                              int, mxnet::DispatchMode mode) {
  return (**reinterpret_cast<OldRequest* const*>(functor))(attrs, mshadow::cpu::kDevMask, mode);
}

template <typename F>
F& value_of(const nnvm::OpMap<F>& map, const nnvm::Op* op) {
  return const_cast<nnvm::OpMap<F>&>(map).data_[op->index_].first;
}
// The old function stays where it is, as a part of a copy that is never deleted.
template <typename Old, typename F, typename Invoker>
void replace(F* function, Invoker invoker) {
  static_assert(sizeof(Old) == sizeof(F));
  Old* const kept = static_cast<Old*>(std::malloc(sizeof(Old)));
  std::memcpy(static_cast<void*>(kept), function, sizeof(Old));
  const Old now{{kept, nullptr}, manage, invoker};
  std::memcpy(static_cast<void*>(function), &now, sizeof(Old));
}

void compute_on_host(nnvm::Op* op) {
  static const auto& cpu = nnvm::Op::GetAttr<FCompute>("FCompute<cpu>");
  static const auto& gpu = nnvm::Op::GetAttr<FCompute>("FCompute<gpu>");
  static const auto& state_cpu = nnvm::Op::GetAttr<FStatefulCompute>("FStatefulCompute<cpu>");
  static const auto& state_gpu = nnvm::Op::GetAttr<FStatefulCompute>("FStatefulCompute<gpu>");
  static const auto& create = nnvm::Op::GetAttr<mxnet::FCreateOpState>("FCreateOpState");
  static const auto& request = nnvm::Op::GetAttr<mxnet::FResourceRequestEx>("FResourceRequestEx");
  if (gpu.count(op) && cpu.count(op)) value_of(gpu, op) = on_gpu(cpu[op], op);
  if (state_gpu.count(op) && state_cpu.count(op)) {
    value_of(state_gpu, op) = on_gpu(state_cpu[op], op);
    if (create.count(op)) replace<OldCreate>(&value_of(create, op), create_for_host);
  }
  if (request.count(op)) replace<OldRequest>(&value_of(request, op), request_for_host);
}

const bool ready = [] {
  random_of_host(ResourceRequest::kRandom);
  // An operator with two names is listed twice.
  std::set<const nnvm::Op*> seen;
  for (const nnvm::Op* op : dmlc::Registry<nnvm::Op>::List()) {
    if (seen.insert(op).second) compute_on_host(const_cast<nnvm::Op*>(op));
  }
  return true;
}();

}  // namespace
