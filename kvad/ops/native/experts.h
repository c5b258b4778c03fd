// Mixtures of experts, and gates.
#pragma once
#include "linear.h"

namespace {

constexpr int MAX_EXPERTS = 1024;

inline F load_wide(const float* p) { return load(p); }
inline F load_wide(const bf16* p) {
  I x;
  for (int i = 0; i < LANES; i++) x[i] = int32_t(uint32_t(p[i]) << 16);
  return as_floats(x);
}

// Multiply rows of a buffer by the sigmoid of gates, one per number, or one per row.
template <class T> void gate(const Run& run, const Op& op, int64_t rows) {
  for (int64_t row = run.low(rows); row < run.high(rows); row++) {
    const float* g = run.buffer<float>(op.in) + row * op.in_stride;
    T* out = run.buffer<T>(op.out) + row * op.out_stride;
    const F whole = sigmoid(all(g[0]));
    for (int i = 0; i < op.k; i += LANES) {
      const F factor = op.own_weights ? sigmoid(load_first(g + i, op.k - i)) : whole;
      F x = F{};
      for (int j = 0; j < LANES && i + j < op.k; j++) x[j] = widen(out[i + j]);
      store_first(out + i, x * factor, op.k - i);
    }
  }
}

struct Choice {  // of one token, in the order of the experts
  int32_t expert;
  float share;
};

inline int best_of(const float* ranking, const bool* taken, int n) {
  int best = -1;
  for (int i = 0; i < n; i++)
    if (!taken[i] && (best < 0 || ranking[i] > ranking[best])) best = i;
  return best;
}

// Set the ranking to -inf outside the best groups. With a selection bias, a group counts by its best two experts.
inline void mask_groups(const Experts& spec, float* ranking) {
  const int size = int(spec.experts / spec.groups);
  float values[MAX_EXPERTS];
  bool best[MAX_EXPERTS] = {};
  for (int g = 0; g < spec.groups; g++) {
    float first = -INFINITY, second = -INFINITY;
    for (int i = 0; i < size; i++) {
      const float x = ranking[g * size + i];
      if (x > first) second = first, first = x;
      else if (x > second) second = x;
    }
    values[g] = spec.selection_bias ? first + second : first;
  }
  for (int i = 0; i < spec.chosen_groups; i++) best[best_of(values, best, int(spec.groups))] = true;
  for (int i = 0; i < spec.experts; i++)
    if (!best[i / size]) ranking[i] = -INFINITY;
}

// PhiMoE: each of two experts has a softmax over the remaining ones that are near to it.
inline void choose_sparsemixer(const Experts& spec, const float* logits, Choice* choices) {
  const int n = int(spec.experts);
  bool taken[MAX_EXPERTS] = {};
  for (int round = 0; round < spec.chosen; round++) {
    const int best = best_of(logits, taken, n);
    const float top = logits[best];
    float total = 0;
    for (int i = 0; i < n; i++) {
      const float size = std::fabs(logits[i]) > top ? std::fabs(logits[i]) : top;
      if (!taken[i] && !((top - logits[i]) / size > 2 * spec.jitter)) total += std::exp(logits[i] - top);
    }
    choices[round] = {best, 1.0f / total};
    taken[best] = true;
  }
}

inline void choose_best(const Experts& spec, float* scores, Choice* choices) {
  const int n = int(spec.experts);
  float ranking[MAX_EXPERTS], total = 0, top = scores[0];
  bool taken[MAX_EXPERTS] = {};
  for (int i = 1; i < n; i++) top = scores[i] > top ? scores[i] : top;
  for (int i = 0; i < n; i++) {
    scores[i] = spec.is_sigmoid ? 1.0f / (1.0f + std::exp(-scores[i])) : std::exp(scores[i] - top);
    total += scores[i];
  }
  for (int i = 0; i < n; i++) {
    if (!spec.is_sigmoid) scores[i] /= total;
    ranking[i] = scores[i] + (spec.selection_bias ? spec.selection_bias[i] : 0);
  }
  if (spec.groups > 1) mask_groups(spec, ranking);
  float sum = 0;
  for (int i = 0; i < spec.chosen; i++) {
    const int best = best_of(ranking, taken, n);
    choices[i] = {best, scores[best]};
    taken[best] = true, sum += scores[best];
  }
  const float factor = spec.renormalize ? spec.routed_scale / (sum > 1e-20f ? sum : 1e-20f) : spec.routed_scale;
  for (int i = 0; i < spec.chosen; i++) choices[i].share *= factor;
}

template <class W> struct ExpertsMemory {  // of all threads
  typedef typename W::T T;
  float *logits, *out;    // [tokens, experts], [pairs, width]; a pair is a token and an expert, in the experts' order
  Choice* choices;        // [tokens, chosen]
  int32_t *pairs, *ends;  // of each choice; after each expert's pairs
  T *x, *inner;           // [pairs, in_stride], [pairs, inner size]
  int64_t size, width, bytes;
  ExpertsMemory(const Op& op, int64_t tokens, char* at) {
    char* start = at;
    const Experts& spec = *op.experts;
    const int64_t count = tokens * spec.chosen;
    auto take = [&at](int64_t bytes) { char* p = at; at += round_up(bytes, 64); return p; };
    size = round_up(spec.size, PANEL), width = round_up(op.n, PANEL);
    logits = reinterpret_cast<float*>(take(tokens * spec.experts * 4));
    choices = reinterpret_cast<Choice*>(take(count * sizeof(Choice)));
    pairs = reinterpret_cast<int32_t*>(take(count * 4));
    ends = reinterpret_cast<int32_t*>(take(spec.experts * 4));
    x = reinterpret_cast<T*>(take(count * op.in_stride * sizeof(T)));
    inner = reinterpret_cast<T*>(take(count * size * sizeof(T)));
    out = reinterpret_cast<float*>(take(count * width * 4));
    bytes = at - start;
  }
};

template <class W> class Mixture {
  typedef typename W::T T;
  const Run& run;
  const Op& op;
  const Experts& spec;
  const int64_t tokens;
  ExpertsMemory<W> memory;

 public:
  Mixture(const Run& run, const Op& op)
      : run(run), op(op), spec(*op.experts), tokens(run.step.tokens), memory(op, tokens, run.shared) {}

  void compute() {
    route();
    run.team.wait();
    for (int64_t t = run.low(tokens); t < run.high(tokens); t++) choose(t);
    run.team.wait();
    if (run.thread == 0) sort();
    run.team.wait();
    gather();
    run.team.wait();
    const int64_t in_width = round_up(op.k, 2), size = round_up(spec.size, 2);
    each_panel(2 * memory.size, spec.gate_up, in_width, [this](int e, int64_t panel, int64_t pair, int m, const T* w) {
      alignas(64) F acc[ROWS][2];
      multiply<W>(m, w, memory.x + pair * op.in_stride, op.in_stride, round_up(op.k, 2), acc);
      activate_pairs(e, panel, pair, m, acc);
    });
    run.team.wait();
    each_panel(memory.width, spec.down, size, [this](int e, int64_t panel, int64_t pair, int m, const T* w) {
      alignas(64) F acc[ROWS][2];
      multiply<W>(m, w, memory.inner + pair * memory.size, memory.size, round_up(spec.size, 2), acc);
      for (int i = 0; i < m; i++)
        for (int half = 0; half < 2; half++) {
          const int64_t at = panel * PANEL + half * LANES;
          const F bias = spec.down_bias ? load(spec.down_bias + e * memory.width + at) : F{};
          store(memory.out + (pair + i) * memory.width + at, acc[i][half] + bias);
        }
    });
    run.team.wait();
    for (int64_t t = run.low(tokens); t < run.high(tokens); t++) add_up(t);
  }

 private:
  void route() {
    const T* x = run.buffer<T>(op.in);
    for (int64_t e = run.low(spec.experts); e < run.high(spec.experts); e++) {
      const float* w = spec.router + e * op.in_stride;
      for (int64_t t = 0; t < tokens; t++) {
        F total = F{};
        for (int i = 0; i < op.in_stride; i += LANES) total += load_wide(x + t * op.in_stride + i) * load(w + i);
        memory.logits[t * spec.experts + e] = sum(total) + (spec.router_bias ? spec.router_bias[e] : 0);
      }
    }
  }

  void choose(int64_t t) {
    float* logits = memory.logits + t * spec.experts;
    Choice* choices = memory.choices + t * spec.chosen;
    if (spec.jitter >= 0) choose_sparsemixer(spec, logits, choices);
    else choose_best(spec, logits, choices);
    for (int i = 1; i < spec.chosen; i++)
      for (int j = i; j > 0 && choices[j].expert < choices[j - 1].expert; j--) {
        const Choice later = choices[j - 1];
        choices[j - 1] = choices[j], choices[j] = later;
      }
    for (int i = 0; i < spec.chosen; i++) {  // a share has the type of the activations
      T share;
      put(&share, choices[i].share);
      choices[i].share = widen(share);
    }
  }

  void sort() {  // by expert, then by token
    std::memset(memory.ends, 0, spec.experts * 4);
    const int64_t count = tokens * spec.chosen;
    for (int64_t i = 0; i < count; i++) memory.ends[memory.choices[i].expert]++;
    int32_t at = 0;
    for (int64_t e = 0; e < spec.experts; e++) at += memory.ends[e], memory.ends[e] = at - memory.ends[e];
    for (int64_t i = 0; i < count; i++) memory.pairs[i] = memory.ends[memory.choices[i].expert]++;
  }

  void gather() {
    const T* x = run.buffer<T>(op.in);
    const int64_t count = tokens * spec.chosen;
    for (int64_t i = run.low(count); i < run.high(count); i++)
      std::memcpy(memory.x + memory.pairs[i] * op.in_stride, x + i / spec.chosen * op.in_stride, op.in_stride * sizeof(T));
  }

  // Call compute(expert, panel, first pair, number of pairs, panel's weights) for all pairs, a few panels at a time.
  template <class Compute> void each_panel(int64_t rows, const void* weights, int64_t k, const Compute& compute) {
    constexpr int64_t SPAN = 4;  // panels
    const int64_t panels = rows / PANEL, spans = (panels + SPAN - 1) / SPAN;
    int64_t next = run.team.ticket.fetch_add(1, std::memory_order_relaxed), unit = 0;
    for (int e = 0; e < spec.experts; e++) {
      const int64_t low = e ? memory.ends[e - 1] : 0, high = memory.ends[e];
      if (low == high) continue;
      for (int64_t span = 0; span < spans; span++, unit++) {
        if (unit != next) continue;
        next = run.team.ticket.fetch_add(1, std::memory_order_relaxed);
        for (int64_t panel = span * SPAN; panel < panels && panel < (span + 1) * SPAN; panel++) {
          const T* w = static_cast<const T*>(weights) + (e * panels + panel) * PANEL * k;
          for (int64_t pair = low; pair < high; pair += W::TOGETHER)
            compute(e, panel, pair, int(high - pair < W::TOGETHER ? high - pair : W::TOGETHER), w);
        }
      }
    }
  }

  void activate_pairs(int e, int64_t panel, int64_t pair, int m, const F (&acc)[ROWS][2]) {
    const float* bias = spec.gate_up_bias ? spec.gate_up_bias + (e * memory.size * 2 + panel * PANEL) : nullptr;
    for (int i = 0; i < m; i++) {
      F g = acc[i][0], up = acc[i][1];
      if (bias) g += load(bias), up += load(bias + LANES);
      if (spec.limit > 0) {
        g = smaller(g, all(spec.limit)), up = larger(smaller(up, all(spec.limit)), all(-spec.limit));
      }
      const F inner = spec.alpha != 0 ? (up + 1.0f) * g * sigmoid(spec.alpha * g) : activate(op.activation, g) * up;
      store(memory.inner + (pair + i) * memory.size + panel * LANES, inner);
    }
  }

  void add_up(int64_t t) {
    float* out = run.buffer<float>(op.out) + t * op.out_stride;
    const Choice* choices = memory.choices + t * spec.chosen;
    const int32_t* pairs = memory.pairs + t * spec.chosen;
    for (int i = 0; i < op.n; i += LANES) {
      F total = F{};
      for (int j = 0; j < spec.chosen; j++)
        total += load(memory.out + pairs[j] * memory.width + i) * choices[j].share;
      total *= op.scale;
      store_first(out + i, op.mode == OUT_ADD ? load_first(out + i, op.n - i) + total : total, op.n - i);
    }
  }
};

}  // namespace
