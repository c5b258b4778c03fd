// Products with int8 and int4 weights: each group of inputs is summed, then scaled.
//
// In bfloat16, a block of activations is converted to 16-bit integers with a scale, a block being a group or a part of
// one: 2^-16 of its largest number is a smaller error than that of bfloat16 itself, except for numbers below 1/128 of it.
// Sums of integers are exact. In float32, activations stay as they are.
#pragma once
#include "linear.h"
#include "store.h"

namespace {

// A step of a panel has four inputs of each row: four int8, or two bytes with two int4 each.
template <int BITS> constexpr int STEP_BYTES = PANEL * BITS / 2;
constexpr int INPUTS = 4;
constexpr int64_t BLOCK = 512;       // inputs whose products fit into 32 bits: 512 x 128 x 32,767
constexpr int64_t BLOCK_ROWS = 240;  // tokens that are converted together
constexpr int TOGETHER = ROWS < 8 ? ROWS : 8;  // tokens that a panel is multiplied by at a time

// Inputs 0 and 2, and 1 and 3, of WIDTH rows as words of 16 bits.
template <int BITS> void read_pairs(const uint8_t* p, VI (&pairs)[2]);
template <> inline void read_pairs<8>(const uint8_t* p, VI (&pairs)[2]) {
  const VI x = load_step(p);
#if defined(__AVX512BW__)
  pairs[0] = (VI)_mm512_srai_epi16(_mm512_slli_epi16((__m512i)x, 8), 8), pairs[1] = (VI)_mm512_srai_epi16((__m512i)x, 8);
#elif defined(__AVX2__)
  pairs[0] = (VI)_mm256_srai_epi16(_mm256_slli_epi16((__m256i)x, 8), 8), pairs[1] = (VI)_mm256_srai_epi16((__m256i)x, 8);
#else
  pairs[0] = (x << 24 >> 24 & 0xffff) | (x << 8 >> 24) << 16, pairs[1] = (x << 16 >> 24 & 0xffff) | (x >> 24) << 16;
#endif
}
template <> inline void read_pairs<4>(const uint8_t* p, VI (&pairs)[2]) {
#if defined(__AVX512BW__)
  const VI x = (VI)_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  const VI x = (VI)_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  VI x;
  for (int i = 0; i < WIDTH; i++) x[i] = p[2 * i] | p[2 * i + 1] << 16;
#endif
  pairs[0] = x & 0xf000f, pairs[1] = (x >> 4) & 0xf000f;
}

inline F load_scales(const uint8_t* p, int i, bool half) {
  return half ? load_halves(reinterpret_cast<const uint16_t*>(p) + i) : load(reinterpret_cast<const float*>(p) + i);
}

inline int64_t group_bytes(int64_t group_size, int64_t bits, int64_t scale_bytes) {
  return PANEL * scale_bytes * (bits == 4 ? 2 : 1) + round_up(group_size, INPUTS) * PANEL * bits / 8;
}

// Activations of some rows as 16-bit integers, in the order of pairs: each group is filled up with zeros.
struct IntegerRows {
  int64_t group, padded, blocks, k;  // blocks of a group
  int16_t* x;                        // [rows, k]
  float *scales, *sums;              // [rows, blocks of all groups]: of a number; of the numbers
  int64_t bytes;
  IntegerRows(const Op& op, int64_t rows, char* at) : group(op.quantized_group) {
    padded = round_up(group, INPUTS), blocks = (group + BLOCK - 1) / BLOCK, k = op.k / group * padded;
    if (k % 512 == 0) k += PANEL;  // rows a multiple of 1 KiB apart would share few sets of the L1 cache
    const int64_t numbers = round_up(rows * k * 2, 64), floats = round_up(rows * count(op) * 4, 64);
    x = reinterpret_cast<int16_t*>(at);
    scales = reinterpret_cast<float*>(at + numbers), sums = reinterpret_cast<float*>(at + numbers + floats);
    bytes = numbers + 2 * floats;
  }
  int64_t count(const Op& op) const { return op.k / group * blocks; }

  template <class T> void convert(const Op& op, int64_t row, const T* from) {
    int16_t* to = x + row * k;
    float *scale = scales + row * count(op), *total = sums + row * count(op);
    for (int64_t g = 0; g < op.k / group; g++, from += group, to += padded) {
      for (int64_t i = padded - INPUTS; i < padded; i++) to[i] = 0;
      for (int64_t low = 0; low < group; low += BLOCK)
        convert_block(from + low, int(group - low < BLOCK ? group - low : BLOCK), to + low, scale++, total++);
    }
  }

 private:
  template <class T> static void convert_block(const T* from, int n, int16_t* to, float* scale, float* total) {
    F highest = F{};
    for (int i = 0; i < n; i += LANES) {
      const F x = load_wide(from + i, n - i);
      highest = larger_or_nan(highest, larger(x, -x));
    }
    const float top = highest_or_nan(highest), inverse = inverse_of(top);
    I sum = I{};
    for (int i = 0; i < n; i += LANES) {
      const I numbers = to_words(load_wide(from + i, n - i), inverse);
      sum += numbers;
      store_pairs(numbers, n - i, to + i);
    }
    int32_t whole = 0;
    for (int i = 0; i < LANES; i++) whole += sum[i];
    *scale = top / 32767.0f, *total = float(whole) * *scale;  // NaN or infinity makes all products NaN
  }

  static void store_pairs(I numbers, int n, int16_t* to) {
#if defined(__AVX512F__)
    const __m512i order = _mm512_set_epi32(15, 13, 14, 12, 11, 9, 10, 8, 7, 5, 6, 4, 3, 1, 2, 0);
    const __m256i words = _mm512_cvtepi32_epi16(_mm512_permutexvar_epi32(order, (__m512i)numbers));
    if (n >= LANES) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words);
#endif
    for (int i = 0; i < LANES && i < n; i++) to[i / INPUTS * INPUTS + i % 2 * 2 + i % INPUTS / 2] = int16_t(numbers[i]);
  }
};

// Multiply M rows, from ``row``, by a panel.
template <int BITS, int M>
void multiply_integers(const Op& op, const uint8_t* w, const IntegerRows& rows, int64_t row, F (&acc)[ROWS][2]) {
  const int64_t count = rows.count(op), stride = rows.k, scale_bytes = PANEL * (op.half_scales ? 2 : 4);
  const int16_t* x = rows.x + row * stride;
  const float *scales = rows.scales + row * count, *sums = rows.sums + row * count;
  V total[M][PARTS] = {};
  for (int64_t g = 0; g < op.k / rows.group; g++, x += rows.padded) {
    V scale[PARTS], minimum[PARTS];
    for (int half = 0; half < 2; half++) {
      reinterpret_cast<F*>(scale)[half] = load_scales(w, half * LANES, op.half_scales);
      if (BITS == 4) reinterpret_cast<F*>(minimum)[half] = load_scales(w + scale_bytes, half * LANES, op.half_scales);
    }
    w += scale_bytes * (BITS == 4 ? 2 : 1);
    for (int64_t low = 0; low < rows.group; low += BLOCK, scales++, sums++) {
      const int n = int(rows.group - low < BLOCK ? rows.group - low : BLOCK);
      VI sum[M][PARTS] = {};
      for (int i = 0; i < n; i += INPUTS, w += STEP_BYTES<BITS>) {
        for (int line = 0; M > 1 && line < STEP_BYTES<BITS>; line += 64) __builtin_prefetch(w + 2048 + line, 0, 3);
#pragma GCC unroll 8
        for (int part = 0; part < PARTS; part++) {
          VI pairs[2];
          read_pairs<BITS>(w + part * WIDTH * BITS / 2, pairs);
#pragma GCC unroll 2
          for (int j = 0; j < 2; j++)
#pragma GCC unroll 12
            for (int m = 0; m < M; m++)
              sum[m][part] = dot_pairs(sum[m][part], pairs[j], x + m * stride + low + i + 2 * j);
        }
      }
#pragma GCC unroll 12
      for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int part = 0; part < PARTS; part++) {
          total[m][part] += to_floats(sum[m][part]) * (scale[part] * scales[m * count]);
          if (BITS == 4) total[m][part] += minimum[part] * sums[m * count];
        }
    }
  }
  for (int m = 0; m < M; m++)
    for (int part = 0; part < PARTS; part++) reinterpret_cast<V*>(acc[m])[part] = total[m][part];
}

// Multiply M rows of float32 x [M, stride] by a panel; sums [M, groups] of x are what minima are multiplied by.
template <int BITS, int M>
void multiply_floats(const Op& op, const uint8_t* w, const float* x, const float* sums, F (&acc)[ROWS][2]) {
  const int groups = op.k / op.quantized_group, scale_bytes = PANEL * (op.half_scales ? 2 : 4);
  for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = F{};
  for (int g = 0; g < groups; g++) {
    const uint8_t *scales = w, *minima = w + scale_bytes;
    w += scale_bytes * (BITS == 4 ? 2 : 1);
    F part[M][2] = {};
    V* sum = reinterpret_cast<V*>(part);
    for (int i = 0; i < op.quantized_group; i += INPUTS, x += INPUTS, w += STEP_BYTES<BITS>)
#pragma GCC unroll 8
      for (int j = 0; j < PARTS; j++) {
        VI pairs[2];
        read_pairs<BITS>(w + j * WIDTH * BITS / 2, pairs);
        const V inputs[INPUTS] = {to_floats(pairs[0] << 16 >> 16), to_floats(pairs[1] << 16 >> 16),
                                  to_floats(pairs[0] >> 16), to_floats(pairs[1] >> 16)};
        const int n = op.quantized_group - i < INPUTS ? op.quantized_group - i : INPUTS;
        for (int input = 0; input < n; input++)
#pragma GCC unroll 12
          for (int m = 0; m < M; m++) sum[m * PARTS + j] += inputs[input] * x[m * int64_t(op.in_stride) + input];
      }
    x -= round_up(op.quantized_group, INPUTS) - op.quantized_group;
    for (int half = 0; half < 2; half++) {
      const F scale = load_scales(scales, half * LANES, op.half_scales);
      for (int m = 0; m < M; m++) acc[m][half] += part[m][half] * scale;
      if (BITS == 8) continue;
      const F minimum = load_scales(minima, half * LANES, op.half_scales);
      for (int m = 0; m < M; m++) acc[m][half] += minimum * all(sums[m * groups + g]);
    }
  }
}

#if defined(__AVX512F__)
#define KVAD_CASES CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#else
#define KVAD_CASES CASE(1) CASE(2) CASE(3)
#endif

template <class W, int BITS> void quantized_linear(const Run& run, const Op& op, int64_t rows) {
  typedef typename W::T T;
  const T* x = run.buffer<T>(op.in) + op.in_offset;
  const int64_t panels = (op.n + PANEL - 1) / PANEL, groups = op.k / op.quantized_group;
  const int64_t size = groups * group_bytes(op.quantized_group, op.bits, op.half_scales ? 2 : 4);
  IntegerRows integers(op, rows < BLOCK_ROWS ? rows : BLOCK_ROWS, run.own);  // each thread has its own
  float* sums = reinterpret_cast<float*>(run.own);
  F acc[ROWS][2];
  for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
    const int64_t end = rows - first < BLOCK_ROWS ? rows : first + BLOCK_ROWS;
    for (int64_t row = first; row < end; row++) {
      const T* from = x + row * op.in_stride;
      if constexpr (sizeof(T) == 2) integers.convert(op, row - first, from);
      else
        for (int64_t g = 0; BITS == 4 && g < groups; g++) {
          float total = 0;
          for (int i = 0; i < op.quantized_group; i++) total += from[g * op.quantized_group + i];
          sums[(row - first) * groups + g] = total;
        }
    }
    for (int64_t panel = run.low(panels); panel < run.high(panels); panel++)
      for (int64_t row = first; row < end; row += TOGETHER) {
        const int m = end - row < TOGETHER ? int(end - row) : TOGETHER;
        const uint8_t* w = static_cast<const uint8_t*>(op.weight) + panel * size;
        switch (m) {
#define CASE(n)                                                                                                       \
  case n:                                                                                                             \
    if constexpr (sizeof(T) == 2) multiply_integers<BITS, n>(op, w, integers, row - first, acc);                      \
    else multiply_floats<BITS, n>(op, w, x + row * op.in_stride, sums + (row - first) * groups, acc);                 \
    break;
          KVAD_CASES
#undef CASE
        }
        finish<W>(run, op, panel, row, m, acc);
      }
  }
}

inline int64_t quantized_bytes(const Op& op, int64_t rows) {  // of a thread
  rows = rows < BLOCK_ROWS ? rows : BLOCK_ROWS;
  return op.type == TYPE_BFLOAT ? IntegerRows(op, rows, nullptr).bytes : rows * (op.k / op.quantized_group) * 4;
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
        const int64_t step = bits / 2, size = group_size * bits / 8;  // bytes
        const uint8_t* from = data[row] + g * size;
        for (int64_t i = 0; i < size; i += step)
          std::memcpy(at + i * PANEL + r * step, from + i, size - i < step ? size - i : step);
      }
    }
  }
}

}  // namespace
