// The scaling vectors d of a HyperLSTM, computed from the embeddings z when needed, for a few rows at a time.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "math.h"
#include "vector.h"

namespace rhhn {

// The scaling vectors of one step. d holds BLOCK rows of each kind (d_h, d_x and b, each for four gates).
template <typename T>
class Scaling {
    using S = typename Arithmetic<T>::type;

   public:
    // Rows that are computed together, so that weight_d is read once for all of them.
    static constexpr int64_t BLOCK = 8;

    Scaling(int64_t Z, int64_t H, const S* weight_d, const T* z, T* dz)
        : Z(Z), H(H), weight_d(weight_d), z(z), dz(dz) {}

    // Size of the scratch for d, at any alignment.
    static int64_t scratch_size(int64_t H) { return 12 * BLOCK * (H + LANES) + LANES; }

    // The scaling vectors of some rows: d[kind][row] = z[row, kind] weight_d[kind].
    void forward(int64_t start, int64_t rows, S* d) const {
        for (int64_t k = 0; k < 12; ++k) {
            const S* weight = weight_d + k * Z * H;
            S some_z[BLOCK][MAX_Z];
            for (int64_t from = 0; from < Z; from += MAX_Z) {
                const int64_t some = std::min(MAX_Z, Z - from);
                for (int64_t r = 0; r < BLOCK; ++r)
                    for (int64_t i = 0; i < some; ++i)
                        some_z[r][i] = r < rows ? S(load(embeddings(start + r)[k * Z + from + i])) : S(0);
                for (int64_t j = 0; j < H; j += WIDE) {
                    // The last columns, with some before them that are computed twice.
                    if (j + WIDE > H && H >= WIDE && Z <= MAX_Z) j = H - WIDE;
                    combine(some_z, some, weight + from * H + j, kind(d, k) + j, std::min(WIDE, H - j),
                            from > 0);
                }
            }
        }
    }

    // Turns the gradients of the scaling vectors into those of z and weight_d.
    void backward(int64_t start, int64_t rows, const S* dd, S* dweight) const {
        for (int64_t k = 0; k < 12; ++k) {
            // Two embeddings at a time share the loads of dd, where the registers hold the sums of both.
            int64_t i = 0;
            if (REGISTERS > 2 * BLOCK)
                for (; i + 2 <= Z; i += 2) embed_backward<2>(start, rows, kind(dd, k), dweight, k * Z + i);
            for (; i < Z; ++i) embed_backward<1>(start, rows, kind(dd, k), dweight, k * Z + i);
        }
    }

    // The scaling vectors of a kind, given those of the first.
    template <typename X>
    X* kind(X* d, int64_t k) const {
        return d + k * BLOCK * stride();
    }

    // Elements between rows of d, which keep every row aligned.
    int64_t stride() const { return (H + LANES - 1) / LANES * LANES; }

    // The first aligned address in scratch.
    static S* aligned(S* pointer) {
        const uintptr_t size = LANES * sizeof(S);
        return reinterpret_cast<S*>((reinterpret_cast<uintptr_t>(pointer) + size - 1) / size * size);
    }

   private:
    // Width of a vector register; columns at a time, so that their sums for BLOCK rows fit the registers; and
    // embeddings at a time. The compiler keeps wider vectors in memory.
    static constexpr int64_t LANES = sizeof(rhhn::Vector) / sizeof(S);
    static constexpr int64_t WIDE = REGISTERS > 2 * BLOCK ? 2 * LANES : LANES, MAX_Z = 64;
    typedef S Vector __attribute__((vector_size(sizeof(rhhn::Vector))));
    static Vector get(const S* from) {
        Vector to;
        std::memcpy(&to, from, sizeof to);
        return to;
    }
    static void put(S* to, Vector from) { std::memcpy(to, &from, sizeof from); }

    const T* embeddings(int64_t b) const { return z + b * 12 * Z; }

    // to[row] (+)= sum over i of z[row][i] weight[i], for up to WIDE columns.
    void combine(const S some_z[][MAX_Z], int64_t some, const S* weight, S* to, int64_t columns, bool add) const {
        const int64_t ld = stride();
        if (columns == WIDE) {
            Vector sum[BLOCK][WIDE / LANES];
            for (int64_t r = 0; r < BLOCK; ++r)
                for (int64_t v = 0; v < WIDE / LANES; ++v)
                    sum[r][v] = add ? get(to + r * ld + v * LANES) : Vector{};
            for (int64_t i = 0; i < some; ++i)
                for (int64_t v = 0; v < WIDE / LANES; ++v) {
                    const Vector w = get(weight + i * H + v * LANES);
                    for (int64_t r = 0; r < BLOCK; ++r) sum[r][v] += some_z[r][i] * w;
                }
            for (int64_t r = 0; r < BLOCK; ++r)
                for (int64_t v = 0; v < WIDE / LANES; ++v) put(to + r * ld + v * LANES, sum[r][v]);
            return;
        }
        for (int64_t r = 0; r < BLOCK; ++r)
            for (int64_t j = 0; j < columns; ++j) {
                S sum = add ? to[r * ld + j] : S(0);
                for (int64_t i = 0; i < some; ++i) sum += some_z[r][i] * weight[i * H + j];
                to[r * ld + j] = sum;
            }
    }

    // The backward pass for SOME embeddings from number at_z of all 12 Z on, given their kind's gradients.
    template <int64_t SOME>
    void embed_backward(int64_t start, int64_t rows, const S* dd, S* dweight, int64_t at_z) const {
        const int64_t ld = stride();
        const S* weight = weight_d + at_z * H;
        S* to = dweight + at_z * H;
        S some_z[BLOCK][SOME] = {};
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t i = 0; i < SOME; ++i) some_z[r][i] = S(load(embeddings(start + r)[at_z + i]));
        Vector sum[BLOCK][SOME] = {};
        const auto columns = [&](int64_t j, auto mask) {
            Vector w[SOME], change[SOME];
            for (int64_t i = 0; i < SOME; ++i) w[i] = get(weight + i * H + j);
            for (int64_t i = 0; i < SOME; ++i) change[i] = get(to + i * H + j);
            for (int64_t r = 0; r < BLOCK; ++r) {
                const Vector g = mask(get(dd + r * ld + j));
                for (int64_t i = 0; i < SOME; ++i) {
                    sum[r][i] += g * w[i];
                    change[i] += some_z[r][i] * g;
                }
            }
            for (int64_t i = 0; i < SOME; ++i) put(to + i * H + j, change[i]);
        };
        int64_t j = 0;
        for (; j + LANES <= H; j += LANES) columns(j, [](Vector g) { return g; });
        if (j < H && H >= LANES) {
            // The last columns, with some before them whose gradients are masked.
            const Vector left_out = first_lanes(LANES - (H - j));
            columns(H - LANES, [&](Vector g) { return left_out != 0 ? Vector{} : g; });
            j = H;
        }
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t i = 0; i < SOME; ++i) {
                S product = total(sum[r][i]);
                for (int64_t rest = j; rest < H; ++rest) {
                    product += dd[r * ld + rest] * weight[i * H + rest];
                    to[i * H + rest] += some_z[r][i] * dd[r * ld + rest];
                }
                store(dz[(start + r) * 12 * Z + at_z + i], product);
            }
    }

    // Ones in the first lanes, zeros in the others.
    static Vector first_lanes(int64_t count) {
        Vector lanes;
        for (int64_t lane = 0; lane < LANES; ++lane) lanes[lane] = lane < count;
        return lanes;
    }

    // The sum of all lanes, by repeated halving.
    template <typename V>
    static S total(V all) {
        if constexpr (sizeof all == 16) {
            S sum = 0;
            for (size_t lane = 0; lane < 16 / sizeof(S); ++lane) sum += all[lane];
            return sum;
        } else {
            typedef S Half __attribute__((vector_size(sizeof all / 2)));
            Half low, high;
            std::memcpy(&low, &all, sizeof low);
            std::memcpy(&high, reinterpret_cast<const char*>(&all) + sizeof low, sizeof high);
            return total(low + high);
        }
    }

    const int64_t Z, H;
    const S* weight_d;
    const T* z;  // [B, 12 Z] of the step
    T* dz;       // the same, null in the forward pass
};

}  // namespace rhhn
