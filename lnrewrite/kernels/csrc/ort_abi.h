// What a custom operator uses of ONNX Runtime's C API, so that no header of it is needed to build.
//
// The API is one table of functions that only ever grows at its end, so that a library built for one version loads into
// all later ones; a function's place in the table is fixed for good. These are the places in onnxruntime_c_api.h of API
// version 17 and later.
#pragma once
#include <cstddef>
#include <cstdint>

struct OrtStatus;
struct OrtValue;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtShapeInferContext;
struct OrtTensorTypeAndShapeInfo;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtCustomOp;

class OrtApi {  // never made here: ONNX Runtime's table is read through it
  void* const table[275];

  template <typename Result, typename... Given> Result call(int place, Given... given) const {
    return reinterpret_cast<Result (*)(Given...)>(table[place])(given...);
  }

 public:
  OrtApi() = delete;
  enum Code : int { fail = 1, invalid_argument = 2 };

  OrtStatus* status(Code code, const char* message) const { return call<OrtStatus*, int>(0, code, message); }
  OrtStatus* create_domain(const char* name, OrtCustomOpDomain** out) const { return call<OrtStatus*>(26, name, out); }
  OrtStatus* add(OrtCustomOpDomain* domain, const OrtCustomOp* op) const { return call<OrtStatus*>(27, domain, op); }
  OrtStatus* add(OrtSessionOptions* options, OrtCustomOpDomain* domain) const {
    return call<OrtStatus*>(28, options, domain);
  }
  OrtStatus* data(const OrtValue* tensor, void** out) const { return call<OrtStatus*>(51, tensor, out); }
  OrtStatus* rank(const OrtTensorTypeAndShapeInfo* info, size_t* out) const { return call<OrtStatus*>(61, info, out); }
  OrtStatus* sizes(const OrtTensorTypeAndShapeInfo* info, int64_t* out, size_t rank) const {
    return call<OrtStatus*>(62, info, out, rank);
  }
  OrtStatus* shape(const OrtValue* tensor, OrtTensorTypeAndShapeInfo** out) const {
    return call<OrtStatus*>(65, tensor, out);
  }
  OrtStatus* attribute(const OrtKernelInfo* info, const char* name, float* out) const {
    return call<OrtStatus*>(85, info, name, out);
  }
  OrtStatus* attribute(const OrtKernelInfo* info, const char* name, int64_t* out) const {
    return call<OrtStatus*>(86, info, name, out);
  }
  OrtStatus* input_count(const OrtKernelContext* context, size_t* out) const {
    return call<OrtStatus*>(88, context, out);
  }
  OrtStatus* input(const OrtKernelContext* context, size_t index, const OrtValue** out) const {
    return call<OrtStatus*>(90, context, index, out);
  }
  OrtStatus* output(OrtKernelContext* context, size_t index, const int64_t* sizes, size_t rank, OrtValue** out) const {
    return call<OrtStatus*>(91, context, index, sizes, rank, out);
  }
  void release(OrtTensorTypeAndShapeInfo* info) const { call<void>(99, info); }
  OrtStatus* gpu_stream(const OrtKernelContext* context, void** out) const {
    return call<OrtStatus*>(193, context, out);
  }
  OrtStatus* input_shape(const OrtShapeInferContext* context, size_t index, OrtTensorTypeAndShapeInfo** out) const {
    return call<OrtStatus*>(268, context, index, out);
  }
  OrtStatus* set_output_shape(
      const OrtShapeInferContext* context, size_t index, const OrtTensorTypeAndShapeInfo* shape) const {
    return call<OrtStatus*>(270, context, index, shape);
  }
  // Call each(data, i) for i below `count` in the session's threads; `batches` 0 lets ONNX Runtime choose.
  OrtStatus* parallel(
      const OrtKernelContext* context, void (*each)(void* data, size_t i), size_t count, size_t batches,
      void* data) const {
    return call<OrtStatus*>(274, context, each, count, batches, data);
  }
};

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

struct OrtCustomOp {  // of API version 17; later versions add members after these
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  int (*GetInputType)(const OrtCustomOp*, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  int (*GetOutputType)(const OrtCustomOp*, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void* kernel, OrtKernelContext*);
  void (*KernelDestroy)(void* kernel);
  int (*GetInputCharacteristic)(const OrtCustomOp*, size_t index);  // 0: required, 1: optional
  int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t index);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t index);  // 0: where the operator runs
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void** kernel);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
};
