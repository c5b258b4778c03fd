// Products with int8, int4 and E2M1 weights: each group of inputs is summed, then scaled.
//
// In bfloat16, a block of activations is converted to 16-bit integers with a scale, a block being a group or a part of
// one: 2^-16 of its largest number is a smaller error than that of bfloat16 itself, except for numbers below 1/128 of it.
// Sums of integers are exact. In float32, activations stay as they are.
//
// With ``activation_bits`` = 8, the integers have 8 bits (ops/quantized_linear.py rounds equally), and smaller blocks.
#pragma once
#include "linear.h"
#include "store.h"

namespace {

// A step of a panel has four inputs of each row: four int8, or two bytes with two int4 each.
enum WeightForm { INT8, INT4, E2M1 };  // int4 has minima; E2M1 numbers are integers up to 12 if they are doubled
constexpr int bits_of(WeightForm form) { return form == INT8 ? 8 : 4; }
inline WeightForm form_of(const Op& op) { return op.bits == 8 ? INT8 : op.is_e2m1 ? E2M1 : INT4; }

// Calls use with the form of the operation's weights, a constant.
template <class Use> void with_form(const Op& op, Use use) {
  switch (form_of(op)) {
    case INT8: return use(std::integral_constant<WeightForm, INT8>());
    case INT4: return use(std::integral_constant<WeightForm, INT4>());
    case E2M1: return use(std::integral_constant<WeightForm, E2M1>());
  }
}

template <WeightForm FORM> constexpr int STEP_BYTES = PANEL * bits_of(FORM) / 2;
constexpr int INPUTS = 4;
constexpr int64_t BLOCK = 512;         // inputs whose products fit into 32 bits: 512 x 128 x 32,767
constexpr int64_t ROUNDED_BLOCK = 128;  // if they are rounded to 8 bits
constexpr int64_t BLOCK_ROWS = 240;    // tokens that are converted together

// The first byte of each word of 16 bits, with its sign.
inline VI low_bytes(VI x) {
#if defined(__AVX512BW__)
  return (VI)_mm512_srai_epi16(_mm512_slli_epi16((__m512i)x, 8), 8);
#elif defined(__AVX2__)
  return (VI)_mm256_srai_epi16(_mm256_slli_epi16((__m256i)x, 8), 8);
#else
  return (x << 24 >> 24 & 0xffff) | (x << 8 >> 24) << 16;
#endif
}

// Bytes from 0 to 15 as twice their E2M1 numbers.
inline VI double_e2m1(VI x) {
  alignas(16) static const int8_t DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
#if defined(__AVX512BW__)
  const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(DOUBLED));
  return (VI)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)x);
#elif defined(__AVX2__)
  const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(DOUBLED));
  return (VI)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)x);
#else
  VI result;
  for (int i = 0; i < WIDTH; i++) {
    uint32_t bytes = 0;
    for (int at = 0; at < 32; at += 8) bytes |= uint32_t(uint8_t(DOUBLED[x[i] >> at & 15])) << at;
    result[i] = int32_t(bytes);
  }
  return result;
#endif
}

// Inputs 0 and 2, and 1 and 3, of WIDTH rows as words of 16 bits.
template <WeightForm FORM> void read_pairs(const uint8_t* p, VI (&pairs)[2]);
template <> inline void read_pairs<INT8>(const uint8_t* p, VI (&pairs)[2]) {
  const VI x = load_step(p);
#if defined(__AVX512BW__)
  pairs[0] = low_bytes(x), pairs[1] = (VI)_mm512_srai_epi16((__m512i)x, 8);
#elif defined(__AVX2__)
  pairs[0] = low_bytes(x), pairs[1] = (VI)_mm256_srai_epi16((__m256i)x, 8);
#else
  pairs[0] = low_bytes(x), pairs[1] = (x << 16 >> 24 & 0xffff) | (x >> 24) << 16;
#endif
}
template <> inline void read_pairs<INT4>(const uint8_t* p, VI (&pairs)[2]) {
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
template <> inline void read_pairs<E2M1>(const uint8_t* p, VI (&pairs)[2]) {
  read_pairs<INT4>(p, pairs);
  pairs[0] = low_bytes(double_e2m1(pairs[0])), pairs[1] = low_bytes(double_e2m1(pairs[1]));
}

// What activations are converted to: a product multiplies a register of weights by INPUTS / PRODUCTS of them, and a panel
// is multiplied by TOGETHER tokens at a time.
struct WordInputs {
  typedef int16_t T;  // in the order of pairs
  static constexpr int PRODUCTS = 2, TOGETHER = REGISTER_ROWS < 8 ? REGISTER_ROWS : 8;
  template <WeightForm FORM> static void read(const uint8_t* p, VI (&w)[PRODUCTS]) { read_pairs<FORM>(p, w); }
  static VI dot(VI sum, VI w, const T* x) { return dot_pairs(sum, w, x); }
  static void put(I numbers, int n, T* group, int64_t at, int64_t) {
    T* to = group + at;
#if defined(__AVX512F__)
    const __m512i order = _mm512_set_epi32(15, 13, 14, 12, 11, 9, 10, 8, 7, 5, 6, 4, 3, 1, 2, 0);
    const __m256i words = _mm512_cvtepi32_epi16(_mm512_permutexvar_epi32(order, (__m512i)numbers));
    if (n >= LANES) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words);
#endif
    for (int i = 0; i < LANES && i < n; i++) to[i / INPUTS * INPUTS + i % 2 * 2 + i % INPUTS / 2] = T(numbers[i]);
  }
};
#ifdef KVAD_BYTES
struct ByteInputs {  // weights are unsigned: signed ones are raised by 128, which the sum of the inputs takes back
  typedef int8_t T;
  static constexpr int PRODUCTS = 1, TOGETHER = 12;
  template <WeightForm FORM> static void read(const uint8_t* p, VI (&w)[PRODUCTS]) {
    w[0] = FORM == INT8 ? load_step(p) : unpack<FORM>(p);
    if (FORM != INT4) w[0] ^= int32_t(0x80808080);
  }
  // Numbers of 4 bits as bytes.
  template <WeightForm FORM> static VI unpack(const uint8_t* p) {
    const VI x = (VI)_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const VI bytes = (x | x << 4) & 0x0f0f0f0f;
    return FORM == E2M1 ? double_e2m1(bytes) : bytes;
  }
  static VI dot(VI sum, VI w, const T* x) { return dot_bytes(sum, w, x); }
  static void put(I numbers, int n, T* group, int64_t at, int64_t) { put_bytes(numbers, n, group + at); }
  static void put_bytes(I numbers, int n, int8_t* to) {
    const __mmask16 mask = n >= LANES ? 0xffff : __mmask16((1u << n) - 1);
    _mm_mask_storeu_epi8(to, mask, _mm512_cvtepi32_epi8((__m512i)numbers));
  }
};
#else
typedef WordInputs ByteInputs;
#endif
#ifdef KVAD_TILES
// Bytes, or words as their high bytes and then their low ones, of each group.
template <class X> struct TileInputs {
  typedef typename X::T T;
  static constexpr int PRODUCTS = X::PRODUCTS, TOGETHER = TILE_ROWS;
  static void put(I numbers, int n, T* group, int64_t at, int64_t padded) {
    int8_t* bytes = reinterpret_cast<int8_t*>(group) + at;
    ByteInputs::put_bytes(sizeof(T) == 2 ? numbers >> 8 : numbers, n, bytes);
    if (sizeof(T) == 2) ByteInputs::put_bytes(numbers, n, bytes + padded);
  }
};
// True if many rows are multiplied by tiles, with the sums of the others.
inline bool uses_tiles(const Op& op, int64_t rows) { return rows > REGISTER_ROWS && op.quantized_group % 32 == 0; }
#endif

inline F load_scales(const uint8_t* p, int i, bool half) {
  return half ? load_halves(reinterpret_cast<const uint16_t*>(p) + i) : load(reinterpret_cast<const float*>(p) + i);
}

inline int64_t group_bytes(int64_t group_size, int64_t bits, int64_t scale_bytes, bool has_minima) {
  return PANEL * scale_bytes * (has_minima ? 2 : 1) + round_up(group_size, INPUTS) * PANEL * bits / 8;
}

inline int64_t panel_bytes(const Op& op) {
  return op.k / op.quantized_group * group_bytes(op.quantized_group, op.bits, op.half_scales ? 2 : 4, form_of(op) == INT4);
}

// Activations of some rows as integers: each group is filled up with zeros.
template <class X> struct IntegerRows {
  static constexpr int TOGETHER = X::TOGETHER;
  int64_t group, padded, block, blocks, k;  // blocks of a group
  float highest;
  typename X::T* x;      // [rows, k]
  float *scales, *sums;  // [rows, blocks of all groups]: of a number; of the numbers
  int64_t bytes;
  IntegerRows(const Op& op, int64_t rows, char* at) : group(op.quantized_group) {
    block = op.activation_bits ? ROUNDED_BLOCK : BLOCK, highest = op.activation_bits ? 127 : 32767;
    padded = round_up(group, INPUTS), blocks = (group + block - 1) / block, k = op.k / group * padded;
    if (k * sizeof(*x) % 1024 == 0) k += PANEL;  // rows a multiple of 1 KiB apart would share few sets of the L1 cache
    const int64_t numbers = round_up(rows * k * sizeof(*x), 64), floats = round_up(rows * count(op) * 4, 64);
    x = reinterpret_cast<typename X::T*>(at);
    scales = reinterpret_cast<float*>(at + numbers), sums = reinterpret_cast<float*>(at + numbers + floats);
    bytes = numbers + 2 * floats;
  }
  int64_t count(const Op& op) const { return op.k / group * blocks; }

  template <class T> void convert(const Op& op, int64_t row, const T* from) {
    typename X::T* to = x + row * k;
    float *scale = scales + row * count(op), *total = sums + row * count(op);
    for (int64_t g = 0; g < op.k / group; g++, from += group, to += padded) {
      for (int64_t i = padded - INPUTS; i < padded; i++) to[i] = 0;
      for (int64_t low = 0; low < group; low += block, scale++, total++) {
        const int n = int(group - low < block ? group - low : block);
        const auto put = [&](I numbers, int i) { X::put(numbers, n - i, to, low + i, padded); };
        const Integers integers = to_integers(from + low, n, largest_of(from + low, n), highest, put);
        *scale = integers.scale;  // NaN or infinity makes all products NaN
        if (X::PRODUCTS == 1 && form_of(op) != INT4) {
          const int32_t subtracted = -128 * integers.sum;
          std::memcpy(total, &subtracted, 4);
        } else {
          *total = float(integers.sum) * *scale;
        }
      }
    }
  }
};

// Multiply M rows, from ``row``, by a panel.
template <WeightForm FORM, class X, int M> __attribute__((noinline))
void multiply_integers(const Op& op, const uint8_t* w, const IntegerRows<X>& rows, int64_t row,
                       std::integral_constant<int, M>, F (&acc)[ROWS][2]) {
  const int64_t count = rows.count(op), scale_bytes = PANEL * (op.half_scales ? 2 : 4);
  RowReader<typename X::T, M> x(rows.x + row * rows.k, rows.k);
  const float *scales = rows.scales + row * count, *sums = rows.sums + row * count;
  constexpr bool IS_RAISED = X::PRODUCTS == 1 && FORM != INT4;
  constexpr int LOADED = WIDTH == LANES ? PARTS : 1;  // parts of a panel whose weights are in registers together
  for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = F{};  // in memory: the registers hold the sums of a block
  for (int64_t g = 0; g < op.k / rows.group; g++) {
    V scale[PARTS], minimum[PARTS];
    for (int half = 0; half < 2; half++) {
      reinterpret_cast<F*>(scale)[half] = load_scales(w, half * LANES, op.half_scales);
      if (FORM == INT4) reinterpret_cast<F*>(minimum)[half] = load_scales(w + scale_bytes, half * LANES, op.half_scales);
    }
    w += scale_bytes * (FORM == INT4 ? 2 : 1);
    for (int64_t low = 0; low < rows.group; low += rows.block, scales++, sums++) {
      const int n = int(rows.group - low < rows.block ? rows.group - low : rows.block);
      VI sum[M][PARTS] = {};
      for (int m = 0; IS_RAISED && m < M; m++)
        for (int part = 0; part < PARTS; part++) sum[m][part] += *reinterpret_cast<const int32_t*>(sums + m * count);
      for (int i = 0; i < n; i += INPUTS, w += STEP_BYTES<FORM>) {
        Ahead::read_once(w, STEP_BYTES<FORM>);
#pragma GCC unroll 8
        for (int first = 0; first < PARTS; first += LOADED) {
          VI weights[LOADED][X::PRODUCTS];
#pragma GCC unroll 2
          for (int part = 0; part < LOADED; part++)
            X::template read<FORM>(w + (first + part) * WIDTH * bits_of(FORM) / 2, weights[part]);
#pragma GCC unroll 2
          for (int j = 0; j < X::PRODUCTS; j++)
#pragma GCC unroll 12
            for (int m = 0; m < M; m++)
#pragma GCC unroll 2
              for (int part = 0; part < LOADED; part++)
                sum[m][first + part] = X::dot(sum[m][first + part], weights[part][j], x[m] + INPUTS / X::PRODUCTS * j);
        }
        x.advance(INPUTS);
      }
      asm volatile("" ::: "memory");  // the totals are not loaded before, when the registers hold the sums
#pragma GCC unroll 12
      for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int part = 0; part < PARTS; part++) {
          V& total = reinterpret_cast<V*>(acc[m])[part];
          total += to_floats(sum[m][part]) * (scale[part] * scales[m * count]);
          if (FORM == INT4) total += minimum[part] * sums[m * count];
        }
    }
  }
}

#ifdef KVAD_TILES
// Add ``N`` blocks' sums of m rows, times their scales, to those of a panel.
template <WeightForm FORM, bool IS_SPLIT, int N>
void add_blocks(int m, const I (*high)[ROWS][2], const I (*low)[ROWS][2], const F (*scale)[2], const F (*minimum)[2],
                const float* scales, const float* sums, int64_t count, F (&acc)[ROWS][2]) {
  for (int i = 0; i < m; i++)
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      F total = acc[i][half];
#pragma GCC unroll 4
      for (int b = 0; b < N; b++) {
        const I sum = IS_SPLIT ? (high[b][i][half] << 8) + low[b][i][half] : high[b][i][half];
        total += (F)_mm512_cvtepi32_ps((__m512i)sum) * (scale[b][half] * scales[i * count + b]);
        if (FORM == INT4) total += minimum[b][half] * sums[i * count + b];
      }
      acc[i][half] = total;
    }
}

// Multiply m rows, from ``row``, by a panel, with the same sums.
template <WeightForm FORM, class X>
void multiply_integers(const Op& op, const uint8_t* w, const IntegerRows<TileInputs<X>>& rows, int64_t row, int m,
                       F (&acc)[ROWS][2]) {
  constexpr bool IS_SPLIT = sizeof(typename X::T) == 2;
  constexpr int SPAN = IS_SPLIT ? 2 : 4;  // blocks whose sums are added together
  const int64_t count = rows.count(op), row_bytes = rows.k * sizeof(typename X::T);
  const int64_t scale_bytes = PANEL * (op.half_scales ? 2 : 4);
  const char* x = reinterpret_cast<const char*>(rows.x) + row * row_bytes;
  const float *scales = rows.scales + row * count, *sums = rows.sums + row * count;
  const int depth = rows.group % 64 ? 32 : 64;
  alignas(64) I high[SPAN][ROWS][2], low[IS_SPLIT ? SPAN : 1][ROWS][2];
  alignas(64) F scale[SPAN][2], minimum[SPAN][2];
  alignas(64) uint8_t unpacked[FORM != INT8 ? BLOCK * PANEL : 1];
  for (int i = 0; i < m; i++) acc[i][0] = acc[i][1] = F{};
  configure_tiles(m, depth);
  const uint8_t* group_scales = w;
  int64_t at = 0;  // in the group
  for (int64_t block = 0; block < count; block += SPAN, scales += SPAN, sums += SPAN) {
    const int span = int(count - block < SPAN ? count - block : SPAN);
    for (int b = 0; b < span; b++) {
      if (at == 0) group_scales = w, w += scale_bytes * (FORM == INT4 ? 2 : 1);
      for (int half = 0; half < 2; half++) {
        scale[b][half] = load_scales(group_scales, half * LANES, op.half_scales);
        if (FORM == INT4) minimum[b][half] = load_scales(group_scales + scale_bytes, half * LANES, op.half_scales);
      }
      const int n = int(rows.group - at < rows.block ? rows.group - at : rows.block), bytes = n * PANEL * bits_of(FORM) / 8;
      for (int line = 0; line < bytes; line += 64) __builtin_prefetch(w + Ahead::BYTES + line, 0, 2);
      const uint8_t* weights = w;
      if constexpr (FORM != INT8) {
        for (int i = 0; i < bytes; i += 32) _mm512_store_si512(unpacked + 2 * i, (__m512i)ByteInputs::unpack<FORM>(w + i));
        weights = unpacked;
      }
      const auto multiply = [&](auto kind, const char* from, I(&out)[ROWS][2]) {
        clear_tiles();
        for (int i = 0; i < n; i += depth) add_tiles<kind.value>(m, weights + i * PANEL, from + i, row_bytes);
        store_tiles(m, out);
      };
      multiply(std::integral_constant<TileProduct, SIGNED_BYTES>(), x + at, high[b]);
      if constexpr (IS_SPLIT)
        multiply(std::integral_constant<TileProduct, UNSIGNED_BYTES>(), x + rows.padded + at, low[b]);
      w += bytes, at += n;
      if (at == rows.group) at = 0, x += rows.group * sizeof(typename X::T);
    }
    if (span == SPAN) {
      add_blocks<FORM, IS_SPLIT, SPAN>(m, high, low, scale, minimum, scales, sums, count, acc);
    } else {
      for (int b = 0; b < span; b++)
        add_blocks<FORM, IS_SPLIT, 1>(m, high + b, low + (IS_SPLIT ? b : 0), scale + b, minimum + b, scales + b, sums + b,
                                      count, acc);
    }
  }
}
#endif

// Multiply M rows of float32 x [M, stride] by a panel; sums [M, groups] of x are what minima are multiplied by.
template <WeightForm FORM, int M> __attribute__((noinline))
void multiply_floats(const Op& op, const uint8_t* w, const float* x, const float* sums, F (&acc)[ROWS][2]) {
  const int groups = op.k / op.quantized_group, scale_bytes = PANEL * (op.half_scales ? 2 : 4);
  for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = F{};
  for (int g = 0; g < groups; g++) {
    const uint8_t *scales = w, *minima = w + scale_bytes;
    w += scale_bytes * (FORM == INT4 ? 2 : 1);
    F part[M][2] = {};
    V* sum = reinterpret_cast<V*>(part);
    for (int i = 0; i < op.quantized_group; i += INPUTS, x += INPUTS, w += STEP_BYTES<FORM>)
#pragma GCC unroll 8
      for (int j = 0; j < PARTS; j++) {
        VI pairs[2];
        read_pairs<FORM>(w + j * WIDTH * bits_of(FORM) / 2, pairs);
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
      if (FORM != INT4) continue;
      const F minimum = load_scales(minima, half * LANES, op.half_scales);
      for (int m = 0; m < M; m++) acc[m][half] += minimum * all(sums[m * groups + g]);
    }
  }
}

#if defined(__AVX512F__)
#define KVAD_CASES CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#else
#define KVAD_CASES
#endif

// Call a function with a number up to TOGETHER: as a constant, unless tiles have any number of rows.
template <int TOGETHER, class Function> inline void call_with_count(int m, Function function) {
  if constexpr (TOGETHER > REGISTER_ROWS) function(m);
  else switch (m) {
#define CASE(n)                                                                          \
  case n:                                                                                \
    if constexpr (n <= TOGETHER) function(std::integral_constant<int, n>());             \
    break;
    CASE(1) CASE(2) CASE(3) KVAD_CASES
#undef CASE
  }
}

// Multiply rows in parts of at most TOGETHER by this thread's panels; ``product`` multiplies M of them by a panel.
template <class W, int TOGETHER, class Product>
void multiply_panels(const Run& run, const Op& op, int64_t first, int64_t end, Product product) {
  const int64_t panels = (op.n + PANEL - 1) / PANEL;
  const int64_t size = panel_bytes(op);
  alignas(64) F acc[ROWS][2];
  const int64_t parts = (end - first + TOGETHER - 1) / TOGETHER;
  for (int64_t panel = run.low(panels); panel < run.high(panels); panel++)
    for (int64_t part = 0; part < parts; part++) {  // of about the same size
      const int64_t row = first + (end - first) * part / parts;
      const int m = int(first + (end - first) * (part + 1) / parts - row);
      const uint8_t* w = static_cast<const uint8_t*>(op.weight) + panel * size;
      call_with_count<TOGETHER>(m, [&](auto count) { product(count, w, row, acc); });
      finish<W>(run, op, panel, row, m, acc);
    }
}

inline void add_groups(const Op& op, const float* x, float* sums) {
  for (int64_t g = 0; g < op.k / op.quantized_group; g++, x += op.quantized_group) {
    sums[g] = 0;
    for (int i = 0; i < op.quantized_group; i++) sums[g] += x[i];
  }
}

constexpr int64_t FEW_ROWS = 4;  // that each thread converts for itself; more are converted by all threads together
inline bool uses_integers(const Op& op) { return op.activation_bits || op.type == TYPE_BFLOAT; }

template <class W, class X, WeightForm FORM> void integer_linear(const Run& run, const Op& op, int64_t rows) {
  typedef typename W::T T;
  const T* x = run.buffer<T>(op.in) + op.in_offset;
  const bool shared = rows > FEW_ROWS;
  IntegerRows<X> integers(op, rows < BLOCK_ROWS ? rows : BLOCK_ROWS, shared ? run.shared : run.own);
  for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
    const int64_t end = rows - first < BLOCK_ROWS ? rows : first + BLOCK_ROWS, count = end - first;
    if (shared && first > 0) run.team.wait();  // for those that still multiply
    for (int64_t row = shared ? run.low(count) : 0; row < (shared ? run.high(count) : count); row++)
      integers.convert(op, row, x + (first + row) * op.in_stride);
    if (shared) run.team.wait();
    multiply_panels<W, X::TOGETHER>(run, op, first, end, [&](auto m, const uint8_t* w, int64_t row, F(&acc)[ROWS][2]) {
      multiply_integers<FORM>(op, w, integers, row - first, m, acc);
    });
  }
}

template <class W, WeightForm FORM> void quantized_linear(const Run& run, const Op& op, int64_t rows) {
#ifdef KVAD_TILES
  if (uses_integers(op) && uses_tiles(op, rows)) {
    if (op.activation_bits) return integer_linear<W, TileInputs<ByteInputs>, FORM>(run, op, rows);
    return integer_linear<W, TileInputs<WordInputs>, FORM>(run, op, rows);
  }
#endif
  if (op.activation_bits) return integer_linear<W, ByteInputs, FORM>(run, op, rows);
  if constexpr (sizeof(typename W::T) == 2) {
    integer_linear<W, WordInputs, FORM>(run, op, rows);
  } else {
    const float* x = run.buffer<float>(op.in) + op.in_offset;
    const int64_t groups = op.k / op.quantized_group;
    float* sums = reinterpret_cast<float*>(run.own);
    for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
      const int64_t end = rows - first < BLOCK_ROWS ? rows : first + BLOCK_ROWS;
      for (int64_t row = first; FORM == INT4 && row < end; row++)
        add_groups(op, x + row * op.in_stride, sums + (row - first) * groups);
      multiply_panels<W, WordInputs::TOGETHER>(
          run, op, first, end, [&](auto m, const uint8_t* w, int64_t row, F(&acc)[ROWS][2]) {
            multiply_floats<FORM, m.value>(op, w, x + row * op.in_stride, sums + (row - first) * groups, acc);
          });
    }
  }
}
#undef KVAD_CASES

// Bytes of what rows are converted to.
inline int64_t converted_bytes(const Op& op, int64_t rows) {
  if (op.activation_bits) return IntegerRows<ByteInputs>(op, rows, nullptr).bytes;
  if (op.type == TYPE_BFLOAT) return IntegerRows<WordInputs>(op, rows, nullptr).bytes;
  return rows * (op.k / op.quantized_group) * 4;
}
inline int64_t quantized_bytes(const Op& op, int64_t rows) { return converted_bytes(op, rows < BLOCK_ROWS ? rows : BLOCK_ROWS); }

// Pack rows of quantized weights, their scales and minima into panels [n / PANEL, groups, (scales, minima, steps)].
inline void pack_quantized(const uint8_t* const* data, const char* const* scales, const char* const* minima, int64_t n,
                           int64_t groups, int64_t group_size, int64_t bits, int64_t scale_bytes, uint8_t* out,
                           int64_t threads) {
  const int64_t bytes = group_bytes(group_size, bits, scale_bytes, minima), panels = (n + PANEL - 1) / PANEL;
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
        if (minima) {
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
