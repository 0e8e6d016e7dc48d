// Products of rows with a float matrix that is stored in panels of columns.
//
// A panel is as wide as a few vector registers. A tile of a few rows keeps all its sums in registers and reads
// the panel once, one line for each element of a row.

#pragma once

#include <algorithm>
#include <cstdint>

#include "vector.h"

namespace rhhn {

// Vectors in a panel's width and rows of a tile. Their sums fill three quarters of the registers.
constexpr int VECTORS = REGISTERS == 32 ? 3 : 2;
constexpr int TILE = REGISTERS == 32 ? 8 : 6;
constexpr int64_t PANEL = VECTORS * WIDTH;

inline int64_t panels_of(int64_t columns) { return (columns + PANEL - 1) / PANEL; }

// Rows of a matrix.
template <typename X>
struct Rows {
    X* data;
    int64_t ld;        // elements between rows
    int64_t next = 1;  // elements between neighbours in a row

    Rows from(int64_t row, int64_t column = 0) const {
        return {data ? data + row * ld + column * next : nullptr, ld, next};
    }
};

static const float ZEROS[PANEL] = {};

// Computes the first V vectors of a panel of y = add + x w for M rows. y may have fewer columns than the last
// vector. For every line of the panel, prefetches a line at each of the STREAMS addresses in `ahead`.
template <int M, int V, int STREAMS>
void tile(Rows<const float> x, int64_t K, Rows<const float> panel, Rows<const float> add, Rows<float> y,
          int64_t columns, const float* const* ahead) {
    constexpr int64_t wide = V * WIDTH;
    const bool partial = columns < wide;
    float rest[M * wide];
    if (partial) {
        for (int m = 0; m < M; ++m)
            for (int64_t n = 0; n < wide; ++n) rest[m * wide + n] = n < columns ? add.data[m * add.ld + n] : 0.0f;
        add = {rest, wide};
    }
    // y may not be in the cache. If it is added to, it is prefetched below and added last.
    const bool grows = add.data == y.data;
    const Rows<const float> begin = grows ? Rows<const float>{ZEROS, 0} : add;
    Vector sums[M][V];
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < V; ++v) sums[m][v] = load(begin.data + m * begin.ld + v * WIDTH);
    // Prefetches the results too, because stores would otherwise wait for one line after another. An unaligned row
    // ends in an additional line.
    for (int m = 0; m < M; ++m) {
        for (int v = 0; v < V; ++v) __builtin_prefetch(y.data + m * y.ld + v * WIDTH, 1);
        __builtin_prefetch(y.data + m * y.ld + wide - 1, 1);
    }
    const float* numbers = x.data;
    const float* line = panel.data;
    const float* asked = ahead[0];
    int64_t apart[STREAMS];
    for (int stream = 0; stream < STREAMS; ++stream) apart[stream] = ahead[stream] - asked;
    for (int64_t k = 0; k < K; ++k, line += panel.ld, asked += panel.ld, numbers += x.next) {
        __builtin_prefetch(asked);
        for (int stream = 1; stream < STREAMS; ++stream) __builtin_prefetch(asked + apart[stream]);
        Vector w[V];
        for (int v = 0; v < V; ++v) w[v] = load(line + v * WIDTH);
        for (int m = 0; m < M; ++m) {
            const Vector factor = broadcast(numbers[m * x.ld]);
            for (int v = 0; v < V; ++v) sums[m][v] += factor * w[v];
        }
    }
    if (grows)
        for (int m = 0; m < M; ++m)
            for (int v = 0; v < V; ++v) sums[m][v] += load(y.data + m * y.ld + v * WIDTH);
    const Rows<float> to = partial ? Rows<float>{rest, wide} : y;
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < V; ++v) store(to.data + m * to.ld + v * WIDTH, sums[m][v]);
    if (partial)
        for (int m = 0; m < M; ++m) std::copy(rest + m * wide, rest + m * wide + columns, y.data + m * y.ld);
}

template <int V, int STREAMS>
void tile_of(int64_t rows, Rows<const float> x, int64_t K, Rows<const float> panel, Rows<const float> add,
             Rows<float> y, int64_t columns, const float* const* ahead) {
    switch (rows) {
        case 1: return tile<1, V, STREAMS>(x, K, panel, add, y, columns, ahead);
        case 2: return tile<2, V, STREAMS>(x, K, panel, add, y, columns, ahead);
        case 3: return tile<3, V, STREAMS>(x, K, panel, add, y, columns, ahead);
        case 4: return tile<4, V, STREAMS>(x, K, panel, add, y, columns, ahead);
        case 5: return tile<5, V, STREAMS>(x, K, panel, add, y, columns, ahead);
        case 6: return tile<6, V, STREAMS>(x, K, panel, add, y, columns, ahead);
        case 7: return tile<7, V, STREAMS>(x, K, panel, add, y, columns, ahead);
        case 8: return tile<8, V, STREAMS>(x, K, panel, add, y, columns, ahead);
    }
}

// The tile function for the number of columns of a panel.
template <int STREAMS>
auto tile_for(int64_t columns) {
    if (columns > 2 * WIDTH) return tile_of<VECTORS, STREAMS>;
    return columns > WIDTH ? tile_of<2, STREAMS> : tile_of<1, STREAMS>;
}

// Rows are divided evenly into tiles, because a tile of one or two rows takes nearly as long as a full one.
inline int64_t tiles_of(int64_t rows) { return (rows + TILE - 1) / TILE; }
inline int64_t tile_start(int64_t rows, int64_t tile) { return rows * tile / tiles_of(rows); }

// Calls work(start, count) for the tiles in [first, last).
template <typename Work>
void in_tiles(int64_t rows, int64_t first, int64_t last, Work work) {
    for (int64_t i = first; i < last; ++i) {
        const int64_t start = tile_start(rows, i);
        work(start, tile_start(rows, i + 1) - start);
    }
}

// Computes a panel of y = add + x w (add may be null) for the tiles in [first, last). x(start, count)
// gives the rows of a tile. The panel holds the first columns of w [K, columns].
template <typename Tiles>
void multiply_tiles(Tiles x, int64_t rows, int64_t first, int64_t last, int64_t K, Rows<const float> panel,
                    const float* next, Rows<const float> add, Rows<float> y, int64_t columns) {
    if (!add.data) add = {ZEROS, 0};
    columns = std::min(columns, PANEL);
    // The first tiles prefetch the next panel. The fewer tiles, the more each one prefetches. One stream is for the
    // ends of the lines, which reach into another cache line if the panel is not aligned.
    constexpr int64_t EVERY = VECTORS + 1;
    const int64_t tiles = last - first, streams = tiles == 1 ? EVERY : tiles < EVERY ? 2 : 1;
    const auto several = streams == 2 ? tile_for<2>(columns) : tile_for<EVERY>(columns);
    const auto multiply = streams == 1 ? tile_for<1>(columns) : several;
    const float* ahead[EVERY];
    int64_t asked = 0;
    in_tiles(rows, first, last, [&](int64_t start, int64_t count) {
        for (int64_t stream = 0; stream < streams; ++stream, ++asked)
            ahead[stream] = asked < EVERY ? next + std::min(asked * WIDTH, PANEL - 1) : panel.data;
        multiply(count, x(start, count), K, panel, add.from(start), y.from(start), columns, ahead);
    });
}

// The same for all tiles of rows that are stored by rows.
inline void multiply_panel(Rows<const float> x, int64_t rows, int64_t K, const float* panel,
                           Rows<const float> add, Rows<float> y, int64_t columns) {
    const auto tile = [&](int64_t start, int64_t) { return x.from(start); };
    multiply_tiles(tile, rows, 0, tiles_of(rows), K, {panel, PANEL}, panel + K * PANEL, add, y, columns);
}

// y = add + x w, with w [K, N] in panels.
inline void multiply(Rows<const float> x, int64_t rows, int64_t K, const float* panels, Rows<const float> add,
                     Rows<float> y, int64_t N) {
    for (int64_t n = 0; n < N; n += PANEL, panels += K * PANEL)
        multiply_panel(x, rows, K, panels, add.from(0, n), y.from(0, n), N - n);
}

// Lines by which packing prefetches.
constexpr int64_t AHEAD = 32;

// Packs one vector of several lines of a panel, from a matrix w that is stored by columns.
inline void lay_square(Rows<const float> w, int64_t lines, int64_t columns, float* panel) {
    if (w.ld == 1 && lines == WIDTH && columns >= WIDTH) {
        Vector square[WIDTH];
        for (int64_t n = 0; n < WIDTH; ++n) {
            const float* from = w.data + n * w.next;
            __builtin_prefetch(from + AHEAD);
            square[n] = load(from);
        }
        transpose(square);
        for (int64_t k = 0; k < WIDTH; ++k) store(panel + k * PANEL, square[k]);
        return;
    }
    for (int64_t k = 0; k < lines; ++k)
        for (int64_t n = 0; n < WIDTH; ++n)
            panel[k * PANEL + n] = n < columns ? w.data[k * w.ld + n * w.next] : 0.0f;
}

// Packs a panel [K, PANEL]: the first columns of w [K, columns], then zeros.
inline void lay_panel(Rows<const float> w, int64_t K, int64_t columns, float* panel) {
    columns = std::min(columns, PANEL);
    if (w.next == 1 && columns == PANEL) {
        for (int64_t k = 0; k < K; ++k, panel += PANEL)
            for (int v = 0; v < VECTORS; ++v) {
                const float* from = w.data + k * w.ld + v * WIDTH;
                __builtin_prefetch(from + AHEAD * w.ld);
                store(panel + v * WIDTH, load(from));
            }
        return;
    }
    if (w.next == 1) {
        for (int64_t k = 0; k < K; ++k, panel += PANEL) {
            std::copy(w.data + k * w.ld, w.data + k * w.ld + columns, panel);
            std::fill(panel + columns, panel + PANEL, 0.0f);
        }
        return;
    }
    for (int64_t n = 0; n < PANEL; n += WIDTH)
        for (int64_t k = 0; k < K; k += WIDTH)
            lay_square(w.from(k, n), std::min(WIDTH, K - k), columns - n, panel + k * PANEL + n);
}

}  // namespace rhhn
