// Attention of few queries to one chunk by tiles.
#pragma once
#include "attend_chunk.h"

namespace {

#ifdef KVAD_TILES
// Up to 16 queries read bfloat16 keys and values from the cache's blocks. Slots are the rows of a tile of keys, queries the
// columns of the other factor, which stays in its tiles. The sums equal those of an arranged chunk.
struct TileQueries {
  static constexpr int DEPTH = 64;         // bytes of a row of a tile
  static constexpr int TILE = 16 * DEPTH;  // bytes
  static constexpr int MAX_STEPS = 4;      // tiles of DEPTH bytes of each query

  static bool can_read(const Op& op, const Group& group, int64_t queries) {
    return queries <= LANES && op.head_dim <= MAX_STEPS * PANEL && direct<bf16>(*op.keys, op.head_dim) &&
           direct<bf16>(*op.values, op.value_dim) && group.block_size % LANES == 0;
  }

  // Load n bytes that are read later into the L2 cache.
  __attribute__((always_inline)) static void read_ahead(const char* at, int64_t n) {
    __asm__ volatile("" : "+r"(at));  // or GCC keeps each address in a register
    for (int64_t i = 0; i < n; i += 64) __builtin_prefetch(at + i, 0, 2);
  }
  static const char* address(const ReadAhead<BFloat>::Slots& slots, const void* otherwise) {
    return slots.store ? slots.address() : static_cast<const char*>(otherwise);
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

  // STEPS: tiles of a query.
  template <int STEPS>
  static void logits(const Op& op, const Group& group, int64_t kv, const Chunk<BFloat>& chunk, int m,
                     const Queries& queries, float* out) {
    constexpr int dim = STEPS * PANEL;
    alignas(64) int32_t pairs[dim / 2 * LANES];  // [dim / 2, queries]: two numbers of each
    const int32_t* rows[LANES];
    for (int i = 0; i < LANES; i++) rows[i] = static_cast<const int32_t*>(queries.vectors) + (i < m ? i : 0) * (dim / 2);
    transpose_words<LANES>(rows, dim / 2, pairs);
    publish(pairs);
    configure_tiles(ROWS, DEPTH);  // a change costs as much as 50 products
    _tile_loadd(4, pairs, DEPTH);
    if (STEPS > 1) _tile_loadd(5, pairs + LANES * LANES, DEPTH);
    if (STEPS > 2) _tile_loadd(6, pairs + 2 * LANES * LANES, DEPTH);
    if (STEPS > 3) _tile_loadd(7, pairs + 3 * LANES * LANES, DEPTH);

    alignas(64) float products[2][PANEL * LANES];  // of a panel of slots, and of the next one
    const bool plain = is_plain(op, group);
    const float low = lowest_position(queries, m);
    const auto finish = [&](int first) {
      const bool all_seen = plain && chunk.highest[first / PANEL] <= low;
      for (int at = first; at < first + PANEL; at += LANES)
        each_column(m, products[first / PANEL % 2] + (at - first) * LANES, [&](F product, int i) {
          store(out + i * CHUNK + at, all_seen ? product * op.scale
                                               : finish_logits(op, group, product, chunk.position + at,
                                                               queries.position[i], queries.head[i]));
        });
    };
    const bf16* keys = static_cast<const bf16*>(op.keys->data) + kv * op.keys->blocks * group.block_size * dim;
    const ReadAhead<BFloat> ahead(op, group, kv, chunk);
    for (int first = 0; first < chunk.count; first += PANEL) {
#define KVAD_STEP(sum, step, a, b)                        \
  if (STEPS > step) {                                     \
    _tile_loadd(a, from + step * PANEL, 2 * dim);         \
    read_ahead(next + step * TILE, TILE);                 \
    _tile_dpbf16ps(sum, a, b);                            \
  }
#define KVAD_SLOTS(sum)                                                                             \
  {                                                                                                 \
    const bf16* from = keys + chunk.slot[first + sum * LANES] * dim;                                \
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

  static void logits(const Op& op, const Group& group, int64_t kv, const Chunk<BFloat>& chunk, int m,
                     const Queries& queries, float* out) {
    switch (op.head_dim / PANEL) {
      case 1: return logits<1>(op, group, kv, chunk, m, queries, out);
      case 2: return logits<2>(op, group, kv, chunk, m, queries, out);
      case 3: return logits<3>(op, group, kv, chunk, m, queries, out);
      default: return logits<MAX_STEPS>(op, group, kv, chunk, m, queries, out);
    }
  }

  // Both halves of a panel of slots where they are stored, or in a copy in which empty slots have zeros.
  static void find_values(const Op& op, const bf16* values, const Chunk<BFloat>& chunk, int first,
                          const bf16* (&halves)[2]) {
    const int64_t dim = op.value_dim;
    for (int half = 0; half < 2; half++) halves[half] = values + chunk.slot[first + half * LANES] * dim;
    if (chunk.highest[first / PANEL] != INFINITY) return;
    for (int i = 0; i < PANEL; i++) {
      bf16* to = chunk.decoded_values + i * dim;
      if (chunk.position[first + i] < 0) std::memset(to, 0, dim * sizeof(bf16));
      else std::memcpy(to, values + chunk.slot[first + i] * dim, dim * sizeof(bf16));
    }
    halves[0] = chunk.decoded_values, halves[1] = chunk.decoded_values + LANES * dim;
  }

  // Sums of PANELS * PANEL dims from dim d.
  template <int PANELS>
  static void sum_values(const Op& op, const Group& group, int64_t kv, const Chunk<BFloat>& chunk, int m, int d,
                         const bf16* weights, float* out) {
    const int64_t dim = op.value_dim;
    const bf16* values = static_cast<const bf16*>(op.values->data) + kv * op.values->blocks * group.block_size * dim;
    const ReadAhead<BFloat> ahead(op, group, kv, chunk);
    alignas(64) bf16 lines[2][2 * PANELS][LANES * PANEL];  // pairs of slots: dims 0 to 3 and 4 to 7 of every 8 of a panel
    const auto pair_slots = [&](int s) {
      const bf16* halves[2];
      find_values(op, values, chunk, s, halves);
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
      const auto& from = lines[s / PANEL % 2];
      _tile_loadd(4, weights + s, 2 * CHUNK);  // rows from m on are not used
      _tile_loadd(6, from[0], DEPTH);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, from[1], DEPTH);
      _tile_dpbf16ps(1, 4, 7);
      if (PANELS == 1) continue;
      _tile_loadd(6, from[2 * PANELS - 2], DEPTH);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, from[2 * PANELS - 1], DEPTH);
      _tile_dpbf16ps(3, 4, 7);
    }
    alignas(64) float sums[4][LANES * LANES];
    _tile_stored(0, sums[0], DEPTH);
    _tile_stored(1, sums[1], DEPTH);
    _tile_stored(2, sums[2], DEPTH);
    _tile_stored(3, sums[3], DEPTH);
    publish(sums);
    for (int i = 0; i < m; i++)
      for (int j = 0; j < PANELS * PANEL; j += 4)
        std::memcpy(out + i * dim + d + j, sums[j / PANEL * 2 + j / 4 % 2] + i * LANES + j % PANEL / 8 * 4, 16);
  }

  static void values(const Op& op, const Group& group, int64_t kv, const Chunk<BFloat>& chunk, int m,
                     const bf16* weights, float* out) {
    publish(weights);
    int d = 0;
    for (; d + 2 * PANEL <= op.value_dim; d += 2 * PANEL) sum_values<2>(op, group, kv, chunk, m, d, weights, out);
    if (d < op.value_dim) sum_values<1>(op, group, kv, chunk, m, d, weights, out);
  }

  // Attend m queries to an open chunk.
  static void attend(const Op& op, const Group& group, int64_t kv, Chunk<BFloat>& chunk, int m, const Queries& queries,
                     float* logits, bf16* weights, Part* parts, float* out) {
    TileQueries::logits(op, group, kv, chunk, m, queries, logits);
    weigh(op, chunk, chunk.count, m, logits, weights, static_cast<float*>(nullptr), parts, static_cast<Unpacked*>(nullptr));
    values(op, group, kv, chunk, m, weights, out);
    if (are_finite(out, m * op.value_dim)) return;
    for (int tile = 0; tile < chunk.count; tile += LANES) read_values(op, group, kv, tile, chunk);
    finish_sums(op, chunk, chunk.count, m, logits, weights, static_cast<Unpacked*>(nullptr), out);
  }
};
#endif

}  // namespace
