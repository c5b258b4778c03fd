// Rotation, cache writes, and attention over the chunks of sequences.
#pragma once
#include "attend_tiles.h"

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


// Merge a later part into ``to``. A part without visible slots changes nothing.
inline void merge(Part& to, float* out, const Part& part, const float* from, int dim) {
  if (part.top == -INFINITY) return;
  if (to.top == -INFINITY) return void((to = part, std::memcpy(out, from, dim * 4)));
  const float top = to.top > part.top ? to.top : part.top, a = std::exp2(to.top - top), b = std::exp2(part.top - top);
  to = {top, to.total * a + part.total * b};
  for (int d = 0; d < dim; d += LANES) store(out + d, load(out + d) * a + load(from + d) * b);
}

template <class T> void write_result(const Op& op, int head, Part part, const float* from, T* out) {
  if (head == op.heads - 1)
    for (int i = op.value_dim; i + head * op.value_dim < op.out_stride; i++) put(out + i, 0);
  if (op.sink_logits) {  // one more logit, without a value
    const float sink = op.sink_logits[head] * LOG2_E, top = part.top > sink ? part.top : sink;
    const float a = part.top == -INFINITY ? 0.0f : std::exp2(part.top - top);
    const float total = part.total * a + std::exp2(sink - top), factor = a / total;
    for (int d = 0; d < op.value_dim; d += LANES) store_first(out + d, load(from + d) * factor, op.value_dim - d);
    return;
  }
  const float factor = part.total == 0 ? 0.0f : 1.0f / part.total;
  for (int d = 0; d < op.value_dim; d += LANES) store_first(out + d, load(from + d) * factor, op.value_dim - d);
}

constexpr int BLOCK_QUERIES = 20 * REGISTER_ROWS;  // queries that read a chunk together

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

// True if keys and values are computed with as integers, whose sums fit into 32 bits.
inline bool uses_words(const Op& op) {
  auto is_packed = [](const Store& store) { return store.format == STORE_INT8 || store.format == STORE_INT4; };
  return op.type == TYPE_BFLOAT && is_packed(*op.keys) && is_packed(*op.values) && op.head_dim <= 512;
}
inline int queries_together(const Op& op) {
  return op.type == TYPE_BFLOAT && !uses_words(op) ? BFloat::TOGETHER : Words::TOGETHER;
}

// A sub-batch is attended in one of two ways, with equal results. If there are many queries, a unit of work is a block of
// queries of one sequence and kv head, and reads all chunks. Else a unit is one chunk, and a second pass merges them.
struct Layout {
  int64_t groups, queries, chunks, blocks, value_dim;
  bool by_chunk;
  Layout(const Op& op, const SubBatch& batch, int threads)
      : groups(op.heads / op.kv_heads), queries(batch.num_new * groups), chunks((batch.slots + CHUNK - 1) / CHUNK),
        blocks((queries + BLOCK_QUERIES - 1) / BLOCK_QUERIES), value_dim(round_up(op.value_dim, PANEL)) {
    by_chunk = queries <= queries_together(op) && chunks > 1 && batch.num_seqs * op.kv_heads < 8 * threads;
  }
  int64_t record() const { return value_dim + 16; }  // floats: Part, then the output
  int64_t record_bytes(const Op& op, const SubBatch& batch) const {
    return by_chunk ? batch.num_seqs * batch.num_new * op.heads * chunks * record() * 4 : 0;
  }
};

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
      const Integers integers = to_integers(from, dim, largest_of(from, dim), HIGHEST_WORD, put);
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

  bool reads_by_tiles(int64_t queries) const {
#ifdef KVAD_TILES
    if constexpr (!std::is_same_v<C, Float>) return TileQueries<C>::can_read(op, group, queries);
#endif
    return false;
  }

  // True if ``queries`` queries of a unit read the cache's blocks; more of them read an arranged copy.
  bool reads_blocks(int64_t queries) const {
    if (reads_by_tiles(queries)) return true;
#ifdef __AVX512F__
    return queries <= REGISTER_ROWS && C::TOGETHER == REGISTER_ROWS;
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
#ifdef KVAD_TILES
    if constexpr (!std::is_same_v<C, Float>)
      if (reads_by_tiles(m))
        return TileQueries<C>::attend(op, group, kv, memory.chunk, m, rows, memory.logits, memory.weights, memory.floats,
                                      parts, memory.out);
#endif
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
        for (int from = 0; from < n; from += C::TOGETHER) {
          const int m = n - from < C::TOGETHER ? n - from : C::TOGETHER;
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
      if (!chunk || unit == run.low(units)) take_queries(layout, first_token + seq * batch.num_new, kv, 0, n);
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
