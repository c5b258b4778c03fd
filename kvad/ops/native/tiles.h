// Products of bfloat16 numbers by tiles (AMX): a tile has 16 rows of 64 bytes.
#pragma once
#include "simd.h"

namespace {

#ifdef KVAD_TILES
// GCC does not know that the instructions for tiles read memory: complete what was written to it.
inline void publish(const void* p) { __asm__ volatile("" ::"r"(p) : "memory"); }

struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];  // of a row of each tile
  uint8_t rows[16];
};

inline thread_local int tile_rows = 0, tile_depth = 0;  // that the tiles are configured for

// The configuration that a thread had before, oneDNN's for example, is restored at the end.
struct TileScope {
  alignas(64) TileConfig before;
  TileScope() { _tile_storeconfig(&before), tile_rows = 0; }
  ~TileScope() {
    if (before.palette) _tile_loadconfig(&before);
    else _tile_release();
  }
};

// Tiles 0 and 1 are the sums of the first 16 rows and each half of a panel, 2 and 3 those of the other rows; 4 and 5
// are rows of x, 6 and 7 halves of a panel. ``depth``: bytes of a row that are multiplied at a time.
inline void configure_tiles(int rows, int depth) {
  if (rows == tile_rows && depth == tile_depth) return;
  alignas(64) TileConfig config = {};
  config.palette = 1;
  const int first = rows < 16 ? rows : 16, second = rows <= 16 ? 1 : rows - 16;  // a tile has a row
  const int counts[8] = {first, first, second, second, first, second, depth / 4, depth / 4};
  for (int i = 0; i < 8; i++) config.rows[i] = uint8_t(counts[i]), config.bytes[i] = i == 4 || i == 5 ? depth : 64;
  publish(&config);
  _tile_loadconfig(&config);
  tile_rows = rows, tile_depth = depth;
}

enum TileProduct { BFLOATS, SIGNED_BYTES, UNSIGNED_BYTES };  // of x; weights are bfloat16 or signed bytes

// Tiles are named by literals. KIND: the TileProduct, a constant where this stands.
#define KVAD_PRODUCT(sum, a, b)                                   \
  if constexpr (KIND == BFLOATS) _tile_dpbf16ps(sum, a, b);       \
  else if constexpr (KIND == SIGNED_BYTES) _tile_dpbssd(sum, a, b); \
  else _tile_dpbusd(sum, a, b)

// Add the products of ``depth`` bytes of each row by those of a panel, whose rows have steps of 4 bytes.
template <TileProduct KIND> inline void add_tiles(int rows, const void* w, const void* x, int64_t row_bytes) {
  const char *panel = static_cast<const char*>(w), *from = static_cast<const char*>(x);
  publish(x);
  _tile_loadd(6, panel, 4 * PANEL);
  _tile_loadd(7, panel + 4 * LANES, 4 * PANEL);
  _tile_loadd(4, from, row_bytes);
  KVAD_PRODUCT(0, 4, 6);
  KVAD_PRODUCT(1, 4, 7);
  if (rows <= 16) return;
  _tile_loadd(5, from + 16 * row_bytes, row_bytes);
  KVAD_PRODUCT(2, 5, 6);
  KVAD_PRODUCT(3, 5, 7);
}

inline void clear_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

inline void load_tiles(int rows, const void* in) {
  const char* from = static_cast<const char*>(in);
  publish(in);
  _tile_loadd(0, from, 4 * PANEL);
  _tile_loadd(1, from + 4 * LANES, 4 * PANEL);
  if (rows <= 16) return;
  _tile_loadd(2, from + 16 * 4 * PANEL, 4 * PANEL);
  _tile_loadd(3, from + 16 * 4 * PANEL + 4 * LANES, 4 * PANEL);
}

// Write the sums as [rows, PANEL] numbers of 4 bytes.
inline void store_tiles(int rows, void* out) {
  char* to = static_cast<char*>(out);
  _tile_stored(0, to, 4 * PANEL);
  _tile_stored(1, to + 4 * LANES, 4 * PANEL);
  if (rows <= 16) return;
  _tile_stored(2, to + 16 * 4 * PANEL, 4 * PANEL);
  _tile_stored(3, to + 16 * 4 * PANEL + 4 * LANES, 4 * PANEL);
}

// Each number is the sum of those of every 32 inputs, in order; which rows are multiplied together does not matter.
template <>
inline void multiply<BFloat>(int rows, const bf16* w, const bf16* x, int64_t stride, int64_t k, F (&acc)[ROWS][2],
                             Ahead ahead, bool continues) {
  configure_tiles(rows, 2 * TILE_DEPTH);
  if (continues) load_tiles(rows, acc);
  else clear_tiles();
  int64_t i = 0, steps = 0;
  for (; i + TILE_DEPTH <= k; i += TILE_DEPTH, w += TILE_DEPTH * PANEL) {
    if (ahead.at)
      for (steps += TILE_DEPTH / BFloat::STEP; steps >= ahead.every; steps -= ahead.every, ahead.at += 64)
        __builtin_prefetch(ahead.at, 0, 2);
    if (ahead.panel)
      for (int64_t line = 0; line < TILE_DEPTH * PANEL * 2; line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(w) + Ahead::BYTES + line, 0, 2);
    add_tiles<BFLOATS>(rows, w, x + i, 2 * stride);
  }
  if (i < k) {
    alignas(64) bf16 last_w[TILE_DEPTH * PANEL] = {}, last_x[ROWS * TILE_DEPTH] = {};
    std::memcpy(last_w, w, (k - i) * PANEL * 2);
    for (int row = 0; row < rows; row++) std::memcpy(last_x + row * TILE_DEPTH, x + row * stride + i, (k - i) * 2);
    add_tiles<BFLOATS>(rows, last_w, last_x, 2 * TILE_DEPTH);
  }
  store_tiles(rows, acc);
}
#else
struct TileScope {};
#endif

}  // namespace
