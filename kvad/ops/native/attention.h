// Rotation, cache writes, and attention over the slots of block tables.
#pragma once
#include "chunk.h"

namespace {

inline void angles(const Run& run, const Op& op) {  // [T, half] cosines, then sines
  const float* table = static_cast<const float*>(op.weight);
  const int half = op.rotary_dim / 2;
  for (int64_t t = run.low(run.step.tokens); t < run.high(run.step.tokens); t++) {
    const bool is_long = op.short_len && (!run.step.seq_lens || run.step.seq_lens[t] > op.short_len);
    const float* inv_freq = is_long ? table + half : table;  // of longer sequences
    float* out = run.buffer<float>(op.out) + t * op.out_stride;
    for (int i = 0; i < half; i++) {
      const float angle = float(run.step.positions[t]) * inv_freq[i];
      out[i] = std::cos(angle) * op.scale, out[half + i] = std::sin(angle) * op.scale;
    }
  }
}

template <class T> void rotate_head(const Op& op, const float* x, const float* angle, T* out) {
  const int half = op.rotary_dim / 2;
  for (int i = 0; i < half; i++) {
    const int first = op.interleaved ? 2 * i : i, second = op.interleaved ? 2 * i + 1 : i + half;
    const float c = angle[i], s = angle[half + i], a = x[first], b = x[second];
    put(out + first, a * c - b * s), put(out + second, b * c + a * s);
  }
  for (int i = op.rotary_dim; i < op.head_dim; i++) put(out + i, x[i]);
}

// Rotate queries into a buffer [H, padded head_dim]; write rotated keys, and values, of the new tokens to the cache.
template <class W> void rotate(const Run& run, const Op& op) {
  typedef typename W::T T;
  const Group& group = run.step.groups[op.group];
  const int q = op.heads, kv = group.slots ? op.kv_heads : 0, dim = op.head_dim, padded = int(round_up(dim, 2));
  const int64_t units = q + 2 * kv, total = run.step.tokens * units;
  float rotated[MAX_HEAD_DIM];
  for (int64_t unit = run.low(total); unit < run.high(total); unit++) {
    const int64_t t = unit / units, head = unit % units;
    const float* x = run.buffer<float>(op.in) + t * op.in_stride;
    const float* angle = op.rotary_dim ? run.buffer<float>(op.angles) + t * op.rotary_dim : nullptr;
    if (head < q) {
      T* out = run.buffer<T>(op.out) + t * op.out_stride + head * padded;
      if (op.query_scale) {
        const float factor = op.query_scale[run.step.positions[t]];
        for (int i = 0; i < dim; i++) rotated[i] = x[head * dim + i] * factor;
        rotate_head(op, rotated, angle, out);
      } else {
        rotate_head(op, x + head * dim, angle, out);
      }
      if (padded > dim) put(out + dim, 0);
    } else if (head < q + kv) {
      rotate_head(op, x + head * dim, angle, rotated);
      const int64_t at = (head - q) * op.keys->blocks * group.block_size + group.slots[t];
      write_vector(*op.keys, at, rotated, dim);
    } else {
      const int64_t at = (head - q - kv) * op.values->blocks * group.block_size + group.slots[t];
      const float* v = x + (q + kv) * dim + (head - q - kv) * op.value_dim;
      write_vector(*op.values, at, v, op.value_dim);
    }
  }
}

struct Part { float top, total; };  // of one query over some slots: largest logit, sum of e^(logit - top)

// Logits of a query and LANES slots from their products; -inf if invisible.
inline F finish_logits(const Op& op, const Group& group, F product, const float* position, float query, int head) {
  F x = product * op.scale, p = load(position), ahead = query - p;
  if (op.softcap > 0) x = op.softcap * tangent(x / op.softcap);
  if (op.slopes) x -= op.slopes[head] * larger(ahead, -ahead);
  if (op.position_bias)
    for (int j = 0; j < LANES; j++) {
      const float at = ahead[j] + op.bias_offset;
      const int distance = at < 0 ? 0 : at >= op.bias_size ? op.bias_size - 1 : int(at);
      x[j] += op.position_bias[head * op.bias_size + distance];
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

// Logits [m, CHUNK] of an arranged chunk.
template <class W>
void chunk_logits(const Op& op, const Group& group, const Chunk<W>& chunk, int count, int m, const Queries& q,
                  float* logits) {
  const int dim = int(round_up(op.head_dim, 2));
  const bool is_plain = !W::IS_INTEGER && group.causal && !group.window && !group.layer_window && !op.slopes &&
                        !op.position_bias && op.softcap <= 0;
  float low = q.position[0];
  for (int i = 1; i < m; i++) low = q.position[i] < low ? q.position[i] : low;
  alignas(64) F acc[ROWS][2];
  for (int tile = 0; tile < count; tile += PANEL) {
    multiply<W>(m, chunk.keys + tile * dim, static_cast<const typename W::T*>(q.vectors), dim, dim, acc);
    if (is_plain && chunk.highest[tile / PANEL] <= low) {  // all see all
      for (int i = 0; i < m; i++)
        for (int half = 0; half < 2; half++) store(logits + i * CHUNK + tile + half * LANES, acc[i][half] * op.scale);
      continue;
    }
    for (int i = 0; i < m; i++)
      for (int at = tile; at < tile + PANEL; at += LANES)
        store(logits + i * CHUNK + at,
              finish_logits(op, group, key_products(op, chunk, acc[i][at > tile], at, q, i), chunk.position + at,
                            q.position[i], q.head[i]));
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

// Weights e^(logit - top) of one query, and their sum.
template <class T> Part soften(const float* logits, int count, T* weights) {
  F top = all(-INFINITY), total = F{};
  for (int s = 0; s < count; s += LANES) top = larger(load(logits + s), top);
  const float best = highest(top);
  const F base = all(best == -INFINITY ? 0.0f : best);
  for (int s = 0; s < count; s += LANES) {
    F p = exponential(load(logits + s) - base);
    total += p;
    store(weights + s, p);
  }
  const float whole = sum(total);  // NaN, if a logit is: then no part with it is left out
  return {whole == whole ? best : whole, whole};
}

// How sums of values, multiplied by words, become numbers.
struct Unpacked { float scale, zero; };

// Words of the weights times the scales of the values of visible slots.
template <class W>
Unpacked pack_weights(const Op& op, const Chunk<W>& chunk, int count, const float* logits, float* weights, uint16_t* out) {
  const bool has_zeros = op.values->format == STORE_INT4;
  F top = F{}, zero = F{};
  for (int s = 0; s < count; s += LANES) {
    const I seen = load(logits + s) != -INFINITY;
    const F p = load(weights + s), x = seen ? p * load(chunk.value_scale + s) : F{};
    if (has_zeros) zero += seen ? p * load(chunk.value_zero + s) : F{};
    top = larger_or_nan(top, x);
    store(weights + s, x);
  }
  const auto put = [&](I numbers, int s) { store_words(numbers, LANES, out + s); };
  return {to_integers(weights, count, highest_or_nan(top), 32767.0f, put).scale, sum(zero)};
}

// Weights of m queries as the values are multiplied by them.
template <class W>
void weigh(const Op& op, const Chunk<W>& chunk, int count, int m, const float* logits, typename W::T* weights,
           float* floats, Part* parts, Unpacked* unpacked) {
  for (int i = 0; i < m; i++) {
    const float* x = logits + i * CHUNK;
    if constexpr (W::IS_INTEGER) {
      parts[i] = soften(x, count, floats);
      unpacked[i] = pack_weights(op, chunk, count, x, floats, weights + i * CHUNK);
    } else {
      parts[i] = soften(x, count, weights + i * CHUNK);
    }
  }
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
    F suspect = F{};
    for (int d = 0; d < value_dim; d += LANES) suspect += load(out + i * value_dim + d) * 0.0f;
    if (!(sum(suspect) == 0))
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

  // Tiles of LANES slots whose products are computed together: enough of them to hide the latency of a sum.
  static constexpr int TILES = M == 1 ? 8 : M == 2 ? 4 : M <= 5 ? 2 : 1;
  static constexpr int64_t LINE = TILES * LANES;

  static void logits(const Op& op, const Group& group, int64_t kv, Chunk<W>& chunk, const Queries& queries, float* out) {
    const int dim = int(round_up(op.head_dim, 2)), words = dim / W::STEP;
    const T* q = static_cast<const T*>(queries.vectors);
    const int64_t heads = kv * op.values->blocks * group.block_size, bytes = slot_bytes(*op.values, op.value_dim);
    const int each = int(LINE + words - 1) / words;  // values that are loaded while a word is multiplied
    int loaded = 0;
    int32_t* arranged = reinterpret_cast<int32_t*>(chunk.keys);  // [words, LINE]
    for (int first = 0; first < chunk.count; first += LINE) {
      const int tiles = chunk.count - first < LINE ? (chunk.count - first) / LANES : TILES;
      for (int tile = 0; tile < tiles; tile++) arrange_tile(op, group, kv, chunk, first + tile * LANES, arranged + tile * LANES);
      V acc[TILES][M] = {};
      for (int word = 0; word < words; word++) {
        for (int i = 0; i < each && loaded < first + LINE && loaded < chunk.count; i++, loaded++)
          prefetch_vector(*op.values, heads + chunk.slot[loaded], bytes);
#pragma GCC unroll 8
        for (int tile = 0; tile < TILES; tile++)
#pragma GCC unroll 12
          for (int i = 0; i < M; i++)
            acc[tile][i] = W::dot(acc[tile][i], load_step(arranged + word * LINE + tile * LANES), q + i * dim + word * W::STEP);
      }
      for (int tile = 0; tile < tiles; tile++)
        for (int i = 0; i < M; i++) {
          const int at = first + tile * LANES;
          store(out + i * CHUNK + at,
                finish_logits(op, group, key_products(op, chunk, (F)acc[tile][i], at, queries, i), chunk.position + at,
                              queries.position[i], queries.head[i]));
        }
    }
  }

  static void arrange_tile(const Op& op, const Group& group, int64_t kv, Chunk<W>& chunk, int tile, int32_t* out) {
    Row rows[LANES];
    read_keys(op, group, kv, tile, chunk, rows);
    transpose_words<LINE>(reinterpret_cast<const int32_t* const*>(rows), int(round_up(op.head_dim, 2)) / W::STEP, out);
  }

  // Two lines of LANES dims each, of a step of slots; packed integers in a format of Store.
  template <int FORMAT> static void load_values(const Row* rows, int d, VI (&lines)[2]) {
    if constexpr (FORMAT != 0) {
      const int at = FORMAT == STORE_INT4 ? d / 2 : d;
      const char *first = reinterpret_cast<const char*>(rows[0]), *second = reinterpret_cast<const char*>(rows[1]);
      return interleave_halves(load_integers<FORMAT>(first + at), load_integers<FORMAT>(second + at), lines);
    }
    if constexpr (IS_HALF) interleave_halves(_mm512_loadu_si512(rows[0] + d), _mm512_loadu_si512(rows[1] + d), lines);
    else lines[0] = load_step(rows[0] + d), lines[1] = load_step(rows[0] + d + LANES);
  }

  template <int PANELS, int FORMAT>
  static void add_values(const Op& op, const Group& group, const Chunk<W>& chunk, int d, const T* weights, float* out,
                         int value_dim) {
    NextSlots next(group, *op.keys, op.head_dim, chunk);
    if (d) next.left = 0;
    V acc[PANELS][M][2];
#pragma GCC unroll 2
    for (int panel = 0; panel < PANELS; panel++)
#pragma GCC unroll 12
      for (int i = 0; i < M; i++) acc[panel][i][0] = acc[panel][i][1] = V{};
    for (int s = 0; s < chunk.count; s += W::STEP) {
      next.prefetch(W::STEP);
#pragma GCC unroll 2
      for (int panel = 0; panel < PANELS; panel++) {
        VI lines[2];
        load_values<FORMAT>(chunk.value + s, d + panel * PANEL, lines);
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

  static bool is_packed(const Op& op) { return W::IS_INTEGER && op.value_dim % PANEL == 0; }

  static void values(const Op& op, const Group& group, const Chunk<W>& chunk, const T* weights, float* out) {
    if constexpr (W::IS_INTEGER) {
      if (is_packed(op) && op.values->format == STORE_INT8)
        return add_panels<STORE_INT8>(op, group, chunk, weights, out);
      if (is_packed(op)) return add_panels<STORE_INT4>(op, group, chunk, weights, out);
    }
    add_panels<0>(op, group, chunk, weights, out);
  }

  template <int FORMAT>
  static void add_panels(const Op& op, const Group& group, const Chunk<W>& chunk, const T* weights, float* out) {
    const int value_dim = int(round_up(op.value_dim, PANEL));
    int d = 0;
    if constexpr (M <= 6)
      for (; d + 2 * PANEL <= value_dim; d += 2 * PANEL)
        add_values<2, FORMAT>(op, group, chunk, d, weights, out, value_dim);
    for (; d < value_dim; d += PANEL) add_values<1, FORMAT>(op, group, chunk, d, weights, out, value_dim);
  }
};

template <class W, int M>
void attend_few(const Op& op, const Group& group, int64_t kv, Chunk<W>& chunk, const Queries& queries, float* logits,
                typename W::T* weights, float* floats, Part* parts, float* out) {
  Unpacked unpacked[M];
  FewQueries<W, M>::logits(op, group, kv, chunk, queries, logits);
  const bool decode = !FewQueries<W, M>::is_packed(op);
  for (int tile = 0; tile < chunk.count; tile += LANES) read_values(op, group, kv, tile, decode, chunk);
  weigh(op, chunk, chunk.count, M, logits, weights, floats, parts, unpacked);
  FewQueries<W, M>::values(op, group, chunk, weights, out);
  finish_sums(op, chunk, chunk.count, M, logits, weights, unpacked, out);
}
#endif

// Merge a later part into ``to``. A part without visible slots changes nothing.
inline void merge(Part& to, float* out, const Part& part, const float* from, int dim) {
  if (part.top == -INFINITY) return;
  if (to.top == -INFINITY) return void((to = part, std::memcpy(out, from, dim * 4)));
  const float top = to.top > part.top ? to.top : part.top, a = std::exp(to.top - top), b = std::exp(part.top - top);
  to = {top, to.total * a + part.total * b};
  for (int d = 0; d < dim; d += LANES) store(out + d, load(out + d) * a + load(from + d) * b);
}

template <class T> void write_result(const Op& op, int head, Part part, const float* from, T* out) {
  if (head == op.heads - 1)
    for (int i = op.value_dim; i + head * op.value_dim < op.out_stride; i++) put(out + i, 0);
  if (op.sink_logits) {  // one more logit, without a value
    const float sink = op.sink_logits[head], top = part.top > sink ? part.top : sink;
    const float a = part.top == -INFINITY ? 0.0f : std::exp(part.top - top);
    const float total = part.total * a + std::exp(sink - top), factor = a / total;
    for (int d = 0; d < op.value_dim; d += LANES) store_first(out + d, load(from + d) * factor, op.value_dim - d);
    return;
  }
  const float factor = part.total == 0 ? 0.0f : 1.0f / part.total;
  for (int d = 0; d < op.value_dim; d += LANES) store_first(out + d, load(from + d) * factor, op.value_dim - d);
}

constexpr int BLOCK_QUERIES = 20 * ROWS;  // queries that read a chunk together

template <class W> struct AttentionMemory {  // of one thread
  typedef typename W::T T;
  Chunk<W> chunk;
  T *weights, *queries;
  float *logits, *floats, *out, *totals;
  int64_t bytes;
  AttentionMemory(const Op& op, char* at) {
    char* start = at;
    const int64_t dim = round_up(op.head_dim, 2), value_dim = round_up(op.value_dim, PANEL);
    auto take = [&at](int64_t bytes) { char* p = at; at += round_up(bytes, 64); return p; };
    chunk.keys = reinterpret_cast<T*>(take(CHUNK * dim * sizeof(T)));
    chunk.values = reinterpret_cast<T*>(take(CHUNK * value_dim * sizeof(T)));
    chunk.decoded_keys = reinterpret_cast<T*>(take(CHUNK * dim * sizeof(T)));
    chunk.decoded_values = reinterpret_cast<T*>(take(CHUNK * value_dim * sizeof(T)));
    chunk.position = reinterpret_cast<float*>(take(CHUNK * 4));
    float** numbers[] = {&chunk.key_scale, &chunk.key_zero, &chunk.value_scale, &chunk.value_zero, &floats};
    for (float** each : numbers) *each = W::IS_INTEGER ? reinterpret_cast<float*>(take(CHUNK * 4)) : nullptr;
    weights = reinterpret_cast<T*>(take(ROWS * CHUNK * sizeof(T)));
    queries = reinterpret_cast<T*>(take(BLOCK_QUERIES * dim * sizeof(T)));
    logits = reinterpret_cast<float*>(take(ROWS * CHUNK * 4));
    out = reinterpret_cast<float*>(take(ROWS * value_dim * 4));
    totals = reinterpret_cast<float*>(take(BLOCK_QUERIES * value_dim * 4));
    bytes = at - start;
  }
};

// A sub-batch is attended in one of two ways, with equal results. If there are many queries, a unit of work is a block of
// queries of one sequence and kv head, and reads all chunks. Else a unit is one chunk, and a second pass merges them.
struct Layout {
  int64_t groups, queries, chunks, blocks, value_dim;
  bool by_chunk;
  Layout(const Op& op, const SubBatch& batch, int threads)
      : groups(op.heads / op.kv_heads), queries(batch.num_new * groups), chunks((batch.slots + CHUNK - 1) / CHUNK),
        blocks((queries + BLOCK_QUERIES - 1) / BLOCK_QUERIES), value_dim(round_up(op.value_dim, PANEL)) {
    by_chunk = queries <= ROWS && chunks > 1 && batch.num_seqs * op.kv_heads < 8 * threads;
  }
  int64_t record() const { return value_dim + 16; }  // floats: Part, then the output
  int64_t record_bytes(const Op& op, const SubBatch& batch) const {
    return by_chunk ? batch.num_seqs * batch.num_new * op.heads * chunks * record() * 4 : 0;
  }
};

// True if keys and values are computed with as integers, whose sums fit into 32 bits.
inline bool uses_words(const Op& op) {
  auto is_packed = [](const Store& store) { return store.format == STORE_INT8 || store.format == STORE_INT4; };
  return op.type == TYPE_BFLOAT && is_packed(*op.keys) && is_packed(*op.values) && op.head_dim <= 512;
}

// W: of queries and output; C: of the products with keys and values, W or Words.
template <class W, class C> class Attention {
  typedef typename W::T T;
  const Run& run;
  const Op& op;
  const Group& group;
  AttentionMemory<C> memory;
  int heads[BLOCK_QUERIES];
  float query[BLOCK_QUERIES], query_scale[BLOCK_QUERIES], query_sum[BLOCK_QUERIES];
  int64_t token[BLOCK_QUERIES];

 public:
  Attention(const Run& run, const Op& op) : run(run), op(op), group(run.step.groups[op.group]), memory(op, run.own) {}

  void attend() {
    int64_t first_token = 0;
    for (int64_t i = 0; i < group.num_sub_batches; i++) {
      const SubBatch& batch = group.sub_batches[i];
      const Layout layout(op, batch, run.team.size);
      if (layout.by_chunk) attend_by_chunk(batch, layout, first_token);
      else attend_by_block(batch, layout, first_token);
      if (i + 1 < group.num_sub_batches) run.team.wait();
      first_token += batch.num_seqs * batch.num_new;
    }
  }

 private:
  // Copy queries low .. low + n of a sequence and kv head: by token, then by head of the group.
  void take_queries(const Layout& layout, int64_t first_token, int64_t kv, int64_t low, int n) {
    const T* q = run.buffer<T>(op.in);
    const int64_t dim = round_up(op.head_dim, 2);
    for (int i = 0; i < n; i++) {
      token[i] = first_token + (low + i) / layout.groups, heads[i] = int(kv * layout.groups + (low + i) % layout.groups);
      query[i] = float(run.step.positions[token[i]]);
      take_query(q + token[i] * op.in_stride + heads[i] * dim, int(dim), i);
    }
  }

  void take_query(const T* from, int dim, int i) {
    typename C::T* to = memory.queries + i * dim;
    if constexpr (!C::IS_INTEGER) {
      std::memcpy(to, from, dim * sizeof(T));
    } else {
      const auto put = [&](I numbers, int d) { store_words(numbers, dim - d, to + d); };
      const Integers integers = to_integers(from, dim, largest_of(from, dim), 32767.0f, put);
      query_scale[i] = integers.scale, query_sum[i] = float(integers.sum) * integers.scale;
    }
  }

  bool open(const SubBatch& batch, int64_t seq, int64_t kv, int64_t chunk, int n) {
    float low = query[0], high = query[0];
    for (int i = 1; i < n; i++) low = query[i] < low ? query[i] : low, high = query[i] > high ? query[i] : high;
    memory.chunk.table = batch.table + seq * batch.width;
    memory.chunk.first = chunk * CHUNK, memory.chunk.slots = batch.slots;
    if (!open_chunk<C>(group, low, high, memory.chunk)) return false;
    if (!reads_blocks(n)) arrange_chunk<C>(op, group, kv, memory.chunk);
    return true;
  }

  // Name the chunk that is read after the open one.
  void announce(const SubBatch& batch, int64_t seq, int64_t kv, int64_t chunk) {
    memory.chunk.next_table = batch.table + seq * batch.width, memory.chunk.next_kv = kv;
    memory.chunk.next_first = chunk * CHUNK, memory.chunk.next_slots = batch.slots;
  }

  // True if ``queries`` queries of a unit read the cache's blocks; more of them read an arranged copy.
  static bool reads_blocks(int64_t queries) {
#ifdef __AVX512F__
    return queries <= ROWS;
#else
    return false;
#endif
  }

  // Attend m queries, of n in the unit, to the open chunk.
  void attend_rows(int64_t kv, int from, int m, int n, Part* parts) {
    const Queries rows = {memory.queries + from * round_up(op.head_dim, 2), query + from, heads + from,
                          query_scale + from, query_sum + from};
    if (reads_blocks(n)) return attend_few_rows(kv, m, rows, parts);
    float high = rows.position[0];
    for (int i = 1; i < m; i++) high = rows.position[i] > high ? rows.position[i] : high;
    int count = memory.chunk.count;  // no query sees a slot behind it
    while (group.causal && count > PANEL && memory.chunk.lowest[count / PANEL - 1] > high) count -= PANEL;
    chunk_logits<C>(op, group, memory.chunk, count, m, rows, memory.logits);
    attend_chunk<C>(op, memory.chunk, count, m, memory.logits, memory.weights, memory.floats, parts, memory.out);
  }

  void attend_few_rows(int64_t kv, int m, const Queries& rows, Part* parts) {
#ifdef __AVX512F__
    switch (m) {
#define CASE(n) \
  case n: return attend_few<C, n>(op, group, kv, memory.chunk, rows, memory.logits, memory.weights, memory.floats, parts, \
                                  memory.out);
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
#endif
  }

  T* output(int64_t t, int head) const { return run.buffer<T>(op.out) + t * op.out_stride + head * op.value_dim; }

  void attend_by_block(const SubBatch& batch, const Layout& layout, int64_t first_token) {
    const int64_t units = batch.num_seqs * op.kv_heads * layout.blocks, dim = layout.value_dim;
    Part parts[ROWS], totals[BLOCK_QUERIES];
    int64_t next = run.team.take();
    for (int64_t unit; (unit = next) < units;) {
      next = run.team.take();
      const int64_t seq = unit / (op.kv_heads * layout.blocks), kv = unit / layout.blocks % op.kv_heads;
      const int64_t low = (layout.blocks - 1 - unit % layout.blocks) * BLOCK_QUERIES;  // the longest first
      const int n = int(layout.queries - low < BLOCK_QUERIES ? layout.queries - low : BLOCK_QUERIES);
      take_queries(layout, first_token + seq * batch.num_new, kv, low, n);
      for (int i = 0; i < n; i++) totals[i] = {-INFINITY, 0};
      std::memset(memory.totals, 0, n * dim * 4);
      for (int64_t chunk = 0; chunk < layout.chunks; chunk++) {
        if (chunk + 1 < layout.chunks) announce(batch, seq, kv, chunk + 1);
        else if (next < units) announce(batch, next / (op.kv_heads * layout.blocks), next / layout.blocks % op.kv_heads, 0);
        else memory.chunk.next_first = memory.chunk.next_slots = 0;
        if (!open(batch, seq, kv, chunk, n)) continue;
        for (int from = 0; from < n; from += ROWS) {
          const int m = n - from < ROWS ? n - from : ROWS;
          attend_rows(kv, from, m, n, parts);
          for (int i = 0; i < m; i++)
            merge(totals[from + i], memory.totals + (from + i) * dim, parts[i], memory.out + i * dim, int(dim));
        }
      }
      for (int i = 0; i < n; i++)
        write_result(op, heads[i], totals[i], memory.totals + i * dim, output(token[i], heads[i]));
    }
  }

  void attend_by_chunk(const SubBatch& batch, const Layout& layout, int64_t first_token) {
    const int64_t units = batch.num_seqs * op.kv_heads * layout.chunks, record = layout.record();
    float* records = reinterpret_cast<float*>(run.shared);
    const int n = int(layout.queries);
    Part parts[ROWS];
    for (int64_t unit = run.low(units); unit < run.high(units); unit++) {  // in sequence, because it reads ahead
      const int64_t seq = unit / (op.kv_heads * layout.chunks), kv = unit / layout.chunks % op.kv_heads;
      const int64_t chunk = unit % layout.chunks;
      take_queries(layout, first_token + seq * batch.num_new, kv, 0, n);
      const int64_t next = unit + 1 < run.high(units) ? unit + 1 : unit;
      announce(batch, next / (op.kv_heads * layout.chunks), next / layout.chunks % op.kv_heads, next % layout.chunks);
      const bool seen = open(batch, seq, kv, chunk, n);
      if (seen) attend_rows(kv, 0, n, n, parts);
      for (int i = 0; i < n; i++) {
        const int64_t row = (token[i] - first_token) * op.heads + heads[i];
        float* to = records + (row * layout.chunks + chunk) * record;
        to[0] = seen ? parts[i].top : -INFINITY, to[1] = seen ? parts[i].total : 0;
        if (seen) std::memcpy(to + 16, memory.out + i * layout.value_dim, layout.value_dim * 4);
      }
    }
    run.team.wait();
    const int64_t rows = batch.num_seqs * batch.num_new * op.heads;
    for (int64_t row = run.low(rows); row < run.high(rows); row++) {
      float* at = records + row * layout.chunks * record;
      Part total = {-INFINITY, 0};
      std::memset(memory.totals, 0, layout.value_dim * 4);
      for (int64_t chunk = 0; chunk < layout.chunks; chunk++) {
        const float* part = at + chunk * record;
        merge(total, memory.totals, {part[0], part[1]}, part + 16, int(layout.value_dim));
      }
      write_result(op, int(row % op.heads), total, memory.totals, output(first_token + row / op.heads, int(row % op.heads)));
    }
  }
};

}  // namespace
