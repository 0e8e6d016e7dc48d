// Matrix products of a few rows, as in a step of decoding, and the LSTM's gates for such a step. A product
// takes as long as reading the matrix once; libraries would also pack it.

#include <algorithm>
#include <cstdint>

#include "math.h"
#include "rows.h"
#include "vector.h"

namespace rhhn {

constexpr int64_t LINE = 16;  // floats in a cache line
// Rows of the matrix that are read together.
constexpr int STREAMS = 4;
// Columns that are computed together: their sums stay in the first cache.
constexpr int64_t BLOCK = 1024;

// ops/native/build.py declares the same fields in the same order.
struct Product {
    int64_t M, K, N;
    int64_t ld_w;    // elements between rows of w
    int64_t ld_add;  // elements between rows of add; 0 if all rows add the same
    int64_t threads;
    const float* x;    // [M, K]
    const float* w;    // [K, N], or transposed [N, K]
    const float* add;  // [M or 1, N]; null for zero
    float* y;          // [M, N] = add + x w
};

// Adds x w to the columns [first, last) of y, for M rows; w is [K, N].
template <int M>
void down(const Product& p, int64_t first, int64_t last) {
    for (int64_t begin = first; begin < last; begin += BLOCK) {
        const int64_t end = std::min(last, begin + BLOCK);
        int64_t k = 0;
        for (; k + STREAMS <= p.K; k += STREAMS) {
            const float* row = p.w + k * p.ld_w;
            Vector factor[M][STREAMS];
            for (int m = 0; m < M; ++m)
                for (int j = 0; j < STREAMS; ++j) factor[m][j] = broadcast(p.x[m * p.K + k + j]);
            int64_t n = begin;
            for (; n + WIDTH <= end; n += WIDTH) {
                Vector w[STREAMS];
                for (int j = 0; j < STREAMS; ++j) {
                    w[j] = load(row + j * p.ld_w + n);
                    __builtin_prefetch(row + (j + STREAMS) * p.ld_w + n);
                }
                for (int m = 0; m < M; ++m) {
                    Vector sum = load(p.y + m * p.N + n);
                    for (int j = 0; j < STREAMS; ++j) sum += factor[m][j] * w[j];
                    store(p.y + m * p.N + n, sum);
                }
            }
            for (; n < end; ++n)
                for (int m = 0; m < M; ++m)
                    for (int j = 0; j < STREAMS; ++j)
                        p.y[m * p.N + n] += p.x[m * p.K + k + j] * row[j * p.ld_w + n];
        }
        for (; k < p.K; ++k)
            for (int m = 0; m < M; ++m)
                for (int64_t n = begin; n < end; ++n)
                    p.y[m * p.N + n] += p.x[m * p.K + k] * p.w[k * p.ld_w + n];
    }
}

// The same for w [N, K], with ROWS of its rows at a time.
template <int M, int ROWS>
void across_rows(const Product& p, int64_t n) {
    const float* row = p.w + n * p.ld_w;
    Vector sums[M][ROWS] = {};
    int64_t k = 0;
    for (; k + WIDTH <= p.K; k += WIDTH) {
        Vector w[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            w[r] = load(row + r * p.ld_w + k);
            __builtin_prefetch(row + (r + ROWS) * p.ld_w + k);
        }
        for (int m = 0; m < M; ++m) {
            const Vector x = load(p.x + m * p.K + k);
            for (int r = 0; r < ROWS; ++r) sums[m][r] += x * w[r];
        }
    }
    for (int m = 0; m < M; ++m)
        for (int r = 0; r < ROWS; ++r) {
            float sum = 0;
            for (int64_t v = 0; v < WIDTH; ++v) sum += sums[m][r][v];
            for (int64_t rest = k; rest < p.K; ++rest) sum += p.x[m * p.K + rest] * row[r * p.ld_w + rest];
            p.y[m * p.N + n + r] += sum;
        }
}

template <int M>
void across(const Product& p, int64_t first, int64_t last) {
    // As many as fit into the registers, with one for each sum, each row and x.
    constexpr int ROWS = std::clamp((REGISTERS - 1) / (M + 1), 1, STREAMS);
    int64_t n = first;
    for (; n + ROWS <= last; n += ROWS) across_rows<M, ROWS>(p, n);
    for (; n < last; ++n) across_rows<M, 1>(p, n);
}

template <int M, bool TRANSPOSED>
void run(const Product& p) {
    in_threads(p.threads, [&](int64_t thread, int64_t count) {
        // Threads share the columns of y in multiples of a cache line.
        const int64_t lines = (p.N + LINE - 1) / LINE;
        const int64_t first = std::min(p.N, lines * thread / count * LINE);
        const int64_t last = std::min(p.N, lines * (thread + 1) / count * LINE);
        for (int m = 0; m < M; ++m) {
            float* y = p.y + m * p.N;
            if (p.add)
                std::copy(p.add + m * p.ld_add + first, p.add + m * p.ld_add + last, y + first);
            else
                std::fill(y + first, y + last, 0.0f);
        }
        if (TRANSPOSED)
            across<M>(p, first, last);
        else
            down<M>(p, first, last);
    });
}

template <bool TRANSPOSED>
void choose(const Product& p) {
    switch (p.M) {
        case 1: return run<1, TRANSPOSED>(p);
        case 2: return run<2, TRANSPOSED>(p);
        case 3: return run<3, TRANSPOSED>(p);
        case 4: return run<4, TRANSPOSED>(p);
        case 5: return run<5, TRANSPOSED>(p);
        case 6: return run<6, TRANSPOSED>(p);
        case 7: return run<7, TRANSPOSED>(p);
        case 8: return run<8, TRANSPOSED>(p);
    }
}

// One row of an LSTM: the new c and h from the sums of the gates i, f, g, o, each [H], and the old c.
void lstm_row(int64_t H, float forget_bias, const float* __restrict gates, const float* __restrict old,
              float* __restrict c, float* __restrict h) {
#pragma omp simd
    for (int64_t j = 0; j < H; ++j) {
        const float kept = sigmoid(gates[H + j] + forget_bias) * old[j];
        const float fresh = kept + sigmoid(gates[j]) * hyperbolic_tangent(gates[2 * H + j]);
        c[j] = fresh;
        h[j] = sigmoid(gates[3 * H + j]) * hyperbolic_tangent(fresh);
    }
}

}  // namespace rhhn

extern "C" void lstm_gates(int64_t B, int64_t H, float forget_bias, const float* gates, const float* old,
                           float* c, float* h) {
    for (int64_t b = 0; b < B; ++b)
        rhhn::lstm_row(H, forget_bias, gates + 4 * b * H, old + b * H, c + b * H, h + b * H);
}
extern "C" void product(const rhhn::Product* p) { rhhn::choose<false>(*p); }
extern "C" void product_transposed(const rhhn::Product* p) { rhhn::choose<true>(*p); }
extern "C" int64_t size_of_product() { return sizeof(rhhn::Product); }
