// Layer normalisation of a row of H numbers, with the biased variance (Ba et al. 2016, equation 4).

#pragma once

#include <cmath>
#include <cstdint>

#include "math.h"

namespace rhhn {

template <typename S>
struct Moments {
    S mean, rstd;
};

template <typename S, typename X>
static Moments<S> moments(const X* x, int64_t H, S epsilon) {
    S sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < H; ++j) sum += load(x[j]);
    const S mean = sum / S(H);
    S square = 0;
#pragma omp simd reduction(+ : square)
    for (int64_t j = 0; j < H; ++j) square += (load(x[j]) - mean) * (load(x[j]) - mean);
    return {mean, S(1) / std::sqrt(square / S(H) + epsilon)};
}

// dx from the gradient of gain * normal(x) + shift, given normal(x); adds to the gradients of gain and shift.
template <typename S>
static void normalise_backward(const S* __restrict normal, S* __restrict grad, const S* __restrict gain,
                               S* __restrict dgain, S* __restrict dshift, S rstd, int64_t H) {
    S sum = 0, product = 0;
#pragma omp simd reduction(+ : sum, product)
    for (int64_t j = 0; j < H; ++j) {
        dgain[j] += grad[j] * normal[j];
        dshift[j] += grad[j];
        grad[j] *= gain[j];
        sum += grad[j];
        product += grad[j] * normal[j];
    }
    sum /= S(H);
    product /= S(H);
#pragma omp simd
    for (int64_t j = 0; j < H; ++j) grad[j] = rstd * (grad[j] - sum - normal[j] * product);
}

}  // namespace rhhn
