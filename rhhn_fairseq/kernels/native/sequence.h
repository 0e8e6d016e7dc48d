// A whole sequence of a small network in one call: its products with the recurrent matrices and the
// point-wise work between them.
//
// Sequences of a batch do not meet, so that each thread takes its share of them from the first step to the
// last and never waits for another. The matrices stay in its cache, which is what "small" means.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "rows.h"
#include "vector.h"

namespace rhhn {

// Columns of a panel and rows of a tile: their product's sums fill three quarters of the registers.
constexpr int64_t PANEL = (REGISTERS == 32 ? 4 : 2) * WIDTH;
constexpr int64_t TILE = 6;

// Mirrored, field by field, by kernels/native/__init__.py.
struct Recurrence {
    const float* weights;  // for each layer a matrix [K, N] in panels [ceil(N / PANEL), K, PANEL], zeros past N
    const float* gal;      // [B, H] or null: what the state is multiplied by before the product
    const float* share;    // [T] or null: what the gradient through layer 0's product is multiplied by
};

// Rows of a matrix.
template <typename X>
struct Rows {
    X* data;
    int64_t ld;  // elements between rows
};

// A panel of y = add + x w for M rows; without add, y = x w.
template <int M>
void tile(Rows<const float> x, int64_t K, const float* panel, Rows<const float> add, Rows<float> y,
          int64_t columns) {
    constexpr int64_t V = PANEL / WIDTH;
    Vector sums[M][V] = {};
    float rest[PANEL];
    if (add.data)
        for (int m = 0; m < M; ++m) {
            const float* from = add.data + m * add.ld;
            if (columns < PANEL) {
                std::copy(from, from + columns, rest);
                from = rest;
            }
            for (int v = 0; v < V; ++v) sums[m][v] = load(from + v * WIDTH);
        }
    for (int64_t k = 0; k < K; ++k, panel += PANEL) {
        Vector w[V];
        for (int v = 0; v < V; ++v) w[v] = load(panel + v * WIDTH);
        for (int m = 0; m < M; ++m) {
            const Vector factor = broadcast(x.data[m * x.ld + k]);
            for (int v = 0; v < V; ++v) sums[m][v] += factor * w[v];
        }
    }
    for (int m = 0; m < M; ++m) {
        float* to = columns < PANEL ? rest : y.data + m * y.ld;
        for (int v = 0; v < V; ++v) store(to + v * WIDTH, sums[m][v]);
        if (columns < PANEL) std::copy(rest, rest + columns, y.data + m * y.ld);
    }
}

// y = add + x w for some rows, w [K, N] in panels.
inline void multiply(Rows<const float> x, int64_t rows, int64_t K, const float* panels, Rows<const float> add,
                     Rows<float> y, int64_t N) {
    const int64_t tiles = (rows + TILE - 1) / TILE;
    for (int64_t n = 0; n < N; n += PANEL, panels += K * PANEL) {
        const int64_t columns = std::min(PANEL, N - n);
        for (int64_t i = 0; i < tiles; ++i) {
            // As equal as can be: a tile of one or two rows takes nearly the time of a whole one.
            const int64_t first = rows * i / tiles, count = rows * (i + 1) / tiles - first;
            const Rows<const float> x_i{x.data + first * x.ld, x.ld};
            const Rows<const float> add_i{add.data ? add.data + first * add.ld + n : nullptr, add.ld};
            const Rows<float> y_i{y.data + first * y.ld + n, y.ld};
            switch (count) {
                case 1: tile<1>(x_i, K, panels, add_i, y_i, columns); break;
                case 2: tile<2>(x_i, K, panels, add_i, y_i, columns); break;
                case 3: tile<3>(x_i, K, panels, add_i, y_i, columns); break;
                case 4: tile<4>(x_i, K, panels, add_i, y_i, columns); break;
                case 5: tile<5>(x_i, K, panels, add_i, y_i, columns); break;
                case 6: tile<6>(x_i, K, panels, add_i, y_i, columns); break;
            }
        }
    }
}

// Runs all steps for one thread's rows. A Step has read, sums, start, gradient and arriving, which say where
// what its product takes and gives lies, from a row on.
template <typename Step, typename Sequence>
void forward_rows(const Sequence& p, const Recurrence& r, int64_t first, int64_t last, float* scratch) {
    const int64_t H = p.H, G = Step::sums_of(p), rows = last - first;
    const int64_t size = (G + PANEL - 1) / PANEL * PANEL * H;
    std::vector<float> dropped(r.gal ? rows * H : 0);
    for (int64_t n = 0; n < Step::steps(p); ++n) {
        const Step step(p, n);
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
    for (int64_t n = Step::steps(p) - 1; n >= 0; --n) {
        const Step step(p, n);
        step.backward(first, last, scratch, slot);
        const Rows<const float> du = step.gradient(first);
        float* dh = step.arriving_at(first);
        multiply(du, rows, G, r.weights + step.layer() * size, {nullptr, 0}, {dh, H}, H);
        if (r.gal)
            for (int64_t i = 0; i < rows * H; ++i) dh[i] *= r.gal[first * H + i];
        if (r.share && step.layer() == 0)
            for (int64_t i = 0; i < rows * H; ++i) dh[i] *= r.share[step.time()];
    }
}

template <typename Step, bool BACKWARD, typename Sequence>
void whole_sequence(const Sequence& p, const Recurrence& r) {
    share_rows(p.B, p.threads, [&](int64_t first, int64_t last, int64_t thread) {
        std::vector<float> scratch(Step::scratch_size(p));
        if constexpr (BACKWARD)
            backward_rows<Step>(p, r, first, last, scratch.data(), thread);
        else
            forward_rows<Step>(p, r, first, last, scratch.data());
    });
}

}  // namespace rhhn
