// Mixtures of experts, and gates.
#pragma once
#include "quantized.h"

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

// The pairs that a product of experts multiplies; a pair is a token and an expert, in the experts' order.
template <class W> class PairRows {
  typedef typename W::T T;

 public:
  const Op& op;
  T* x;             // [pairs, in_stride]
  char* converted;  // quantized weights: pairs as integers, or sums of their groups
  int64_t count;

  PairRows(const Op& op, int64_t count) : op(op), x(nullptr), converted(nullptr), count(count) {}
  bool has_integers() const { return op.bits && uses_integers(op); }
  bool uses_tiles(int64_t rows) const {  // for an expert of this many pairs
#ifdef KVAD_TILES
    return has_integers() && ::uses_tiles(op, rows);
#else
    return false;
#endif
  }
  int together(bool tiles) const {
    if (tiles) return TILE_ROWS;
    if (!op.bits) return W::TOGETHER;
    return op.activation_bits ? ByteInputs::TOGETHER : WordInputs::TOGETHER;
  }
  int64_t panel_size() const {
    return op.bits ? panel_bytes(op) : round_up(op.k, 2) * PANEL * int64_t(sizeof(T));
  }

  void convert(int64_t pair, const T* from, bool tiles) {
    if (has_integers()) return with_integers(tiles, [&](auto rows) { rows.convert(op, pair, from); });
    if constexpr (sizeof(T) == 4)
      if (op.bits && form_of(op) == INT4) add_groups(op, from, sums(pair));
  }

  void multiply(const char* w, int64_t pair, int m, bool tiles, Ahead ahead, F (&acc)[ROWS][2]) const {
    if (op.bits) return with_form(op, [&](auto form) { multiply_quantized<form()>(w, pair, m, tiles, acc); });
    const T* from = x + pair * op.in_stride;
    ::multiply<W>(m, reinterpret_cast<const T*>(w), from, op.in_stride, round_up(op.k, 2), acc, ahead);
  }

 private:
  float* sums(int64_t pair) const {
    return reinterpret_cast<float*>(converted) + pair * (op.k / op.quantized_group);
  }

  template <class Use> void with_integers(bool tiles, Use use) const {
#ifdef KVAD_TILES
    if (tiles && op.activation_bits) return use(IntegerRows<TileInputs<ByteInputs>>(op, count, converted));
    if (tiles) return use(IntegerRows<TileInputs<WordInputs>>(op, count, converted));
#endif
    if (op.activation_bits) return use(IntegerRows<ByteInputs>(op, count, converted));
    use(IntegerRows<WordInputs>(op, count, converted));
  }

  template <WeightForm FORM> void multiply_quantized(const char* at, int64_t pair, int m, bool tiles, F (&acc)[ROWS][2]) const {
    const uint8_t* w = reinterpret_cast<const uint8_t*>(at);
    if (has_integers())
      return with_integers(tiles, [&](const auto& rows) {
        call_with_count<std::decay_t<decltype(rows)>::TOGETHER>(
            m, [&](auto count) { multiply_integers<FORM>(op, w, rows, pair, count, acc); });
      });
    if constexpr (sizeof(T) == 4)
      call_with_count<WordInputs::TOGETHER>(m, [&](auto count) {
        multiply_floats<FORM, count.value>(op, w, x + pair * op.in_stride, sums(pair), acc);
      });
  }
};

template <class W> struct ExpertsMemory {  // of all threads
  typedef typename W::T T;
  float *logits, *out;    // [tokens, experts], [pairs, width]
  Choice* choices;        // [tokens, chosen]
  int32_t *pairs, *ends;  // of each choice; after each expert's pairs
  PairRows<W> in, inner;
  int64_t size, width, bytes;
  ExpertsMemory(const Op& op, int64_t tokens, char* at)
      : in(*op.experts->gate_up, tokens * op.experts->chosen), inner(*op.experts->down, in.count) {
    char* start = at;
    const Experts& spec = *op.experts;
    auto take = [&at](int64_t bytes) { char* p = at; at += round_up(bytes, 64); return p; };
    size = round_up(spec.size, PANEL), width = round_up(op.n, PANEL);
    logits = reinterpret_cast<float*>(take(tokens * spec.experts * 4));
    choices = reinterpret_cast<Choice*>(take(in.count * sizeof(Choice)));
    pairs = reinterpret_cast<int32_t*>(take(in.count * 4));
    ends = reinterpret_cast<int32_t*>(take(spec.experts * 4));
    for (PairRows<W>* rows : {&in, &inner}) {
      if (rows == &inner || !rows->has_integers())
        rows->x = reinterpret_cast<T*>(take(rows->count * rows->op.in_stride * sizeof(T)));
      if (rows->op.bits) rows->converted = take(converted_bytes(rows->op, rows->count));
    }
    out = reinterpret_cast<float*>(take(in.count * width * 4));
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
    each_panel(2 * memory.size, memory.in, [this](int e, int64_t panel, int64_t pair, int m, const F(&acc)[ROWS][2]) {
      activate_pairs(e, panel, pair, m, acc);
    });
    run.team.wait();
    if (memory.inner.op.bits) convert_inner(), run.team.wait();
    each_panel(memory.width, memory.inner, [this](int e, int64_t panel, int64_t pair, int m, const F(&acc)[ROWS][2]) {
      const float* biases = memory.inner.op.bias;
      for (int i = 0; i < m; i++)
        for (int half = 0; half < 2; half++) {
          const int64_t at = panel * PANEL + half * LANES;
          const F bias = biases ? load(biases + e * memory.width + at) : F{};
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

  // Copy or convert the input of each pair.
  void gather() {
    const T* x = run.buffer<T>(op.in);
    PairRows<W>& in = memory.in;
    for (int64_t i = run.low(in.count); i < run.high(in.count); i++) {
      const T* from = x + i / spec.chosen * op.in_stride;
      const int64_t pair = memory.pairs[i];
      if (in.x) std::memcpy(in.x + pair * op.in_stride, from, op.in_stride * sizeof(T));
      if (in.op.bits) in.convert(pair, from, in.uses_tiles(pairs_of(memory.choices[i].expert)));
    }
  }

  int64_t low_pair(int64_t e) const { return e ? memory.ends[e - 1] : 0; }
  int64_t pairs_of(int64_t e) const { return memory.ends[e] - low_pair(e); }

  // Convert the inner numbers of each pair.
  void convert_inner() {
    PairRows<W>& inner = memory.inner;
    const int64_t low = run.low(inner.count), high = run.high(inner.count);
    for (int64_t e = 0, pair = low; pair < high; pair++) {
      while (memory.ends[e] <= pair) e++;
      inner.convert(pair, inner.x + pair * inner.op.in_stride, inner.uses_tiles(pairs_of(e)));
    }
  }

  // Call use(expert, panel, first pair, number of pairs, sums) for the products of all pairs, a few panels at a time.
  template <class Use> void each_panel(int64_t rows, const PairRows<W>& in, const Use& use) {
    constexpr int64_t SPAN = 4;  // panels
    constexpr int few = TILE_ROWS > REGISTER_ROWS ? 1 : 0;  // pairs; one is not measured with AMX
    const int64_t panels = rows / PANEL, spans = (panels + SPAN - 1) / SPAN, size = in.panel_size();
    alignas(64) F acc[ROWS][2];
    int64_t next = run.team.take(), unit = 0;
    for (int e = 0; e < spec.experts; e++) {
      const int64_t low = low_pair(e), count = pairs_of(e);
      if (count == 0) continue;
      const bool tiles = in.uses_tiles(count);
      const int64_t parts = (count + in.together(tiles) - 1) / in.together(tiles);
      for (int64_t span = 0; span < spans; span++, unit++) {
        if (unit != next) continue;
        next = run.team.take();
        const int64_t last = smaller((span + 1) * SPAN, panels);
        for (int64_t panel = span * SPAN; panel < last; panel++) {
          const char* w = static_cast<const char*>(in.op.weight) + (e * panels + panel) * size;
          for (int64_t part = 0; part < parts; part++) {  // of about the same size
            const int64_t pair = low + count * part / parts;
            const int m = int(low + count * (part + 1) / parts - pair);
            Ahead ahead;
            ahead.panel = m > few && part == 0 && (parts == 1 || panel == span * SPAN);
            if (parts > 1 && panel + 1 < last) ahead.read_next(w + size, part, parts, in.op.k / W::STEP);
            in.multiply(w, pair, m, tiles, ahead, acc);
            use(e, panel, pair, m, acc);
          }
        }
      }
    }
  }

  void activate_pairs(int e, int64_t panel, int64_t pair, int m, const F (&acc)[ROWS][2]) {
    const float* biases = memory.in.op.bias;
    const float* bias = biases ? biases + (e * memory.size * 2 + panel * PANEL) : nullptr;
    for (int i = 0; i < m; i++) {
      F g = acc[i][0], up = acc[i][1];
      if (bias) g += load(bias), up += load(bias + LANES);
      if (spec.limit > 0) {
        g = smaller(g, all(spec.limit)), up = larger(smaller(up, all(spec.limit)), all(-spec.limit));
      }
      const F inner = spec.alpha != 0 ? (up + 1.0f) * g * sigmoid(spec.alpha * g) : activate(op.activation, g) * up;
      store(memory.inner.x + (pair + i) * memory.inner.op.in_stride + panel * LANES, inner);
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
