// Reading and writing stored keys and values, in the formats of kvad/ops/quantize.py.
#pragma once
#include "step.h"

namespace {

inline float half_to_float(uint16_t x) {
  const uint32_t sign = uint32_t(x & 0x8000) << 16, magnitude = x & 0x7fff;
  uint32_t bits = magnitude >= 0x7c00 ? 0x7f800000 | (magnitude & 0x3ff) << 13 : (magnitude << 13) + 0x38000000;
  float result;
  if (magnitude < 0x400) result = float(magnitude) * 5.9604644775390625e-8f;  // 2^-24
  else std::memcpy(&result, &bits, 4);
  std::memcpy(&bits, &result, 4);
  bits |= sign;
  std::memcpy(&result, &bits, 4);
  return result;
}

// Round to a small float of ``mantissa`` bits whose smallest normal number has the exponent ``lowest``: to the nearest,
// ties to even. The result is a float; its bits are taken by the caller.
inline float round_float(float x, int mantissa, int lowest) {
  if (!(x - x == 0)) return x;
  int exponent;
  std::frexp(x, &exponent);  // x = f 2^exponent, 1/2 <= f < 1
  const int step = (exponent - 1 > lowest ? exponent - 1 : lowest) - mantissa;
  return std::ldexp(std::nearbyint(std::ldexp(x, -step)), step);
}

// Bits of a float that ``round_float`` has rounded, in a format of 1 + exponent + mantissa bits.
inline uint32_t pack_float(float x, int mantissa, int lowest, uint32_t infinity, uint32_t nan) {
  const uint32_t sign = std::signbit(x);
  const int exponent_bits = mantissa == 10 || mantissa == 2 ? 5 : 4;
  const uint32_t high = sign << (exponent_bits + mantissa);
  if (x != x) return high | nan;
  if (x - x != 0) return high | infinity;
  x = std::fabs(x);
  if (x < std::ldexp(1.0f, lowest)) return high | uint32_t(std::ldexp(x, mantissa - lowest));
  int exponent;
  const float fraction = std::frexp(x, &exponent);
  if (mantissa == 10 && exponent > 16) return high | infinity;
  const uint32_t field = uint32_t(exponent - 1 - lowest + 1);
  return high | field << mantissa | (uint32_t(std::ldexp(fraction, mantissa + 1)) & ((1u << mantissa) - 1));
}

inline uint16_t float_to_half(float x) { return uint16_t(pack_float(round_float(x, 10, -14), 10, -14, 0x7c00, 0x7e00)); }

inline uint8_t float_to_fp8(float x, bool e5m2) {  // clamped to the largest number; NaN if x is not finite
  const float largest = e5m2 ? 57344.0f : 448.0f;
  const int mantissa = e5m2 ? 2 : 3, lowest = e5m2 ? -14 : -6;
  if (x - x != 0) return uint8_t((std::signbit(x) ? 0x80 : 0) | 0x7f);
  x = x > largest ? largest : x < -largest ? -largest : x;
  return uint8_t(pack_float(round_float(x, mantissa, lowest), mantissa, lowest, 0x7c, 0x7f));
}

inline float e4m3_to_float(uint8_t x) {
  if ((x & 0x7f) == 0x7f) return NAN;
  return half_to_float(uint16_t((x & 0x80) << 8 | (x & 0x7f) << 7)) * 256.0f;
}

inline F load_halves(const uint16_t* p) {
#ifdef __AVX512F__
  return (F)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  F result;
  for (int i = 0; i < LANES; i++) result[i] = half_to_float(p[i]);
  return result;
#endif
}

// 16 numbers of fp8: e5m2 is the high byte of a half; e4m3 has another bias, no infinity, and a NaN in the last code.
inline F load_fp8(const uint8_t* p, bool e5m2) {
#ifdef __AVX512F__
  const __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  if (e5m2) return (F)_mm512_cvtph_ps(_mm256_slli_epi16(codes, 8));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(0x80)), 8);
  const __m256i size = _mm256_and_si256(codes, _mm256_set1_epi16(0x7f));
  const F x = (F)_mm512_cvtph_ps(_mm256_or_si256(sign, _mm256_slli_epi16(size, 7))) * 256.0f;
  const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(size, _mm256_set1_epi16(0x7f));
  return (F)_mm512_mask_mov_ps((__m512)x, is_nan, _mm512_set1_ps(NAN));
#else
  F result;
  for (int i = 0; i < LANES; i++) result[i] = e5m2 ? half_to_float(uint16_t(p[i] << 8)) : e4m3_to_float(p[i]);
  return result;
#endif
}

inline F load_nibbles(const uint8_t* p) {  // 16 numbers of 8 bytes, the low bits first
#if defined(__x86_64__)
  const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), mask = _mm_set1_epi8(15);
  const __m128i both = _mm_unpacklo_epi8(_mm_and_si128(x, mask), _mm_and_si128(_mm_srli_epi16(x, 4), mask));
  return unsigned_to_floats(&both);
#else
  F result;
  for (int i = 0; i < LANES; i++) result[i] = float(p[i / 2] >> i % 2 * 4 & 15);
  return result;
#endif
}

// Decode ``n`` numbers of the vector at ``index`` (counted in slots over all heads), and zeros up to ``padded``.
template <class T> void read_vector(const Store& from, int64_t index, int n, int padded, T* out) {
  int i = 0;
  switch (from.format) {
    case STORE_FLOAT: {
      const float* x = static_cast<const float*>(from.data) + index * n;
      for (; i + LANES <= n; i += LANES) store(out + i, load(x + i));
      for (; i < n; i++) put(out + i, x[i]);
      break;
    }
    case STORE_BFLOAT: {
      const bf16* x = static_cast<const bf16*>(from.data) + index * n;
      for (; i < n; i++) put(out + i, widen(x[i]));
      break;
    }
    case STORE_HALF: {
      const uint16_t* x = static_cast<const uint16_t*>(from.data) + index * n;
      for (; i + LANES <= n; i += LANES) store(out + i, load_halves(x + i));
      for (; i < n; i++) put(out + i, half_to_float(x[i]));
      break;
    }
    case STORE_INT8: {
      const int8_t* x = static_cast<const int8_t*>(from.data) + index * n;
      const float scale = from.scale[index];
      for (; i + LANES <= n; i += LANES)
        store(out + i, signed_to_floats(x + i) * scale);
      for (; i < n; i++) put(out + i, float(x[i]) * scale);
      break;
    }
    case STORE_INT4: {
      const uint8_t* x = static_cast<const uint8_t*>(from.data) + index * (n / 2);
      const float scale = from.scale[index], zero = from.zero[index];
      for (; i + LANES <= n; i += LANES) store(out + i, load_nibbles(x + i / 2) * scale + zero);
      for (; i < n; i++) put(out + i, float(x[i / 2] >> i % 2 * 4 & 15) * scale + zero);
      break;
    }
    default: {
      const uint8_t* x = static_cast<const uint8_t*>(from.data) + index * n;
      const bool e5m2 = from.format == STORE_E5M2;
      for (; i + LANES <= n; i += LANES) store(out + i, load_fp8(x + i, e5m2));
      for (; i < n; i++) put(out + i, e5m2 ? half_to_float(uint16_t(x[i] << 8)) : e4m3_to_float(x[i]));
    }
  }
  for (; i < padded; i++) put(out + i, 0);
}

inline void write_vector(const Store& to, int64_t index, const float* x, int n) {
  switch (to.format) {
    case STORE_FLOAT: std::memcpy(static_cast<float*>(to.data) + index * n, x, n * 4); break;
    case STORE_BFLOAT:
      for (int i = 0; i < n; i++) static_cast<bf16*>(to.data)[index * n + i] = narrow(x[i]);
      break;
    case STORE_HALF:
      for (int i = 0; i < n; i++) static_cast<uint16_t*>(to.data)[index * n + i] = float_to_half(x[i]);
      break;
    case STORE_INT8: {
      float top = 0;
      for (int i = 0; i < n; i++) top = std::fabs(x[i]) > top || x[i] != x[i] ? std::fabs(x[i]) : top;
      const float scale = top / 127 > 1.17549435e-38f || top != top ? top / 127 : 1.17549435e-38f;
      for (int i = 0; i < n; i++) {
        float q = std::nearbyint(x[i] / scale);
        static_cast<int8_t*>(to.data)[index * n + i] = q == q ? int8_t(q) : 0;
      }
      to.scale[index] = scale;
      break;
    }
    case STORE_INT4: {
      float low = x[0], high = x[0];
      bool finite = true;
      for (int i = 0; i < n; i++) {
        low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high, finite &= x[i] - x[i] == 0;
      }
      const float step = (high - low) / 15, scale = !finite ? NAN : step > 1.17549435e-38f ? step : 1.17549435e-38f;
      uint8_t* out = static_cast<uint8_t*>(to.data) + index * (n / 2);
      for (int i = 0; i < n; i += 2) {
        float a = std::nearbyint((x[i] - low) / scale), b = std::nearbyint((x[i + 1] - low) / scale);
        out[i / 2] = finite ? uint8_t(int(a) | int(b) << 4) : 0;
      }
      to.scale[index] = scale, to.zero[index] = finite ? low : NAN;
      break;
    }
    default:
      for (int i = 0; i < n; i++)
        static_cast<uint8_t*>(to.data)[index * n + i] = float_to_fp8(x[i], to.format == STORE_E5M2);
  }
}

}  // namespace
