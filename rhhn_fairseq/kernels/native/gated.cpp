// The point-wise part of one time step of LSTM, LN LSTM, HyperLSTM and LN HyperLSTM, forward and backward.
//
// Gates lie in the order i, f, g, o. One row is one sequence of the batch; rows are independent, so they are
// what threads share. See the equations in cells/lstm.py and cells/hyper_lstm.py, and kernels/gated.py for
// what each buffer is.

#include <algorithm>

#include "math.h"
#include "normal.h"
#include "rows.h"
#include "sequence.h"

namespace rhhn {

// Mirrored, field by field, by kernels/native/__init__.py. A missing tensor is a null pointer.
struct Gated {
    int64_t T, B, H, Z;      // Z is zero without a hypernetwork
    int64_t ld_u, ld_du;     // elements between rows of u and of du
    int64_t keep_t, keep_b;  // elements between steps and rows of keep; 0 where it is the same for all
    double forget_bias, epsilon;
    double keep_scale;              // what a kept unit of the update is multiplied by
    double zone_h_rate, zone_c_rate;  // the expectation where there is no mask
    int64_t threads;                // slots of sums
    // Forward. Operands unless said otherwise.
    void* u;                 // [T, B, ld_u]: all of the sums, or with a hypernetwork h W_h
    const void* gx;          // [T, B, 4 H]: x W_x, with a hypernetwork, or for a whole sequence in one call
    const void* z;           // [T, B, 12 Z]: embeddings of d_h, d_x, b, each for four gates. This and the next
                             // two with a hypernetwork only
    const void* weight_d;    // [12, Z, H] state type: from z to d_h, d_x and b
    const void* bias;        // [4, H] state type: added to b
    const void* gate_gain;   // [4 H] state type; null without layer normalisation
    const void* gate_shift;  // [4 H] state type
    const void* c_gain;      // [H] state type
    const void* c_shift;     // [H] state type
    const uint8_t* mask;     // [T, B]
    const uint8_t* keep;     // [T or 1, B or 1, H]
    const uint8_t* zone_h;   // [T, B, H]
    const uint8_t* zone_c;   // [T, B, H]
    const void* c_scale;     // [T] state type: the gradient's share through c
    const void* h0;          // [B, H]
    const void* c0;          // [B, H] state type
    void* h;                 // [T, B, H] state after each step
    void* c;                 // [T, B, H] state type
    void* y;                 // [T, B, H] outputs; null where they are h
    // Backward.
    const void* dy;     // [T, B, H] or null
    void* dh;           // [B, H]: gradient that came through the matrices from step t + 1
    void* dh_direct;    // [B, H] state type: the rest of it, in and out; null where it is always zero
    void* dc;           // [B, H] state type, in and out
    void* du;           // [T, B, ld_u]
    void* dgx;          // [T, B, 4 H]
    void* dz;           // [T, B, 12 Z]
    void* dweight_d;    // [threads, 12, Z, H] state type, summed over rows and steps
    void* sums;         // [threads, 14 H] state type: gradients of gate_gain, gate_shift, bias (4 H each),
                        // c_gain and c_shift (H each), summed over rows and steps
};

template <typename T, bool HYPER>
class GatedStep {
    using S = typename Arithmetic<T>::type;

   public:
    using State = S;

    GatedStep(const Gated& p, int64_t t) : p(p), t(t), H(p.H) {}

    void forward(int64_t first, int64_t last, S* scratch) const {
        if constexpr (HYPER) {
            S* d = aligned(scratch + row_scratch(H));
            for (int64_t start = first; start < last; start += BLOCK) {
                const int64_t rows = std::min(BLOCK, last - start);
                scale(start, rows, d);
                for (int64_t r = 0; r < rows; ++r) forward_row(start + r, scratch, d + r * stride());
            }
        } else {
            for (int64_t b = first; b < last; ++b) forward_row(b, scratch, nullptr);
        }
    }

    void backward(int64_t first, int64_t last, S* scratch, int64_t slot) const {
        S* total = static_cast<S*>(p.sums) + slot * 14 * H;
        if constexpr (HYPER) {
            S* d = aligned(scratch + row_scratch(H));
            for (int64_t start = first; start < last; start += BLOCK) {
                const int64_t rows = std::min(BLOCK, last - start);
                scale(start, rows, d);
                for (int64_t r = 0; r < rows; ++r) backward_row(start + r, scratch, total, d + r * stride());
                // By now every d has given way to its gradient.
                scale_backward(start, rows, d, static_cast<S*>(p.dweight_d) + slot * 12 * p.Z * H);
            }
        } else {
            for (int64_t b = first; b < last; ++b) backward_row(b, scratch, total, nullptr);
        }
    }

    // What sequence.h asks for.
    static int64_t steps(const Gated& p) { return p.T; }
    static int64_t sums_of(const Gated& p) { return 4 * p.H; }
    int64_t time() const { return t; }
    int64_t layer() const { return 0; }
    const T* read(int64_t b) const {
        return t ? at<T>(p.h) + ((t - 1) * p.B + b) * H : at<T>(p.h0) + b * H;
    }
    Rows<const T> start(int64_t b) const { return {at<T>(p.gx) + (t * p.B + b) * 4 * H, 4 * H}; }
    Rows<T> sums_at(int64_t b) const { return {at<T>(p.u) + (t * p.B + b) * p.ld_u, p.ld_u}; }
    Rows<const T> gradient(int64_t b) const { return {at<T>(p.du) + (t * p.B + b) * p.ld_du, p.ld_du}; }
    T* arriving_at(int64_t b) const { return at<T>(p.dh) + b * H; }

    static int64_t scratch_size(const Gated& p) {
        return row_scratch(p.H) + (HYPER ? 12 * BLOCK * (p.H + LANES) + LANES : 0);
    }

   private:
    // Rows whose scaling vectors are made together, so that weight_d is read once for all of them.
    static constexpr int64_t BLOCK = 8;
    static int64_t row_scratch(int64_t H) { return 18 * H + 16; }

    // Numbers that are worked on at once, and how many such groups of columns; embeddings in one go.
    static constexpr int64_t LANES = 64 / sizeof(S), WIDE = 2 * LANES, MAX_Z = 64;
    typedef S Vector __attribute__((vector_size(64)));
    static Vector get(const S* from) {
        Vector to;
        std::memcpy(&to, from, sizeof to);
        return to;
    }
    static void put(S* to, Vector from) { std::memcpy(to, &from, sizeof from); }

    // d: the scaling vectors of the row, BLOCK rows apart from kind to kind.
    void forward_row(int64_t b, S* scratch, const S* d) const {
        const int64_t row = (t * p.B + b) * H, before = row - p.B * H;
        const T* h_old = t ? at<T>(p.h) + before : at<T>(p.h0) + b * H;
        const S* c_old = t ? at<S>(p.c) + before : at<S>(p.c0) + b * H;
        T* h = at<T>(p.h) + row;
        S* c = at<S>(p.c) + row;
        T* y = p.y ? at<T>(p.y) + row : nullptr;
        if (p.mask && !p.mask[t * p.B + b]) {
            std::copy(h_old, h_old + H, h);
            std::copy(c_old, c_old + H, c);
            if (y) std::fill(y, y + H, T{});
            return;
        }
        S *a = scratch, *inner = scratch + 4 * H;
        sums(b, a, d);
        if (p.gate_gain) {
            for (int64_t k = 0; k < 4; ++k) {
                S* __restrict gate = a + k * H;
                const S* __restrict gain = at<S>(p.gate_gain) + k * H;
                const S* __restrict shift = at<S>(p.gate_shift) + k * H;
                const Moments<S> m = moments(gate, H, S(p.epsilon));
#pragma omp simd
                for (int64_t j = 0; j < H; ++j) gate[j] = (gate[j] - m.mean) * m.rstd * gain[j] + shift[j];
            }
        }
        {
            const S forget_bias = S(p.forget_bias);
            const S *__restrict i = a, *__restrict f = a + H, *__restrict g = a + 2 * H;
            S *__restrict to = inner, *__restrict keep = scratch + 5 * H;
            factors(keep_row(b), S(p.keep_scale), S(1), keep, H);
#pragma omp simd
            for (int64_t j = 0; j < H; ++j) to[j] = hyperbolic_tangent(g[j]) * keep[j];
#pragma omp simd
            for (int64_t j = 0; j < H; ++j)
                to[j] = sigmoid(f[j] + forget_bias) * c_old[j] + sigmoid(i[j]) * to[j];
        }
        zone(c, inner, c_old, p.zone_c ? p.zone_c + row : nullptr, S(p.zone_c_rate));
        if (p.c_gain) {
            const S *__restrict gain = at<S>(p.c_gain), *__restrict shift = at<S>(p.c_shift);
            const Moments<S> m = moments(inner, H, S(p.epsilon));
            for (int64_t j = 0; j < H; ++j) inner[j] = (inner[j] - m.mean) * m.rstd * gain[j] + shift[j];
        }
        {
            const S* __restrict o = a + 3 * H;
            S* __restrict to = inner;
#pragma omp simd
            for (int64_t j = 0; j < H; ++j) to[j] = sigmoid(o[j]) * hyperbolic_tangent(to[j]);
        }
        zone(h, inner, h_old, p.zone_h ? p.zone_h + row : nullptr, S(p.zone_h_rate));
        if (y) std::copy(h, h + H, y);
    }

    // Leaves in d the gradients of the scaling vectors.
    void backward_row(int64_t b, S* scratch, S* total, S* d) const {
        const int64_t row = (t * p.B + b) * H, before = row - p.B * H;
        const S* __restrict c_old = t ? at<S>(p.c) + before : at<S>(p.c0) + b * H;
        const T* __restrict dh_mm = at<T>(p.dh) + b * H;
        S* __restrict dh_direct = p.dh_direct ? at<S>(p.dh_direct) + b * H : nullptr;
        S* __restrict dc = at<S>(p.dc) + b * H;
        if (p.mask && !p.mask[t * p.B + b]) {
            for (int64_t j = 0; j < H; ++j) dh_direct[j] += load(dh_mm[j]);
            clear(b, d);
            return;
        }
        S *a = scratch, *inner = scratch + 4 * H, *update = scratch + 5 * H, *dh = scratch + 6 * H;
        S *da = scratch + 7 * H, *gate_rstd = scratch + 11 * H;
        S *normal = scratch + 11 * H + 4, *c_normal = scratch + 15 * H + 4;
        S *__restrict keep = scratch + 16 * H + 4, *__restrict stays = scratch + 17 * H + 4;
        factors(keep_row(b), S(p.keep_scale), S(1), keep, H);
        factors(p.zone_c ? p.zone_c + row : nullptr, S(1), S(p.zone_c_rate), stays, H);
        sums(b, a, d);
        if (p.gate_gain) {
            for (int64_t k = 0; k < 4; ++k) {
                S *__restrict gate = a + k * H, *__restrict out = normal + k * H;
                const S* __restrict gain = at<S>(p.gate_gain) + k * H;
                const S* __restrict shift = at<S>(p.gate_shift) + k * H;
                const Moments<S> m = moments(gate, H, S(p.epsilon));
                gate_rstd[k] = m.rstd;
#pragma omp simd
                for (int64_t j = 0; j < H; ++j) {
                    out[j] = (gate[j] - m.mean) * m.rstd;
                    gate[j] = out[j] * gain[j] + shift[j];
                }
            }
        }
        {
            S *__restrict i = a, *__restrict f = a + H, *__restrict g = a + 2 * H, *__restrict o = a + 3 * H;
            S *__restrict to = inner, *__restrict new_update = update;
            const S forget_bias = S(p.forget_bias);
#pragma omp simd
            for (int64_t j = 0; j < H; ++j) {
                i[j] = sigmoid(i[j]);
                f[j] = sigmoid(f[j] + forget_bias);
                g[j] = hyperbolic_tangent(g[j]);
                o[j] = sigmoid(o[j]);
            }
#pragma omp simd
            for (int64_t j = 0; j < H; ++j) {
                new_update[j] = g[j] * keep[j];
                to[j] = f[j] * c_old[j] + i[j] * new_update[j];
            }
        }
        // inner: what the output's tanh sees, and then that tanh.
        S c_rstd = 0;
        if (p.c_gain) {
            const S *__restrict gain = at<S>(p.c_gain), *__restrict shift = at<S>(p.c_shift);
            const Moments<S> m = moments(inner, H, S(p.epsilon));
            c_rstd = m.rstd;
#pragma omp simd
            for (int64_t j = 0; j < H; ++j) {
                c_normal[j] = (inner[j] - m.mean) * m.rstd;
                inner[j] = hyperbolic_tangent(c_normal[j] * gain[j] + shift[j]);
            }
        } else {
#pragma omp simd
            for (int64_t j = 0; j < H; ++j) inner[j] = hyperbolic_tangent(inner[j]);
        }
        arriving(row, dh_mm, dh_direct, dh);
        S* __restrict dc_new = da;  // until the gates' gradients take its place
        {
            const S* __restrict o = a + 3 * H;
            S* __restrict d_o = da + 3 * H;
#pragma omp simd
            for (int64_t j = 0; j < H; ++j) {
                d_o[j] = dh[j] * inner[j] * o[j] * (S(1) - o[j]);
                dc_new[j] = dh[j] * o[j] * (S(1) - inner[j] * inner[j]);
            }
        }
        if (p.c_gain)
            normalise_backward(c_normal, dc_new, at<S>(p.c_gain), total + 12 * H, total + 13 * H, c_rstd, H);
        {
            const S *__restrict i = a, *__restrict f = a + H, *__restrict g = a + 2 * H;
            S *__restrict d_f = da + H, *__restrict d_g = da + 2 * H;
            const S through = p.c_scale ? at<S>(p.c_scale)[t] : S(1);
#pragma omp simd
            for (int64_t j = 0; j < H; ++j) {
                const S d = dc_new[j] + dc[j] * (S(1) - stays[j]);
                dc[j] = dc[j] * stays[j] + d * f[j] * through;
                d_f[j] = d * c_old[j] * f[j] * (S(1) - f[j]);
                d_g[j] = d * i[j] * keep[j] * (S(1) - g[j] * g[j]);
                dc_new[j] = d * update[j] * i[j] * (S(1) - i[j]);
            }
        }
        if (p.gate_gain) {
            for (int64_t k = 0; k < 4; ++k)
                normalise_backward(normal + k * H, da + k * H, at<S>(p.gate_gain) + k * H, total + k * H,
                                   total + (4 + k) * H, gate_rstd[k], H);
        }
        spread(b, da, total + 8 * H, d);
    }

    template <typename X>
    static X* at(void* pointer) {
        return static_cast<X*>(pointer);
    }
    template <typename X>
    static const X* at(const void* pointer) {
        return static_cast<const X*>(pointer);
    }

    const uint8_t* keep_row(int64_t b) const {
        return p.keep ? p.keep + t * p.keep_t + b * p.keep_b : nullptr;
    }

    // The sums of the four gates of a row, before any normalisation.
    void sums(int64_t b, S* __restrict a, const S* d) const {
        const T* __restrict u = at<T>(p.u) + (t * p.B + b) * p.ld_u;
        if constexpr (!HYPER) {
#pragma omp simd
            for (int64_t j = 0; j < 4 * H; ++j) a[j] = load(u[j]);
        } else {
            const T* __restrict gx = at<T>(p.gx) + (t * p.B + b) * 4 * H;
            for (int64_t k = 0; k < 4; ++k) {
                const S *__restrict d_h = kind(d, k), *__restrict d_x = kind(d, 4 + k);
                const S *__restrict shift = kind(d, 8 + k), *__restrict bias = at<S>(p.bias) + k * H;
#pragma omp simd
                for (int64_t j = 0; j < H; ++j)
                    a[k * H + j] =
                        d_h[j] * load(u[k * H + j]) + (d_x[j] * load(gx[k * H + j]) + (shift[j] + bias[j]));
            }
        }
    }

    // Where the scaling vectors of a kind are, given those of the first.
    template <typename X>
    X* kind(X* d, int64_t k) const {
        return d + k * BLOCK * stride();
    }

    // Elements between rows of d: as many as let every row start where a vector may.
    int64_t stride() const { return (H + LANES - 1) / LANES * LANES; }

    static S* aligned(S* pointer) {
        const uintptr_t size = LANES * sizeof(S);
        return reinterpret_cast<S*>((reinterpret_cast<uintptr_t>(pointer) + size - 1) / size * size);
    }

    const T* embeddings(int64_t b) const { return at<T>(p.z) + (t * p.B + b) * 12 * p.Z; }

    // The scaling vectors of some rows: d[kind][row] = z[row, kind] weight_d[kind].
    void scale(int64_t start, int64_t rows, S* d) const {
        const int64_t Z = p.Z;
        for (int64_t k = 0; k < 12; ++k) {
            const S* weight = at<S>(p.weight_d) + k * Z * H;
            S z[BLOCK][MAX_Z];
            for (int64_t from = 0; from < Z; from += MAX_Z) {
                const int64_t some = std::min(MAX_Z, Z - from);
                for (int64_t r = 0; r < BLOCK; ++r)
                    for (int64_t i = 0; i < some; ++i)
                        z[r][i] = r < rows ? S(load(embeddings(start + r)[k * Z + from + i])) : S(0);
                for (int64_t j = 0; j < H; j += WIDE)
                    combine(z, some, weight + from * H + j, kind(d, k) + j, std::min(WIDE, H - j), from > 0);
            }
        }
    }

    // to[row] (+)= sum over i of z[row][i] weight[i], for up to WIDE columns.
    void combine(const S z[][MAX_Z], int64_t some, const S* weight, S* to, int64_t columns, bool add) const {
        const int64_t ld = stride();
        if (columns == WIDE) {
            Vector sum[BLOCK][WIDE / LANES];
            for (int64_t r = 0; r < BLOCK; ++r)
                for (int64_t v = 0; v < WIDE / LANES; ++v)
                    sum[r][v] = add ? get(to + r * ld + v * LANES) : Vector{};
            for (int64_t i = 0; i < some; ++i)
                for (int64_t v = 0; v < WIDE / LANES; ++v) {
                    const Vector w = get(weight + i * H + v * LANES);
                    for (int64_t r = 0; r < BLOCK; ++r) sum[r][v] += z[r][i] * w;
                }
            for (int64_t r = 0; r < BLOCK; ++r)
                for (int64_t v = 0; v < WIDE / LANES; ++v) put(to + r * ld + v * LANES, sum[r][v]);
            return;
        }
        for (int64_t r = 0; r < BLOCK; ++r)
            for (int64_t j = 0; j < columns; ++j) {
                S sum = add ? to[r * ld + j] : S(0);
                for (int64_t i = 0; i < some; ++i) sum += z[r][i] * weight[i * H + j];
                to[r * ld + j] = sum;
            }
    }

    // From the gradients of the scaling vectors to those of z and weight_d.
    void scale_backward(int64_t start, int64_t rows, const S* dd, S* dweight) const {
        for (int64_t k = 0; k < 12; ++k) {
            // Two embeddings at a time: what is loaded of dd serves both.
            int64_t i = 0;
            for (; i + 2 <= p.Z; i += 2) embed_backward<2>(start, rows, kind(dd, k), dweight, k * p.Z + i);
            if (i < p.Z) embed_backward<1>(start, rows, kind(dd, k), dweight, k * p.Z + i);
        }
    }

    // The same for SOME embeddings from number ``at`` of all 12 Z on, given the gradients of their kind.
    template <int64_t SOME>
    void embed_backward(int64_t start, int64_t rows, const S* dd, S* dweight, int64_t at_z) const {
        const int64_t ld = stride();
        const S* weight = at<S>(p.weight_d) + at_z * H;
        S* to = dweight + at_z * H;
        S z[BLOCK][SOME] = {};
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t i = 0; i < SOME; ++i) z[r][i] = S(load(embeddings(start + r)[at_z + i]));
        Vector sum[BLOCK][SOME] = {};
        int64_t j = 0;
        for (; j + LANES <= H; j += LANES) {
            Vector w[SOME], change[SOME];
            for (int64_t i = 0; i < SOME; ++i) w[i] = get(weight + i * H + j);
            for (int64_t i = 0; i < SOME; ++i) change[i] = get(to + i * H + j);
            for (int64_t r = 0; r < BLOCK; ++r) {
                const Vector g = get(dd + r * ld + j);
                for (int64_t i = 0; i < SOME; ++i) {
                    sum[r][i] += g * w[i];
                    change[i] += z[r][i] * g;
                }
            }
            for (int64_t i = 0; i < SOME; ++i) put(to + i * H + j, change[i]);
        }
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t i = 0; i < SOME; ++i) {
                S product = 0;
                for (int64_t lane = 0; lane < LANES; ++lane) product += sum[r][i][lane];
                for (int64_t rest = j; rest < H; ++rest) {
                    product += dd[r * ld + rest] * weight[i * H + rest];
                    to[i * H + rest] += z[r][i] * dd[r * ld + rest];
                }
                store(at<T>(p.dz)[(t * p.B + start + r) * 12 * p.Z + at_z + i], product);
            }
    }

    // From the gradient of the sums to those of their parts.
    void spread(int64_t b, const S* __restrict da, S* __restrict dbias, S* d) const {
        T* __restrict du = at<T>(p.du) + (t * p.B + b) * p.ld_du;
        if constexpr (!HYPER) {
#pragma omp simd
            for (int64_t j = 0; j < 4 * H; ++j) store(du[j], da[j]);
        } else {
            const T* __restrict u = at<T>(p.u) + (t * p.B + b) * p.ld_u;
            const T* __restrict gx = at<T>(p.gx) + (t * p.B + b) * 4 * H;
            T* __restrict dgx = at<T>(p.dgx) + (t * p.B + b) * 4 * H;
            for (int64_t k = 0; k < 4; ++k) {
                S *__restrict d_h = kind(d, k), *__restrict d_x = kind(d, 4 + k), *__restrict d_b = kind(d, 8 + k);
#pragma omp simd
                for (int64_t j = 0; j < H; ++j) {
                    const S g = da[k * H + j];
                    store(du[k * H + j], g * d_h[j]);
                    store(dgx[k * H + j], g * d_x[j]);
                    d_h[j] = g * load(u[k * H + j]);
                    d_x[j] = g * load(gx[k * H + j]);
                    d_b[j] = g;
                    dbias[k * H + j] += g;
                }
            }
        }
    }

    // Padding: no gradient reaches the sums.
    void clear(int64_t b, S* d) const {
        T* du = at<T>(p.du) + (t * p.B + b) * p.ld_du;
        std::fill(du, du + 4 * H, T{});
        if constexpr (HYPER) {
            T* dgx = at<T>(p.dgx) + (t * p.B + b) * 4 * H;
            std::fill(dgx, dgx + 4 * H, T{});
            for (int64_t k = 0; k < 12; ++k) std::fill(kind(d, k), kind(d, k) + H, S(0));
        }
    }

    // The gradient that reaches the new h, and the share of it that goes past the step to the old one.
    void arriving(int64_t row, const T* __restrict dh_mm, S* __restrict dh_direct,
                  S* __restrict dh) const {
        if (p.dy) {
            const T* __restrict dy = at<T>(p.dy) + row;
#pragma omp simd
            for (int64_t j = 0; j < H; ++j) dh[j] = load(dh_mm[j]) + load(dy[j]);
        } else {
#pragma omp simd
            for (int64_t j = 0; j < H; ++j) dh[j] = load(dh_mm[j]);
        }
        if (!dh_direct) return;
        const uint8_t* zone_h = p.zone_h ? p.zone_h + row : nullptr;
        const S rate = S(p.zone_h_rate);
        for (int64_t j = 0; j < H; ++j) {
            const S all = dh[j] + dh_direct[j], stays = zone_h ? S(zone_h[j]) : rate;
            dh_direct[j] = all * stays;
            dh[j] = all * (S(1) - stays);
        }
    }

    template <typename X>
    void zone(X* __restrict to, const S* __restrict fresh, const X* __restrict old, const uint8_t* mask,
              S rate) const {
        if (mask) {
            for (int64_t j = 0; j < H; ++j)
                if (mask[j]) to[j] = old[j];
                else store(to[j], fresh[j]);
        } else if (rate != S(0)) {
            for (int64_t j = 0; j < H; ++j) store(to[j], fresh[j] + rate * (load(old[j]) - fresh[j]));
        } else {
#pragma omp simd
            for (int64_t j = 0; j < H; ++j) store(to[j], fresh[j]);
        }
    }

    const Gated& p;
    const int64_t t, H;
};

}  // namespace rhhn

#define RHHN_EXPORT_DIRECTION(NAME, TYPE, HYPER, BACKWARD)                                     \
    extern "C" void NAME(const rhhn::Gated* p, int64_t t) {                                    \
        const rhhn::GatedStep<TYPE, HYPER> step(*p, t);                                        \
        rhhn::over_rows<rhhn::GatedStep<TYPE, HYPER>, BACKWARD>(step, *p);                     \
    }
#define RHHN_EXPORT(NAME, TYPE)                                        \
    RHHN_EXPORT_DIRECTION(lstm_forward_##NAME, TYPE, false, false)       \
    RHHN_EXPORT_DIRECTION(lstm_backward_##NAME, TYPE, false, true)       \
    RHHN_EXPORT_DIRECTION(hyper_lstm_forward_##NAME, TYPE, true, false)  \
    RHHN_EXPORT_DIRECTION(hyper_lstm_backward_##NAME, TYPE, true, true)

RHHN_EXPORT(float32, float)
RHHN_EXPORT(float64, double)
RHHN_EXPORT(bfloat16, rhhn::bfloat16)

// In float32 alone: there operands and states are of one type.
extern "C" void lstm_sequence_forward(const rhhn::Gated* p, const rhhn::Recurrence* r) {
    rhhn::whole_sequence<rhhn::GatedStep<float, false>, false>(*p, *r);
}
extern "C" void lstm_sequence_backward(const rhhn::Gated* p, const rhhn::Recurrence* r) {
    rhhn::whole_sequence<rhhn::GatedStep<float, false>, true>(*p, *r);
}
extern "C" int64_t panel_columns() { return rhhn::PANEL; }
