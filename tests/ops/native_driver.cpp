// Random programs for the CPU kernels under sanitizers: every array is exactly as large as the kernels may touch.
// Threads are std::thread (OpenMP's own are unknown to ThreadSanitizer), and their number must not change a bit.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <numeric>
#include <sanitizer/asan_interface.h>
#include <thread>
#include <utility>
#include <vector>

#include "step.cpp"

namespace {

struct Batch { int64_t num_seqs, num_new, context; };  // context: earlier tokens of the longest sequence
struct Dims { int head, value; };
struct Weights { int bits, group, hidden; };
enum Pattern {
  CAUSAL, WINDOW, SINKS, WINDOW_STEP, LAYER_WINDOW, TWO_SIDED, TWO_SIDED_WINDOW, EXTRAS, PATTERNS = 13
};

// The lengths of these lists have no common factor, so that consecutive programs have all pairs of entries.
const std::vector<Batch> BATCHES[] = {{{1, 1, 0}}, {{1, 1, 700}}, {{7, 1, 300}}, {{1, 12, 20}}, {{1, 13, 250}},
                                      {{1, 40, 0}}, {{5, 1, 530}, {1, 3, 10}}, {{2, 4, 600}},
                                      {{1, 90, 190}, {3, 1, 9}}};
const Weights WEIGHTS[] = {{0, 1, 45}, {8, 2, 42}, {4, 2, 42}, {8, 8, 40}, {4, 8, 40}, {8, 32, 96}, {4, 32, 96},
                           {8, 600, 600}, {4, 600, 600}, {0, 1, 96}, {0, 1, 64}};
const int BLOCK_SIZES[] = {1, 4, 16, 0, 7};  // 0: a sequence is one block
const Dims DIMS[] = {{64, 64}, {20, 24}, {32, 96}, {17, 19}};
constexpr int FORMATS = 7, VOCABULARY = 77, MAX_RANK = 7;

int padded(int64_t numbers) { return int(round_up(numbers, PANEL) + (round_up(numbers, PANEL) % 1024 ? 0 : PANEL)); }

class Program {
  const int index, type, heads, kv_heads;
  const Weights weights;
  uint64_t state;
  std::vector<std::unique_ptr<char[]>> memory;
  std::vector<std::pair<const char*, int64_t>> written;
  std::vector<Op> ops;
  std::vector<int64_t> widths, table_sizes;
  std::vector<SubBatch> batches;
  std::vector<std::pair<int64_t, int64_t>> earlier, fresh;  // position and slot of tokens in the cache, and of new ones
  int64_t blocks = 1, length = 0;
  Store keys{}, values{};
  Experts experts{};
  Op gate_up{}, down{};
  Group group{};
  Step step{};

 public:
  explicit Program(int index)
      : index(index), type(index % 2), heads(index / 2 % 2 ? 6 : 2), kv_heads(2), weights(WEIGHTS[index % 11]),
        state(index) {
    make_tables();
    make_step();
    Dims dims = packs_cache() ? Dims{128, 64} : DIMS[index / 3 % 4];
    const int key_format = packs_cache() ? STORE_INT4 - index / 10 % 2 : index % FORMATS;
    const int value_format = packs_cache() ? key_format : (index + index / FORMATS) % FORMATS;
    if (key_format == STORE_INT4) dims.head += dims.head % 2;  // two numbers per byte
    if (value_format == STORE_INT4) dims.value += dims.value % 2;
    make_store(keys, key_format, dims.head), make_store(values, value_format, dims.value);
    make_layers(dims);
  }

  // Run with some threads; returns all that was written.
  std::vector<char> run(int threads) {
    Model model{ops.data(), widths.data(), int64_t(ops.size()), int64_t(widths.size()), threads, nullptr, 0, 0};
    const Sizes needed = sizes(model, step, threads);
    void* scratch = nullptr;
    const int64_t bytes = needed.buffers + needed.own * threads + needed.shared;
    if (posix_memalign(&scratch, 4096, bytes)) std::abort();
    std::memset(scratch, 0xff, bytes);  // NaN
    char* at = model.scratch = static_cast<char*>(scratch);
    for (int64_t width : widths) {
      written.emplace_back(at, width * step.tokens);
      char* end = at + round_up(width * step.tokens, 64) + 64;
      ASAN_POISON_MEMORY_REGION(at + width * step.tokens, end - (at + width * step.tokens));
      at = end;
    }
    Team team;
    team.size = threads;
    std::vector<std::thread> others;
    for (int i = 1; i < threads; i++) others.emplace_back([&, i] { run_thread(model, step, needed, team, i); });
    run_thread(model, step, needed, team, 0);
    for (std::thread& thread : others) thread.join();
    std::vector<char> result;
    for (const auto& part : written) result.insert(result.end(), part.first, part.first + part.second);
    for (int64_t i = 0; i < step.num_logits * VOCABULARY; i++)
      if (!std::isfinite(step.logits[i])) result.clear();
    std::free(scratch);
    return result;
  }

 private:
  // Every tenth program has a cache that few queries multiply as bytes or by tiles, if the processor can.
  bool packs_cache() const { return index % 10 == 9; }

  uint32_t random() { return uint32_t((state = state * 6364136223846793005u + 1442695040888963407u) >> 33); }
  float uniform() { return float(random() % 2001) / 1000 - 1; }

  template <class T> T* array(int64_t n) {
    memory.emplace_back(new char[n * sizeof(T)]);
    return reinterpret_cast<T*>(std::memset(memory.back().get(), 0xff, n * sizeof(T)));
  }
  float* floats(int64_t n, float scale = 1, float center = 0) {
    float* x = array<float>(n);
    for (int64_t i = 0; i < n; i++) x[i] = center + scale * uniform();
    return x;
  }
  void* numbers(int64_t n, float scale) {  // of the type of the weights
    if (type == TYPE_FLOAT) return floats(n, scale);
    bf16* x = array<bf16>(n);
    for (int64_t i = 0; i < n; i++) put(x + i, scale * uniform());
    return x;
  }

  // Block tables whose blocks are shuffled; block 0 is empty and fills up the tables of shorter sequences.
  void make_tables() {
    const std::vector<Batch>& all = BATCHES[index % 9];
    group.block_size = packs_cache() ? LANES : BLOCK_SIZES[index % 5];
    for (const Batch& batch : all) length = std::max(length, batch.context + batch.num_new);
    if (!group.block_size) group.block_size = length + 3;
    for (const Batch& batch : all) {
      const int64_t longest = batch.context + batch.num_new;
      const int64_t width = (longest + group.block_size - 1) / group.block_size;
      const int64_t slots = width == 1 ? longest : width * group.block_size;
      batches.push_back({batch.num_seqs, batch.num_new, width, slots, nullptr});
      blocks += batch.num_seqs * width;
    }
    std::vector<int64_t> shuffled(blocks - 1);
    std::iota(shuffled.begin(), shuffled.end(), 1);
    for (size_t i = shuffled.size(); i > 1; i--) std::swap(shuffled[i - 1], shuffled[random() % i]);
    for (size_t i = 0; i < all.size(); i++) {
      int64_t* table = array<int64_t>(all[i].num_seqs * batches[i].width);
      batches[i].table = table;
      for (int64_t seq = 0; seq < all[i].num_seqs; seq++, table += batches[i].width) {
        const int64_t context = std::max<int64_t>(0, all[i].context - 40 * seq), end = context + all[i].num_new;
        for (int64_t block = 0; block < batches[i].width; block++) {
          table[block] = block * group.block_size < end ? shuffled.back() : 0;
          if (table[block]) shuffled.pop_back();
        }
        for (int64_t p = 0; p < end; p++) {
          const int64_t slot = table[p / group.block_size] * group.block_size + p % group.block_size;
          if (p >= context) fresh.emplace_back(p, slot);
          else if (random() % 9) earlier.emplace_back(p, slot);  // the others are empty now
        }
      }
    }
  }

  void make_step() {
    const int pattern = index % PATTERNS, tokens = int(fresh.size());
    int64_t *ids = array<int64_t>(tokens), *positions = array<int64_t>(tokens), *slots = array<int64_t>(tokens);
    int64_t* lens = array<int64_t>(tokens);
    for (int i = 0; i < tokens; i++) {
      ids[i] = random() % VOCABULARY, positions[i] = fresh[i].first, slots[i] = fresh[i].second;
      lens[i] = positions[i] + 1;
    }
    group.slots = slots, group.positions = array<int64_t>(blocks * group.block_size);  // -1: empty
    for (const auto& token : earlier) group.positions[token.second] = token.first;
    group.sub_batches = batches.data(), group.num_sub_batches = int64_t(batches.size());
    group.causal = pattern != TWO_SIDED && pattern != TWO_SIDED_WINDOW,
    group.window_step = pattern == WINDOW_STEP ? 8 : 1;
    const bool sinks = pattern == SINKS || pattern == WINDOW_STEP;
    const bool windowed = sinks || pattern == WINDOW || pattern == TWO_SIDED_WINDOW;
    group.window = windowed ? 37 : 0, group.num_sinks = sinks ? 4 : 0;
    group.layer_window = pattern == LAYER_WINDOW ? 21 : 0;
    const int64_t num_logits = (tokens + 1) / 2;
    int64_t* indices = array<int64_t>(num_logits);
    for (int64_t i = 0; i < num_logits; i++) indices[i] = tokens - 1 - 2 * i;
    float* logits = array<float>(num_logits * VOCABULARY);
    int32_t* adapters = index % 4 ? array<int32_t>(tokens) : nullptr;
    for (int i = 0; adapters && i < tokens; i++) adapters[i] = random() % 3;
    int32_t* best = array<int32_t>(num_logits);
    int64_t* all = array<int64_t>(tokens);
    std::iota(all, all + tokens, 0);
    float* hidden = array<float>(tokens * weights.hidden);
    written.emplace_back(reinterpret_cast<char*>(hidden), tokens * weights.hidden * 4);
    step = {tokens, num_logits, 1, ids, positions, indices, lens, &group, adapters, logits, tokens, all, hidden, VOCABULARY - 5, best, nullptr};
    written.emplace_back(reinterpret_cast<char*>(best), num_logits * 4);
    written.emplace_back(reinterpret_cast<char*>(step.logits), num_logits * VOCABULARY * 4);
    written.emplace_back(reinterpret_cast<char*>(group.positions), blocks * group.block_size * 8);
  }

  void make_store(Store& to, int format, int dim) {
    int64_t last = 0;  // used slot; the array ends there, because empty slots are not read, or after its tile
    for (const auto* tokens : {&earlier, &fresh})
      for (const auto& token : *tokens) last = std::max(last, token.second);
    bool has_tiles = false;  // read whole
#ifdef KVAD_TILES
    has_tiles = &to == &keys && format == STORE_BFLOAT && group.block_size % LANES == 0 && dim % PANEL == 0;
#endif
#ifdef KVAD_BYTES
    has_tiles = has_tiles || packs_cache();
#endif
    const int64_t used = round_up(last + 1, has_tiles ? LANES : 1);
    const int64_t slots = (kv_heads - 1) * blocks * group.block_size + used;
    to.blocks = blocks, to.format = format;
    const int64_t bytes = slots * slot_bytes(to, dim);
    written.emplace_back(static_cast<char*>(to.data = array<char>(bytes)), bytes);
    for (float** part : {&to.scale, &to.zero}) {
      if (format != STORE_INT4 && (format != STORE_INT8 || part == &to.zero)) continue;
      written.emplace_back(reinterpret_cast<char*>(*part = array<float>(slots)), slots * 4);
    }
    for (const auto& token : earlier)
      for (int head = 0; head < kv_heads; head++) {
        float x[MAX_HEAD_DIM];
        for (int i = 0; i < dim; i++) x[i] = uniform();
        write_vector(to, head * blocks * group.block_size + token.second, x, dim);
      }
  }

  int buffer(int64_t numbers, bool is_float) {
    widths.push_back(numbers * (is_float || type == TYPE_FLOAT ? 4 : 2));
    return int(widths.size()) - 1;
  }

  Op& add_op(int kind, int in, int in_stride, int out, int out_stride, int k) {
    Op op{};
    op.kind = kind, op.type = type, op.in = in, op.in_stride = in_stride, op.out = out, op.out_stride = out_stride;
    op.k = k, op.scale = 1;
    ops.push_back(op);
    return ops.back();
  }

  // Two adapters of a product: one with two terms, which share a panel if the number of panels is odd, and one with a
  // term in the last panel.
  Adapter* make_adapters(int64_t panels, int k) {
    const auto term = [&](int64_t rank, int64_t first, int64_t count) {
      return LoraTerm{floats(rank * k, 0.2f), floats(rank * count * PANEL, 0.2f), rank, first, count};
    };
    LoraTerm* terms = array<LoraTerm>(3);
    terms[0] = term(3, 0, (panels + 1) / 2), terms[1] = term(2, panels / 2, panels - panels / 2);
    terms[2] = term(1 + index % MAX_RANK, panels - 1, 1);
    Adapter* adapters = array<Adapter>(2);
    adapters[0] = {terms, 2}, adapters[1] = {terms + 2, 1};
    return adapters;
  }

  Op& product(int in, int in_stride, int k, int out, int out_stride, int n, int mode) {
    const int64_t rows = round_up(n, PANEL);
    const Adapter* adapters = mode == OUT_LOGITS ? nullptr : make_adapters(rows / PANEL, k);
    const int low = adapters ? buffer(MAX_RANK, true) : 0;
    if (adapters) {
      Op& lora = add_op(OP_LORA, in, in_stride, low, MAX_RANK, k);
      lora.adapters = adapters, lora.n = MAX_RANK;
    }
    Op& op = add_op(OP_LINEAR, in, in_stride, out, out_stride, k);
    op.adapters = adapters, op.low = low, op.low_stride = MAX_RANK;
    op.mode = mode, op.n = int(mode == OUT_LOGITS ? n : rows), op.activation = 1 + index % TANH;
    if (index % 3) op.bias = floats(rows, 0.1f);
    set_weights(op, k, n);
    return op;
  }

  // Quantized, if the inputs are whole groups.
  void set_weights(Op& op, int k, int64_t n) {
    const int64_t rows = round_up(n, PANEL), groups = k / weights.group;
    const int even = int(round_up(k, 2)), bytes = type == TYPE_FLOAT ? 4 : 2, scale_bytes = index % 3 ? 2 : 4;
    op.k = k;
    if (!weights.bits || k % weights.group) {
      op.k = even;
      std::vector<const void*> from;
      for (int row = 0; row < n; row++) from.push_back(numbers(k, 0.2f));
      char* panels = array<char>(rows * even * bytes);
      kvad_pack(from.data(), n, k, even, bytes, panels, 1);
      op.weight = panels;
      return;
    }
    op.bits = weights.bits, op.quantized_group = weights.group, op.half_scales = scale_bytes == 2;
    op.activation_bits = index % 5 < 2 ? 8 : 0;
    std::vector<const uint8_t*> data;
    std::vector<const char*> scales[2];  // and minima
    for (int row = 0; row < n; row++) {
      uint8_t* x = array<uint8_t>(k * weights.bits / 8);
      for (int i = 0; i < k * weights.bits / 8; i++) x[i] = uint8_t(random());
      data.push_back(x);
      for (int part = 0; part < 2; part++) {
        float* factors = floats(groups, 0.001f, part ? -0.008f : 0.001f);
        uint16_t* halves = array<uint16_t>(groups);
        for (int64_t i = 0; i < groups; i++) halves[i] = float_to_half(factors[i]);
        scales[part].push_back(op.half_scales ? reinterpret_cast<char*>(halves) : reinterpret_cast<char*>(factors));
      }
    }
    op.is_e2m1 = weights.bits == 4 && index % 2;
    const bool has_minima = weights.bits == 4 && !op.is_e2m1;
    const int64_t bytes_of_group = group_bytes(weights.group, weights.bits, scale_bytes, has_minima);
    uint8_t* panels = array<uint8_t>(rows / PANEL * groups * bytes_of_group);
    kvad_pack_quantized(data.data(), scales[0].data(), has_minima ? scales[1].data() : nullptr, n, groups, weights.group, weights.bits,
                        scale_bytes, panels, 1);
    op.weight = panels;
  }

  Op& normalize(int from, int to, bool out_float, int kind) {
    const int width = weights.hidden, stride = padded(width);
    Op& op = add_op(OP_NORM, from, stride, to, stride, width);
    op.mode = kind, op.eps = 1e-5f, op.out_float = out_float;
    if (kind != NORM_NONE) op.weight = floats(width);
    if (kind == NORM_LAYER) op.bias = floats(width);
    return op;
  }

  void make_layers(Dims dims) {
    const int size = weights.hidden, stride = padded(size);
    const int stream = buffer(stride, true), input = buffer(stride, false);
    Op& embed = add_op(OP_EMBED, 0, 0, stream, stride, size);
    embed.weight = numbers(VOCABULARY * size, 1), embed.bias_offset = 2;
    if (index % 3 == 1) embed.bias = floats((length + 2) * size);
    normalize(stream, input, false, NORM_RMS);
    attention(dims, stream, input);
    normalize(stream, stream, true, NORM_LAYER);
    normalize(stream, input, false, NORM_NONE);
    if (index / 7 % 3 == 0) mixture(stream, input);
    else feed_forward(stream, input, index / 7 % 3 == 1);
    normalize(stream, input, false, NORM_LAYER);
    const int selected = buffer(stride, false);
    add_op(OP_SELECT, input, 0, selected, 0, stride * (type == TYPE_FLOAT ? 4 : 2)).n = size;
    product(selected, stride, size, 0, 0, VOCABULARY, OUT_LOGITS).softcap = index % 2 ? 30 : 0;
  }

  void attention(Dims dims, int stream, int input) {
    const int size = weights.hidden, stride = padded(size), rotary = dims.head / 4 * 2;
    const int width = (heads + kv_heads) * dims.head + kv_heads * dims.value, attended_width = heads * dims.value;
    const int query_size = int(heads * round_up(dims.head, 2));
    const int projected = buffer(padded(width), true), angle = buffer(rotary, true);
    const int queries = buffer(padded(query_size), false), attended = buffer(padded(attended_width), false);
    product(input, stride, size, projected, padded(width), width, OUT_FLOAT).clip = index % 2 ? 3 : 0;
    Op& norm = add_op(OP_NORM, projected, padded(width), projected, padded(width), dims.head);  // of keys
    norm.in_offset = norm.out_offset = heads * dims.head, norm.heads = kv_heads, norm.mode = NORM_RMS, norm.eps = 1e-6f;
    norm.out_float = 1, norm.own_weights = index % 2, norm.weight = floats((index % 2 ? kv_heads : 1) * dims.head);
    Op& angles = add_op(OP_ANGLES, 0, 0, angle, rotary, 0);
    angles.rotary_dim = rotary, angles.short_len = index % 3 ? 0 : 100;
    angles.weight = floats(rotary / 2 * (index % 3 ? 1 : 2));
    Op op = add_op(OP_ROTATE, projected, padded(width), queries, padded(query_size), 0);
    op.heads = heads, op.kv_heads = kv_heads, op.head_dim = dims.head, op.value_dim = dims.value;
    op.keys = &keys, op.values = &values, op.rotary_dim = rotary, op.angles = angle, op.interleaved = index % 2;
    if (index % 4 == 1) op.query_scale = floats(length);
    ops.back() = op;
    op.kind = OP_ATTEND, op.in = queries, op.in_stride = padded(query_size), op.out = attended;
    op.out_stride = padded(attended_width), op.scale = 0.3f;
    if (index % PATTERNS >= EXTRAS) {
      op.softcap = 20, op.slopes = floats(heads), op.sink_logits = floats(heads);
      op.bias_offset = 3, op.bias_size = 12, op.position_bias = floats(heads * 12);
    }
    ops.push_back(op);
    const int gates = buffer(padded(attended_width), true);
    product(input, stride, size, gates, padded(attended_width), attended_width, OUT_FLOAT);
    add_op(OP_GATE, gates, padded(attended_width), attended, padded(attended_width), attended_width).own_weights = 1;
    product(attended, padded(attended_width), attended_width, stream, stride, size, OUT_ADD);
  }

  void feed_forward(int stream, int input, bool gated) {
    const int size = weights.hidden, stride = padded(size), inner = weights.bits ? 3 * weights.group : 50;
    const int half = int(round_up(inner, gated ? LANES : PANEL)), buffer_of_inner = buffer(padded(half), false);
    product(input, stride, size, buffer_of_inner, padded(half), gated ? 2 * half : inner,
            gated ? OUT_GATED : OUT_ACTIVATED);
    const int branch = buffer(stride, true);
    product(buffer_of_inner, padded(half), inner, branch, stride, size, OUT_FLOAT);
    add_op(OP_ADD, branch, stride, stream, stride, size);
  }

  void mixture(int stream, int input) {
    const int size = weights.hidden, stride = padded(size), inner = weights.bits ? 3 * weights.group : 35, count = 6;
    const int64_t rows = round_up(inner, PANEL), out = round_up(size, PANEL);
    gate_up.type = down.type = type, gate_up.in_stride = stride, down.in_stride = int(rows);
    set_weights(gate_up, size, count * 2 * rows), set_weights(down, inner, count * out);
    experts.router = floats(count * stride), experts.router_bias = floats(count);
    experts.gate_up = &gate_up, experts.down = &down;
    if (index % 2) gate_up.bias = floats(count * 2 * rows), down.bias = floats(count * out);
    if (index % 3) experts.selection_bias = floats(count), experts.groups = 3, experts.chosen_groups = 2;
    experts.experts = count, experts.chosen = 2, experts.size = inner, experts.is_sigmoid = index % 3 == 1;
    experts.renormalize = index % 2, experts.routed_scale = 1.5f, experts.jitter = index % 5 ? -1 : 0.1f;
    if (index % 4 == 2) experts.alpha = 1.7f, experts.limit = 7;
    Op& op = add_op(OP_EXPERTS, input, stride, stream, stride, size);
    op.n = size, op.mode = OUT_ADD, op.activation = SILU, op.experts = &experts;
  }
};

// Draw from rows of exactly as many scores as there are tokens; false if a token is impossible.
bool draws(int index) {
  const int64_t rows = 3, n = 1 + index * 37 % 2100;
  uint64_t state = index;
  const auto random = [&] { return (state = state * 6364136223846793005u + 1442695040888963407u) >> 33; };
  std::vector<float> scores(rows * n);
  for (float& score : scores) score = random() % 5 ? float(random() % 4001) / 500 - 4 : index % 2 ? -INFINITY : 1;
  std::vector<DrawParameters> parameters(rows);
  for (DrawParameters& each : parameters) {
    const double top_k = random() % 3 ? 0 : 1 + random() % 60, top_p = random() % 2 ? 1 : 0.001 * (random() % 1000);
    each = {0.01 + 0.002 * (random() % 1000), top_k, top_p, random() % 2 ? 0 : 0.001 * (random() % 1001), 1e-3 * (random() % 1000)};
  }
  std::vector<float> totals(rows);
  kvad_log_totals(scores.data(), rows, n, n, totals.data(), 2);
  for (int64_t row = 0; row < rows; row++) {
    double total = 0;
    for (int64_t i = 0; i < n; i++) total += std::exp(double(scores[row * n + i]));
    const bool is_finite = *std::min_element(&scores[row * n], &scores[row * n] + n) > -INFINITY;
    if (is_finite ? !(std::abs(totals[row] - std::log(total)) < 1e-4) : totals[row] == totals[row]) return false;
  }
  std::vector<int64_t> tokens(rows, -2);
  kvad_draw(scores.data(), rows, n, n, parameters.data(), tokens.data(), 2);
  for (int64_t row = 0; row < rows; row++) {
    const float* own = scores.data() + row * n;
    const bool is_possible = *std::max_element(own, own + n) > -INFINITY;
    if (is_possible != (tokens[row] >= 0) || tokens[row] >= n) return false;
    if (is_possible && own[tokens[row]] == -INFINITY) return false;
  }
  return true;
}

// Copy the second of four blocks to the last one, after it was overwritten by the first; false if others change.
bool copies() {
  const int64_t heads = 3, bytes = 5, stride = 4 * bytes, pairs[] = {0, 1, 1, 3};
  std::vector<char> data(heads * stride);
  for (size_t i = 0; i < data.size(); i++) data[i] = char(i);
  kvad_copy_blocks(data.data(), heads, stride, bytes, pairs, 2, 2);
  for (int64_t i = 0; i < heads * stride; i++) {
    const int64_t place = i % stride, first = i - place + place % bytes;
    if (data[i] != (place / bytes == 2 ? i : first)) return false;
  }
  return true;
}

}  // namespace

// Arguments: the first program, the end of the programs, and the numbers of threads whose bits are compared.
int main(int count, char** arguments) {
  kvad_cpu_level();  // asks Linux for AMX
  if (!copies()) return std::printf("blocks were not copied\n"), 1;
  for (int index = std::atoi(arguments[1]); index < std::atoi(arguments[2]); index++) {
    if (!draws(index)) return std::printf("program %d: an impossible token or a wrong sum\n", index), 1;
    std::vector<char> expected;
    for (int i = 3; i < count; i++) {
      const int threads = std::atoi(arguments[i]);
      const std::vector<char> result = Program(index).run(threads);
      if (i == 3) expected = result;
      if (!result.empty() && result == expected) continue;
      const char* what = result.empty() ? "logits are not finite" : "other bits";
      std::printf("program %d, %d threads: %s\n", index, threads, what);
      return 1;
    }
  }
}
