// Matrix products of floats, of rows with a matrix that lies in panels of columns.
//
// A panel is as wide as a few vector registers: tiles of a few rows keep all their sums in registers while
// the panel passes by once, one line of it for each number of a row.

#pragma once

#include <algorithm>
#include <cstdint>

#include "vector.h"

namespace rhhn {

// Vectors of a panel's width and rows of a tile: their product's sums fill three quarters of the registers.
constexpr int VECTORS = REGISTERS == 32 ? 3 : 2;
constexpr int TILE = REGISTERS == 32 ? 8 : 6;
constexpr int64_t PANEL = VECTORS * WIDTH;

inline int64_t panels_of(int64_t columns) { return (columns + PANEL - 1) / PANEL; }

// Rows of a matrix.
template <typename X>
struct Rows {
    X* data;
    int64_t ld;        // elements between rows
    int64_t next = 1;  // elements between the numbers of a row

    Rows from(int64_t row, int64_t column = 0) const {
        return {data ? data + row * ld + column * next : nullptr, ld, next};
    }
};

// The first V vectors of a panel of y = add + x w for M rows. Of the last vector only the first columns may be
// y's. Asks for a line of what follows, ahead, with every line of the panel.
template <int M, int V>
void tile(Rows<const float> x, int64_t K, const float* panel, Rows<const float> add, Rows<float> y,
          int64_t columns, const float* ahead) {
    constexpr int64_t wide = V * WIDTH;
    const bool part = columns < wide;
    float rest[M * wide];
    if (part) {
        for (int m = 0; m < M; ++m)
            for (int64_t n = 0; n < wide; ++n) rest[m * wide + n] = n < columns ? add.data[m * add.ld + n] : 0.0f;
        add = {rest, wide};
    }
    Vector sums[M][V];
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < V; ++v) sums[m][v] = load(add.data + m * add.ld + v * WIDTH);
    const float* numbers = x.data;
    for (int64_t k = 0; k < K; ++k, panel += PANEL, ahead += PANEL, numbers += x.next) {
        __builtin_prefetch(ahead);
        Vector w[V];
        for (int v = 0; v < V; ++v) w[v] = load(panel + v * WIDTH);
        for (int m = 0; m < M; ++m) {
            const Vector factor = broadcast(numbers[m * x.ld]);
            for (int v = 0; v < V; ++v) sums[m][v] += factor * w[v];
        }
    }
    const Rows<float> to = part ? Rows<float>{rest, wide} : y;
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < V; ++v) store(to.data + m * to.ld + v * WIDTH, sums[m][v]);
    if (part)
        for (int m = 0; m < M; ++m) std::copy(rest + m * wide, rest + m * wide + columns, y.data + m * y.ld);
}

template <int V>
void tile_of(int64_t rows, Rows<const float> x, int64_t K, const float* panel, Rows<const float> add,
             Rows<float> y, int64_t columns, const float* ahead) {
    switch (rows) {
        case 1: return tile<1, V>(x, K, panel, add, y, columns, ahead);
        case 2: return tile<2, V>(x, K, panel, add, y, columns, ahead);
        case 3: return tile<3, V>(x, K, panel, add, y, columns, ahead);
        case 4: return tile<4, V>(x, K, panel, add, y, columns, ahead);
        case 5: return tile<5, V>(x, K, panel, add, y, columns, ahead);
        case 6: return tile<6, V>(x, K, panel, add, y, columns, ahead);
        case 7: return tile<7, V>(x, K, panel, add, y, columns, ahead);
        case 8: return tile<8, V>(x, K, panel, add, y, columns, ahead);
    }
}

// Calls work(first, rows) for each tile of some rows, which are as equal as can be: a tile of one or two rows
// takes nearly the time of a whole one.
template <typename Work>
void in_tiles(int64_t rows, Work work) {
    const int64_t tiles = (rows + TILE - 1) / TILE;
    for (int64_t i = 0; i < tiles; ++i) {
        const int64_t first = rows * i / tiles;
        work(first, rows * (i + 1) / tiles - first);
    }
}

// A panel of y = add + x w for some rows, without add of y = x w; the panel holds the first columns of
// w [K, columns].
inline void multiply_panel(Rows<const float> x, int64_t rows, int64_t K, const float* panel,
                           Rows<const float> add, Rows<float> y, int64_t columns) {
    static const float zeros[PANEL] = {};
    if (!add.data) add = {zeros, 0};
    columns = std::min(columns, PANEL);
    const auto chosen = columns > 2 * WIDTH ? tile_of<VECTORS> : columns > WIDTH ? tile_of<2> : tile_of<1>;
    in_tiles(rows, [&](int64_t first, int64_t count) {
        // The next panel comes from afar: the first tiles ask for a share of it each.
        const int64_t i = first / TILE;
        const float* ahead = i < VECTORS ? panel + K * PANEL + i * WIDTH : panel;
        chosen(count, x.from(first), K, panel, add.from(first), y.from(first), columns, ahead);
    });
}

// y = add + x w for some rows, w [K, N] in panels.
inline void multiply(Rows<const float> x, int64_t rows, int64_t K, const float* panels, Rows<const float> add,
                     Rows<float> y, int64_t N) {
    for (int64_t n = 0; n < N; n += PANEL, panels += K * PANEL)
        multiply_panel(x, rows, K, panels, add.from(0, n), y.from(0, n), N - n);
}

// Lays a panel out, [K, PANEL]: the first columns of w [K, columns], zeros past them.
inline void lay_panel(Rows<const float> w, int64_t K, int64_t columns, float* panel) {
    columns = std::min(columns, PANEL);
    if (w.next == 1) {
        for (int64_t k = 0; k < K; ++k, panel += PANEL) {
            std::copy(w.data + k * w.ld, w.data + k * w.ld + columns, panel);
            std::fill(panel + columns, panel + PANEL, 0.0f);
        }
        return;
    }
    // Stored by columns: as many lines of the panel at once as a cache line has numbers of a column.
    constexpr int64_t LINES = 16;
    for (int64_t k = 0; k < K; k += LINES, panel += LINES * PANEL) {
        const int64_t lines = std::min(LINES, K - k);
        for (int64_t n = 0; n < PANEL; ++n)
            for (int64_t i = 0; i < lines; ++i)
                panel[i * PANEL + n] = n < columns ? w.data[(k + i) * w.ld + n * w.next] : 0.0f;
    }
}

}  // namespace rhhn
