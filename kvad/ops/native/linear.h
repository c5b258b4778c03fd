// Embeddings, norms, products with packed weights, sums.
#pragma once
#include "lora.h"

namespace {

// Write the sums of m rows and one panel: adapters, bias, activation, scale, and where they go.
template <class W>
inline void finish(const Run& run, const Op& op, int64_t panel, int64_t row, int m, F (&acc)[ROWS][2]) {
  typedef typename W::T T;
  if (op.adapters && run.step.adapters) add_terms(run, op, panel, row, m, acc);
  F bias[2] = {F{}, F{}};
  if (op.bias) bias[0] = load(op.bias + panel * PANEL), bias[1] = load(op.bias + panel * PANEL + LANES);
  for (int i = 0; i < m; i++) {
    F a = acc[i][0] + bias[0], b = acc[i][1] + bias[1];
    const int64_t at = (row + i) * op.out_stride + op.out_offset;
    if (op.mode == OUT_GATED) {  // a panel has 16 rows of the gate, then the same 16 of up
      store(run.buffer<T>(op.out) + at + panel * LANES, activate(op.activation, a) * b);
    } else if (op.mode == OUT_ACTIVATED) {
      T* out = run.buffer<T>(op.out) + at + panel * PANEL;
      store(out, activate(op.activation, a)), store(out + LANES, activate(op.activation, b));
    } else if (op.mode == OUT_LOGITS) {
      a *= op.scale, b *= op.scale;
      if (op.softcap > 0) a = op.softcap * tangent(a / op.softcap), b = op.softcap * tangent(b / op.softcap);
      float* out = run.step.logits + (row + i) * op.n + panel * PANEL;
      const int n = int(op.n - panel * PANEL);
      store_first(out, a, n);
      if (n > LANES) store_first(out + LANES, b, n - LANES);
    } else {
      float* out = run.buffer<float>(op.out) + at + panel * PANEL;
      if (op.clip > 0) {
        a = smaller(larger(a, all(-op.clip)), all(op.clip)), b = smaller(larger(b, all(-op.clip)), all(op.clip));
      }
      if (op.mode == OUT_ADD) a = load(out) + a * op.scale, b = load(out + LANES) + b * op.scale;
      store(out, a), store(out + LANES, b);
    }
  }
}

// Parts of a product, for the L2 cache: rows whose inputs stay in it while panels pass. Tiles divide many inputs too, and
// keep the sums of some panels.
template <class W> struct Blocks {
  static constexpr bool BY_TILES = W::TOGETHER > REGISTER_ROWS;
  static constexpr int64_t BYTES = (BY_TILES ? 768 : 512) << 10, INPUTS = 2048, PANELS = 8;
  int64_t rows, inputs, panels;
  Blocks(const Op& op, int64_t num_rows) : rows(num_rows), inputs(op.k), panels((op.n + PANEL - 1) / PANEL) {
    if (num_rows <= W::TOGETHER) return;
    const int64_t parts = BY_TILES ? (op.k + INPUTS - 1) / INPUTS : 1;
    if (parts > 1) inputs = round_up((op.k + parts - 1) / parts, TILE_DEPTH), panels = PANELS;
    const int64_t passes = BYTES / (inputs * int64_t(sizeof(typename W::T)) * W::TOGETHER);
    const int64_t most = (passes > 1 ? passes : 1) * W::TOGETHER, times = (num_rows + most - 1) / most;
    rows = round_up((num_rows + times - 1) / times, W::TOGETHER);
  }
  bool keeps_sums(const Op& op) const { return inputs < op.k; }
  int64_t bytes(const Op& op) const { return keeps_sums(op) ? panels * rows * PANEL * 4 : 0; }
};

template <class W> void linear(const Run& run, const Op& op, int64_t rows) {
  typedef typename W::T T;
  const T* x = run.buffer<T>(op.in) + op.in_offset;
  const T* w = static_cast<const T*>(op.weight);
  const int64_t panels = (op.n + PANEL - 1) / PANEL, size = int64_t(op.k) * PANEL, high = run.high(panels);
  const Blocks<W> blocks(op, rows);
  constexpr int64_t few = Blocks<W>::BY_TILES ? LANES : 0;  // rows of one tile; the processor alone loads ahead faster
  alignas(64) F own[ROWS][2];
  for (int64_t first = 0; first < rows; first += blocks.rows) {
    const int64_t end = smaller(first + blocks.rows, rows), passes = (end - first + W::TOGETHER - 1) / W::TOGETHER;
    for (int64_t group = run.low(panels); group < high; group += blocks.panels) {
      const int64_t last = smaller(group + blocks.panels, high);
      for (int64_t from = 0; from < op.k; from += blocks.inputs) {
        const int64_t k = smaller(blocks.inputs, op.k - from), steps = k / W::STEP;  // of 64 * PANEL / LANES bytes
        for (int64_t panel = group; panel < last; panel++)
          for (int64_t row = first; row < end; row += W::TOGETHER) {
            const int m = int(smaller(end - row, int64_t(W::TOGETHER)));
            Ahead ahead;
            ahead.panel = rows > few && passes == 1;
            // The passes after the first one would not use the memory.
            if (passes > 1 && panel + 1 < last)
              ahead.read_next(w + (panel + 1) * size + from * PANEL, (row - first) / W::TOGETHER, passes, steps);
            char* sums = run.own + ((panel - group) * blocks.rows + row - first) * PANEL * 4;
            auto& acc = blocks.keeps_sums(op) ? *reinterpret_cast<F(*)[ROWS][2]>(sums) : own;
            multiply<W>(m, w + panel * size + from * PANEL, x + row * op.in_stride + from, op.in_stride, k, acc, ahead, from > 0);
            if (from + k == op.k) finish<W>(run, op, panel, row, m, acc);
          }
      }
    }
  }
}

// The best logit of some columns of a row, the first of equal ones; index -1 if one is not finite.
struct Best {
  float value;
  int32_t index;
};
inline Best best_logit(const float* logits, int64_t low, int64_t high, int64_t num_tokens) {
  F top = all(-INFINITY), defect = F{};
  I at = I{} - 1, column = I{};
  for (int i = 0; i < LANES; i++) column[i] = i;
  Best best = {-INFINITY, INT32_MAX};
  float rest = 0;
  int64_t c = low;
  for (; c + LANES <= high && c + LANES <= num_tokens; c += LANES) {
    const F x = load(logits + c);
    const I better = x > top;
    top = better ? x : top, at = better ? column + int32_t(c) : at, defect += x * 0.0f;
  }
  for (int i = 0; i < LANES; i++)
    if (at[i] >= 0 && (top[i] > best.value || (top[i] == best.value && at[i] < best.index))) best = {top[i], at[i]};
  for (; c < high; c++) {
    rest += logits[c] * 0.0f;
    if (c < num_tokens && logits[c] > best.value) best = {logits[c], int32_t(c)};
  }
  if (!(sum(defect) + rest == 0)) best.index = -1;
  return best;
}

// Find the best token of each row: every thread in its share of the columns, then the first thread among theirs.
inline void find_best(const Run& run, int64_t size) {
  const Step& step = run.step;
  Best* found = reinterpret_cast<Best*>(run.shared);  // [rows, threads]
  for (int64_t row = 0; row < step.num_logits; row++)
    found[row * run.team.size + run.thread] = best_logit(step.logits + row * size, run.low(size), run.high(size), step.num_tokens);
  run.team.wait();
  for (int64_t row = 0; run.thread == 0 && row < step.num_logits; row++) {
    Best best = found[row * run.team.size];
    for (int i = 1; i < run.team.size && best.index >= 0; i++) {
      const Best& other = found[row * run.team.size + i];
      if (other.index < 0 || other.value > best.value) best = other;
    }
    step.best[row] = best.index == INT32_MAX ? -1 : best.index;
  }
}

template <class T> void norm_row(const Op& op, const float* x, const float* weight, const float* bias, T* out) {
  const int width = op.k;
  F mean = F{}, factor = all(op.scale);
  if (op.mode == NORM_LAYER) {
    F total = F{};
    for (int i = 0; i < width; i += LANES) total += load_first(x + i, width - i);
    mean = all(sum(total) / width);
  }
  if (op.mode != NORM_NONE) {
    F squares = F{};
    int i = 0;
    for (; i + LANES <= width; i += LANES) {
      F d = load(x + i) - mean;
      squares += d * d;
    }
    if (i < width) {
      F d = load_first(x + i, width - i) - mean;
      for (int j = width - i; j < LANES; j++) d[j] = 0;
      squares += d * d;
    }
    factor = all(op.scale / std::sqrt(sum(squares) / width + op.eps));
  }
  int i = 0;
  for (; i + LANES <= width; i += LANES) {
    F y = (load(x + i) - mean) * factor;
    if (weight) y *= load(weight + i);
    if (bias) y += load(bias + i);
    store(out + i, y);
  }
  if (i == width) return;
  F y = (load_first(x + i, width - i) - mean) * factor;
  if (weight) y *= load_first(weight + i, width - i);
  if (bias) y += load_first(bias + i, width - i);
  store_first(out + i, y, width - i);
}

template <class T> void norm(const Run& run, const Op& op, int64_t rows) {
  const float* weights = static_cast<const float*>(op.weight);
  const int heads = op.heads ? op.heads : 1;
  for (int64_t row = run.low(rows); row < run.high(rows); row++) {
    T* out = run.buffer<T>(op.out) + row * op.out_stride + op.out_offset;
    for (int head = 0; head < heads; head++) {
      const float* x = run.buffer<float>(op.in) + row * op.in_stride + op.in_offset + head * op.k;
      int64_t at = op.own_weights ? int64_t(head) * op.k : 0;
      norm_row(op, x, weights ? weights + at : nullptr, op.bias ? op.bias + at : nullptr, out + head * op.k);
    }
    if (!op.heads)
      for (int64_t i = op.k; i < op.out_stride; i++) put(out + i, 0);
  }
}

template <class T> void embed(const Run& run, const Op& op) {
  const T* table = static_cast<const T*>(op.weight);
  for (int64_t t = run.low(run.step.tokens); t < run.high(run.step.tokens); t++) {
    const T* row = table + run.step.token_ids[t] * op.k;
    float* out = run.buffer<float>(op.out) + t * op.out_stride;
    for (int i = 0; i < op.k; i++) out[i] = widen(row[i]) * op.scale;
    if (op.bias) {
      const float* added = op.bias + (run.step.positions[t] + op.bias_offset) * op.k;
      for (int i = 0; i < op.k; i++) out[i] += added[i];
    }
    for (int i = op.k; i < op.out_stride; i++) out[i] = 0;
  }
}

inline void add(const Run& run, const Op& op, int64_t rows) {
  for (int64_t row = run.low(rows); row < run.high(rows); row++) {
    const float* from = run.buffer<float>(op.in) + row * op.in_stride;
    float* to = run.buffer<float>(op.out) + row * op.out_stride;
    for (int i = 0; i < op.k; i++) to[i] += from[i] * op.scale;
  }
}

// k: bytes of a row; without a buffer: floats of the output.
template <class T> void select_rows(const Run& run, const Op& op) {
  for (int64_t i = run.low(run.step.num_logits); i < run.high(run.step.num_logits); i++) {
    char* out = op.out < 0 ? reinterpret_cast<char*>(run.step.logits) : run.buffers[op.out];
    const int64_t stride = op.out < 0 ? op.in_stride * 4 : op.k;
    std::memcpy(out + i * op.k, run.buffers[op.in] + run.step.logit_indices[i] * stride, op.k);
  }
  for (int64_t i = run.low(run.step.num_hidden); i < run.high(run.step.num_hidden); i++) {
    const T* row = reinterpret_cast<const T*>(run.buffers[op.in] + run.step.hidden_indices[i] * op.k);
    for (int j = 0; j < op.n; j++) run.step.hidden[i * op.n + j] = widen(row[j]);
  }
}

}  // namespace
