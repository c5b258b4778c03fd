// Products of bfloat16 numbers by tiles (AMX): a tile has 16 rows of 64 bytes.
#pragma once
#include "simd.h"

namespace {

#if defined(__AMX_BF16__)
// GCC does not know that the instructions for tiles read memory: complete what was written to it.
inline void publish(const void* p) { __asm__ volatile("" ::"r"(p) : "memory"); }

struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];  // of a row of each tile
  uint8_t rows[16];
};

inline thread_local int tile_rows = 0;  // of x that the tiles are configured for

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
// are rows of x, 6 and 7 halves of a panel.
inline void configure_tiles(int rows) {
  if (rows == tile_rows) return;
  alignas(64) TileConfig config = {};
  config.palette = 1;
  const int first = rows < 16 ? rows : 16, second = rows <= 16 ? 1 : rows - 16;  // a tile has a row
  const int counts[8] = {first, first, second, second, first, second, 16, 16};
  for (int i = 0; i < 8; i++) config.rows[i] = uint8_t(counts[i]), config.bytes[i] = 64;
  publish(&config);
  _tile_loadconfig(&config);
  tile_rows = rows;
}

// Add the products of 32 numbers of each row by those of a panel.
inline void add_tiles(int rows, const bf16* w, const bf16* x, int64_t stride) {
  publish(x);
  _tile_loadd(6, w, 4 * PANEL);
  _tile_loadd(7, w + PANEL, 4 * PANEL);
  _tile_loadd(4, x, stride * 2);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if (rows <= 16) return;
  _tile_loadd(5, x + 16 * stride, stride * 2);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// Each number is the sum of those of every 32 inputs, in order; which rows are multiplied together does not matter.
template <>
inline void multiply<BFloat>(int rows, const bf16* w, const bf16* x, int64_t stride, int64_t k, F (&acc)[ROWS][2],
                             Ahead ahead) {
  constexpr int64_t DEPTH = 32;
  configure_tiles(rows);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  int64_t i = 0, steps = 0;
  for (; i + DEPTH <= k; i += DEPTH, w += DEPTH * PANEL) {
    if (ahead.at)
      for (steps += DEPTH / BFloat::STEP; steps >= ahead.every; steps -= ahead.every, ahead.at += 64)
        __builtin_prefetch(ahead.at, 0, 2);
    if (ahead.panel)
      for (int64_t line = 0; line < DEPTH * PANEL * 2; line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(w) + Ahead::BYTES + line, 0, 2);
    add_tiles(rows, w, x + i, stride);
  }
  if (i < k) {
    alignas(64) bf16 last_w[DEPTH * PANEL] = {}, last_x[ROWS * DEPTH] = {};
    std::memcpy(last_w, w, (k - i) * PANEL * 2);
    for (int row = 0; row < rows; row++) std::memcpy(last_x + row * DEPTH, x + row * stride + i, (k - i) * 2);
    add_tiles(rows, last_w, last_x, DEPTH);
  }
  _tile_stored(0, acc, sizeof acc[0]);
  _tile_stored(1, &acc[0][1], sizeof acc[0]);
  if (rows <= 16) return;
  _tile_stored(2, acc[16], sizeof acc[0]);
  _tile_stored(3, &acc[16][1], sizeof acc[0]);
}
#else
struct TileScope {};
#endif

}  // namespace
