// Products with int8 and int4 weights. Activations stay as they are: each group of inputs is summed, then scaled.
#pragma once
#include "linear.h"
#include "store.h"

namespace {

// Two inputs of WIDTH rows, as the product reads them, and their product with a token's numbers x[0] and x[1].
#ifdef __AVX512BF16__
typedef uint16_t Words __attribute__((vector_size(64), aligned(4), may_alias));
struct BFloatPair {
  VI both;  // the first input in the low half of a lane; integers up to 128 are exact
  BFloatPair(V first, V second) : both(((VI)first >> 16 & 0xffff) | ((VI)second & int32_t(0xffff0000))) {}
  BFloatPair(VI nibbles) {  // two per lane, in the low and in the high half
    const Words numbers = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                           0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    both = (VI)_mm512_permutexvar_epi16((__m512i)nibbles, (__m512i)numbers);
  }
  V dot(V acc, const bf16* x) const { return BFloat::dot(acc, both, x); }
};
#endif
struct FloatPair {
  V first, second;
  FloatPair(V a, V b) : first(a), second(b) {}
  FloatPair(VI nibbles) : first(to_floats(nibbles & 0xffff)), second(to_floats(nibbles >> 16)) {}
  template <class T> V dot(V acc, const T* x) const {
    acc += first * widen(x[0]);
    return acc + second * widen(x[1]);
  }
};
template <class W> struct PairOf { typedef FloatPair Type; };
#ifdef __AVX512BF16__
template <> struct PairOf<BFloat> { typedef BFloatPair Type; };
#endif

// A step of two inputs of a panel: 16 rows, then the other 16.
struct Int8 {  // the first input of 16 rows, then the second
  static constexpr int BYTES = 2 * PANEL;
  template <class Pair> static Pair read(const uint8_t* step, int row) {
    const uint8_t* p = step + row / LANES * LANES * 2 + row % LANES;
    return Pair(to_floats(widen_signed(p)), to_floats(widen_signed(p + LANES)));
  }
};
struct Int4 {  // both inputs in a byte, the first in the low bits
  static constexpr int BYTES = PANEL;
  template <class Pair> static Pair read(const uint8_t* step, int row) {
    const VI both = widen_unsigned(step + row);
    return Pair((both & 15) | (both >> 4) << 16);
  }
};

inline F load_scales(const uint8_t* p, int i, bool half) {
  return half ? load_halves(reinterpret_cast<const uint16_t*>(p) + i) : load(reinterpret_cast<const float*>(p) + i);
}

inline int64_t group_bytes(int64_t group_size, int64_t bits, int64_t scale_bytes) {
  return PANEL * (scale_bytes * (bits == 4 ? 2 : 1) + group_size * bits / 8);
}

// Multiply M rows x [M, stride] by a panel; sums [M, groups] of x are what minima are multiplied by.
template <class W, class Q, int M>
void multiply_groups(const Op& op, const uint8_t* w, const typename W::T* x, const float* sums, F (&acc)[ROWS][2]) {
  typedef typename PairOf<W>::Type Pair;
  const bool half = op.half_scales, has_minimum = Q::BYTES == Int4::BYTES;
  const int groups = op.k / op.quantized_group, scale_bytes = PANEL * (half ? 2 : 4);
  for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = F{};
  for (int g = 0; g < groups; g++) {
    const uint8_t *scales = w, *minima = w + scale_bytes;
    w += scale_bytes * (has_minimum ? 2 : 1);
    V part[M][PARTS];
    for (int m = 0; m < M; m++)
      for (int i = 0; i < PARTS; i++) part[m][i] = V{};
    for (int i = 0; i < op.quantized_group; i += 2, x += 2, w += Q::BYTES)
#pragma GCC unroll 8
      for (int j = 0; j < PARTS; j++) {
        const Pair pair = Q::template read<Pair>(w, j * WIDTH);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) part[m][j] = pair.dot(part[m][j], x + m * int64_t(op.in_stride));
      }
    F sum_of[M][2];
    for (int m = 0; m < M; m++)
      for (int j = 0; j < PARTS; j++) reinterpret_cast<V*>(sum_of[m])[j] = part[m][j];
    for (int half_panel = 0; half_panel < 2; half_panel++) {
      const F scale = load_scales(scales, half_panel * LANES, half);
      for (int m = 0; m < M; m++) acc[m][half_panel] += sum_of[m][half_panel] * scale;
      if (!has_minimum) continue;
      const F minimum = load_scales(minima, half_panel * LANES, half);
      for (int m = 0; m < M; m++) acc[m][half_panel] += minimum * all(sums[m * groups + g]);
    }
  }
}

template <class W, class Q>
void multiply_groups(int rows, const Op& op, const uint8_t* w, const typename W::T* x, const float* sums,
                     F (&acc)[ROWS][2]) {
  switch (rows) {
#define CASE(n) case n: return multiply_groups<W, Q, n>(op, w, x, sums, acc);
    CASE(1) CASE(2) CASE(3)
#if defined(__AVX512F__)
    CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
  }
}

template <class W, class Q> void quantized_linear(const Run& run, const Op& op, int64_t rows) {
  const typename W::T* x = run.buffer<typename W::T>(op.in) + op.in_offset;
  const int64_t panels = (op.n + PANEL - 1) / PANEL, groups = op.k / op.quantized_group;
  const int64_t size = groups * group_bytes(op.quantized_group, op.bits, op.half_scales ? 2 : 4);
  float* sums = reinterpret_cast<float*>(run.own);  // each thread has its own
  for (int64_t row = 0; op.bits == 4 && row < rows; row++)
    for (int64_t g = 0; g < groups; g++) {
      float total = 0;
      for (int i = 0; i < op.quantized_group; i++) total += widen(x[row * op.in_stride + g * op.quantized_group + i]);
      sums[row * groups + g] = total;
    }
  F acc[ROWS][2];
  for (int64_t panel = run.low(panels); panel < run.high(panels); panel++)
    for (int64_t row = 0; row < rows; row += ROWS) {
      const int m = rows - row < ROWS ? int(rows - row) : ROWS;
      const uint8_t* w = static_cast<const uint8_t*>(op.weight) + panel * size;
      multiply_groups<W, Q>(m, op, w, x + row * op.in_stride, sums + row * groups, acc);
      finish<W>(run, op, panel, row, m, acc);
    }
}

// Pack rows of quantized weights, their scales and minima into panels [n / PANEL, groups, (scales, minima, steps)].
inline void pack_quantized(const uint8_t* const* data, const char* const* scales, const char* const* minima, int64_t n,
                           int64_t groups, int64_t group_size, int64_t bits, int64_t scale_bytes, uint8_t* out,
                           int64_t threads) {
  const int64_t bytes = group_bytes(group_size, bits, scale_bytes), panels = (n + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(int(threads)) schedule(static)
  for (int64_t panel = 0; panel < panels; panel++) {
    uint8_t* to = out + panel * groups * bytes;
    std::memset(to, 0, groups * bytes);
    for (int64_t r = 0; r < PANEL && panel * PANEL + r < n; r++) {
      const int64_t row = panel * PANEL + r;
      if (!data[row]) continue;
      for (int64_t g = 0; g < groups; g++) {
        uint8_t* at = to + g * bytes;
        std::memcpy(at + r * scale_bytes, scales[row] + g * scale_bytes, scale_bytes);
        at += PANEL * scale_bytes;
        if (bits == 4) {
          std::memcpy(at + r * scale_bytes, minima[row] + g * scale_bytes, scale_bytes);
          at += PANEL * scale_bytes;
        }
        at += r / LANES * LANES * (bits == 4 ? 1 : 2) + r % LANES;
        const uint8_t* from = data[row] + g * group_size * bits / 8;
        for (int64_t i = 0; i < group_size; i += 2, at += PANEL * bits / 4) {
          at[0] = bits == 4 ? from[i / 2] : from[i];
          if (bits == 8) at[LANES] = from[i + 1];
        }
      }
    }
  }
}

}  // namespace
