// Attention of some queries to one chunk.
#pragma once
#include "chunk.h"

namespace {

struct Part { float top, total; };  // of one query over some slots: largest logit, sum of 2^(logit - top)

// Logits are times this number: e^logit is then a power of two.
constexpr float LOG2_E = 1.44269504f;
inline F scale_product(const Op& op, F product) { return product * (op.scale * LOG2_E); }

// Logits of a query and LANES slots from their products; -inf if invisible.
inline F finish_logits(const Op& op, const Group& group, F product, const float* position, float query, int head) {
  F x = scale_product(op, product), p = load(position), ahead = query - p;
  if (op.softcap > 0) x = op.softcap * LOG2_E * tangent(x / (op.softcap * LOG2_E));
  if (op.slopes) x -= op.slopes[head] * LOG2_E * larger(ahead, -ahead);
  if (op.position_bias)
    for (int j = 0; j < LANES; j++) {
      const float at = ahead[j] + op.bias_offset;
      const int distance = at < 0 ? 0 : at >= op.bias_size ? op.bias_size - 1 : int(at);
      x[j] += op.position_bias[head * op.bias_size + distance] * LOG2_E;
    }
  I seen = p >= 0.0f;
  if (group.window && group.window_step != 1) {
    for (int j = 0; j < LANES; j++) seen[j] = visible(group, query, p[j]) ? -1 : 0;
  } else if (group.causal) {
    seen &= ahead >= 0.0f;
    if (group.window) seen &= (ahead < float(group.window)) | (p < float(group.num_sinks));
    if (group.layer_window) seen &= ahead < float(group.layer_window);
  } else if (group.window) {
    seen &= larger(ahead, -ahead) < float(group.window);
  }
  return seen ? x : all(-INFINITY);
}

struct Queries {  // some queries of one kv head, their positions and heads
  const void* vectors;  // [m, even head_dim]
  const float* position;
  const int* head;
  const float *scale, *sum;  // of the numbers of Words: of one, and of all
};

// Products of a query and LANES slots, from the sums of words or numbers.
template <class W> F key_products(const Op& op, const Chunk<W>& chunk, F sums, int at, const Queries& q, int i) {
  if constexpr (!W::IS_INTEGER) return sums;
  F x = integers_to_floats(sums) * (load(chunk.key_scale + at) * q.scale[i]);
  if (op.keys->format == STORE_INT4) x += load(chunk.key_zero + at) * q.sum[i];
  return x;
}

inline float lowest_position(const Queries& q, int m) {
  float low = q.position[0];
  for (int i = 1; i < m; i++) low = q.position[i] < low ? q.position[i] : low;
  return low;
}

// Writes logits [m, CHUNK] of a chunk, LANES slots of a query at a time.
template <class W> struct Logits {
  const Op& op;
  const Group& group;
  const Chunk<W>& chunk;
  const Queries& queries;
  float* out;
  const float low;
  const bool plain;  // a query sees every slot that is not later, and logits are products times a scale
  Logits(const Op& op, const Group& group, const Chunk<W>& chunk, const Queries& queries, int m, float* out)
      : op(op), group(group), chunk(chunk), queries(queries), out(out), low(lowest_position(queries, m)),
        plain(group.causal && !group.window && !group.layer_window && !op.slopes && !op.position_bias && op.softcap <= 0) {}

  bool all_seen(int at) const { return plain && chunk.highest[at / PANEL] <= low; }
  void put(F sums, int at, int i, bool all_seen) const {  // sums: of words or numbers
    const F product = key_products(op, chunk, sums, at, queries, i);
    store(out + i * CHUNK + at, all_seen ? scale_product(op, product)
                                         : finish_logits(op, group, product, chunk.position + at, queries.position[i],
                                                         queries.head[i]));
  }
};

// Logits [m, CHUNK] of an arranged chunk.
template <class W>
void chunk_logits(const Op& op, const Group& group, const Chunk<W>& chunk, int count, int m, const Queries& q,
                  float* out) {
  const int dim = int(round_up(op.head_dim, 2));
  const Logits<W> logits(op, group, chunk, q, m, out);
  alignas(64) F acc[ROWS][2];
  for (int tile = 0; tile < count; tile += PANEL) {
    multiply<W>(m, chunk.keys + tile * dim, static_cast<const typename W::T*>(q.vectors), dim, dim, acc);
    const bool all_seen = logits.all_seen(tile);
    for (int i = 0; i < m; i++)
      for (int half = 0; half < 2; half++) logits.put(acc[i][half], tile + half * LANES, i, all_seen);
  }
}

// Sum the values of visible slots only, because 0 x NaN is NaN.
template <class W>
void sum_visible(const Chunk<W>& chunk, int count, const float* logits, const typename W::T* weights, int value_dim,
                 float* out) {
  for (int d = 0; d < value_dim; d++) {
    float total = 0;
    for (int s = 0; s < count; s++)
      if (logits[s] != -INFINITY) total += widen(weights[s]) * widen(chunk.value[s][d]);
    out[d] = total;
  }
}

// The largest logit, or part of one, of some; count: a multiple of PANEL.
inline float largest_logit(const float* logits, int count) {
  F top[2] = {all(-INFINITY), all(-INFINITY)};
  for (int s = 0; s < count; s += PANEL)
    for (int half = 0; half < 2; half++) top[half] = larger(load(logits + s + half * LANES), top[half]);
  return highest(larger(top[0], top[1]));
}

// Weights 2^(logit - top) of one query, LANES at a time, and their sums.
template <class Put> F soften(const float* logits, int count, float top, Put put) {
  const F base = all(top == -INFINITY ? 0.0f : top);
  F total = F{};
  for (int s = 0; s < count; s += LANES) {
    F p = power_of_two(load(logits + s) - base);
    total += p;
    put(p, s);
  }
  return total;
}

// How sums of values, multiplied by words, become numbers.
struct Unpacked { float scale, zero; };

// Weights of one query as words, times the scales of the values of visible slots.
template <class W>
F soften_words(const Op& op, const Chunk<W>& chunk, int count, const float* logits, float largest, float* floats,
               uint16_t* words, Unpacked& unpacked) {
  const bool has_zeros = op.values->format == STORE_INT4;
  I top = I{};
  F zero = F{};
  const F total = soften(logits, count, largest, [&](F p, int s) {
    const I seen = load(logits + s) != -INFINITY;
    const F x = seen ? p * load(chunk.value_scale + s) : F{};
    if (has_zeros) zero += seen ? p * load(chunk.value_zero + s) : F{};
    top = larger_size(top, x);
    store(floats + s, x);
  });
  const auto put = [&](I numbers, int s) { store_words(numbers, LANES, words + s); };
  unpacked = {to_integers(floats, count, largest_size(top), HIGHEST_WORD, put).scale, sum(zero)};
  return total;
}

// Weights of m queries as the values are multiplied by them. A loop for each part: none waits for that of one query.
template <class W>
void weigh(const Op& op, const Chunk<W>& chunk, int count, int m, const float* logits, typename W::T* weights,
           float* floats, Part* parts, Unpacked* unpacked) {
  F totals[ROWS];
  for (int i = 0; i < m; i++) parts[i].top = largest_logit(logits + i * CHUNK, count);
  for (int i = 0; i < m; i++) {
    const float* x = logits + i * CHUNK;
    typename W::T* to = weights + i * CHUNK;
    if constexpr (W::IS_INTEGER) totals[i] = soften_words(op, chunk, count, x, parts[i].top, floats, to, unpacked[i]);
    else totals[i] = soften(x, count, parts[i].top, [&](F p, int s) { store(to + s, p); });
  }
  for (int i = 0; i < m; i++) {
    parts[i].total = sum(totals[i]);
    if (parts[i].total != parts[i].total) parts[i].top = parts[i].total;  // NaN: then no part with it is left out
  }
}

inline bool are_finite(const float* x, int n) {
  F suspect = F{};
  for (int i = 0; i < n; i += LANES) suspect += load(x + i) * 0.0f;
  return sum(suspect) == 0;
}

// Make numbers of sums of words [m, value_dim], and mend those that are not finite because of an invisible slot.
template <class W>
void finish_sums(const Op& op, const Chunk<W>& chunk, int count, int m, const float* logits,
                 const typename W::T* weights, const Unpacked* unpacked, float* out) {
  const int value_dim = int(round_up(op.value_dim, PANEL));
  for (int i = 0; i < m; i++) {
    if constexpr (W::IS_INTEGER) {
      for (float *x = out + i * value_dim, *end = x + value_dim; x < end; x += LANES)
        store(x, integers_to_floats(load(x)) * unpacked[i].scale + unpacked[i].zero);
      continue;
    }
    if (!are_finite(out + i * value_dim, value_dim))
      sum_visible<W>(chunk, count, logits + i * CHUNK, weights + i * CHUNK, value_dim, out + i * value_dim);
  }
}

// Attend m queries to an arranged chunk: out [m, padded value_dim], not divided by the total.
template <class W>
void attend_chunk(const Op& op, const Chunk<W>& chunk, int count, int m, const float* logits, typename W::T* weights,
                  float* floats, Part* parts, float* out) {
  const int value_dim = int(round_up(op.value_dim, PANEL));
  Unpacked unpacked[ROWS];
  weigh(op, chunk, count, m, logits, weights, floats, parts, unpacked);
  alignas(64) F acc[ROWS][2];
  for (int d = 0; d < value_dim; d += PANEL) {
    multiply<W>(m, chunk.values + int64_t(d) * CHUNK, weights, CHUNK, count, acc);
    for (int i = 0; i < m; i++)
      store(out + i * value_dim + d, acc[i][0]), store(out + i * value_dim + d + LANES, acc[i][1]);
  }
  finish_sums(op, chunk, count, m, logits, weights, unpacked, out);
}

#ifdef __AVX512F__
// Few queries read keys and values from the cache's blocks, with the sums of an arranged chunk.
template <class W, int M> struct FewQueries {
  typedef typename W::T T;
  typedef const T* Row;
  static constexpr bool IS_HALF = sizeof(T) == 2;

  static void logits(const Op& op, const Group& group, int64_t kv, const Chunk<W>& chunk, const Queries& queries,
                     float* out) {
    const int dim = int(round_up(op.head_dim, 2)), words = dim / W::STEP;
    const T* q = static_cast<const T*>(queries.vectors);
    const Logits<W> logits(op, group, chunk, queries, M, out);
    const ReadAhead<W> ahead(op, group, kv, chunk);
    for (int at = 0; at < chunk.count; at += LANES) {
      const char* next = reinterpret_cast<const char*>(q);  // a line of it is loaded with every word
      Row rows[LANES];
      if (read_keys(op, group, kv, at, chunk, rows)) next = ahead.after_keys(at).address(q);
      else for (int i = 0; i < LANES; i++) ahead.with_keys(at + i);
      V acc[M] = {};
      for (int first = 0; first < words; first += LANES) {
        __m512i columns[LANES];  // words of the slots; they stay in registers
        const __mmask16 present = words - first < LANES ? (1 << (words - first)) - 1 : -1;
        for (int i = 0; i < LANES; i++)
          columns[i] = _mm512_maskz_loadu_epi32(present, reinterpret_cast<const int32_t*>(rows[i]) + first);
        transpose(columns);
#pragma GCC unroll 16
        for (int word = 0; word < LANES; word++) {
          if (first + word == words) break;
          __builtin_prefetch(next + 64 * (first + word), 0, 2);
#pragma GCC unroll 12
          for (int i = 0; i < M; i++)
            acc[i] = W::dot(acc[i], (VI)columns[word], q + i * dim + (first + word) * W::STEP);
        }
      }
      const bool all_seen = logits.all_seen(at);
      for (int i = 0; i < M; i++) logits.put((F)acc[i], at, i, all_seen);
    }
  }

  // Two lines of LANES dims each, of a step of slots.
  static void load_values(const Row* rows, int d, VI (&lines)[2]) {
    if constexpr (IS_HALF) interleave_halves(_mm512_loadu_si512(rows[0] + d), _mm512_loadu_si512(rows[1] + d), lines);
    else lines[0] = load_step(rows[0] + d), lines[1] = load_step(rows[0] + d + LANES);
  }

  template <int PANELS>
  static void add_values(const Op& op, const Group& group, int64_t kv, const Chunk<W>& chunk, int d, const T* weights,
                         float* out) {
    const int value_dim = int(round_up(op.value_dim, PANEL));
    const ReadAhead<W> ahead(op, group, kv, chunk);
    V acc[PANELS][M][2];
#pragma GCC unroll 2
    for (int panel = 0; panel < PANELS; panel++)
#pragma GCC unroll 12
      for (int i = 0; i < M; i++) acc[panel][i][0] = acc[panel][i][1] = V{};
    const bool in_sequence = group.block_size % LANES == 0;  // the slots of a tile
    const int64_t bytes = W::STEP * ahead.value_bytes;       // of a step
    const char* next = nullptr;
    for (int s = 0; s < chunk.count; s += W::STEP) {
      if (!d) {
        next = s % LANES && in_sequence ? next + bytes : ahead.after_values(s).address(chunk.values);
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(next + i, 0, 2);
      }
#pragma GCC unroll 2
      for (int panel = 0; panel < PANELS; panel++) {
        VI lines[2];
        load_values(chunk.value + s, d + panel * PANEL, lines);
#pragma GCC unroll 12
        for (int i = 0; i < M; i++)
#pragma GCC unroll 2
          for (int half = 0; half < 2; half++)
            acc[panel][i][half] = W::dot(acc[panel][i][half], lines[half], weights + i * CHUNK + s);
      }
    }
#pragma GCC unroll 2
    for (int panel = 0; panel < PANELS; panel++)
#pragma GCC unroll 12
      for (int i = 0; i < M; i++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
          store(out + i * value_dim + d + panel * PANEL + half * LANES, (F)acc[panel][i][half]);
  }

  static void values(const Op& op, const Group& group, int64_t kv, const Chunk<W>& chunk, const T* weights,
                     float* out) {
    const int value_dim = int(round_up(op.value_dim, PANEL));
    int d = 0;
    if constexpr (M <= 6)
      for (; d + 2 * PANEL <= value_dim; d += 2 * PANEL) add_values<2>(op, group, kv, chunk, d, weights, out);
    for (; d < value_dim; d += PANEL) add_values<1>(op, group, kv, chunk, d, weights, out);
  }
};

#ifdef KVAD_BYTES
// 64 integers as bytes.
template <int FORMAT> __m512i load_bytes(const char* p) {
  if (FORMAT == STORE_INT8) return _mm512_loadu_si512(p);
  const __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_and_si512(_mm512_or_si512(both, _mm512_slli_epi16(both, 4)), _mm512_set1_epi8(15));
}

// Scales and zeros of a tile's keys and values, which are stored in sequence. What empty slots have does not matter.
inline void read_scales(const Op& op, const Group& group, int64_t kv, const Chunk<Words>& chunk, int tile) {
  const auto read = [&](const Store& from, float* scale, float* zero) {
    const int64_t at = kv * from.blocks * group.block_size + chunk.slot[tile];
    store(scale + tile, load(from.scale + at));
    if (from.format == STORE_INT4) store(zero + tile, load(from.zero + at));
  };
  read(*op.keys, chunk.key_scale, chunk.key_zero), read(*op.values, chunk.value_scale, chunk.value_zero);
}

// Numbers FIRST to FIRST + LINES, of 4, of every 16 bytes of four slots, as lines of four bytes per number.
template <int FORMAT, int FIRST, int LINES>
void interleave_bytes(const char* at, int64_t bytes, __m512i (&lines)[LINES]) {
  const __m512i a = load_bytes<FORMAT>(at), b = load_bytes<FORMAT>(at + bytes);
  const __m512i c = load_bytes<FORMAT>(at + 2 * bytes), d = load_bytes<FORMAT>(at + 3 * bytes);
  for (int i = 0; i < LINES; i++) {
    const bool second = (FIRST + i) / 2;
    const __m512i x = second ? _mm512_unpackhi_epi8(a, b) : _mm512_unpacklo_epi8(a, b);
    const __m512i y = second ? _mm512_unpackhi_epi8(c, d) : _mm512_unpacklo_epi8(c, d);
    lines[i] = (FIRST + i) % 2 ? _mm512_unpackhi_epi16(x, y) : _mm512_unpacklo_epi16(x, y);
  }
}

// Write the sums of a line of ``interleave_bytes``, which belong to 4 of every 16 numbers.
inline void store_line(F sums, float* out) {
  for (int part = 0; part < 4; part++) std::memcpy(out + 16 * part, reinterpret_cast<const float*>(&sums) + 4 * part, 16);
}

// 256 times the sums of high bytes, plus those of low ones.
inline F join_bytes(__m512i high, __m512i low) { return (F)_mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }

// Quarter i of the result is the sum of the quarters of line i.
inline __m512i add_quarters(const __m512i (&lines)[4]) {
  const auto add = [](__m512i a, __m512i b) {  // a0 + a2, a1 + a3, b0 + b2, b1 + b3
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xee));
  };
  const __m512i a = add(lines[0], lines[1]), b = add(lines[2], lines[3]);
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

// Few queries multiply int8 or int4 keys and values as bytes, where they are stored. The words of queries and weights are
// two bytes each; the sums of both are exact, and so equal those of Words.
template <int M> struct ByteQueries {
  static constexpr int LINE = 64;  // numbers that are loaded at a time

  static bool can_read(const Op& op, const Group& group) {
    return op.head_dim % LINE == 0 && op.value_dim % LINE == 0 && group.block_size % LANES == 0;
  }

  struct WeightBytes {  // words [M, CHUNK] are 256 times a signed byte plus an unsigned one
    alignas(64) int8_t high[M * CHUNK];
    alignas(64) uint8_t low[M * CHUNK];
    WeightBytes(const uint16_t* words) {
      for (int i = 0; i < M * CHUNK; i += 32) {
        const __m512i x = _mm512_loadu_si512(words + i);
        _mm256_store_si256(reinterpret_cast<__m256i*>(high + i), _mm512_cvtepi16_epi8(_mm512_srai_epi16(x, 8)));
        _mm256_store_si256(reinterpret_cast<__m256i*>(low + i), _mm512_cvtepi16_epi8(x));
      }
    }
  };

  static __m512i four(const void* p) {  // bytes, repeated
    int32_t bytes;
    std::memcpy(&bytes, p, 4);
    return _mm512_set1_epi32(bytes);
  }

  template <int FORMAT> static constexpr int bytes(int n) { return FORMAT == STORE_INT8 ? n : n / 2; }

  // Words of queries are 256 times a signed byte plus another. A line has four bytes of each quarter of LINE dims, four
  // times, as ``interleave_words`` arranges four keys; four lines have all of them.
  struct QueryBytes {
    alignas(64) int8_t high[512 / LINE * 4][M][LINE], low[512 / LINE * 4][M][LINE];
    int32_t raised[M];  // what the keys add that are raised by 128, so that they are unsigned
    QueryBytes(const uint16_t* words, int dim) {
      const auto high_byte = [](__m512i x) { return _mm512_srai_epi16(_mm512_add_epi16(x, _mm512_set1_epi16(128)), 8); };
      for (int i = 0; i < M; i++, words += dim) {
        int32_t total = 0;
        for (int d = 0; d < dim; d += LINE) {
          const __m512i a = _mm512_loadu_si512(words + d), b = _mm512_loadu_si512(words + d + 32);
          put(high_byte(a), high_byte(b), high + d / 16, i), put(a, b, low + d / 16, i);
        }
        for (int d = 0; d < dim; d++) total += int16_t(words[d]);
        raised[i] = 128 * total;
      }
    }
    static void put(__m512i a, __m512i b, int8_t (*to)[M][LINE], int i) {
      const __m512i x = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(a)), _mm512_cvtepi16_epi8(b), 1);
      _mm512_store_si512(to[0][i], _mm512_shuffle_epi32(x, _MM_PERM_AAAA));
      _mm512_store_si512(to[1][i], _mm512_shuffle_epi32(x, _MM_PERM_BBBB));
      _mm512_store_si512(to[2][i], _mm512_shuffle_epi32(x, _MM_PERM_CCCC));
      _mm512_store_si512(to[3][i], _mm512_shuffle_epi32(x, _MM_PERM_DDDD));
    }
  };

  // Sums of every four slots of a tile: what each quarter of their keys adds to each of the four.
  template <int FORMAT>
  __attribute__((always_inline)) static void multiply_tile(const char* tile, int dim, const QueryBytes& q,
                                                           __m512i (&sums)[M][4]) {
#pragma GCC unroll 4
    for (int four = 0; four < 4; four++) {
      __m512i high[M], low[M];
      for (int i = 0; i < M; i++) high[i] = low[i] = _mm512_setzero_si512();
      for (int d = 0; d < dim; d += LINE) {
        __m512i words[4];
        for (int i = 0; i < 4; i++) words[i] = load_bytes<FORMAT>(tile + bytes<FORMAT>((4 * four + i) * dim + d));
        interleave_words(words);
#pragma GCC unroll 4
        for (int word = 0; word < 4; word++) {
          const __m512i u = FORMAT == STORE_INT8 ? _mm512_xor_si512(words[word], _mm512_set1_epi8(-128)) : words[word];
#pragma GCC unroll 12
          for (int i = 0; i < M; i++) {
            high[i] = _mm512_dpbusd_epi32(high[i], u, _mm512_load_si512(q.high[d / 16 + word][i]));
            low[i] = _mm512_dpbusd_epi32(low[i], u, _mm512_load_si512(q.low[d / 16 + word][i]));
          }
        }
      }
      for (int i = 0; i < M; i++) sums[i][four] = (__m512i)join_bytes(high[i], low[i]);
    }
  }

  template <int FORMAT>
  static void logits(const Op& op, const Group& group, int64_t kv, Chunk<Words>& chunk, const Queries& queries,
                     float* out) {
    const int dim = op.head_dim;
    const QueryBytes q(static_cast<const uint16_t*>(queries.vectors), dim);
    const int64_t keys = kv * op.keys->blocks * group.block_size;
    const Logits<Words> logits(op, group, chunk, queries, M, out);
    const ReadAhead<Words> ahead(op, group, kv, chunk);
    for (int at = 0; at < chunk.count; at += LANES) {
      const char* tile = static_cast<const char*>(op.keys->data) + (keys + chunk.slot[at]) * bytes<FORMAT>(dim);
      ahead.with_keys(at, LANES);
      __m512i sums[M][4];
      if (dim == LINE) multiply_tile<FORMAT>(tile, LINE, q, sums);  // without a loop
      else multiply_tile<FORMAT>(tile, dim, q, sums);
      read_scales(op, group, kv, chunk, at);
      const bool all_seen = logits.all_seen(at);
      for (int i = 0; i < M; i++) {
        const __m512i raised = _mm512_set1_epi32(FORMAT == STORE_INT8 ? q.raised[i] : 0);
        logits.put((F)_mm512_sub_epi32(add_quarters(sums[i]), raised), at, i, all_seen);
      }
    }
  }

  template <int FORMAT, int FIRST>
  static void add_values(const Op& op, const Group& group, int64_t kv, const Chunk<Words>& chunk, int d,
                         const WeightBytes& p, float* out) {
    constexpr int LINES = M <= 3 ? 4 : M <= 6 ? 2 : 1;  // sums that the registers hold
    const int64_t values = kv * op.values->blocks * group.block_size, slot = bytes<FORMAT>(op.value_dim);
    const ReadAhead<Words> ahead(op, group, kv, chunk);
    __m512i high[M][LINES], low[M][LINES];
    for (int i = 0; i < M; i++)
      for (int line = 0; line < LINES; line++) high[i][line] = low[i][line] = _mm512_setzero_si512();
    for (int at = 0; at < chunk.count; at += LANES) {
      const char* tile = static_cast<const char*>(op.values->data) + (values + chunk.slot[at]) * slot + bytes<FORMAT>(d);
      if (d + FIRST == 0) ahead.with_values(at, LANES);
      for (int s = 0; s < LANES; s += 4) {
        __m512i lines[LINES];
        interleave_bytes<FORMAT, FIRST>(tile + s * slot, slot, lines);
#pragma GCC unroll 12
        for (int i = 0; i < M; i++) {
          const __m512i a = four(p.high + i * CHUNK + at + s), b = four(p.low + i * CHUNK + at + s);
#pragma GCC unroll 4
          for (int line = 0; line < LINES; line++) {
            high[i][line] = _mm512_dpbusd_epi32(high[i][line], a, lines[line]);
            low[i][line] = _mm512_dpbusd_epi32(low[i][line], b, lines[line]);
          }
        }
      }
    }
    for (int i = 0; i < M; i++)
      for (int line = 0; line < LINES; line++)
        store_line(join_bytes(high[i][line], low[i][line]), out + i * op.value_dim + d + 4 * (FIRST + line));
    if constexpr (FIRST + LINES < 4) add_values<FORMAT, FIRST + LINES>(op, group, kv, chunk, d, p, out);
  }

  template <int FORMAT>
  static void values(const Op& op, const Group& group, int64_t kv, const Chunk<Words>& chunk, const uint16_t* weights,
                     float* out) {
    const WeightBytes p(weights);  // not negative
    for (int d = 0; d < op.value_dim; d += LINE) add_values<FORMAT, 0>(op, group, kv, chunk, d, p, out);
  }
};
#endif

// Attend M queries to an open chunk, with the sums of an arranged one.
template <class W, int M>
void attend_few(const Op& op, const Group& group, int64_t kv, Chunk<W>& chunk, const Queries& queries, float* logits,
                typename W::T* weights, float* floats, Part* parts, float* out) {
  Unpacked unpacked[M];
  const auto finish = [&](auto add_values) {
    weigh(op, chunk, chunk.count, M, logits, weights, floats, parts, unpacked);
    add_values();
    finish_sums(op, chunk, chunk.count, M, logits, weights, unpacked, out);
  };
#ifdef KVAD_BYTES
  if constexpr (W::IS_INTEGER)
    if (ByteQueries<M>::can_read(op, group)) {
      typedef ByteQueries<M> B;
      if (op.keys->format == STORE_INT8) B::template logits<STORE_INT8>(op, group, kv, chunk, queries, logits);
      else B::template logits<STORE_INT4>(op, group, kv, chunk, queries, logits);
      return finish([&] {
        if (op.values->format == STORE_INT8) B::template values<STORE_INT8>(op, group, kv, chunk, weights, out);
        else B::template values<STORE_INT4>(op, group, kv, chunk, weights, out);
      });
    }
#endif
  FewQueries<W, M>::logits(op, group, kv, chunk, queries, logits);
  for (int tile = 0; tile < chunk.count; tile += LANES) read_values(op, group, kv, tile, chunk);
  finish([&] { FewQueries<W, M>::values(op, group, kv, chunk, weights, out); });
}
#endif

}  // namespace
