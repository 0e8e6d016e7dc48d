// Number types and point-wise functions that a compiler turns into vector instructions.
//
// Operands (the inputs of matrix products) are float, double or bfloat16. All arithmetic and all states are
// float, or double for double operands. The functions of floats have no branches, propagate NaN, and are exact
// to about two units in the last place.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace rhhn {

struct bfloat16 {
    uint16_t bits;
};

template <typename T>
struct Arithmetic {
    using type = float;
};
template <>
struct Arithmetic<double> {
    using type = double;
};

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline float load(float x) { return x; }
inline double load(double x) { return x; }
inline float load(bfloat16 x) { return float_of(uint32_t(x.bits) << 16); }

inline void store(float& to, float x) { to = x; }
inline void store(double& to, double x) { to = x; }
inline void store(bfloat16& to, float x) {
    // Round to nearest, ties to even. A NaN stays quiet.
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    to.bits = uint16_t(x == x ? rounded : (bits >> 16) | 0x40u);
}

// Always inline: a loop with a call is not vectorised, and a compiler's own choice depends on unrelated code.
#define RHHN_INLINE inline __attribute__((always_inline))

// exp(x) = 2^n p(r) with a remainder r in [-ln 2 / 2, ln 2 / 2]. p is Taylor's polynomial of degree 7, whose
// error is below a unit in the last place.
RHHN_INLINE float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const float shifted = x * 1.44269504088896341f + shift;
    const float n = shifted - shift;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    // The last bits of the shifted number are n, which moves into the exponent. A NaN survives in p.
    return p * float_of((bits_of(shifted) << 23) + 0x3f800000u);
}
RHHN_INLINE double exponential(double x) { return std::exp(x); }

RHHN_INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
RHHN_INLINE double sigmoid(double x) { return 1.0 / (1.0 + exponential(-x)); }

// An odd polynomial below 0.625, otherwise from exp(2 |x|). At 0.625 both are exact to a unit.
RHHN_INLINE float hyperbolic_tangent(float x) {
    const float size = std::fabs(x);
    const float square = x * x;
    // Coefficients: Cephes' tanhf, a minimax fit on [0, 0.625].
    float p = -5.70498872745e-3f;
    p = p * square + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    const float series = x + x * square * p;
    const float quotient = 1.0f - 2.0f / (exponential(2.0f * size) + 1.0f);
    return size < 0.625f ? series : std::copysign(quotient, x);
}
RHHN_INLINE double hyperbolic_tangent(double x) { return std::tanh(x); }

// A mask as factors: `set` where it is not zero, otherwise 0; `without` everywhere if there is no mask. Loops
// over factors are vectorised; loops over a mask that may be missing are not.
template <typename S>
inline void factors(const uint8_t* __restrict mask, S set, S without, S* __restrict to, int64_t size) {
    if (mask) {
#pragma omp simd
        for (int64_t j = 0; j < size; ++j) to[j] = mask[j] ? set : S(0);
    } else {
        std::fill(to, to + size, without);
    }
}

// Calls the version of a loop that was compiled for two constants.
template <typename Loop>
inline void specialised(bool one, bool other, Loop loop) {
    using Yes = std::true_type;
    using No = std::false_type;
    if (one) other ? loop(Yes{}, Yes{}) : loop(Yes{}, No{});
    else other ? loop(No{}, Yes{}) : loop(No{}, No{});
}

}  // namespace rhhn
