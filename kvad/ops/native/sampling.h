// Tokens drawn from rows of scores after temperature, top-k, top-p and min-p (kvad/engine/execution/sampler.py).
//
// Filters keep the scores up to a threshold, which is found without sorting: each pass over a row halves the range in
// which it is. Keys order scores as integers: the bits of (the best score - score) / temperature; 0 is the best one.
#pragma once
#include <cmath>
#include <vector>

#include "simd.h"

extern "C" {
struct DrawParameters {
  double temperature, top_k, top_p, min_p, uniform;  // top_k 0: all; uniform: in [0, 1)
};
}

namespace {

constexpr int32_t LAST_KEY = 0x7F800000;  // of infinity
constexpr int64_t PART = 64 * LANES;      // numbers that are summed in float before they are added to a double

struct Row {
  int32_t* keys;   // [padded]
  float* weights;  // [padded] probabilities relative to the best token's
  int64_t padded;
};

inline F load_scores(const float* p, int64_t n) {  // -inf after the first n, which is never drawn
  if (n >= LANES) return load(p);
  F x = all(-INFINITY);
  for (int64_t i = 0; i < n; i++) x[i] = p[i];
  return x;
}

// Write the keys and weights of n scores.
inline void read_scores(const float* scores, int64_t n, double temperature, const Row& row) {
  F best = all(-INFINITY);
  for (int64_t i = 0; i < row.padded; i += LANES) best = larger(best, load_scores(scores + i, n - i));
  float top = highest(best);
  if (top == -INFINITY) top = 0;
  const F tau = all(float(temperature) > 1e-30f ? float(temperature) : 1e-30f);
  for (int64_t i = 0; i < row.padded; i += LANES) {
    const F below = (all(top) - load_scores(scores + i, n - i)) / tau;
    *reinterpret_cast<I*>(row.keys + i) = as_ints(below);
    store(row.weights + i, exponential(-below));
  }
}

struct Sum {
  double total;
  int32_t last, following;  // the keys of (low, high] beside the limit
};

// The sum of the weights (or the number) of keys up to ``key``.
template <bool COUNTS> Sum sum_up_to(const Row& row, int32_t low, int32_t key, int32_t high) {
  I last = I{} - 1, following = I{} + (LAST_KEY + 1);
  double total = 0;
  for (int64_t start = 0; start < row.padded; start += PART) {
    const int64_t end = start + PART < row.padded ? start + PART : row.padded;
    F part = F{};
    for (int64_t i = start; i < end; i += LANES) {
      const I keys = *reinterpret_cast<const I*>(row.keys + i);
      const I kept = keys <= key;
      part += kept ? (COUNTS ? all(1) : load(row.weights + i)) : F{};
      const I before = kept & (keys > low) ? keys : I{} - 1, after = ~kept & (keys <= high) ? keys : I{} + (LAST_KEY + 1);
      last = before > last ? before : last, following = after < following ? after : following;
    }
    total += sum(part);
  }
  Sum result = {total, -1, LAST_KEY + 1};
  for (int i = 0; i < LANES; i++) {
    if (last[i] > result.last) result.last = last[i];
    if (following[i] < result.following) result.following = following[i];
  }
  return result;
}

struct Threshold {
  int32_t key;
  double before;  // the sum of all smaller keys
};

// The first key up to ``high`` at which the sum reaches the limit.
template <bool COUNTS> Threshold find_threshold(const Row& row, double limit, int32_t high) {
  Threshold result = {high, 0};
  int32_t low = -1;
  while (result.key - low > 1) {
    const int32_t middle = low + (result.key - low) / 2;
    const Sum sum = sum_up_to<COUNTS>(row, low, middle, result.key);
    if (sum.total >= limit) result.key = sum.last;
    else if (sum.following > LAST_KEY) low = result.key - 1;  // rounding: all keys together do not reach the limit
    else low = sum.following - 1, result.before = sum.total;
  }
  return result;
}

// Set the weights of dropped tokens to 0: keys above the threshold, or at it after the first ``num_ties``.
inline void drop_beyond(const Row& row, int32_t threshold, int64_t num_ties, int32_t last_key) {
  for (int64_t i = 0; i < row.padded; i += LANES) {
    const I keys = *reinterpret_cast<const I*>(row.keys + i);
    const I kept = (keys <= threshold) & (keys <= last_key);
    store(row.weights + i, kept ? load(row.weights + i) : F{});
    const I ties = keys == threshold;
    if (num_ties > row.padded || !sum_of(ties)) continue;
    for (int j = 0; j < LANES; j++)
      if (ties[j] && --num_ties < 0) row.weights[i + j] = 0;
  }
}

// The first token at which the sum of the weights exceeds its share of all; -1 if all are 0.
inline int64_t find_token(const Row& row, double uniform) {
  double total = 0, before = 0;
  const auto part_sum = [&](int64_t start) {
    F part = F{};
    for (int64_t i = start; i < start + PART && i < row.padded; i += LANES) part += load(row.weights + i);
    return double(sum(part));
  };
  for (int64_t start = 0; start < row.padded; start += PART) total += part_sum(start);
  int64_t token = -1;
  for (int64_t start = 0; start < row.padded; start += PART) {
    const double part = part_sum(start);
    if (before + part > uniform * total) {
      double cumulated = before;
      for (int64_t i = start; i < start + PART && i < row.padded; i++) {
        if (row.weights[i] > 0) token = i;  // rounding may leave none that exceeds it: then the last one is drawn
        cumulated += row.weights[i];
        if (cumulated > uniform * total) return i;
      }
      return token;
    }
    before += part;
  }
  return token;
}

// The logarithm of the sum of e^score; NaN if a score is not finite.
inline double log_total(const float* scores, int64_t n) {
  const int64_t whole = n - n % LANES;
  F best = all(-INFINITY), defect = F{};
  for (int64_t i = 0; i < whole; i += LANES) {
    const F x = load(scores + i);
    best = larger(best, x), defect += x * 0.0f;
  }
  float top = highest(best), rest = 0;
  for (int64_t i = whole; i < n; i++) top = scores[i] > top ? scores[i] : top, rest += scores[i] * 0.0f;
  if (!(sum(defect) + rest == 0)) return NAN;
  double total = 0;
  for (int64_t start = 0; start < n; start += PART) {
    F part = F{};
    for (int64_t i = start; i < start + PART && i < n; i += LANES) part += exponential(load_scores(scores + i, n - i) - all(top));
    total += sum(part);
  }
  return top + std::log(total);
}

inline int64_t draw(const float* scores, int64_t n, const DrawParameters& parameters, const Row& row) {
  read_scores(scores, n, parameters.temperature, row);
  int32_t threshold = LAST_KEY;
  int64_t num_ties = INT64_MAX;
  if (parameters.top_k > 0) threshold = find_threshold<true>(row, parameters.top_k, threshold).key;
  if (parameters.top_p < 1) {
    const double limit = parameters.top_p * sum_up_to<false>(row, -1, threshold, threshold).total;
    const Threshold found = find_threshold<false>(row, limit, threshold);
    threshold = found.key;
    float distance;
    std::memcpy(&distance, &threshold, 4);
    const double weight = std::exp(-double(distance));  // a tie is kept while the sum before it is below the limit
    const double ties = std::ceil((limit - found.before) / (weight > 1e-300 ? weight : 1e-300));
    num_ties = ties > double(n) ? INT64_MAX : ties > 1 ? int64_t(ties) : 1;
  }
  int32_t last_key = LAST_KEY;
  if (parameters.min_p > 0) {
    const float distance = float(0.0 - std::log(parameters.min_p));
    std::memcpy(&last_key, &distance, 4);
  }
  drop_beyond(row, threshold, num_ties, last_key);
  return find_token(row, parameters.uniform);
}

}  // namespace
