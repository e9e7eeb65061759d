// Rows of the boundary on a GPU: one block a row, the row in registers, every number read and written once, sixteen
// bytes at a time; any width and alignment by a second kernel that reads again what it needs again.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "boundary.h"

namespace {

constexpr int warp = 32, most_threads = 512;

__device__ float wide(float v) { return v; }
__device__ float wide(__half v) { return __half2float(v); }
__device__ float wide(__nv_bfloat16 v) { return __bfloat162float(v); }
template <typename T> __device__ T narrow(float v);  // to the nearest, ties to even
template <> __device__ float narrow<float>(float v) { return v; }
template <> __device__ __half narrow<__half>(float v) { return __float2half_rn(v); }
template <> __device__ __nv_bfloat16 narrow<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }

template <typename T> struct alignas(16) Pack {
  static constexpr int count = 16 / sizeof(T);
  T v[count];
};

template <typename T> struct Row {
  const T *f, *x, *g_out, *b_out, *g_in, *b_in;
  T *h, *z;
  int width;
  float eps_out, eps_in;

  __device__ void move(int64_t row) {
    f += row * width;
    x += row * width;
    h += row * width;
    if (z) z += row * width;
  }
};

// Sum over a block; every thread gets it. Each sum of a kernel has a room of its own.
__device__ float block_sum(float v, float* room) {
  for (int step = warp / 2; step; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  const int lane = threadIdx.x % warp, warps = blockDim.x / warp;
  if (warps == 1) return v;
  if (lane == 0) room[threadIdx.x / warp] = v;
  __syncthreads();
  v = lane < warps ? room[lane] : 0.0f;
  for (int step = warp / 2; step; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

struct Statistics { float mean, scale; };  // (v - mean) * scale has mean 0 (LayerNorm) and mean square 1

// each(of): call of(v) for every number of this thread's
template <bool layer, typename Each>
__device__ Statistics statistics(Each each, int width, float eps, float (*room)[warp]) {
  float mean = 0.0f;
  if constexpr (layer) {
    float sum = 0.0f;
    each([&](float v) { sum += v; });
    mean = block_sum(sum, room[0]) / width;
  }
  float squares = 0.0f;
  each([&](float v) { squares += (v - mean) * (v - mean); });
  return {mean, rsqrtf(block_sum(squares, room[1]) / width + eps)};
}

template <typename T> __device__ float affine(float v, Statistics s, T gain, const T* bias) {
  v = (v - s.mean) * s.scale * wide(gain);
  return bias ? v + wide(*bias) : v;
}

template <typename T> __device__ T summed(float v, T x) { return narrow<T>(wide(narrow<T>(v)) + wide(x)); }

template <typename T, bool layer, int packs>
__global__ __launch_bounds__(most_threads) void in_registers(Row<T> r) {
  using P = Pack<T>;
  __shared__ float room[4][warp];
  r.move(blockIdx.x);
  const int all = r.width / P::count;
  auto at = [](const T* base, int k) { return reinterpret_cast<const P*>(base)[k]; };
  float v[packs][P::count];
  P x[packs];
#pragma unroll
  for (int i = 0; i < packs; ++i) {
    const int k = threadIdx.x + i * blockDim.x;
    if (k >= all) continue;
    const P f = at(r.f, k);
    x[i] = at(r.x, k);
#pragma unroll
    for (int j = 0; j < P::count; ++j) v[i][j] = wide(f.v[j]);
  }
  auto each = [&](auto of) {
#pragma unroll
    for (int i = 0; i < packs; ++i)
      if (threadIdx.x + i * blockDim.x < all)
#pragma unroll
        for (int j = 0; j < P::count; ++j) of(v[i][j]);
  };
  auto normed = [&](Statistics s, const T* gains, const T* biases, T* to, auto of) {
#pragma unroll
    for (int i = 0; i < packs; ++i) {
      const int k = threadIdx.x + i * blockDim.x;
      if (k >= all) continue;
      const P gain = at(gains, k), bias = biases ? at(biases, k) : gain;
      P made;
#pragma unroll
      for (int j = 0; j < P::count; ++j) {
        made.v[j] = of(affine(v[i][j], s, gain.v[j], biases ? &bias.v[j] : nullptr), x[i].v[j]);
        v[i][j] = wide(made.v[j]);
      }
      reinterpret_cast<P*>(to)[k] = made;
    }
  };
  const Statistics out = statistics<layer>(each, r.width, r.eps_out, room);
  normed(out, r.g_out, r.b_out, r.h, [](float a, T b) { return summed(a, b); });
  if (!r.z) return;
  const Statistics in = statistics<layer>(each, r.width, r.eps_in, room + 2);
  normed(in, r.g_in, r.b_in, r.z, [](float a, T) { return narrow<T>(a); });
}

template <typename T, bool layer> __global__ __launch_bounds__(most_threads) void any_width(Row<T> r) {
  __shared__ float room[4][warp];
  r.move(blockIdx.x);
  auto over = [&](const T* row) {
    return [=](auto of) { for (int k = threadIdx.x; k < r.width; k += blockDim.x) of(wide(row[k])); };
  };
  const Statistics out = statistics<layer>(over(r.f), r.width, r.eps_out, room);
  for (int k = threadIdx.x; k < r.width; k += blockDim.x)
    r.h[k] = summed(affine(wide(r.f[k]), out, r.g_out[k], r.b_out ? r.b_out + k : nullptr), r.x[k]);
  if (!r.z) return;
  const Statistics in = statistics<layer>(over(r.h), r.width, r.eps_in, room + 2);  // a thread reads what it wrote
  for (int k = threadIdx.x; k < r.width; k += blockDim.x)
    r.z[k] = narrow<T>(affine(wide(r.h[k]), in, r.g_in[k], r.b_in ? r.b_in + k : nullptr));
}

template <typename T, bool layer> void launch(const Boundary& b, cudaStream_t stream) {
  const auto vector = [](const void* p) { return static_cast<const T*>(p); };
  const Row<T> row{vector(b.f), vector(b.x), vector(b.g_out), vector(b.b_out), vector(b.g_in), vector(b.b_in),
                   static_cast<T*>(b.h), static_cast<T*>(b.z), static_cast<int>(b.width), b.eps_out, b.eps_in};
  bool aligned = b.width % Pack<T>::count == 0;
  const void* places[] = {b.f, b.x, b.g_out, b.b_out, b.g_in, b.b_in, b.h, b.z};
  for (const void* p : places)
    aligned = aligned && reinterpret_cast<uintptr_t>(p) % 16 == 0;
  const int all = static_cast<int>((b.width + Pack<T>::count - 1) / Pack<T>::count);
  const auto blocks = static_cast<unsigned>(b.rows);
  const auto threads = [&](int packs) {
    return static_cast<unsigned>((all + packs * warp - 1) / (packs * warp) * warp);
  };
  if (aligned && all <= most_threads)
    in_registers<T, layer, 1><<<blocks, threads(1), 0, stream>>>(row);
  else if (aligned && all <= 2 * most_threads)
    in_registers<T, layer, 2><<<blocks, threads(2), 0, stream>>>(row);
  else if (aligned && all <= 4 * most_threads)
    in_registers<T, layer, 4><<<blocks, threads(4), 0, stream>>>(row);
  else
    any_width<T, layer><<<blocks, most_threads, 0, stream>>>(row);
}

template <typename T> void launch(const Boundary& b, cudaStream_t stream) {
  return b.layer ? launch<T, true>(b, stream) : launch<T, false>(b, stream);
}

}  // namespace

// Queue the rows on a CUDA stream; returns null, or what went wrong.
extern "C" const char* cuda_rows(const Boundary& b, void* queue) {
  const auto stream = static_cast<cudaStream_t>(queue);
  if (b.rows > INT32_MAX || b.width > INT32_MAX) return "more than 2^31 rows or columns";
  switch (b.type) {
    case Type::float32: launch<float>(b, stream); break;
    case Type::float16: launch<__half>(b, stream); break;
    case Type::bfloat16: launch<__nv_bfloat16>(b, stream); break;
  }
  const cudaError_t failed = cudaGetLastError();
  return failed == cudaSuccess ? nullptr : cudaGetErrorString(failed);
}
