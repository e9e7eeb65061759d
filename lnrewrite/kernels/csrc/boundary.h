// The boundary between two sublayers of a residual network, as all kernels take it:
//
//     h = x + round(norm(f) * g_out + b_out)        z = norm(h) * g_in + b_in        norm: LayerNorm or RMSNorm
//
// over the last axis. f, x, h, z: [rows, width]; gains and biases: [width]; all of one type. Statistics and products
// are float32; h and the norm of f are rounded to the type, as the operators that this stands for round them.
#pragma once
#include <cstdint>

enum class Type : int { float32 = 1, float16 = 10, bfloat16 = 16 };  // ONNX's numbers for them

struct Boundary {
  Type type;
  bool layer;                   // LayerNorm; RMSNorm otherwise
  int64_t rows, width;
  const void *f, *x, *g_out, *b_out, *g_in, *b_in;  // a bias may be null
  void *h, *z;                  // z null: h alone is wanted, and g_in, b_in are not read
  float eps_out, eps_in;
};
