// Attention of few queries to one chunk by tiles.
#pragma once
#include "attend_chunk.h"

namespace {

#ifdef KVAD_TILES
// Few queries read bfloat16 or int8 keys and values from the cache's blocks. Slots are the rows of a tile of keys, queries
// the columns of the other factor, which stays in its tiles. A word of a query or weight, for int8, is two signed bytes, 256
// times the first plus the second, in columns (of weights: rows) that are 8 apart. Sums equal those of an arranged chunk.
template <class W> struct TileQueries {
  typedef typename W::T T;
  typedef std::conditional_t<W::IS_INTEGER, int8_t, bf16> Stored;
  static constexpr TileProduct KIND = W::IS_INTEGER ? SIGNED_BYTES : BFLOATS;
  static constexpr int DEPTH = 64;         // bytes of a row of a tile
  static constexpr int TILE = 16 * DEPTH;  // bytes
  static constexpr int MAX_STEPS = 4;      // tiles of DEPTH bytes of each query
  static constexpr int MIN_NUMBERS = W::IS_INTEGER ? 384 : 0;  // of all queries: ByteQueries multiplies fewer of them faster
  static constexpr int MAX_QUERIES = W::IS_INTEGER ? LANES / 2 : LANES;

  static bool can_read(const Op& op, const Group& group, int64_t queries) {
    constexpr int format = W::IS_INTEGER ? STORE_INT8 : STORE_BFLOAT, numbers = DEPTH / sizeof(Stored);
    const bool fits = op.head_dim % numbers == 0 && op.head_dim <= MAX_STEPS * numbers && op.value_dim % numbers == 0;
    const bool is_stored_so = op.keys->format == format && op.values->format == format;
    return queries <= MAX_QUERIES && queries * op.head_dim >= MIN_NUMBERS && fits && is_stored_so &&
           group.block_size % LANES == 0;
  }

  // Load n bytes that are read later into the L2 cache.
  __attribute__((always_inline)) static void read_ahead(const char* at, int64_t n) {
    __asm__ volatile("" : "+r"(at));  // or GCC keeps each address in a register
    for (int64_t i = 0; i < n; i += 64) __builtin_prefetch(at + i, 0, 2);
  }
  static const char* address(const typename ReadAhead<W>::Slots& slots, const void* otherwise) {
    if (W::IS_INTEGER && slots.store) __builtin_prefetch(slots.store->scale + slots.first, 0, 2);
    return slots.address(otherwise);
  }
  static const Stored* head_of(const Store& store, const Group& group, int64_t kv, int dim) {
    return static_cast<const Stored*>(store.data) + kv * store.blocks * group.block_size * dim;
  }

  // Columns 0 to m of products [LANES slots, 16]; ``put`` takes a column and its number.
  template <class Put> static void each_column(int m, const float* products, Put put) {
    for (int first = 0; first < m; first += 4) {
      __m512 rows[4];  // row i, i + 4, i + 8 and i + 12 in their lanes
      for (int i = 0; i < 4; i++) {
        const auto row = [&](int lane) { return _mm_load_ps(products + (4 * lane + i) * LANES + first); };
        rows[i] = _mm512_broadcast_f32x4(row(0));
        rows[i] = _mm512_mask_broadcast_f32x4(rows[i], 0x00f0, row(1));
        rows[i] = _mm512_mask_broadcast_f32x4(rows[i], 0x0f00, row(2));
        rows[i] = _mm512_mask_broadcast_f32x4(rows[i], 0xf000, row(3));
      }
      const auto low = [](__m512 a, __m512 b) { return _mm512_castps_pd(_mm512_unpacklo_ps(a, b)); };
      const auto high = [](__m512 a, __m512 b) { return _mm512_castps_pd(_mm512_unpackhi_ps(a, b)); };
      const __m512d a = low(rows[0], rows[1]), b = low(rows[2], rows[3]);
      put((F)_mm512_unpacklo_pd(a, b), first);
      if (first + 1 < m) put((F)_mm512_unpackhi_pd(a, b), first + 1);
      if (first + 2 >= m) return;
      const __m512d c = high(rows[0], rows[1]), d = high(rows[2], rows[3]);
      put((F)_mm512_unpacklo_pd(c, d), first + 2);
      if (first + 3 < m) put((F)_mm512_unpackhi_pd(c, d), first + 3);
    }
  }

  // Bytes of words [m, n] as bytes [LANES, stride]; n: a multiple of 32.
  static void split(const uint16_t* words, int64_t words_stride, int m, int n, int8_t* bytes, int64_t stride) {
    for (int i = 0; i < m; i++)
      for (int j = 0; j < n; j += 32) {
        const __m512i x = _mm512_loadu_si512(words + i * words_stride + j);
        const __m512i high = _mm512_srai_epi16(_mm512_add_epi16(x, _mm512_set1_epi16(128)), 8);
        const auto put = [&](int row, __m512i words) {
          _mm256_store_si256(reinterpret_cast<__m256i*>(bytes + row * stride + j), _mm512_cvtepi16_epi8(words));
        };
        put(i, high), put(MAX_QUERIES + i, x);
      }
  }
  static __m256i join(const float* products) {  // of LANES columns, or rows
    const __m256i* parts = reinterpret_cast<const __m256i*>(products);
    return _mm256_add_epi32(_mm256_slli_epi32(parts[0], 8), parts[1]);
  }

  // Queries as the columns of tiles, in steps of 4 bytes of each: [STEPS, LANES, LANES].
  template <int STEPS> static void arrange_queries(const Queries& queries, int m, int32_t* columns) {
    constexpr int words = STEPS * LANES;  // of 4 bytes
    alignas(64) int8_t bytes[W::IS_INTEGER ? LANES * STEPS * DEPTH : 1];
    const void* from = queries.vectors;
    if constexpr (W::IS_INTEGER) {
      split(static_cast<const uint16_t*>(from), STEPS * DEPTH, m, STEPS * DEPTH, bytes, STEPS * DEPTH);
      from = bytes;
    }
    const int32_t* rows[LANES];
    for (int i = 0; i < LANES; i++) rows[i] = static_cast<const int32_t*>(from) + (i % MAX_QUERIES < m ? i : 0) * words;
    transpose_words<LANES>(rows, words, columns);
    publish(columns);
  }

  // STEPS: tiles of a query.
  template <int STEPS>
  static void logits(const Op& op, const Group& group, int64_t kv, const Chunk<W>& chunk, int m, const Queries& queries,
                     float* out) {
    constexpr int dim = STEPS * DEPTH / sizeof(Stored);
    alignas(64) int32_t columns[STEPS * LANES * LANES];
    arrange_queries<STEPS>(queries, m, columns);
    configure_tiles(ROWS, DEPTH);  // a change costs as much as 50 products
    _tile_loadd(4, columns, DEPTH);
    if (STEPS > 1) _tile_loadd(5, columns + LANES * LANES, DEPTH);
    if (STEPS > 2) _tile_loadd(6, columns + 2 * LANES * LANES, DEPTH);
    if (STEPS > 3) _tile_loadd(7, columns + 3 * LANES * LANES, DEPTH);

    alignas(64) float products[2][PANEL * LANES];  // of a panel of slots, and of the next one
    const Logits<W> logits(op, group, chunk, queries, m, out);
    const auto finish = [&](int first) {
      const bool all_seen = logits.all_seen(first);
      for (int at = first; at < first + PANEL; at += LANES) {
        float* from = products[first / PANEL % 2] + (at - first) * LANES;
        if constexpr (W::IS_INTEGER) {
          for (int i = 0; i < LANES; i++, from += LANES) _mm256_store_si256(reinterpret_cast<__m256i*>(from), join(from));
          from -= LANES * LANES;
          read_scales(op, group, kv, chunk, at);
        }
        each_column(m, from, [&](F product, int i) { logits.put(product, at, i, all_seen); });
      }
    };
    const Stored* keys = head_of(*op.keys, group, kv, dim);
    const ReadAhead<W> ahead(op, group, kv, chunk);
    for (int first = 0; first < chunk.count; first += PANEL) {
#define KVAD_STEP(sum, step, a, b)                                       \
  if (STEPS > step) {                                                    \
    _tile_loadd(a, from + step * DEPTH / sizeof(Stored), STEPS * DEPTH); \
    read_ahead(next + step * TILE, TILE);                                \
    KVAD_PRODUCT(sum, a, b);                                             \
  }
#define KVAD_SLOTS(sum)                                                                             \
  {                                                                                                 \
    const Stored* from = keys + chunk.slot[first + sum * LANES] * dim;                              \
    const char* next = address(ahead.after_keys(first + sum * LANES), from);                        \
    _tile_zero(sum);                                                                                \
    KVAD_STEP(sum, 0, 2, 4) KVAD_STEP(sum, 1, 3, 5) KVAD_STEP(sum, 2, 2, 6) KVAD_STEP(sum, 3, 3, 7) \
  }
      KVAD_SLOTS(0)
      KVAD_SLOTS(1)
#undef KVAD_SLOTS
#undef KVAD_STEP
      if (first) finish(first - PANEL);  // while the tiles compute
      float* to = products[first / PANEL % 2];
      _tile_stored(0, to, DEPTH);
      _tile_stored(1, to + LANES * LANES, DEPTH);
      publish(to);
    }
    finish(chunk.count - PANEL);
  }

  static void logits(const Op& op, const Group& group, int64_t kv, const Chunk<W>& chunk, int m, const Queries& queries,
                     float* out) {
    switch (op.head_dim * sizeof(Stored) / DEPTH) {
      case 1: return logits<1>(op, group, kv, chunk, m, queries, out);
      case 2: return logits<2>(op, group, kv, chunk, m, queries, out);
      case 3: return logits<3>(op, group, kv, chunk, m, queries, out);
      default: return logits<MAX_STEPS>(op, group, kv, chunk, m, queries, out);
    }
  }

  // Both halves of a panel of slots where they are stored, or in a copy in which empty slots have zeros.
  static void find_values(const Op& op, const Group& group, int64_t kv, Chunk<W>& chunk, int first,
                          const bf16* (&halves)[2]) {
    const int64_t dim = op.value_dim;
    for (int half = 0; half < 2; half++)
      halves[half] = head_of(*op.values, group, kv, int(dim)) + chunk.slot[first + half * LANES] * dim;
    if (chunk.highest[first / PANEL] != INFINITY) return;
    for (int half = 0; half < 2; half++) {
      read_values(op, group, kv, first + half * LANES, chunk);
      halves[half] = chunk.decoded_values + half * LANES * dim;
    }
    for (int i = 0; i < PANEL; i++)
      std::memcpy(chunk.decoded_values + i * dim, chunk.value[first + i], dim * sizeof(bf16));
  }

  // Add the products of weights, rows of a tile, and some tiles of values.
  template <int TILES> static void add_lines(const void* weights, int64_t stride, const void* lines) {
    const char* from = static_cast<const char*>(lines);
    _tile_loadd(4, weights, stride);
    _tile_loadd(6, from, DEPTH);
    KVAD_PRODUCT(0, 4, 6);
    _tile_loadd(7, from + TILE, DEPTH);
    KVAD_PRODUCT(1, 4, 7);
    if (TILES == 2) return;
    _tile_loadd(6, from + 2 * TILE, DEPTH);
    KVAD_PRODUCT(2, 4, 6);
    _tile_loadd(7, from + 3 * TILE, DEPTH);
    KVAD_PRODUCT(3, 4, 7);
  }

  static void store_sums(void* to) {
    char* sums = static_cast<char*>(to);
    _tile_stored(0, sums, DEPTH);
    _tile_stored(1, sums + TILE, DEPTH);
    _tile_stored(2, sums + 2 * TILE, DEPTH);
    _tile_stored(3, sums + 3 * TILE, DEPTH);
    publish(sums);
  }

  // Sums of PANELS * PANEL dims of bfloat16 from dim d.
  template <int PANELS>
  static void sum_values(const Op& op, const Group& group, int64_t kv, Chunk<W>& chunk, int m, int d,
                         const bf16* weights, float* out) {
    const int64_t dim = op.value_dim;
    const bf16* values = head_of(*op.values, group, kv, int(dim));
    const ReadAhead<W> ahead(op, group, kv, chunk);
    alignas(64) bf16 lines[2][2 * PANELS][LANES * PANEL];  // pairs of slots: dims 0 to 3 and 4 to 7 of every 8 of a panel
    const auto pair_slots = [&](int s) {
      const bf16* halves[2];
      find_values(op, group, kv, chunk, s, halves);
      bf16* to = lines[s / PANEL % 2][0];
      for (int half = 0; half < 2; half++) {
        const bf16* from = halves[half] + d;
        const char* next = address(ahead.after_values(s + half * LANES), values);
        for (int pair = 0; pair < LANES / 2; pair++, from += 2 * dim, next += 4 * dim, to += PANEL) {
          for (int panel = 0; panel < PANELS; panel++) {
            const __m512i x = _mm512_loadu_si512(from + panel * PANEL), y = _mm512_loadu_si512(from + dim + panel * PANEL);
            _mm512_store_si512(to + 2 * panel * LANES * PANEL, _mm512_unpacklo_epi16(x, y));
            _mm512_store_si512(to + (2 * panel + 1) * LANES * PANEL, _mm512_unpackhi_epi16(x, y));
          }
          if (!d) read_ahead(next, 4 * dim);
        }
      }
      publish(to);
    };
    clear_tiles();
    pair_slots(0);
    for (int s = 0; s < chunk.count; s += PANEL) {
      if (s + PANEL < chunk.count) pair_slots(s + PANEL);
      add_lines<2 * PANELS>(weights + s, 2 * CHUNK, lines[s / PANEL % 2][0]);  // rows from m on are not used
    }
    alignas(64) float sums[4][LANES * LANES];
    store_sums(sums);
    for (int i = 0; i < m; i++)
      for (int j = 0; j < PANELS * PANEL; j += 4)
        std::memcpy(out + i * dim + d + j, sums[j / PANEL * 2 + j / 4 % 2] + i * LANES + j % PANEL / 8 * 4, 16);
  }

  // Sums of DEPTH dims of int8 from dim d; weights: bytes [LANES, CHUNK]. Tile t has dims 4 t to 4 t + 3 of every 16.
  static void sum_bytes(const Op& op, const Group& group, int64_t kv, const Chunk<W>& chunk, int m, int d,
                        const int8_t* weights, float* out) {
    const int64_t dim = op.value_dim;
    const int8_t* values = head_of(*op.values, group, kv, int(dim));
    const ReadAhead<W> ahead(op, group, kv, chunk);
    alignas(64) int8_t lines[2][4][TILE];  // of each tile: DEPTH slots, 4 of them in each row
    const auto arrange = [&](int s) {
      for (int row = 0; row < LANES; row++) {
        const int slot = s + row / 4 * LANES, at = slot < chunk.count ? slot : s;  // weights of slots behind it are zero
        const int8_t* from = values + (chunk.slot[at] + row % 4 * 4) * dim + d;
        if (!d && row % 4 == 0) read_ahead(address(ahead.after_values(at), from), LANES * dim);
        __m512i numbers[4];
        interleave_bytes<STORE_INT8, 0>(reinterpret_cast<const char*>(from), dim, numbers);
        for (int t = 0; t < 4; t++) _mm512_store_si512(lines[s / DEPTH % 2][t] + row * DEPTH, numbers[t]);
      }
      publish(lines);
    };
    clear_tiles();
    arrange(0);
    for (int s = 0; s < chunk.count; s += DEPTH) {
      if (s + DEPTH < chunk.count) arrange(s + DEPTH);
      add_lines<4>(weights + s, CHUNK, lines[s / DEPTH % 2][0]);
    }
    alignas(64) int32_t sums[4][LANES][LANES];
    store_sums(sums);
    for (int i = 0; i < m; i++)
      for (int t = 0; t < 4; t++) {
        const __m512i high = _mm512_load_si512(sums[t][i]), low = _mm512_load_si512(sums[t][MAX_QUERIES + i]);
        store_line(join_bytes(high, low), out + i * dim + d + 4 * t);
      }
  }

  static void values(const Op& op, const Group& group, int64_t kv, Chunk<W>& chunk, int m, const T* weights,
                     float* out) {
    int d = 0;
    if constexpr (W::IS_INTEGER) {
      alignas(64) int8_t bytes[LANES * CHUNK];
      split(weights, CHUNK, m, chunk.count, bytes, CHUNK);
      const int64_t rest = round_up(chunk.count, DEPTH) - chunk.count;
      for (int8_t* row = bytes; row < bytes + LANES * CHUNK; row += CHUNK) std::memset(row + chunk.count, 0, rest);
      publish(bytes);
      for (; d < op.value_dim; d += DEPTH) sum_bytes(op, group, kv, chunk, m, d, bytes, out);
    } else {
      publish(weights);
      for (; d + 2 * PANEL <= op.value_dim; d += 2 * PANEL) sum_values<2>(op, group, kv, chunk, m, d, weights, out);
      if (d < op.value_dim) sum_values<1>(op, group, kv, chunk, m, d, weights, out);
    }
  }

  // Attend m queries to an open chunk.
  static void attend(const Op& op, const Group& group, int64_t kv, Chunk<W>& chunk, int m, const Queries& queries,
                     float* logits, T* weights, float* floats, Part* parts, float* out) {
    Unpacked unpacked[MAX_QUERIES];
    TileQueries::logits(op, group, kv, chunk, m, queries, logits);
    weigh(op, chunk, chunk.count, m, logits, weights, floats, parts, unpacked);
    values(op, group, kv, chunk, m, weights, out);
    if constexpr (!W::IS_INTEGER) {
      if (are_finite(out, m * op.value_dim)) return;
      for (int tile = 0; tile < chunk.count; tile += LANES) read_values(op, group, kv, tile, chunk);
    }
    finish_sums(op, chunk, chunk.count, m, logits, weights, unpacked, out);
  }
};
#endif

}  // namespace
