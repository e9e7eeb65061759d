// The ONNX Runtime operators lnrewrite::NormAddNorm(f, x, g_out, g_in[, b_out, b_in]) -> (h, z) and
// lnrewrite::NormAdd(f, x, g_out[, b_out]) -> h, attributes eps_out, eps_in, layernorm: see boundary.h.
#include <algorithm>
#include <memory>
#include <vector>

#include "boundary.h"
#include "ort_abi.h"

#if defined(__x86_64__)
#define LEVELS(of) of(base) of(v3) of(v4)
#else
#define LEVELS(of) of(base)
#endif
#define DECLARE(level) extern "C" void cpu_rows_##level(const Boundary& b, int64_t first, int64_t last);
LEVELS(DECLARE)

#ifdef WITH_CUDA
extern "C" const char* cuda_rows(const Boundary& b, void* stream);  // null, or what went wrong
#endif

namespace {

constexpr uint32_t api_version = 17;
const OrtApi* api = nullptr;

#define TRY(expression)                                    \
  do {                                                     \
    if (OrtStatus* failed = (expression)) return failed;   \
  } while (false)

using Rows = void (*)(const Boundary&, int64_t, int64_t);

Rows best_rows() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (fma && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return cpu_rows_v4;
  if (fma) return cpu_rows_v3;
#endif
  return cpu_rows_base;
}

struct Operator : OrtCustomOp {
  Type type;
  bool both, cuda;  // NormAddNorm, NormAdd otherwise; on CUDA, on the CPU otherwise
};

const Operator& self(const OrtCustomOp* op) { return *static_cast<const Operator*>(op); }

struct Kernel {
  const Operator& op;  // one of those that are registered, for as long as the library is loaded
  float eps_out = 0, eps_in = 0;
  int64_t layer = 0;
};

OrtStatus* create(const OrtCustomOp* op, const OrtApi* table, const OrtKernelInfo* info, void** out) {
  std::unique_ptr<Kernel> kernel(new Kernel{self(op)});
  TRY(table->attribute(info, "eps_out", &kernel->eps_out));
  if (kernel->op.both) TRY(table->attribute(info, "eps_in", &kernel->eps_in));
  TRY(table->attribute(info, "layernorm", &kernel->layer));
  *out = kernel.release();
  return nullptr;
}

OrtStatus* sizes_of(const OrtValue* tensor, std::vector<int64_t>& out) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  TRY(api->shape(tensor, &info));
  size_t rank = 0;
  OrtStatus* failed = api->rank(info, &rank);
  if (!failed) {
    out.resize(rank);
    failed = api->sizes(info, out.data(), rank);
  }
  api->release(info);
  return failed;
}

// Rows in tasks of at least 16384 numbers, so that waking a thread is worth it.
struct Tasks {
  const Boundary& boundary;
  int64_t count;

  explicit Tasks(const Boundary& b)
      : boundary(b), count(std::clamp<int64_t>(b.rows * b.width / 16384, 1, std::min<int64_t>(b.rows, 256))) {}

  static void run(void* data, size_t index) {
    static const Rows rows = best_rows();
    const Tasks& tasks = *static_cast<const Tasks*>(data);
    const int64_t i = static_cast<int64_t>(index), all = tasks.boundary.rows;
    rows(tasks.boundary, all * i / tasks.count, all * (i + 1) / tasks.count);
  }
};

OrtStatus* launch(const Kernel& kernel, const OrtKernelContext* context, const Boundary& boundary) {
  if (kernel.op.cuda) {
#ifdef WITH_CUDA
    void* stream = nullptr;
    TRY(api->gpu_stream(context, &stream));
    const char* failed = cuda_rows(boundary, stream);
    return failed ? api->status(OrtApi::fail, failed) : nullptr;
#endif
  }
  Tasks tasks(boundary);
  if (tasks.count > 1) return api->parallel(context, Tasks::run, static_cast<size_t>(tasks.count), 0, &tasks);
  Tasks::run(&tasks, 0);
  return nullptr;
}

OrtStatus* compute(void* held, OrtKernelContext* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(held);
  Boundary b{};
  b.type = kernel.op.type;
  b.layer = kernel.layer != 0;
  b.eps_out = kernel.eps_out;
  b.eps_in = kernel.eps_in;
  const void** places_of_both[] = {&b.f, &b.x, &b.g_out, &b.g_in, &b.b_out, &b.b_in};
  const void** places_of_one[] = {&b.f, &b.x, &b.g_out, &b.b_out};
  const void*** places = kernel.op.both ? places_of_both : places_of_one;
  size_t count = 0;
  TRY(api->input_count(context, &count));
  std::vector<int64_t> sizes, others;
  for (size_t i = 0; i < count; ++i) {
    const OrtValue* tensor = nullptr;
    TRY(api->input(context, i, &tensor));
    if (!tensor) continue;
    void* data = nullptr;
    TRY(api->data(tensor, &data));
    *places[i] = data;
    TRY(sizes_of(tensor, i ? others : sizes));
    if (sizes.empty()) return api->status(OrtApi::invalid_argument, "f needs one axis at least");
    if (i == 1 && others != sizes) return api->status(OrtApi::invalid_argument, "x needs the shape of f");
    if (i > 1 && (others.size() != 1 || others[0] != sizes.back()))
      return api->status(OrtApi::invalid_argument, "gains and biases need the shape of f's last axis");
  }
  OrtValue* made = nullptr;
  TRY(api->output(context, 0, sizes.data(), sizes.size(), &made));
  TRY(api->data(made, &b.h));
  if (kernel.op.both) {
    TRY(api->output(context, 1, sizes.data(), sizes.size(), &made));
    TRY(api->data(made, &b.z));
  }
  b.width = sizes.back();
  b.rows = 1;
  for (size_t i = 0; i + 1 < sizes.size(); ++i) b.rows *= sizes[i];
  return b.rows && b.width ? launch(kernel, context, b) : nullptr;
}

OrtStatus* infer(const OrtCustomOp* op, OrtShapeInferContext* context) {
  OrtTensorTypeAndShapeInfo* shape = nullptr;
  TRY(api->input_shape(context, 0, &shape));
  TRY(api->set_output_shape(context, 0, shape));
  return self(op).both ? api->set_output_shape(context, 1, shape) : nullptr;
}

Operator make(Type type, bool both, bool cuda) {
  Operator op{};
  op.version = api_version;
  op.type = type;
  op.both = both;
  op.cuda = cuda;
  op.GetName = [](const OrtCustomOp* o) { return self(o).both ? "NormAddNorm" : "NormAdd"; };
  op.GetExecutionProviderType = [](const OrtCustomOp* o) {
    return self(o).cuda ? "CUDAExecutionProvider" : "CPUExecutionProvider";
  };
  op.GetInputTypeCount = [](const OrtCustomOp* o) -> size_t { return self(o).both ? 6 : 4; };
  op.GetOutputTypeCount = [](const OrtCustomOp* o) -> size_t { return self(o).both ? 2 : 1; };
  op.GetInputType = op.GetOutputType = [](const OrtCustomOp* o, size_t) { return static_cast<int>(self(o).type); };
  op.GetInputCharacteristic = [](const OrtCustomOp* o, size_t i) { return i < (self(o).both ? 4u : 3u) ? 0 : 1; };
  op.GetOutputCharacteristic = op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = compute;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.InferOutputShapeFn = infer;
  op.GetStartVersion = op.GetEndVersion = [](const OrtCustomOp*) { return 1; };
  return op;
}

std::vector<Operator> all() {
  std::vector<Operator> made;
  for (bool cuda : {false, true}) {
#ifndef WITH_CUDA
    if (cuda) continue;
#endif
    for (Type type : {Type::float32, Type::float16, Type::bfloat16})
      for (bool both : {true, false}) made.push_back(make(type, both, cuda));
  }
  return made;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Say whether the library holds CUDA kernels.
EXPORTED bool lnrewrite_has_cuda() {
#ifdef WITH_CUDA
  return true;
#else
  return false;
#endif
}

// What ONNX Runtime calls when a session registers this library.
EXPORTED OrtStatus* RegisterCustomOps(
    OrtSessionOptions* options, const OrtApiBase* base) {
  static const std::vector<Operator> operators = all();
  api = base->GetApi(api_version);
  OrtCustomOpDomain* domain = nullptr;
  TRY(api->create_domain("lnrewrite", &domain));
  for (const Operator& op : operators) TRY(api->add(domain, &op));
  return api->add(options, domain);
}
