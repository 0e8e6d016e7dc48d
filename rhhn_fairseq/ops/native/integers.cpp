// Products of float rows with a matrix of 8-bit integers: every row is rounded to 8 bits by its own range.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "rows.h"

namespace rhhn {

constexpr int64_t COLUMNS = 16;  // of a panel
constexpr int64_t DEPTH = 4;     // rows of the matrix that an instruction multiplies and adds
constexpr int ROWS = 4;          // of x, that are computed together

// ops/native/build.py declares the same fields in the same order.
struct Integers {
    int64_t M, K, N;
    int64_t threads;
    const float* x;          // [M, K]
    const int8_t* panels;    // [N / 16, K / 4, 16, 4], rounded up, the rest zero; magnitudes are 63 at most
    const float* scales;     // [N]: of the columns
    const int32_t* sums;     // [N]: of each column's integers
    float* y;                // [M, N]
};

// The sums of products of one panel with some rows of bytes, each row `depth` groups of four long.
template <int M, bool VNNI>
void multiply(const int8_t* panel, const uint8_t* const* rows, int64_t depth, int32_t (*sums)[COLUMNS]) {
#if defined(__AVX512BW__) || defined(__AVX2__)
#ifdef __AVX512BW__
    typedef __m512i Register;
    const auto load = [](const void* from) { return _mm512_loadu_si512(from); };
    const auto repeat = [](int32_t four) { return _mm512_set1_epi32(four); };
    const auto add = [](Register sum, Register x, Register w) {
        if constexpr (VNNI) {
            // Not all processors with AVX-512 have it, so the intrinsic is not there in this build.
            asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
            return sum;
        }
        // Two products in 16 bits: 2 * 255 * 63 fits.
        return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(x, w), _mm512_set1_epi16(1)));
    };
#else
    typedef __m256i Register;
    const auto load = [](const void* from) { return _mm256_loadu_si256((const __m256i*)from); };
    const auto repeat = [](int32_t four) { return _mm256_set1_epi32(four); };
    const auto add = [](Register sum, Register x, Register w) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(x, w), _mm256_set1_epi16(1)));
    };
#endif
    constexpr int PARTS = COLUMNS * DEPTH / sizeof(Register);
    Register totals[M][PARTS] = {};
    for (int64_t k = 0; k < depth; ++k, panel += COLUMNS * DEPTH) {
        Register w[PARTS];
        for (int part = 0; part < PARTS; ++part) w[part] = load(panel + part * sizeof(Register));
        for (int m = 0; m < M; ++m) {
            int32_t four;
            std::memcpy(&four, rows[m] + k * DEPTH, sizeof four);
            const Register x = repeat(four);
            for (int part = 0; part < PARTS; ++part) totals[m][part] = add(totals[m][part], x, w[part]);
        }
    }
    for (int m = 0; m < M; ++m) std::memcpy(sums[m], totals[m], sizeof totals[m]);
#else
    for (int m = 0; m < M; ++m) std::fill(sums[m], sums[m] + COLUMNS, 0);
    for (int64_t k = 0; k < depth; ++k, panel += COLUMNS * DEPTH)
        for (int m = 0; m < M; ++m)
            for (int64_t n = 0; n < COLUMNS; ++n)
                for (int64_t j = 0; j < DEPTH; ++j)
                    sums[m][n] += int32_t(rows[m][k * DEPTH + j]) * panel[n * DEPTH + j];
#endif
}

// Writes a row in bytes: x = scale * (byte - zero) to rounding. Returns scale and zero; the scale of a row with
// infinite numbers or NaN is NaN, and so are its products.
std::pair<float, int32_t> round_row(const float* x, int64_t K, uint8_t* bytes) {
    float low = 0, high = 0, invalid = 0;
#pragma omp simd reduction(min : low) reduction(max : high) reduction(+ : invalid)
    for (int64_t k = 0; k < K; ++k) {
        low = std::min(low, x[k]);
        high = std::max(high, x[k]);
        invalid += x[k] * 0;
    }
    if (invalid != 0) {
        std::fill_n(bytes, K, uint8_t(0));
        return {invalid, 0};
    }
    const float scale = high > low ? (high - low) / 255 : 1, zero = float(int32_t(0.5f - low / scale));
#pragma omp simd
    for (int64_t k = 0; k < K; ++k)
        bytes[k] = uint8_t(int32_t(std::min(std::max(x[k] / scale + zero, 0.0f), 255.0f) + 0.5f));
    return {scale, int32_t(zero)};
}

struct Rows {
    int64_t depth;
    std::vector<uint8_t> bytes;
    std::vector<std::pair<float, int32_t>> ranges;
};

template <int M>
void multiply_rows(const Integers& p, const Rows& rounded, int64_t m, int64_t panel) {
    const uint8_t* rows[M];
    for (int i = 0; i < M; ++i) rows[i] = rounded.bytes.data() + (m + i) * rounded.depth * DEPTH;
    alignas(64) int32_t sums[M][COLUMNS];
    const int8_t* integers = p.panels + panel * rounded.depth * COLUMNS * DEPTH;
#ifdef __AVX512BW__
    static const bool vnni = __builtin_cpu_supports("avx512vnni");
    if (vnni)
        multiply<M, true>(integers, rows, rounded.depth, sums);
    else
#endif
        multiply<M, false>(integers, rows, rounded.depth, sums);
    const int64_t first = panel * COLUMNS, count = std::min(COLUMNS, p.N - first);
    for (int i = 0; i < M; ++i) {
        const auto [scale, zero] = rounded.ranges[m + i];
        for (int64_t n = 0; n < count; ++n)
            p.y[(m + i) * p.N + first + n] =
                scale * p.scales[first + n] * float(sums[i][n] - zero * p.sums[first + n]);
    }
}

}  // namespace rhhn

extern "C" void multiply_integers(const rhhn::Integers* call) {
    using namespace rhhn;
    const Integers& p = *call;
    static thread_local Rows kept;
    Rows& rounded = kept;
    rounded.depth = (p.K + DEPTH - 1) / DEPTH;
    rounded.bytes.resize(p.M * rounded.depth * DEPTH);
    rounded.ranges.resize(p.M);
    // What lies behind a row is multiplied by zeros of the panels.
    for (int64_t m = 0; m < p.M; ++m)
        rounded.ranges[m] = round_row(p.x + m * p.K, p.K, rounded.bytes.data() + m * rounded.depth * DEPTH);
    share_rows((p.N + COLUMNS - 1) / COLUMNS, p.threads, [&](int64_t first, int64_t last, int64_t) {
        for (int64_t panel = first; panel < last; ++panel) {
            int64_t m = 0;
            for (; m + ROWS <= p.M; m += ROWS) multiply_rows<ROWS>(p, rounded, m, panel);
            for (; m < p.M; ++m) multiply_rows<1>(p, rounded, m, panel);
        }
    });
}
extern "C" int64_t size_of_integers() { return sizeof(rhhn::Integers); }
