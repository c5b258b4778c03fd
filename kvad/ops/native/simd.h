// Vectors of 16 numbers, conversions and activations, for any instruction set that GCC or Clang compiles for.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
constexpr int PANEL = 32;   // rows of a weight that are stored together
constexpr int CHUNK = 256;  // slots that attention reads at a time; its results are merged in order
constexpr int MAX_HEAD_DIM = 1024;
#if defined(__AVX512F__)
constexpr int REGISTER_ROWS = 12;  // tokens that a panel is multiplied by at a time: what the registers hold
#else
constexpr int REGISTER_ROWS = 3;
#endif
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define KVAD_TILES
constexpr int TILE_ROWS = 32;  // the same in bfloat16
#else
constexpr int TILE_ROWS = REGISTER_ROWS;
#endif
constexpr int TILE_DEPTH = 32;  // bfloat16 inputs of a step of tiles
constexpr int ROWS = TILE_ROWS;  // of either, at most

typedef float F __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t bf16;

// What a register holds. GCC computes wider vectors in memory, so products use these.
#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int PARTS = PANEL / WIDTH;
typedef float V __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t VI __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

inline F load(const float* p) { return *reinterpret_cast<const F*>(p); }
inline void store(float* p, F x) { *reinterpret_cast<F*>(p) = x; }
inline F all(float x) { return F{} + x; }
inline F as_floats(I x) { return reinterpret_cast<F&>(x); }
inline I as_ints(F x) { return reinterpret_cast<I&>(x); }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline F larger(F a, F b) { return a > b ? a : b; }
inline F smaller(F a, F b) { return a < b ? a : b; }

inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}
inline float widen(float x) { return x; }

inline bf16 narrow(float x) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return bf16((bits >> 16) | 64);  // NaN
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void put(bf16* p, float x) { *p = narrow(x); }
inline void put(float* p, float x) { *p = x; }

inline void store(bf16* p, F x) {
#ifdef __AVX512BF16__
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
  for (int i = 0; i < LANES; i++) p[i] = narrow(x[i]);
#endif
}

template <class T> inline void store_first(T* p, F x, int n) {
  if (n >= LANES) return store(p, x);
  for (int i = 0; i < n; i++) put(p + i, x[i]);
}
inline F load_first(const float* p, int n) {
  if (n >= LANES) return load(p);
  F x = F{};
  for (int i = 0; i < n; i++) x[i] = p[i];
  return x;
}

inline F load_wide(const float* p, int n) { return load_first(p, n); }
inline F load_wide(const bf16* p, int n) {  // zeros after the first n
#if defined(__AVX512BW__)
  const __mmask16 mask = n >= LANES ? 0xffff : __mmask16((1u << n) - 1);
  return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16);
#else
  F x = F{};
  for (int i = 0; i < LANES && i < n; i++) x[i] = widen(p[i]);
  return x;
#endif
}

// WIDTH bytes as integers.
#if defined(__AVX512F__)
inline VI widen_signed(const void* p) { return (VI)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline VI widen_unsigned(const void* p) { return (VI)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
#elif defined(__AVX2__)
inline VI widen_signed(const void* p) { return (VI)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline VI widen_unsigned(const void* p) { return (VI)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
#else
inline VI widen_signed(const void* p) {
  const int8_t* x = static_cast<const int8_t*>(p);
  return VI{x[0], x[1], x[2], x[3]};
}
inline VI widen_unsigned(const void* p) {
  const uint8_t* x = static_cast<const uint8_t*>(p);
  return VI{x[0], x[1], x[2], x[3]};
}
#endif
inline V to_floats(VI x) { return __builtin_convertvector(x, V); }
inline F signed_to_floats(const void* p) {  // 16 of them
  V x[LANES / WIDTH];
  for (int i = 0; i < LANES / WIDTH; i++) x[i] = to_floats(widen_signed(static_cast<const char*>(p) + i * WIDTH));
  return reinterpret_cast<const F&>(x);
}
inline F unsigned_to_floats(const void* p) {
  V x[LANES / WIDTH];
  for (int i = 0; i < LANES / WIDTH; i++) x[i] = to_floats(widen_unsigned(static_cast<const char*>(p) + i * WIDTH));
  return reinterpret_cast<const F&>(x);
}

inline float sum(F x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);  // in the same order
#endif
  float s[8];
  for (int i = 0; i < 8; i++) s[i] = x[i] + x[i + 8];
  return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}
inline int32_t sum_of(I x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  int32_t total = 0;
  for (int i = 0; i < LANES; i++) total += x[i];
  return total;
#endif
}
inline float highest(F x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#endif
  float top = x[0];
  for (int i = 1; i < LANES; i++) top = x[i] > top ? x[i] : top;
  return top;
}
// The largest size of some numbers, or NaN: as bits, NaN is larger than any number.
inline I larger_size(I top, F x) {
  const I size = as_ints(x) & 0x7fffffff;
  return size > top ? size : top;
}
inline float largest_size(I sizes) {
#if defined(__AVX512F__)
  int32_t top = _mm512_reduce_max_epi32((__m512i)sizes);
#else
  int32_t top = sizes[0];
  for (int i = 1; i < LANES; i++) top = sizes[i] > top ? sizes[i] : top;
#endif
  float size;
  std::memcpy(&size, &top, 4);
  return size;
}

// e^x: 2^n times a polynomial of degree 6 on [-ln2/2, ln2/2] (Cephes, expf). NaN stays NaN.
inline F exponential(F x) {  // 0 below -87, at most e^88
#ifdef __AVX512F__
  x = (F)_mm512_min_ps((__m512)all(88.0f), (__m512)x);  // the second one, if it is NaN
  const __m512 n = _mm512_roundscale_ps((__m512)(x * 1.44269504f), 0);
  F r = x - (F)n * 0.693359375f + (F)n * 2.12194440e-4f;
#else
  F bounded = smaller(larger(x, all(-87.0f)), all(88.0f));
  F n = bounded * 1.44269504f + 12582912.0f;
  I shift = as_ints(n) << 23;
  n -= 12582912.0f;
  F r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
#endif
  F p = all(1.9875691500e-4f) * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
#ifdef __AVX512F__
  const F result = (F)_mm512_scalef_ps((__m512)p, n);
  return (F)_mm512_mask_mov_ps((__m512)result, _mm512_cmp_ps_mask((__m512)x, (__m512)all(-87.0f), _CMP_LT_OQ), (__m512)F{});
#else
  F result = as_floats(as_ints(p) + shift);
  return x > -87.0f ? result : (x == x ? F{} : x);
#endif
}

// 2^x of x <= 0: that of the whole part, rounded down, times a polynomial of the rest, within 2^-23. NaN stays NaN.
inline F power_of_two(F x) {  // 0 below -126
#ifdef __AVX512F__
  const F r = (F)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);  // x without the whole part; 0 of infinity
#else
  const F bounded = larger(x, all(-126.0f));
  F whole = (bounded - 0.5f) + 12582912.0f;
  const I shift = as_ints(whole) << 23;
  whole -= 12582912.0f;
  const F r = bounded - whole;
#endif
  F p = all(1.86713e-3f) * r + 9.01703e-3f;  // least relative error on [0, 1), 1 at 0
  p = p * r + 5.579991e-2f;
  p = p * r + 2.4016445e-1f;
  p = p * r + 6.9315131e-1f;
  p = p * r + 1.0f;
#ifdef __AVX512F__
  return (F)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
  return x > -126.0f ? as_floats(as_ints(p) + shift) : (x == x ? F{} : x);
#endif
}
inline F sigmoid(F x) { return 1.0f / (1.0f + exponential(-x)); }
inline F tangent(F x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }

// erf, within 1.5e-7 (Abramowitz & Stegun 1964, 7.1.26).
inline F error_function(F x) {
  F size = larger(x, -x), t = 1.0f / (1.0f + 0.3275911f * size);
  F p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
  F result = 1.0f - p * exponential(-size * size);
  return x < 0.0f ? -result : result;
}

enum Activation { NO_ACTIVATION, SILU, GELU, GELU_TANH, QUICK_GELU, RELU, RELU2, TANH };
inline F activate(int kind, F x) {
  switch (kind) {
    case SILU: return x * sigmoid(x);
    case GELU: return 0.5f * x * (1.0f + error_function(x * 0.70710678f));
    case GELU_TANH: return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
    case QUICK_GELU: return x * sigmoid(1.702f * x);
    case RELU: return x > 0.0f ? x : x * 0.0f;
    case RELU2: return x > 0.0f ? x * x : x * 0.0f;
    case TANH: return tangent(x);
    default: return x;
  }
}

// Number types of weights, activations and products. A step is what one multiply-add of a lane reads; TOGETHER tokens
// are multiplied by a panel at a time.
struct BFloat {
  typedef bf16 T;
  static constexpr int STEP = 2, TOGETHER = TILE_ROWS;
  static constexpr bool IS_INTEGER = false;
  static V dot(V acc, VI w, const T* x) {
#ifdef __AVX512BF16__
    uint32_t pair;
    std::memcpy(&pair, x, 4);
    return (V)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(int(pair)));
#else
    const VI first = w << 16, second = w & int32_t(0xffff0000);
    acc += (V)first * widen(x[0]);
    return acc + (V)second * widen(x[1]);
#endif
  }
};
struct Float {
  typedef float T;
  static constexpr int STEP = 1, TOGETHER = REGISTER_ROWS;
  static constexpr bool IS_INTEGER = false;
  static V dot(V acc, VI w, const T* x) { return acc + (V)w * *x; }
};
inline VI load_step(const void* w) { return *static_cast<const VI*>(w); }

inline VI dot_pairs(VI sum, VI pairs, const void* x) {  // sum + pairs[0] x[0] + pairs[1] x[1]
  int32_t both;
  std::memcpy(&both, x, 4);
#if defined(__AVX512VNNI__)
  return (VI)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)pairs, _mm512_set1_epi32(both));
#elif defined(__AVX512BW__)
  return sum + (VI)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi32(both));
#elif defined(__AVX2__)
  return sum + (VI)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi32(both));
#else
  return sum + (pairs << 16 >> 16) * int32_t(int16_t(both)) + (pairs >> 16) * (both >> 16);
#endif
}

#if defined(__AVX512VNNI__)
#define KVAD_BYTES
inline VI dot_bytes(VI sum, VI w, const void* x) {  // sum + four unsigned numbers of w times four signed ones of x
  int32_t four;
  std::memcpy(&four, x, 4);
  return (VI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(four));
}
#endif

constexpr float HIGHEST_WORD = 127 * 256 + 127;  // of queries and weights: 256 times a signed byte plus another

// 16-bit integers: the sums are integers of 32 bits, in the bits of V.
struct Words {
  typedef uint16_t T;
  static constexpr int STEP = 2, TOGETHER = REGISTER_ROWS;
  static constexpr bool IS_INTEGER = true;
  static V dot(V acc, VI w, const T* x) { return (V)dot_pairs((VI)acc, w, x); }
};
inline F integers_to_floats(F x) {
  V parts[LANES / WIDTH];
  for (int i = 0; i < LANES / WIDTH; i++) parts[i] = to_floats(reinterpret_cast<const VI*>(&x)[i]);
  return reinterpret_cast<const F&>(parts);
}

// The integers of some numbers, which are integers times the scale; that of the largest number is ``highest``. NaN or
// infinity makes the scale so.
struct Integers {
  float scale;
  int32_t sum;
};
template <class T, class Put> inline Integers to_integers(const T* from, int n, float largest, float highest, Put put) {
  const float inverse = largest > 0 ? highest / largest : 0.0f;
  I total = I{};
  for (int i = 0; i < n; i += LANES) {
    const F x = load_wide(from + i, n - i) * inverse;
#if defined(__AVX512F__)
    const __mmask16 is_valid = _mm512_cmp_ps_mask(_mm512_abs_ps((__m512)x), _mm512_set1_ps(highest + 0.5f), _CMP_LT_OQ);
    const I numbers = (I)_mm512_maskz_cvtps_epi32(is_valid, (__m512)x);
#else
    const I rounded = as_ints(x + 12582912.0f) - as_ints(all(12582912.0f));  // in the low bits
    const I numbers = ((x > -highest - 0.5f) & (x < highest + 0.5f)) & rounded;
#endif
    total += numbers;
    put(numbers, i);
  }
  return {largest / highest, sum_of(total)};
}
template <class T> inline float largest_of(const T* from, int n) {  // in size, or NaN
  I top = I{};
  for (int i = 0; i < n; i += LANES) top = larger_size(top, load_wide(from + i, n - i));
  return largest_size(top);
}
inline void store_words(I numbers, int n, uint16_t* to) {
#if defined(__AVX512F__)
  if (n >= LANES) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16((__m512i)numbers));
#endif
  for (int i = 0; i < LANES && i < n; i++) to[i] = uint16_t(numbers[i]);
}

// What is loaded ahead during a product: a line of ``at`` after every ``every`` steps, or the panel itself. Processors
// load ahead within a page of memory only.
struct Ahead {
  const char* at = nullptr;
  int64_t every = INT64_MAX;
  bool panel = false;
  static constexpr int BYTES = 6144;
  // Weights that a step reads once are not kept in the L3 cache, where the engine's own data stay.
  __attribute__((always_inline)) static void read_once(const void* w, int size) {
    for (int line = 0; line < size; line += 64) __builtin_prefetch(static_cast<const char*>(w) + BYTES + line, 0, 0);
  }
  // In one of several passes of ``steps`` over a panel: a share of the next panel, of which each step has two lines.
  void read_next(const void* panel, int64_t pass, int64_t passes, int64_t steps) {
    every = passes / 2 < steps ? passes / 2 : steps;
    at = static_cast<const char*>(panel) + pass * (steps / every) * 64;
  }
};

// Where M rows are read. GCC would keep an address of each, and there are not as many registers: three rows share one.
template <class T, int M> struct RowReader {
  static constexpr int GROUPS = (M + 2) / 3;
  const T* at[GROUPS];
  const int64_t stride;
  __attribute__((always_inline)) RowReader(const T* x, int64_t stride) : stride(stride) {
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) at[g] = x + 3 * g * stride;
  }
  __attribute__((always_inline)) const T* operator[](int m) const { return at[m / 3] + m % 3 * stride; }
  __attribute__((always_inline)) void advance(int n) {
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; g++) {
      at[g] += n;
      __asm__ volatile("" : "+r"(at[g]));
    }
  }
};

// Multiply M rows x [M, stride] by a panel [k / STEP, PANEL, STEP]: every number is summed over k in order.
template <class W, int M>
inline void multiply_rows(const typename W::T* w, const typename W::T* x, int64_t stride, int64_t k, F (&acc)[ROWS][2],
                          Ahead ahead) {
  V a[M][PARTS];  // in registers, if all loops over it are unrolled
#pragma GCC unroll 12
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; part++) a[m][part] = V{};
  RowReader<typename W::T, M> rows(x, stride);
  for (int64_t steps = k / W::STEP; steps > 0; steps -= ahead.every, ahead.at += 64) {
    if (ahead.at) __builtin_prefetch(ahead.at, 0, 2);
    for (int64_t i = steps < ahead.every ? steps : ahead.every; i > 0; i--, w += PANEL * W::STEP) {
      if (ahead.panel) Ahead::read_once(w, PANEL * 4);
#pragma GCC unroll 12
      for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int part = 0; part < PARTS; part++)
          a[m][part] = W::dot(a[m][part], load_step(w + part * WIDTH * W::STEP), rows[m]);
      rows.advance(W::STEP);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; part++) reinterpret_cast<V*>(acc[m])[part] = a[m][part];
}
// ``continues``: add to the sums of the inputs before these, which only tiles do.
template <class W>
inline void multiply(int rows, const typename W::T* w, const typename W::T* x, int64_t stride, int64_t k,
                     F (&acc)[ROWS][2], Ahead ahead = {}, bool continues = false) {
  switch (rows) {
#define CASE(n) case n: return multiply_rows<W, n>(w, x, stride, k, acc, ahead);
    CASE(1) CASE(2) CASE(3)
#if defined(__AVX512F__)
    CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
  }
}

}  // namespace
