// Rows of the boundary on a CPU, sixteen numbers at a time. This file is compiled once for every level of instructions,
// LEVEL naming it, and operators.cc picks one at run time. Nothing relies on -ffast-math: NaN and infinity go where
// arithmetic takes them.
#include <cmath>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "boundary.h"

namespace {

constexpr int64_t lanes = 16;
using Floats = float __attribute__((vector_size(64)));  // what GCC and Clang map to the registers that there are
using Words = uint32_t __attribute__((vector_size(64)));
using Signed = int32_t __attribute__((vector_size(64)));
using Shorts = uint16_t __attribute__((vector_size(32)));

struct Half { uint16_t bits; };
struct Brain { uint16_t bits; };

template <typename To, typename From> To as(const From& from) {  // the same bits
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
template <typename To> To at(const void* place) {
  To to;
  std::memcpy(&to, place, sizeof to);
  return to;
}

// ---- sixteen numbers of each type, to float32 and back (to the nearest, ties to even) ----

inline Floats wide(const float* v) { return at<Floats>(v); }
inline void narrow(Floats v, float* out) { std::memcpy(out, &v, sizeof v); }

inline Floats wide(const Brain* v) { return as<Floats>(__builtin_convertvector(at<Shorts>(v), Words) << 16); }
inline void narrow(Floats v, Brain* out) {
  const Words u = as<Words>(v), rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const Words made = (u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded;
  const Shorts bits = __builtin_convertvector(made, Shorts);
  std::memcpy(out, &bits, sizeof bits);
}

#if defined(__AVX512F__)
inline Floats wide(const Half* v) { return as<Floats>(_mm512_maskz_cvtph_ps(0xffff, at<__m256i>(v))); }
inline void narrow(Floats v, Half* out) {
  const __m256i bits = _mm512_maskz_cvtps_ph(0xffff, as<__m512>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  std::memcpy(out, &bits, sizeof bits);
}
#elif defined(__F16C__)
inline Floats wide(const Half* v) {
  const __m256 low = _mm256_cvtph_ps(at<__m128i>(v)), high = _mm256_cvtph_ps(at<__m128i>(v + 8));
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
inline void narrow(Floats v, Half* out) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const __m128i low = _mm256_cvtps_ph(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7), nearest);
  const __m128i high = _mm256_cvtps_ph(__builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15), nearest);
  std::memcpy(out, &low, sizeof low);
  std::memcpy(out + 8, &high, sizeof high);
}
#else
inline Floats wide(const Half* v) {
  const Words u = __builtin_convertvector(at<Shorts>(v), Words), magnitude = (u & 0x7fffu) << 13;
  const Words scaled = as<Words>(as<Floats>(magnitude) * 0x1p112f);  // the exponents' biases; subnormals come out right
  const Words finite = magnitude >= (31u << 23) ? scaled | 0x7f800000u : scaled;
  return as<Floats>(finite | (u & 0x8000u) << 16);
}
inline void narrow(Floats v, Half* out) {
  const Words u = as<Words>(v), sign = u & 0x80000000u, magnitude = u ^ sign, none = u ^ u;
  const Words normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const Words subnormal = as<Words>(as<Floats>(magnitude) + 0.5f) - 0x3f000000u;  // the addition rounds it
  const Words special = magnitude > 0x7f800000u ? none + 0x7e00u : none + 0x7c00u;
  const Words finite = magnitude < (113u << 23) ? subnormal : normal;
  const Shorts bits = __builtin_convertvector((magnitude >= (143u << 23) ? special : finite) | sign >> 16, Shorts);
  std::memcpy(out, &bits, sizeof bits);
}
#endif

// ---- a row's numbers from p on, of which `left` are there; lanes beyond read as zero ----

template <typename T> Floats load(const T* p, int64_t left) {
  if (left >= lanes) return wide(p);
  T padded[lanes] = {};
  std::memcpy(padded, p, static_cast<size_t>(left) * sizeof(T));
  return wide(padded);
}
template <typename T> void store(Floats v, T* p, int64_t left) {
  if (left >= lanes) return narrow(v, p);
  T padded[lanes];
  narrow(v, padded);
  std::memcpy(p, padded, static_cast<size_t>(left) * sizeof(T));
}
template <typename T> Floats rounded(Floats v) {
  T bits[lanes];
  narrow(v, bits);
  return wide(bits);
}
inline Floats masked(Floats v, int64_t left) {
  constexpr Signed lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return left >= lanes ? v : lane < static_cast<int32_t>(left) ? v : Floats{};
}
inline float total(Floats v) {
  float sum = 0;
  for (int64_t i = 0; i < lanes; ++i) sum += v[i];
  return sum;
}

// ---- the algorithm ----

struct Statistics { float mean, scale; };  // (v - mean) * scale has mean 0 (LayerNorm) and mean square 1

template <bool layer, typename T> Statistics statistics(const T* v, int64_t width, float eps) {
  const float count = static_cast<float>(width);
  Floats sum = {}, squares = {};
  if constexpr (layer)
    for (int64_t k = 0; k < width; k += lanes) sum += load(v + k, width - k);
  const float mean = total(sum) / count;
  for (int64_t k = 0; k < width; k += lanes) {
    Floats d = load(v + k, width - k);
    if constexpr (layer) d = width - k < lanes ? masked(d - mean, width - k) : d - mean;
    squares += d * d;
  }
  return {mean, 1 / std::sqrt(total(squares) / count + eps)};
}

template <typename T> Floats affine(Floats v, Statistics s, const T* gain, const T* bias, int64_t k, int64_t left) {
  v = (v - s.mean) * s.scale * load(gain + k, left);
  return bias ? v + load(bias + k, left) : v;
}

template <typename T, bool layer> void rows(const Boundary& b, int64_t first, int64_t last) {
  const auto *g_out = static_cast<const T*>(b.g_out), *b_out = static_cast<const T*>(b.b_out);
  const auto *g_in = static_cast<const T*>(b.g_in), *b_in = static_cast<const T*>(b.b_in);
  const int64_t n = b.width;
  for (int64_t start = first * n; start < last * n; start += n) {
    const auto *f = static_cast<const T*>(b.f) + start, *x = static_cast<const T*>(b.x) + start;
    auto* h = static_cast<T*>(b.h) + start;
    const Statistics out = statistics<layer>(f, n, b.eps_out);
    for (int64_t k = 0; k < n; k += lanes) {
      const Floats v = affine(load(f + k, n - k), out, g_out, b_out, k, n - k);
      store(rounded<T>(v) + load(x + k, n - k), h + k, n - k);
    }
    if (!b.z) continue;
    auto* z = static_cast<T*>(b.z) + start;
    const Statistics in = statistics<layer>(h, n, b.eps_in);
    for (int64_t k = 0; k < n; k += lanes) store(affine(load(h + k, n - k), in, g_in, b_in, k, n - k), z + k, n - k);
  }
}

}  // namespace

#define NAMED(level) cpu_rows_##level
#define FOR(level) NAMED(level)

// Compute the rows from `first` up to `last`.
extern "C" void FOR(LEVEL)(const Boundary& b, int64_t first, int64_t last) {
  switch (b.type) {
    case Type::float32: return b.layer ? rows<float, true>(b, first, last) : rows<float, false>(b, first, last);
    case Type::float16: return b.layer ? rows<Half, true>(b, first, last) : rows<Half, false>(b, first, last);
    case Type::bfloat16: return b.layer ? rows<Brain, true>(b, first, last) : rows<Brain, false>(b, first, last);
  }
}
