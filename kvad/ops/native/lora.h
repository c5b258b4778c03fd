// Low-rank adapters (kvad/model/lora.py): each token adds B (A x) of its own adapter to some products.
#pragma once
#include "step.h"

namespace {

// A row of all A of an adapter, one after another; null after the last.
inline const float* row_of_a(const Adapter& adapter, int64_t index, int k) {
  for (int64_t t = 0; t < adapter.num_terms; index -= adapter.terms[t++].rank)
    if (index < adapter.terms[t].rank) return adapter.terms[t].a + index * k;
  return nullptr;
}

// The numbers A x of each row, FEW at a time; n: the most that an adapter has.
template <class T> void lora(const Run& run, const Op& op, int64_t rows) {
  constexpr int FEW = 4;
  const int64_t parts = (op.n + FEW - 1) / FEW;
  for (int64_t item = run.low(rows * parts); item < run.high(rows * parts); item++) {
    const int64_t row = item / parts, first = item % parts * FEW;
    const int32_t number = run.step.adapters[row];
    const float* a[FEW];
    int count = 0;
    while (number && count < FEW && (a[count] = row_of_a(op.adapters[number - 1], first + count, op.k))) count++;
    if (!count) continue;
    for (int j = count; j < FEW; j++) a[j] = a[0];
    const T* x = run.buffer<T>(op.in) + row * op.in_stride + op.in_offset;
    F acc[FEW] = {F{}, F{}, F{}, F{}};
    int i = 0;
    for (; i + LANES <= op.k; i += LANES) {
      const F wide = load_wide(x + i, LANES);
      for (int j = 0; j < FEW; j++) acc[j] += wide * load(a[j] + i);
    }
    if (i < op.k) {
      const F wide = load_wide(x + i, op.k - i);
      for (int j = 0; j < FEW; j++) acc[j] += wide * load_first(a[j] + i, op.k - i);
    }
    float* out = run.buffer<float>(op.out) + row * op.out_stride + first;
    for (int j = 0; j < count; j++) out[j] = sum(acc[j]);
  }
}

// Add the terms of m rows to the sums of one panel.
inline void add_terms(const Run& run, const Op& op, int64_t panel, int64_t row, int m, F (&acc)[ROWS][2]) {
  for (int i = 0; i < m; i++) {
    const int32_t number = run.step.adapters[row + i];
    if (!number) continue;
    const Adapter& adapter = op.adapters[number - 1];
    const float* low = run.buffer<float>(op.low) + (row + i) * op.low_stride;
    F a = F{}, b = F{};
    for (int64_t t = 0; t < adapter.num_terms; low += adapter.terms[t++].rank) {
      const LoraTerm& term = adapter.terms[t];
      const int64_t at = panel - term.first_panel;
      if (at < 0 || at >= term.panels) continue;
      const float* column = term.b + at * PANEL;
      for (int64_t j = 0; j < term.rank; j++, column += term.panels * PANEL) {
        a += low[j] * load(column), b += low[j] * load(column + LANES);
      }
    }
    acc[i][0] += a, acc[i][1] += b;
  }
}

}  // namespace
