// Many steps of a network in one call: the products with recurrent matrices and the point-wise work between
// them.
//
// Sequences of a batch are independent, so each thread runs its own sequences from the first step to the last
// and never waits for another. Every thread reads every matrix, so the matrices should stay in a cache or serve
// many rows.

#pragma once

#include <cstdint>
#include <vector>

#include "matmul.h"
#include "rows.h"

namespace rhhn {

// ops/native/build.py declares the same fields in the same order.
struct Recurrence {
    const float* weights;  // for each layer a matrix [K, N] in panels [ceil(N / PANEL), K, PANEL], zeros past N
    const float* gal;      // [B, H] or null: factors of the state before the product
    const float* share;    // [T] or null: factors of the gradient through layer 0's product
    int64_t start, stop;   // the time steps to run; stop is excluded
};

// Whether the state of a sequence starts anew before a step. Before the first step, the caller clears it.
template <typename Sequence>
bool starts_anew(const Sequence& p, int64_t t, int64_t b) {
    return p.resets && t && p.resets[t * p.B + b];
}

// Runs the steps for one thread's rows. A Step has the methods read, sums_at, start, gradient and arriving_at, which
// give the operands and results of its product, starting at a row; and clear_state and clear_gradient.
template <typename Step, typename Sequence>
void forward_rows(const Sequence& p, const Recurrence& r, int64_t first, int64_t last, float* scratch) {
    const int64_t H = p.H, G = Step::sums_of(p), rows = last - first;
    const int64_t size = (G + PANEL - 1) / PANEL * PANEL * H;
    std::vector<float> dropped(r.gal ? rows * H : 0);
    for (int64_t n = r.start * Step::layers(p); n < r.stop * Step::layers(p); ++n) {
        const Step step(p, n);
        step.clear_state(first, last);
        Rows<const float> x{step.read(first), H};
        if (r.gal) {
            for (int64_t i = 0; i < rows * H; ++i) dropped[i] = x.data[i] * r.gal[first * H + i];
            x.data = dropped.data();
        }
        multiply(x, rows, H, r.weights + step.layer() * size, step.start(first), step.sums_at(first), G);
        step.forward(first, last, scratch);
    }
}

template <typename Step, typename Sequence>
void backward_rows(const Sequence& p, const Recurrence& r, int64_t first, int64_t last, float* scratch,
                   int64_t slot) {
    const int64_t H = p.H, G = Step::sums_of(p), rows = last - first;
    const int64_t size = (H + PANEL - 1) / PANEL * PANEL * G;
    for (int64_t n = r.stop * Step::layers(p) - 1; n >= r.start * Step::layers(p); --n) {
        const Step step(p, n);
        step.backward(first, last, scratch, slot);
        const Rows<const float> du = step.gradient(first);
        float* dh = step.arriving_at(first);
        multiply(du, rows, G, r.weights + step.layer() * size, {nullptr, 0}, {dh, H}, H);
        if (r.gal)
            for (int64_t i = 0; i < rows * H; ++i) dh[i] *= r.gal[first * H + i];
        if (r.share && step.layer() == 0)
            for (int64_t i = 0; i < rows * H; ++i) dh[i] *= r.share[step.time()];
        step.clear_gradient(first, last);
    }
}

template <typename Step, bool BACKWARD, typename Sequence>
void run_sequence(const Sequence& p, const Recurrence& r) {
    share_rows(p.B, p.threads, [&](int64_t first, int64_t last, int64_t thread) {
        std::vector<float> scratch(Step::scratch_size(p));
        if constexpr (BACKWARD)
            backward_rows<Step>(p, r, first, last, scratch.data(), thread);
        else
            forward_rows<Step>(p, r, first, last, scratch.data());
    });
}

}  // namespace rhhn
