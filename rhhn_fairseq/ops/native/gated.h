// The point-wise part of one time step of LSTM, LN LSTM, HyperLSTM and LN HyperLSTM, forward and backward.
//
// The order of gates is i, f, g, o. A row is a sequence of the batch. Rows are independent, so threads share
// them. The equations are in cells/lstm.py and cells/hyper_lstm.py, the buffers in ops/buffers.py.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "math.h"
#include "normal.h"
#include "scaling.h"
#include "sequence.h"

namespace rhhn {

// ops/native/build.py declares the same fields in the same order. A missing tensor is null.
struct Gated {
    int64_t T, B, H, Z;      // Z is zero without a hypernetwork
    int64_t D;               // number of steps that du holds
    int64_t ld_u, ld_du;     // elements between rows of u and of du
    int64_t keep_t;          // elements between steps of keep; 0 if all share one
    double forget_bias, epsilon;
    double keep_scale;              // factor of a kept unit of the update
    double zone_h_rate, zone_c_rate;  // the share that zoneout keeps without a mask
    int64_t threads;                // slots of sums
    // Forward. Operands unless noted otherwise.
    void* u;                 // [T, B, ld_u]: all of the sums, or with a hypernetwork h W_h
    const void* gx;          // [T, B, 4 H]: x W_x, with a hypernetwork or for many steps in one call
    void* z;                 // [T, B, 12 Z]: embeddings of d_h, d_x, b, each for four gates. This and the next
                             // two only with a hypernetwork
    const void* weight_d;    // [12, Z, H] state type: from z to d_h, d_x and b
    const void* bias;        // [4, H] state type: added to b
    const void* gate_gain;   // [4 H] state type; null without layer normalisation
    const void* gate_shift;  // [4 H] state type
    const void* c_gain;      // [H] state type
    const void* c_shift;     // [H] state type
    const uint8_t* mask;     // [T, B]
    const uint8_t* resets;   // [T, B]: before which steps the state starts anew; read by whole sequences only
    const uint8_t* keep;     // [T or 1, B, H]
    const uint8_t* zone_h;   // [T, B, H]
    const uint8_t* zone_c;   // [T, B, H]
    const void* c_scale;     // [T] state type: factors of the gradient through c
    const void* h0;          // [B, H]
    const void* c0;          // [B, H] state type
    void* h;                 // [T, B, H] state after each step
    void* c;                 // [T, B, H] state type
    void* y;                 // [T, B, H] outputs; null if they equal h
    // Backward.
    const void* dy;     // [T, B, H] or null
    void* dh;           // [B, H]: gradient through the matrices of step t + 1
    void* dh_direct;    // [B, H] state type: the remaining gradient, in and out; null if always zero
    void* dc;           // [B, H] state type, in and out
    void* du;           // [D, B, ld_du]
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

    GatedStep(const Gated& p, int64_t t)
        : p(p), t(t), H(p.H), scaling(p.Z, p.H, at<S>(p.weight_d), step_of(p.z), step_of(p.dz)) {}

    void forward(int64_t first, int64_t last, S* scratch) const {
        if constexpr (HYPER) {
            S* d = Scaling<T>::aligned(scratch + row_scratch(H));
            for (int64_t start = first; start < last; start += BLOCK) {
                const int64_t rows = std::min(BLOCK, last - start);
                scaling.forward(start, rows, d);
                for (int64_t r = 0; r < rows; ++r) forward_row(start + r, scratch, d + r * scaling.stride());
            }
        } else {
            for (int64_t b = first; b < last; ++b) forward_row(b, scratch, nullptr);
        }
    }

    void backward(int64_t first, int64_t last, S* scratch, int64_t slot) const {
        S* total = static_cast<S*>(p.sums) + slot * 14 * H;
        if constexpr (HYPER) {
            S* d = Scaling<T>::aligned(scratch + row_scratch(H));
            for (int64_t start = first; start < last; start += BLOCK) {
                const int64_t rows = std::min(BLOCK, last - start);
                scaling.forward(start, rows, d);
                for (int64_t r = 0; r < rows; ++r)
                    backward_row(start + r, scratch, total, d + r * scaling.stride());
                // At this point every d has been replaced by its gradient.
                scaling.backward(start, rows, d, at<S>(p.dweight_d) + slot * 12 * p.Z * H);
            }
        } else {
            for (int64_t b = first; b < last; ++b) backward_row(b, scratch, total, nullptr);
        }
    }

    // The interface of sequence.h.
    static int64_t layers(const Gated&) { return 1; }
    static int64_t sums_of(const Gated& p) { return 4 * p.H; }
    int64_t time() const { return t; }
    int64_t layer() const { return 0; }
    const T* read(int64_t b) const {
        return t ? at<T>(p.h) + ((t - 1) * p.B + b) * H : at<T>(p.h0) + b * H;
    }
    Rows<const T> start(int64_t b) const { return {at<T>(p.gx) + (t * p.B + b) * 4 * H, 4 * H}; }
    Rows<T> sums_at(int64_t b) const { return {at<T>(p.u) + (t * p.B + b) * p.ld_u, p.ld_u}; }
    Rows<const T> gradient(int64_t b) const { return {products_gradient(b), p.ld_du}; }
    T* arriving_at(int64_t b) const { return at<T>(p.dh) + b * H; }
    void clear_state(int64_t first, int64_t last) const {
        for (int64_t b = first; b < last; ++b) {
            if (!starts_anew(p, t, b)) continue;
            std::fill_n(at<T>(p.h) + ((t - 1) * p.B + b) * H, H, T{});
            std::fill_n(at<S>(p.c) + ((t - 1) * p.B + b) * H, H, S{});
        }
    }
    void clear_gradient(int64_t first, int64_t last) const {
        for (int64_t b = first; b < last; ++b) {
            if (!starts_anew(p, t, b)) continue;
            std::fill_n(at<T>(p.dh) + b * H, H, T{});
            if (p.dh_direct) std::fill_n(at<S>(p.dh_direct) + b * H, H, S{});
            std::fill_n(at<S>(p.dc) + b * H, H, S{});
        }
    }
    // The interface of hyper_sequence.cpp.
    const T* state(int64_t b) const { return at<T>(p.h) + (t * p.B + b) * H; }
    Rows<T> embeddings_at(int64_t b) const { return {at<T>(p.z) + (t * p.B + b) * 12 * p.Z, 12 * p.Z}; }
    Rows<const T> embeddings_gradient(int64_t b) const {
        return {at<T>(p.dz) + (t * p.B + b) * 12 * p.Z, 12 * p.Z};
    }

    static int64_t scratch_size(const Gated& p) {
        return row_scratch(p.H) + (HYPER ? Scaling<T>::scratch_size(p.H) : 0);
    }

   private:
    static constexpr int64_t BLOCK = Scaling<T>::BLOCK;
    static int64_t row_scratch(int64_t H) { return 22 * H; }

    // d: the scaling vectors of the row; kinds are BLOCK rows apart.
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
        // Without zoneout, c and h are computed in their buffers.
        const bool zoned_c = p.zone_c || p.zone_c_rate != 0, zoned_h = p.zone_h || p.zone_h_rate != 0;
        S* inner = zoned_c ? scratch + 4 * H : c;
        const S* keep = keep_of(b, scratch + 5 * H);
        const S* a = sums(b, scratch, d);
        new_c(a, c_old, keep, inner);
        if (zoned_c) zone(c, inner, c_old, p.zone_c ? p.zone_c + row : nullptr, S(p.zone_c_rate));
        if (zoned_h) {
            S* fresh = scratch + 5 * H;
            output(a, inner, fresh);
            zone(h, fresh, h_old, p.zone_h ? p.zone_h + row : nullptr, S(p.zone_h_rate));
        } else {
            output(a, inner, h);
        }
        if (y) std::copy(h, h + H, y);
    }

    // Layer normalisation of a gate's sums: scale and shift of each.
    struct Normal {
        const S *gain, *shift;
        S mean, rstd;
    };
    Normal normal_of(const S* gate, int64_t k) const {
        const Moments<S> m = moments<S>(gate, H, S(p.epsilon));
        return {at<S>(p.gate_gain) + k * H, at<S>(p.gate_shift) + k * H, m.mean, m.rstd};
    }

    // The new c before zoneout from the sums of the gates.
    void new_c(const S* a, const S* c_old, const S* keep, S* to) const {
        Normal i{}, f{}, g{};
        if (p.gate_gain) i = normal_of(a, 0), f = normal_of(a + H, 1), g = normal_of(a + 2 * H, 2);
        specialised(p.gate_gain != nullptr, keep != nullptr, [&](auto normed, auto drops) {
            new_c<decltype(normed)::value, decltype(drops)::value>(a, i, f, g, c_old, keep, to);
        });
    }
    template <bool NORM, bool DROPS>
    void new_c(const S* __restrict a, Normal i, Normal f, Normal g, const S* __restrict c_old,
               const S* __restrict keep, S* __restrict to) const {
        const S forget_bias = S(p.forget_bias);
        const S *__restrict i_gain = i.gain, *__restrict f_gain = f.gain, *__restrict g_gain = g.gain;
        const S *__restrict i_shift = i.shift, *__restrict f_shift = f.shift, *__restrict g_shift = g.shift;
#pragma omp simd
        for (int64_t j = 0; j < H; ++j) {
            S a_i = a[j], a_f = a[H + j], a_g = a[2 * H + j];
            if (NORM) {
                a_i = (a_i - i.mean) * i.rstd * i_gain[j] + i_shift[j];
                a_f = (a_f - f.mean) * f.rstd * f_gain[j] + f_shift[j];
                a_g = (a_g - g.mean) * g.rstd * g_gain[j] + g_shift[j];
            }
            const S update = DROPS ? hyperbolic_tangent(a_g) * keep[j] : hyperbolic_tangent(a_g);
            to[j] = sigmoid(a_f + forget_bias) * c_old[j] + sigmoid(a_i) * update;
        }
    }

    // The new h before zoneout from the sums of the gates and the new c.
    template <typename X>
    void output(const S* a, const S* c, X* to) const {
        if (!p.gate_gain) return output<false>(a + 3 * H, {}, c, {}, to);
        const Moments<S> m = moments<S>(c, H, S(p.epsilon));
        const Normal inner{at<S>(p.c_gain), at<S>(p.c_shift), m.mean, m.rstd};
        output<true>(a + 3 * H, normal_of(a + 3 * H, 3), c, inner, to);
    }
    template <bool NORM, typename X>
    void output(const S* __restrict o, Normal n, const S* __restrict c, Normal m, X* __restrict to) const {
        const S *__restrict gain = n.gain, *__restrict shift = n.shift;
        const S *__restrict c_gain = m.gain, *__restrict c_shift = m.shift;
#pragma omp simd
        for (int64_t j = 0; j < H; ++j) {
            S a = o[j], inner = c[j];
            if (NORM) {
                a = (a - n.mean) * n.rstd * gain[j] + shift[j];
                inner = (inner - m.mean) * m.rstd * c_gain[j] + c_shift[j];
            }
            store(to[j], sigmoid(a) * hyperbolic_tangent(inner));
        }
    }

    // Replaces the scaling vectors d by their gradients.
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
        S *dh = scratch + 6 * H, *da = scratch + 7 * H;
        const S* keep = keep_of(b, scratch + 16 * H);
        const S* stays = nullptr;
        if (p.zone_c || p.zone_c_rate != 0) {
            S* shares = scratch + 17 * H;
            factors(p.zone_c ? p.zone_c + row : nullptr, S(1), S(p.zone_c_rate), shares, H);
            stays = shares;
        }
        arriving(row, dh_mm, dh_direct, dh);
        backward_gates(sums(b, scratch, d), c_old, keep, stays, dh, dc, da, scratch, total);
        spread(b, da, total + 8 * H, d);
    }

    // Turns the gradients of the new h and c into those of the gates' sums and, in place, of the old c.
    void backward_gates(const S* sums, const S* c_old, const S* keep, const S* stays, const S* dh, S* dc, S* da,
                        S* scratch, S* total) const {
        S *inner = scratch + 4 * H, *dc_new = scratch + 5 * H;
        S *normal = scratch + 11 * H, *c_normal = scratch + 15 * H, *a = scratch + 18 * H;
        S rstd[4];
        for (int64_t k = 0; k < 4; ++k) rstd[k] = activate(sums + k * H, k, a + k * H, normal + k * H);
        keep ? new_c_of_gates<true>(a, c_old, keep, inner) : new_c_of_gates<false>(a, c_old, keep, inner);
        if (p.gate_gain) {
            const Moments<S> m = moments<S>(inner, H, S(p.epsilon));
            through_output<true>(a + 3 * H, inner, m, dh, c_normal, dc_new, da + 3 * H);
            normalise_backward(c_normal, dc_new, at<S>(p.c_gain), total + 12 * H, total + 13 * H, m.rstd, H);
        } else {
            through_output<false>(a + 3 * H, inner, {}, dh, c_normal, dc_new, da + 3 * H);
        }
        specialised(keep != nullptr, stays != nullptr, [&](auto drops, auto zoned) {
            through_c<decltype(drops)::value, decltype(zoned)::value>(a, c_old, keep, stays, dc_new, dc, da);
        });
        if (!p.gate_gain) return;
        for (int64_t k = 0; k < 4; ++k)
            normalise_backward(normal + k * H, da + k * H, at<S>(p.gate_gain) + k * H, total + k * H,
                               total + (4 + k) * H, rstd[k], H);
    }
    // Computes a gate from its sums, and their normalised values; returns 1 / standard deviation.
    S activate(const S* sums, int64_t k, S* gate, S* normal) const {
        Normal n{};
        if (p.gate_gain) n = normal_of(sums, k);
        specialised(k == 2, p.gate_gain != nullptr, [&](auto tangent, auto normed) {
            activate<decltype(tangent)::value, decltype(normed)::value>(sums, n, k == 1 ? S(p.forget_bias) : S(0),
                                                                        gate, normal);
        });
        return n.rstd;
    }
    template <bool TANGENT, bool NORM>
    void activate(const S* __restrict sums, Normal n, S more, S* __restrict gate, S* __restrict normal) const {
        const S *__restrict gain = n.gain, *__restrict shift = n.shift;
#pragma omp simd
        for (int64_t j = 0; j < H; ++j) {
            S a = sums[j];
            if (NORM) {
                normal[j] = (a - n.mean) * n.rstd;
                a = normal[j] * gain[j] + shift[j];
            }
            gate[j] = TANGENT ? hyperbolic_tangent(a) : sigmoid(a + more);
        }
    }
    template <bool DROPS>
    void new_c_of_gates(const S* __restrict a, const S* __restrict c_old, const S* __restrict keep,
                        S* __restrict to) const {
#pragma omp simd
        for (int64_t j = 0; j < H; ++j)
            to[j] = a[H + j] * c_old[j] + a[j] * (DROPS ? a[2 * H + j] * keep[j] : a[2 * H + j]);
    }
    // The gradients of the sums of o and of the c that its tanh reads.
    template <bool NORM>
    void through_output(const S* __restrict o, const S* __restrict c, Moments<S> m, const S* __restrict dh,
                        S* __restrict c_normal, S* __restrict dc_new, S* __restrict d_o) const {
        const S *__restrict gain = at<S>(p.c_gain), *__restrict shift = at<S>(p.c_shift);
#pragma omp simd
        for (int64_t j = 0; j < H; ++j) {
            S inner = c[j];
            if (NORM) {
                c_normal[j] = (inner - m.mean) * m.rstd;
                inner = c_normal[j] * gain[j] + shift[j];
            }
            inner = hyperbolic_tangent(inner);
            d_o[j] = dh[j] * inner * o[j] * (S(1) - o[j]);
            dc_new[j] = dh[j] * o[j] * (S(1) - inner * inner);
        }
    }
    // The gradients of the normalised sums of i, f and g, and of the old c.
    template <bool DROPS, bool ZONED>
    void through_c(const S* __restrict a, const S* __restrict c_old, const S* __restrict keep,
                   const S* __restrict stays, const S* __restrict dc_new, S* __restrict dc,
                   S* __restrict da) const {
        const S through = share();
#pragma omp simd
        for (int64_t j = 0; j < H; ++j) {
            const S i = a[j], f = a[H + j], g = a[2 * H + j];
            const S kept = DROPS ? keep[j] : S(1), stay = ZONED ? stays[j] : S(0);
            const S d = dc_new[j] + dc[j] * (S(1) - stay);
            dc[j] = dc[j] * stay + d * f * through;
            da[j] = d * (g * kept) * i * (S(1) - i);
            da[H + j] = d * c_old[j] * f * (S(1) - f);
            da[2 * H + j] = d * i * kept * (S(1) - g * g);
        }
    }

    // The factor of the gradient through c.
    S share() const { return p.c_scale ? at<S>(p.c_scale)[t] : S(1); }

    // The first embedding of a step, or its gradient.
    T* step_of(void* all) const { return all ? at<T>(all) + t * p.B * 12 * p.Z : nullptr; }

    template <typename X>
    static X* at(void* pointer) {
        return static_cast<X*>(pointer);
    }
    template <typename X>
    static const X* at(const void* pointer) {
        return static_cast<const X*>(pointer);
    }

    const T* products(int64_t b) const { return at<T>(p.u) + (t * p.B + b) * p.ld_u; }
    T* products_gradient(int64_t b) const { return at<T>(p.du) + (t % p.D * p.B + b) * p.ld_du; }

    // Factors of the update, [H]; null if all are one.
    const S* keep_of(int64_t b, S* to) const {
        if (!p.keep) return nullptr;
        factors(p.keep + t * p.keep_t + b * H, S(p.keep_scale), S(1), to, H);
        return to;
    }

    // The sums of the four gates of a row, before any normalisation; in `to` unless u holds them.
    const S* sums(int64_t b, S* __restrict to, const S* d) const {
        const T* __restrict u = products(b);
        if constexpr (HYPER) {
            const T* __restrict gx = at<T>(p.gx) + (t * p.B + b) * 4 * H;
            for (int64_t k = 0; k < 4; ++k) {
                const S *__restrict d_h = scaling.kind(d, k), *__restrict d_x = scaling.kind(d, 4 + k);
                const S *__restrict shift = scaling.kind(d, 8 + k), *__restrict bias = at<S>(p.bias) + k * H;
#pragma omp simd
                for (int64_t j = 0; j < H; ++j)
                    to[k * H + j] =
                        d_h[j] * load(u[k * H + j]) + (d_x[j] * load(gx[k * H + j]) + (shift[j] + bias[j]));
            }
        } else if constexpr (std::is_same_v<S, T>) {
            return u;
        } else {
#pragma omp simd
            for (int64_t j = 0; j < 4 * H; ++j) to[j] = load(u[j]);
        }
        return to;
    }

    // Turns the gradient of the sums into those of their terms.
    void spread(int64_t b, const S* __restrict da, S* __restrict dbias, S* d) const {
        T* __restrict du = products_gradient(b);
        if constexpr (!HYPER) {
#pragma omp simd
            for (int64_t j = 0; j < 4 * H; ++j) store(du[j], da[j]);
        } else {
            const T* __restrict u = products(b);
            const T* __restrict gx = at<T>(p.gx) + (t * p.B + b) * 4 * H;
            T* __restrict dgx = at<T>(p.dgx) + (t * p.B + b) * 4 * H;
            for (int64_t k = 0; k < 4; ++k) {
                S *__restrict d_h = scaling.kind(d, k), *__restrict d_x = scaling.kind(d, 4 + k);
                S* __restrict d_b = scaling.kind(d, 8 + k);
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
        T* du = products_gradient(b);
        std::fill(du, du + 4 * H, T{});
        if constexpr (HYPER) {
            T* dgx = at<T>(p.dgx) + (t * p.B + b) * 4 * H;
            std::fill(dgx, dgx + 4 * H, T{});
            for (int64_t k = 0; k < 12; ++k) std::fill(scaling.kind(d, k), scaling.kind(d, k) + H, S(0));
        }
    }

    // The gradient that reaches the new h, and the share of it that bypasses the step.
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

    // Zoneout by a mask, or in expectation.
    template <typename X>
    void zone(X* __restrict to, const S* __restrict fresh, const X* __restrict old, const uint8_t* mask,
              S rate) const {
        if (mask) {
            for (int64_t j = 0; j < H; ++j)
                if (mask[j]) to[j] = old[j];
                else store(to[j], fresh[j]);
        } else {
            for (int64_t j = 0; j < H; ++j) store(to[j], fresh[j] + rate * (load(old[j]) - fresh[j]));
        }
    }

    const Gated& p;
    const int64_t t, H;
    const Scaling<T> scaling;
};

}  // namespace rhhn
