// What Python and C++ share (library.py has the same structures), and the team of threads that runs a step.
#pragma once
#include <atomic>
#include <sched.h>

#include "tiles.h"

extern "C" {

enum OpKind { OP_EMBED, OP_NORM, OP_LINEAR, OP_ANGLES, OP_ROTATE, OP_ATTEND, OP_ADD, OP_SELECT, OP_EXPERTS, OP_GATE, OP_LORA };
enum OutputMode { OUT_FLOAT, OUT_ADD, OUT_GATED, OUT_ACTIVATED, OUT_LOGITS };
enum NormKind { NORM_NONE, NORM_RMS, NORM_LAYER };
enum NumberType { TYPE_FLOAT, TYPE_BFLOAT };
enum StoreFormat { STORE_FLOAT, STORE_BFLOAT, STORE_HALF, STORE_INT8, STORE_INT4, STORE_E4M3, STORE_E5M2 };

struct Store {  // keys or values of a layer: data [K, blocks, block_size, width], scale and zero [K, blocks, block_size]
  void* data;
  float *scale, *zero;
  int64_t blocks, format;
};

struct Experts {  // of one layer
  const float *router, *router_bias, *selection_bias;  // [experts, in_stride], [experts]
  const struct Op *gate_up, *down;  // LINEAR: panels of each expert, of gate_up 16 rows of the gate, then of up; biases
  int64_t experts, chosen, size, groups, chosen_groups, is_sigmoid, renormalize;  // size: of an expert's inner layer
  float routed_scale, jitter, alpha, limit;                                       // negative, 0, 0: none
};

struct LoraTerm {  // of one adapter, in some columns of a product
  const float *a, *b;  // [rank, k], scaled [rank, panels, PANEL]
  int64_t rank, first_panel, panels;
};

struct Adapter {  // its terms of one product
  const LoraTerm* terms;
  int64_t num_terms;
};

struct Op {
  int32_t kind, type;                                     // NumberType of weights and activations
  int32_t in, out;                                        // buffers
  int32_t in_offset, out_offset, in_stride, out_stride;   // of a row, in numbers
  int32_t n, k;                                           // outputs, inputs; width of a norm or row: k
  int32_t mode, activation;                               // OutputMode; NormKind
  int32_t heads, kv_heads, head_dim, value_dim;
  int32_t group, rotary_dim, interleaved, angles;         // cache group; buffer of angles
  int32_t own_weights, out_float, bias_size, bias_offset;  // NORM, GATE: of each head, number; EMBED: of its positions
  int32_t short_len;                                      // ANGLES: longer sequences have the second frequencies
  int32_t bits, quantized_group, half_scales;             // LINEAR with quantized weights (quantized.h); bits: 0 if not
  int32_t is_e2m1, activation_bits;                       // 4 bits are E2M1; bits of their inputs: 8, or 0
  int32_t low, low_stride;                                // LINEAR: buffer of x A' (lora.h), numbers of a row
  const void* weight;                                     // panels; a norm's weight; a table of embeddings
  const float* bias;                                      // of LINEAR and NORM; EMBED: a table of positions
  const Store *keys, *values;
  const float *position_bias, *slopes, *sink_logits;      // ATTEND: [H, bias_size] by distance from -bias_offset; [H]; [H]
  const float* query_scale;                               // ROTATE: by position, or null
  const Experts* experts;
  const Adapter* adapters;                                // LINEAR, LORA: by number - 1; or null
  float scale, eps, softcap, clip;
};

struct SubBatch {
  int64_t num_seqs, num_new, width, slots;  // tables [num_seqs, width]; slots to read of a sequence
  const int64_t* table;
};

struct Group {  // a cache group in one step
  const int64_t* slots;  // [T] of new tokens; null: nothing is written
  int64_t* positions;    // [blocks, block_size]
  const SubBatch* sub_batches;
  int64_t num_sub_batches, block_size;
  int64_t causal, window, num_sinks, window_step, layer_window;  // windows: 0 if none
};

struct Step {
  int64_t tokens, num_logits, num_groups;
  const int64_t *token_ids, *positions, *logit_indices, *seq_lens;  // seq_lens [T], or null
  const Group* groups;
  const int32_t* adapters;  // [T] number of each token's adapter, 0: none; null: no token has one
  float* logits;    // [num_logits, V]
  int64_t num_hidden;
  const int64_t* hidden_indices;  // of tokens
  float* hidden;       // [num_hidden, n of SELECT]: what the head reads
  int64_t num_tokens;  // the first ids, which may be sampled
  int32_t* best;  // [num_logits]: of them the first one with the largest logit; -1 if a logit is not finite; null: not found
  double* seconds;  // [num_ops + 1] of the first thread in each operation, then waiting for others; null: not measured
};

struct Model {
  const Op* ops;
  const int64_t* widths;  // bytes of a row of each buffer
  int64_t num_ops, num_buffers, threads;
  char* scratch;  // owned by the library
  int64_t scratch_bytes, peak_bytes;
};
}

namespace {

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct Team {  // of OpenMP threads; a barrier that spins, then yields its core
  std::atomic<int> arrived{0}, round{0};
  std::atomic<int64_t> ticket{0};  // of work that is shared out in pieces; reset by the barrier
  int size = 1;
  int64_t take() { return ticket.fetch_add(1, std::memory_order_relaxed); }
  void wait() {
    if (size == 1) return void(ticket.store(0, std::memory_order_relaxed));
    int now = round.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      arrived.store(0, std::memory_order_relaxed);
      ticket.store(0, std::memory_order_relaxed);
      round.store(now + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round.load(std::memory_order_acquire) == now; spins++) {
      if (spins > 20000) sched_yield();
#if defined(__x86_64__)
      else _mm_pause();
#endif
    }
  }
};

struct Run {  // one thread of a step
  const Model& model;
  const Step& step;
  Team& team;
  int thread;
  char *own, *shared;  // memory of this thread, and of all
  char* buffers[64];
  template <class T> T* buffer(int index) const { return reinterpret_cast<T*>(buffers[index]); }
  // This thread's share of n pieces; the first thread has the only one.
  int64_t low(int64_t n) const { return (n * thread + team.size - 1) / team.size; }
  int64_t high(int64_t n) const { return (n * (thread + 1) + team.size - 1) / team.size; }
};

}  // namespace
