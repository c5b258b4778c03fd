// One forward pass on a CPU: a list of operations over a few buffers, run by one team of threads.
//
// What a token gets does not depend on the other tokens of the step or on the number of threads: every product is summed
// over its inputs in order, and attention reads chunks of CHUNK slots that are merged in order.
#include <cstdlib>
#ifdef __linux__
#include <sys/mman.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "quantized.h"
#include "sampling.h"

namespace {

constexpr int64_t RETAINED_BYTES = 64 << 20;  // of activations that stay allocated between steps
constexpr int64_t HUGE_PAGE = 2 << 20;

template <class W> void run_op(const Run& run, const Op& op, int64_t rows) {
  typedef typename W::T T;
  switch (op.kind) {
    case OP_EMBED: return embed<T>(run, op);
    case OP_NORM: return op.out_float ? norm<float>(run, op, rows) : norm<T>(run, op, rows);
    case OP_LINEAR:
      if (!op.bits) return linear<W>(run, op, rows);
      return with_form(op, [&](auto form) { quantized_linear<W, form()>(run, op, rows); });
    case OP_ANGLES: return angles(run, op);
    case OP_ROTATE: return rotate<W>(run, op);
    case OP_ATTEND:
      if (uses_words(op)) return Attention<BFloat, Words>(run, op).attend();
      return Attention<W, W>(run, op).attend();
    case OP_ADD: return add(run, op, rows);
    case OP_SELECT: return select_rows<T>(run, op);
    case OP_EXPERTS: return Mixture<W>(run, op).compute();
    case OP_LORA: return lora<T>(run, op, rows);
    case OP_GATE: return op.out_float ? gate<float>(run, op, rows) : gate<T>(run, op, rows);
  }
}

double now() {
#ifdef _OPENMP
  return omp_get_wtime();
#else
  return 0;
#endif
}

struct Sizes { int64_t buffers, own, shared; };

Sizes sizes(const Model& model, const Step& step, int threads) {
  Sizes result = {0, 0, 0};
  for (int64_t i = 0; i < model.num_buffers; i++) result.buffers += round_up(model.widths[i] * step.tokens, 64) + 64;
  for (int64_t i = 0; i < model.num_ops; i++) {
    const Op& op = model.ops[i];
    if (op.kind == OP_LINEAR && op.bits) {
      const bool shared = uses_integers(op) && step.tokens > FEW_ROWS;
      const int64_t all = shared ? quantized_bytes(op, step.tokens) : 0;
      const int64_t own = quantized_bytes(op, shared ? FEW_ROWS : step.tokens);
      result.own = own > result.own ? own : result.own, result.shared = all > result.shared ? all : result.shared;
    }
    if (op.kind == OP_LINEAR && !op.bits && op.type == TYPE_BFLOAT) {
      const int64_t bytes = Blocks<BFloat>(op, step.tokens).bytes(op);
      result.own = bytes > result.own ? bytes : result.own;
    }
    if (op.kind == OP_EXPERTS) {
      const int64_t bytes = op.type == TYPE_BFLOAT ? ExpertsMemory<BFloat>(op, step.tokens, nullptr).bytes
                                                   : ExpertsMemory<Float>(op, step.tokens, nullptr).bytes;
      result.shared = bytes > result.shared ? bytes : result.shared;
    }
    if (op.kind != OP_ATTEND) continue;
    const int64_t own = uses_words(op)             ? AttentionMemory<Words>(op, nullptr).bytes
                        : op.type == TYPE_BFLOAT ? AttentionMemory<BFloat>(op, nullptr).bytes
                                                 : AttentionMemory<Float>(op, nullptr).bytes;
    result.own = own > result.own ? own : result.own;
    const Group& group = step.groups[op.group];
    for (int64_t j = 0; j < group.num_sub_batches; j++) {
      int64_t bytes = Layout(op, group.sub_batches[j], threads).record_bytes(op, group.sub_batches[j]);
      result.shared = bytes > result.shared ? bytes : result.shared;
    }
  }
  const int64_t found = step.num_logits * threads * sizeof(Best);
  result.own = round_up(result.own, 4096), result.shared = found > result.shared ? found : result.shared;
  return result;
}

void run_thread(const Model& model, const Step& step, const Sizes& memory, Team& team, int thread) {
  Run run{model, step, team, thread, nullptr, nullptr, {}};
  char* at = model.scratch;
  for (int64_t i = 0; i < model.num_buffers; i++) {
    run.buffers[i] = at;
    at += round_up(model.widths[i] * step.tokens, 64) + 64;
  }
  run.own = at + thread * memory.own, run.shared = at + team.size * memory.own;
  int64_t rows = step.tokens;
  for (int64_t g = 0; thread == 0 && g < step.num_groups; g++)
    for (int64_t t = 0; step.groups[g].slots && t < step.tokens; t++)
      step.groups[g].positions[step.groups[g].slots[t]] = step.positions[t];
  for (int64_t i = 0; i < model.num_ops; i++) {
    const Op& op = model.ops[i];
    if (op.kind == OP_LORA && !step.adapters) continue;
    const double start = step.seconds && thread == 0 ? now() : 0;
    if (op.type == TYPE_BFLOAT) run_op<BFloat>(run, op, rows);
    else run_op<Float>(run, op, rows);
    if (op.kind == OP_SELECT) rows = step.num_logits;
    const double end = step.seconds && thread == 0 ? now() : 0;
    team.wait();
    if (step.seconds && thread == 0) step.seconds[i] += end - start, step.seconds[model.num_ops] += now() - end;
  }
  if (step.best) find_best(run, model.ops[model.num_ops - 1].n);
}

// True if the processor has AMX and Linux lets this process use it.
bool has_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  unsigned int a, b, c, d;
  constexpr unsigned int TILES = 1 << 24 | 1 << 22 | 1 << 25;  // AMX-TILE, AMX-BF16, AMX-INT8
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & TILES) != TILES) return false;
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
  return false;
#endif
}

}  // namespace

extern "C" {

const char* kvad_source_hash() { return KVAD_SOURCE_HASH; }

// The instruction sets of this machine: 1 AVX2, 2 AVX-512, 3 with bfloat16 and VNNI, 4 with AMX.
int kvad_cpu_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) return has_tiles() ? 4 : 3;
  if (avx512) return 2;
  return avx2;
#else
  return 0;
#endif
}

// Pack rows of k numbers of 2 or 4 bytes into panels [ceil(n / PANEL), padded_k / step, PANEL, step], where a step has 4
// bytes. A null row is zero.
void kvad_pack(const void* const* rows, int64_t n, int64_t k, int64_t padded_k, int64_t bytes, char* out,
               int64_t threads) {
  const int64_t step = 4 / bytes, panels = (n + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(int(threads)) schedule(static)
  for (int64_t panel = 0; panel < panels; panel++) {
    char* to = out + panel * PANEL * padded_k * bytes;
    std::memset(to, 0, PANEL * padded_k * bytes);
    for (int64_t r = 0; r < PANEL && panel * PANEL + r < n; r++) {
      const char* from = static_cast<const char*>(rows[panel * PANEL + r]);
      if (!from) continue;
      for (int64_t i = 0; i < k; i += step)
        std::memcpy(to + (i / step * PANEL + r) * 4, from + i * bytes, (k - i < step ? k - i : step) * bytes);
    }
  }
}

// Pack quantized weights (quantized.h). A null row is zero.
void kvad_pack_quantized(const uint8_t* const* data, const char* const* scales, const char* const* minima, int64_t n,
                         int64_t groups, int64_t group_size, int64_t bits, int64_t scale_bytes, uint8_t* out,
                         int64_t threads) {
  pack_quantized(data, scales, minima, n, groups, group_size, bits, scale_bytes, out, threads);
}

// Draw a token of each row of scores [rows, stride], of which n are tokens; -1 if all of them are -inf.
void kvad_draw(const float* scores, int64_t rows, int64_t stride, int64_t n, const DrawParameters* parameters,
               int64_t* tokens, int64_t threads) {
  const int64_t padded = round_up(n, LANES);
#pragma omp parallel for num_threads(int(threads < rows ? threads : rows)) schedule(dynamic)
  for (int64_t i = 0; i < rows; i++) {
    static thread_local std::vector<float> memory;  // [2, padded]
    memory.resize(2 * padded);
    const Row row{reinterpret_cast<int32_t*>(memory.data()), memory.data() + padded, padded};
    tokens[i] = draw(scores + i * stride, n, parameters[i], row);
  }
}

// Copy blocks of data [heads, blocks, bytes], in the order of pairs [n, 2] of a source and a target.
void kvad_copy_blocks(char* data, int64_t heads, int64_t stride, int64_t bytes, const int64_t* pairs, int64_t n,
                      int64_t threads) {
#pragma omp parallel for num_threads(int(threads < heads ? threads : heads))
  for (int64_t head = 0; head < heads; head++)
    for (int64_t i = 0; i < n; i++) {
      char* own = data + head * stride;
      std::memmove(own + pairs[2 * i + 1] * bytes, own + pairs[2 * i] * bytes, bytes);
    }
}

// Write the logarithm of the sum of e^score of each row of scores [rows, stride], of which n count; NaN of one that is
// not finite.
void kvad_log_totals(const float* scores, int64_t rows, int64_t stride, int64_t n, float* totals, int64_t threads) {
#pragma omp parallel for num_threads(int(threads < rows ? threads : rows)) schedule(dynamic)
  for (int64_t i = 0; i < rows; i++) totals[i] = float(log_total(scores + i * stride, n));
}

void kvad_free(Model* model) {
  std::free(model->scratch);
  model->scratch = nullptr, model->scratch_bytes = 0;
}

// Run one step. Returns 0, or 1 if there is no memory.
int kvad_step(Model* model, const Step* step) {
  const Sizes memory = sizes(*model, *step, int(model->threads));
  const int64_t needed = round_up(memory.buffers + memory.own * model->threads + memory.shared, 4096);
  if (needed > model->scratch_bytes) {
    kvad_free(model);
    const bool is_large = needed > 2 * HUGE_PAGE;
    const int64_t alignment = is_large ? HUGE_PAGE : 4096;
    // The size has to be a multiple of the alignment; what is added is never touched.
    model->scratch = static_cast<char*>(std::aligned_alloc(alignment, round_up(needed, alignment)));
    if (!model->scratch) return 1;
#ifdef __linux__
    if (is_large) madvise(model->scratch, needed, MADV_HUGEPAGE);  // fewer page faults and TLB misses
#endif
    model->scratch_bytes = needed;
    model->peak_bytes = needed > model->peak_bytes ? needed : model->peak_bytes;
  }
  Team team;
#pragma omp parallel num_threads(int(model->threads))
  {
    int thread = 0;
#ifdef _OPENMP
    thread = omp_get_thread_num();
#pragma omp single
    team.size = omp_get_num_threads();
#endif
#if defined(__x86_64__)
    const unsigned int control = _mm_getcsr();
    _mm_setcsr(control | 0x8040);  // denormal numbers are zero
#endif
    const TileScope scope;
    run_thread(*model, *step, memory, team, thread);
#if defined(__x86_64__)
    _mm_setcsr(control);
#endif
  }
  if (model->scratch_bytes > RETAINED_BYTES) kvad_free(model);
  return 0;
}

}
