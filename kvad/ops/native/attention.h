// Rotation, cache writes, and attention over the slots of block tables.
#pragma once
#include "store.h"

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
      rotate_head(op, x + head * dim, angle, out);
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

// One chunk of a kv head, arranged like weights: keys [dim / STEP, PANEL, STEP] for every PANEL slots, values
// [CHUNK / STEP, PANEL, STEP] for every PANEL dims.
template <class W> struct Chunk {
  typedef typename W::T T;
  T *keys, *values, *decoded_keys, *decoded_values;
  float* position;  // of each slot, -1: empty; exact below 2^24
  int count;        // slots that some query may see, rounded up to PANEL
};

#ifdef __AVX512F__
inline void transpose(__m512i (&r)[16]) {  // 16 rows of 16 words
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
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

// Write 16 vectors of words of 4 bytes as columns of out [words, PANEL].
inline void transpose_words(const int32_t* const* rows, int words, int32_t* out) {
  int word = 0;
#ifdef __AVX512F__
  for (; word + 16 <= words; word += 16) {
    __m512i r[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(rows[i] + word);
    transpose(r);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + (word + i) * PANEL, r[i]);
  }
#endif
  for (; word < words; word++)
    for (int i = 0; i < 16; i++) out[word * PANEL + i] = rows[i][word];
}

// Write the values of a step of slots as lines of every panel, PANEL dims each.
inline void interleave(const bf16* const* rows, int dim, bf16* out, int64_t panel) {  // a0 b0 a1 b1 ...
  for (int i = 0; i < dim; i += PANEL, out += panel) {
#ifdef __AVX512BW__
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    __m512i x = _mm512_loadu_si512(rows[0] + i), y = _mm512_loadu_si512(rows[1] + i);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(x, low, y));
    _mm512_storeu_si512(out + PANEL, _mm512_permutex2var_epi16(x, high, y));
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
  if (!group.causal) return true;
  const float ahead = query - key;
  if (ahead < 0 || (group.layer_window && ahead >= group.layer_window)) return false;
  if (!group.window || key < group.num_sinks) return true;
  if (group.window_step == 1) return ahead < group.window;
  const int64_t first = query < group.window ? 0 : int64_t(query) - group.window + 1;
  return key >= round_up(first, group.window_step);
}

template <class T> const T* direct(const Store& store, int dim) {  // vectors that need not be decoded or padded
  const bool same = store.format == (sizeof(T) == 2 ? STORE_BFLOAT : STORE_FLOAT);
  return same && dim % PANEL == 0 ? static_cast<const T*>(store.data) : nullptr;
}

// Read the positions of a chunk's slots. Returns false if no query of [low, high] sees one of them.
template <class W>
bool open_chunk(const Group& group, const int64_t* table, int64_t first, int count, float low, float high,
                Chunk<W>& chunk) {
  int last = -1;
  for (int i = 0; i < count; i++) {
    const int64_t slot = first + i;
    const float p = float(group.positions[table[slot / group.block_size] * group.block_size + slot % group.block_size]);
    chunk.position[i] = p;
    const bool in_reach = !group.causal || p <= high;
    const bool recent = !group.causal || !group.window || p < group.num_sinks || low - p < group.window;
    if (p >= 0 && in_reach && recent) last = i;
  }
  chunk.count = int(round_up(last + 1, PANEL));
  for (int i = count; i < chunk.count; i++) chunk.position[i] = -1;
  return last >= 0;
}

template <class W>
void read_chunk(const Op& op, const Group& group, const int64_t* table, int64_t first, int count, int64_t kv,
                Chunk<W>& chunk) {
  typedef typename W::T T;
  static const T zeros[MAX_HEAD_DIM] = {};
  const int dim = int(round_up(op.head_dim, 2)), value_dim = int(round_up(op.value_dim, PANEL));
  const T *keys = direct<T>(*op.keys, op.head_dim), *values = direct<T>(*op.values, op.value_dim);
  const T *k[CHUNK], *v[CHUNK];
  for (int i = 0; i < chunk.count; i++) {
    k[i] = v[i] = zeros;
    if (i >= count || chunk.position[i] < 0) continue;  // what an empty slot holds may not be finite
    const int64_t slot = first + i, offset = slot % group.block_size;
    const int64_t at = (kv * op.keys->blocks + table[slot / group.block_size]) * group.block_size + offset;
    if (keys) k[i] = keys + at * dim;
    else read_vector(*op.keys, at, op.head_dim, dim, chunk.decoded_keys + i * dim), k[i] = chunk.decoded_keys + i * dim;
    if (values) v[i] = values + at * value_dim;
    else {
      T* decoded = chunk.decoded_values + i * value_dim;
      read_vector(*op.values, at, op.value_dim, value_dim, decoded), v[i] = decoded;
    }
  }
  const int words = dim / W::STEP;
  for (int tile = 0; tile < chunk.count; tile += LANES) {
    int32_t* out = reinterpret_cast<int32_t*>(chunk.keys) + int64_t(tile / PANEL) * words * PANEL + tile % PANEL;
    transpose_words(reinterpret_cast<const int32_t* const*>(k + tile), words, out);
  }
  for (int i = 0; i < chunk.count; i += W::STEP)
    interleave(v + i, value_dim, chunk.values + i * PANEL, int64_t(CHUNK) * PANEL);
}

struct Part { float top, total; };  // of one query over some slots: largest logit, sum of e^(logit - top)

// Logits [m, CHUNK] of m queries at ``query`` positions; -inf if invisible.
template <class W>
void chunk_logits(const Op& op, const Group& group, const Chunk<W>& chunk, int m, const typename W::T* q,
                  const float* query, const int* heads, float* logits) {
  const int dim = int(round_up(op.head_dim, 2));
  const bool simple = (!group.window || group.window_step == 1);
  F acc[ROWS][2];
  for (int tile = 0; tile < chunk.count; tile += PANEL) {
    multiply<W>(m, chunk.keys + tile * dim, q, dim, dim, acc);
    for (int i = 0; i < m; i++)
      for (int half = 0; half < 2; half++) {
        const int at = tile + half * LANES;
        F x = acc[i][half] * op.scale, p = load(chunk.position + at), ahead = query[i] - p;
        if (op.softcap > 0) x = op.softcap * tangent(x / op.softcap);
        if (op.slopes) x -= op.slopes[heads[i]] * larger(ahead, -ahead);
        if (op.position_bias)
          for (int j = 0; j < LANES; j++) {
            const int distance = ahead[j] < 0 ? 0 : ahead[j] >= op.bias_size ? op.bias_size - 1 : int(ahead[j]);
            x[j] += op.position_bias[heads[i] * op.bias_size + distance];
          }
        I seen = p >= 0.0f;
        if (!simple) {
          for (int j = 0; j < LANES; j++) seen[j] = visible(group, query[i], p[j]) ? -1 : 0;
        } else if (group.causal) {
          seen &= ahead >= 0.0f;
          if (group.window) seen &= (ahead < float(group.window)) | (p < float(group.num_sinks));
          if (group.layer_window) seen &= ahead < float(group.layer_window);
        }
        store(logits + i * CHUNK + at, seen ? x : all(-INFINITY));
      }
  }
}

// Sum the values of visible slots only, because 0 x NaN is NaN.
template <class W>
void sum_visible(const Chunk<W>& chunk, const float* logits, const typename W::T* weights, int value_dim, float* out) {
  for (int d = 0; d < value_dim; d++) {
    const typename W::T* panel = chunk.values + int64_t(d / PANEL) * CHUNK * PANEL;
    float total = 0;
    for (int s = 0; s < chunk.count; s++)
      if (logits[s] != -INFINITY) {
        const int64_t at = s / W::STEP * (PANEL * W::STEP) + d % PANEL * W::STEP + s % W::STEP;
        total += widen(weights[s]) * widen(panel[at]);
      }
    out[d] = total;
  }
}

// Attend m queries to one chunk: out [m, padded value_dim], not divided by the total.
template <class W>
void attend_chunk(const Op& op, const Chunk<W>& chunk, int m, const float* logits, typename W::T* weights, Part* parts,
                  float* out) {
  const int value_dim = int(round_up(op.value_dim, PANEL));
  for (int i = 0; i < m; i++) {
    F top = all(-INFINITY), total = F{};
    for (int s = 0; s < chunk.count; s += LANES) {
      F x = load(logits + i * CHUNK + s);
      top = x > top ? x : (x == x ? top : x);  // NaN stays
    }
    const float best = highest(top);
    const F base = all(best == -INFINITY ? 0.0f : best);
    for (int s = 0; s < chunk.count; s += LANES) {
      F p = exponential(load(logits + i * CHUNK + s) - base);
      total += p;
      store(weights + i * CHUNK + s, p);
    }
    parts[i] = {best, sum(total)};
  }
  F acc[ROWS][2], suspect[ROWS] = {};
  for (int d = 0; d < value_dim; d += PANEL) {
    multiply<W>(m, chunk.values + int64_t(d) * CHUNK, weights, CHUNK, chunk.count, acc);
    for (int i = 0; i < m; i++) {
      store(out + i * value_dim + d, acc[i][0]), store(out + i * value_dim + d + LANES, acc[i][1]);
      suspect[i] += (acc[i][0] + acc[i][1]) * 0.0f;
    }
  }
  for (int i = 0; i < m; i++)
    if (!(sum(suspect[i]) == 0)) sum_visible<W>(chunk, logits + i * CHUNK, weights + i * CHUNK, value_dim, out + i * value_dim);
}

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
  float *logits, *out, *totals;
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

template <class W> class Attention {
  typedef typename W::T T;
  const Run& run;
  const Op& op;
  const Group& group;
  AttentionMemory<W> memory;
  int heads[BLOCK_QUERIES];
  float query[BLOCK_QUERIES];
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
      std::memcpy(memory.queries + i * dim, q + token[i] * op.in_stride + heads[i] * dim, dim * sizeof(T));
    }
  }

  bool open(const SubBatch& batch, int64_t seq, int64_t kv, int64_t chunk, int n) {
    float low = query[0], high = query[0];
    for (int i = 1; i < n; i++) low = query[i] < low ? query[i] : low, high = query[i] > high ? query[i] : high;
    const int64_t first = chunk * CHUNK, *table = batch.table + seq * batch.width;
    const int count = int(batch.slots - first < CHUNK ? batch.slots - first : CHUNK);
    if (!open_chunk<W>(group, table, first, count, low, high, memory.chunk)) return false;
    read_chunk<W>(op, group, table, first, count, kv, memory.chunk);
    return true;
  }

  void attend_rows(int from, int m, Part* parts) {
    const T* q = memory.queries + from * round_up(op.head_dim, 2);
    chunk_logits<W>(op, group, memory.chunk, m, q, query + from, heads + from, memory.logits);
    attend_chunk<W>(op, memory.chunk, m, memory.logits, memory.weights, parts, memory.out);
  }

  T* output(int64_t t, int head) const { return run.buffer<T>(op.out) + t * op.out_stride + head * op.value_dim; }

  void attend_by_block(const SubBatch& batch, const Layout& layout, int64_t first_token) {
    const int64_t units = batch.num_seqs * op.kv_heads * layout.blocks, dim = layout.value_dim;
    Part parts[ROWS], totals[BLOCK_QUERIES];
    for (int64_t unit; (unit = run.team.ticket.fetch_add(1, std::memory_order_relaxed)) < units;) {
      const int64_t seq = unit / (op.kv_heads * layout.blocks), kv = unit / layout.blocks % op.kv_heads;
      const int64_t low = (layout.blocks - 1 - unit % layout.blocks) * BLOCK_QUERIES;  // the longest first
      const int n = int(layout.queries - low < BLOCK_QUERIES ? layout.queries - low : BLOCK_QUERIES);
      take_queries(layout, first_token + seq * batch.num_new, kv, low, n);
      for (int i = 0; i < n; i++) totals[i] = {-INFINITY, 0};
      std::memset(memory.totals, 0, n * dim * 4);
      for (int64_t chunk = 0; chunk < layout.chunks; chunk++) {
        if (!open(batch, seq, kv, chunk, n)) continue;
        for (int from = 0; from < n; from += ROWS) {
          const int m = n - from < ROWS ? n - from : ROWS;
          attend_rows(from, m, parts);
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
    for (int64_t unit; (unit = run.team.ticket.fetch_add(1, std::memory_order_relaxed)) < units;) {
      const int64_t seq = unit / (op.kv_heads * layout.chunks), kv = unit / layout.chunks % op.kv_heads;
      const int64_t chunk = unit % layout.chunks;
      take_queries(layout, first_token + seq * batch.num_new, kv, 0, n);
      const bool seen = open(batch, seq, kv, chunk, n);
      if (seen) attend_rows(0, n, parts);
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
