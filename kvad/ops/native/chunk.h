// One chunk of a kv head: positions, vectors, and both arranged like weights for products of many queries.
#pragma once
#include "store.h"

namespace {

// Keys [dim / STEP, PANEL, STEP] for every PANEL slots, values [CHUNK / STEP, PANEL, STEP] for every PANEL dims. In
// bfloat16, int8 and int4 are computed with as they are stored (Words); other packed formats are decoded.
template <class W> struct Chunk {
  typedef typename W::T T;
  T *keys, *values, *decoded_keys, *decoded_values;
  const T* value[CHUNK];        // of each slot; zeros if it is empty
  int64_t slot[CHUNK];          // counted over all blocks of a head
  float* position;              // of each slot, -1: empty; exact below 2^24
  float *key_scale, *key_zero, *value_scale, *value_zero;  // of each slot, for Words; zero: null for int8
  float lowest[CHUNK / PANEL];  // of the positions of every PANEL slots; infinity if they are empty
  float highest[CHUNK / PANEL];  // of them; infinity if a slot is empty
  int count;                    // slots that some query may see, rounded up to PANEL
  const int64_t* table;         // of the sequence, whose chunk begins at slot ``first`` of ``slots``
  int64_t first, slots;
  const int64_t* next_table;    // of the chunk that is read next
  int64_t next_first, next_slots, next_kv;
};

#ifdef __AVX512F__
// Four rows of 16 words: each quarter of a line becomes their words at one place.
inline void interleave_words(__m512i* rows) {
  const __m512i a = _mm512_unpacklo_epi32(rows[0], rows[1]), b = _mm512_unpackhi_epi32(rows[0], rows[1]);
  const __m512i c = _mm512_unpacklo_epi32(rows[2], rows[3]), d = _mm512_unpackhi_epi32(rows[2], rows[3]);
  rows[0] = _mm512_unpacklo_epi64(a, c), rows[1] = _mm512_unpackhi_epi64(a, c);
  rows[2] = _mm512_unpacklo_epi64(b, d), rows[3] = _mm512_unpackhi_epi64(b, d);
}

inline void transpose(__m512i (&r)[16]) {  // 16 rows of 16 words
  __m512i t[16];
  for (int i = 0; i < 16; i += 4) interleave_words(r + i);
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}
#endif

// Write 16 vectors of words of 4 bytes as columns of out [words, LINE].
template <int64_t LINE> void transpose_words(const int32_t* const* rows, int words, int32_t* out) {
  int word = 0;
#ifdef __AVX512F__
  for (; word + 16 <= words; word += 16) {
    __m512i r[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(rows[i] + word);
    transpose(r);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + (word + i) * LINE, r[i]);
  }
#endif
  for (; word < words; word++)
    for (int i = 0; i < 16; i++) out[word * LINE + i] = rows[i][word];
}

// Write the values of a step of slots as lines of every panel, PANEL dims each.
#ifdef __AVX512BW__
inline void interleave_halves(__m512i x, __m512i y, VI (&out)[2]) {  // x0 y0 x1 y1 ...
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                       5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  out[0] = (VI)_mm512_permutex2var_epi16(x, low, y), out[1] = (VI)_mm512_permutex2var_epi16(x, high, y);
}
#endif
inline void interleave(const bf16* const* rows, int dim, bf16* out, int64_t panel) {
  for (int i = 0; i < dim; i += PANEL, out += panel) {
#ifdef __AVX512BW__
    VI lines[2];
    interleave_halves(_mm512_loadu_si512(rows[0] + i), _mm512_loadu_si512(rows[1] + i), lines);
    _mm512_storeu_si512(out, (__m512i)lines[0]), _mm512_storeu_si512(out + PANEL, (__m512i)lines[1]);
#else
    for (int j = 0; j < PANEL; j++) out[2 * j] = rows[0][i + j], out[2 * j + 1] = rows[1][i + j];
#endif
  }
}
inline void interleave(const float* const* rows, int dim, float* out, int64_t panel) {
  for (int i = 0; i < dim; i += PANEL, out += panel) std::memcpy(out, rows[0] + i, PANEL * 4);
}

inline bool visible(const Group& group, float query, float key) {  // AttentionPattern.visible
  if (key < 0) return false;
  const float ahead = query - key;
  if (!group.causal) return !group.window || std::fabs(ahead) < group.window;
  if (ahead < 0 || (group.layer_window && ahead >= group.layer_window)) return false;
  if (!group.window || key < group.num_sinks) return true;
  if (group.window_step == 1) return ahead < group.window;
  const int64_t first = query < group.window ? 0 : int64_t(query) - group.window + 1;
  return key >= round_up(first, group.window_step);
}

inline bool any(I x) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#else
  int32_t bits = 0;
  for (int i = 0; i < LANES; i++) bits |= x[i];
  return bits != 0;
#endif
}

// Read the positions of a chunk's slots. Returns false if no query of [low, high] sees one of them.
template <class W>
bool open_chunk(const Group& group, float low, float high, Chunk<W>& chunk) {
  const int64_t size = group.block_size, *table = chunk.table, first = chunk.first;
  const int count = int(chunk.slots - first < CHUNK ? chunk.slots - first : CHUNK);
  int64_t block = first / size, offset = first % size;
  for (int i = 0; i < count; block++, offset = 0) {
    const int64_t at = table[block] * size + offset;
    const int n = int(size - offset < count - i ? size - offset : count - i);
    for (int j = 0; j < n; j++) chunk.position[i + j] = float(group.positions[at + j]), chunk.slot[i + j] = at + j;
    i += n;
  }
  const int padded = int(round_up(count, PANEL));
  for (int i = count; i < padded; i++) chunk.position[i] = -1, chunk.slot[i] = 0;
  chunk.count = 0;
  for (int tile = 0; tile < padded; tile += PANEL) {
    const F p[2] = {load(chunk.position + tile), load(chunk.position + tile + LANES)};
    F lowest = all(INFINITY), top = all(-INFINITY);
    I seen = I{};
    for (int half = 0; half < 2; half++) {
      I possible = p[half] >= 0.0f;
      lowest = smaller(lowest, possible ? p[half] : all(INFINITY));
      top = larger(top, possible ? p[half] : all(INFINITY));
      if (group.causal) possible &= p[half] <= high;
      if (group.causal && group.window) possible &= (p[half] < float(group.num_sinks)) | (low - p[half] < float(group.window));
      seen |= possible;
    }
    chunk.lowest[tile / PANEL] = -highest(-lowest), chunk.highest[tile / PANEL] = highest(top);
    if (any(seen)) chunk.count = tile + PANEL;
  }
  return chunk.count > 0;
}

template <class T> const T* direct(const Store& store, int dim) {  // vectors that need not be decoded or padded
  const bool same = store.format == (sizeof(T) == 2 ? STORE_BFLOAT : STORE_FLOAT);
  return same && dim % PANEL == 0 ? static_cast<const T*>(store.data) : nullptr;
}

inline int64_t slot_bytes(const Store& store, int dim) {
  switch (store.format) {
    case STORE_FLOAT: return dim * 4;
    case STORE_BFLOAT: case STORE_HALF: return dim * 2;
    case STORE_INT4: return dim / 2;
    default: return dim;
  }
}

#if defined(__AVX512BW__)
// 32 integers as words.
template <int FORMAT> __m512i load_integers(const void* p) {
  if (FORMAT == STORE_INT8) return _mm512_cvtepi8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  return _mm512_and_si512(_mm512_or_si512(both, _mm512_slli_epi32(both, 12)), _mm512_set1_epi16(15));
}
#endif

inline void read_integers(const Store& from, int64_t index, int n, int padded, uint16_t* out) {
  int i = 0;
  if (from.format == STORE_INT8) {
    const int8_t* x = static_cast<const int8_t*>(from.data) + index * n;
#if defined(__AVX512BW__)
    for (; i + 32 <= n; i += 32) _mm512_storeu_si512(out + i, load_integers<STORE_INT8>(x + i));
#endif
    for (; i < n; i++) out[i] = uint16_t(x[i]);
  } else {
    const uint8_t* x = static_cast<const uint8_t*>(from.data) + index * (n / 2);
#if defined(__AVX512BW__)
    for (; i + 32 <= n; i += 32) _mm512_storeu_si512(out + i, load_integers<STORE_INT4>(x + i / 2));
#endif
    for (; i < n; i += 2) out[i] = x[i / 2] & 15, out[i + 1] = x[i / 2] >> 4;
  }
  for (; i < padded; i++) out[i] = 0;
}

// Find or decode the vectors of LANES slots of a kv head, from ``tile``. Returns true if they are read where they are
// stored, in sequence. What an empty slot holds may not be finite: it has zeros.
template <class W>
bool read_tile(const Store& store, const Group& group, int64_t kv, int dim, int padded, const Chunk<W>& chunk, int tile,
               typename W::T* decoded, const typename W::T** rows, float* scale, float* zero) {
  typedef typename W::T T;
  static const T zeros[MAX_HEAD_DIM] = {};
  const int64_t first = kv * store.blocks * group.block_size;
  const T* data = W::IS_INTEGER ? nullptr : direct<T>(store, dim);
  if (data && group.block_size % LANES == 0 && chunk.highest[tile / PANEL] != INFINITY) {
    data += (first + chunk.slot[tile]) * dim;
    for (int i = 0; i < LANES; i++) rows[i] = data + i * dim;
    return true;
  }
  for (int i = 0; i < LANES; i++) {
    const bool is_empty = chunk.position[tile + i] < 0;
    const int64_t at = first + chunk.slot[tile + i];
    rows[i] = zeros;
    if constexpr (W::IS_INTEGER) {
      scale[tile + i] = is_empty ? 0 : store.scale[at];
      if (store.format == STORE_INT4) zero[tile + i] = is_empty ? 0 : store.zero[at];
    }
    if (is_empty) continue;
    rows[i] = data ? data + at * dim : decoded + i * padded;
    if constexpr (W::IS_INTEGER) read_integers(store, at, dim, padded, decoded + i * padded);
    else if (!data) read_vector(store, at, dim, padded, decoded + i * padded);
  }
  return false;
}

// Loads what is read DISTANCE bytes after the keys, and then the values, of an open chunk, into the L2 cache.
template <class W> struct ReadAhead {
  static constexpr int64_t DISTANCE = 6144;
  const Op& op;
  const Group& group;
  const Chunk<W>& chunk;
  const int64_t keys, values, next_keys;  // first slots of the heads
  const int64_t key_bytes, value_bytes;
  const int distance;  // in slots: some tiles
  ReadAhead(const Op& op, const Group& group, int64_t kv, const Chunk<W>& chunk)
      : op(op), group(group), chunk(chunk), keys(kv * op.keys->blocks * group.block_size),
        values(kv * op.values->blocks * group.block_size), next_keys(chunk.next_kv * op.keys->blocks * group.block_size),
        key_bytes(slot_bytes(*op.keys, op.head_dim)), value_bytes(slot_bytes(*op.values, op.value_dim)),
        distance(int(round_up(DISTANCE / key_bytes, LANES))) {}

  struct Slots {  // some of one store; none if it is null
    const Store* store = nullptr;
    int64_t first = 0, bytes = 0;
    const char* address(const void* otherwise) const {
      return static_cast<const char*>(store ? store->data : otherwise) + first * bytes;
    }
  };
  // What is read after the keys, or values, from slot s of the open chunk: a tile of LANES slots is stored in sequence if
  // blocks have whole ones.
  Slots after_keys(int s) const {
    s += distance;
    if (s < chunk.count) return {op.keys, keys + chunk.slot[s], key_bytes};
    if (s < 2 * chunk.count) return {op.values, values + chunk.slot[s - chunk.count], value_bytes};
    return {};
  }
  Slots after_values(int s) const {
    s += distance;
    if (s < chunk.count) return {op.values, values + chunk.slot[s], value_bytes};
    const int64_t slot = chunk.next_first + s - chunk.count;
    if (slot >= chunk.next_slots) return {};
    const int64_t block = chunk.next_table[slot / group.block_size];
    return {op.keys, next_keys + block * group.block_size + slot % group.block_size, key_bytes};
  }

  // GCC removes calls of functions that only do this.
  __attribute__((always_inline)) static void load(const Slots& slots, int n) {
    if (!slots.store) return;
    const char* at = slots.address(nullptr);
    for (int64_t i = 0; i < n * slots.bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
    if (slots.store->scale) __builtin_prefetch(slots.store->scale + slots.first, 0, 2);
    if (slots.store->zero) __builtin_prefetch(slots.store->zero + slots.first, 0, 2);
  }
  // While n keys from slot s are read, which are stored in sequence.
  __attribute__((always_inline)) void with_keys(int s, int n = 1) const { load(after_keys(s), n); }
  __attribute__((always_inline)) void with_values(int s, int n = 1) const { load(after_values(s), n); }
};

template <class W>
bool read_values(const Op& op, const Group& group, int64_t kv, int tile, Chunk<W>& chunk) {
  const int padded = int(round_up(op.value_dim, PANEL));
  return read_tile(*op.values, group, kv, op.value_dim, padded, chunk, tile,
                   chunk.decoded_values + int64_t(tile) * padded, chunk.value + tile, chunk.value_scale,
                   chunk.value_zero);
}

template <class W>
bool read_keys(const Op& op, const Group& group, int64_t kv, int tile, const Chunk<W>& chunk,
               const typename W::T** rows) {
  return read_tile(*op.keys, group, kv, op.head_dim, int(round_up(op.head_dim, 2)), chunk, tile, chunk.decoded_keys,
                   rows, chunk.key_scale, chunk.key_zero);
}

// Arrange all keys and values.
template <class W> void arrange_chunk(const Op& op, const Group& group, int64_t kv, Chunk<W>& chunk) {
  const int words = int(round_up(op.head_dim, 2)) / W::STEP, value_dim = int(round_up(op.value_dim, PANEL));
  const ReadAhead<W> ahead(op, group, kv, chunk);
  for (int tile = 0; tile < chunk.count; tile += LANES) {
    const typename W::T* rows[LANES];
    for (int i = 0; i < LANES; i++) ahead.with_keys(tile + i), ahead.with_values(tile + i);
    read_keys(op, group, kv, tile, chunk, rows);
    int32_t* out = reinterpret_cast<int32_t*>(chunk.keys) + int64_t(tile / PANEL) * words * PANEL + tile % PANEL;
    transpose_words<PANEL>(reinterpret_cast<const int32_t* const*>(rows), words, out);
    read_values(op, group, kv, tile, chunk);
  }
  for (int i = 0; i < chunk.count; i += W::STEP)
    interleave(chunk.value + i, value_dim, chunk.values + i * PANEL, int64_t(CHUNK) * PANEL);
}

}  // namespace
