// The point-wise part of one layer of one time step of recurrent highway networks, plain or scaled by the
// hypervectors z of a HyperRHN, forward and backward.
//
// Halves lie in the order h, t. See the equations in cells/rhn.py and cells/hyper_rhn.py, and
// kernels/highway.py for what each buffer is.

#include <algorithm>

#include "math.h"
#include "rows.h"

namespace rhhn {

// Mirrored, field by field, by kernels/native/__init__.py. A missing tensor is a null pointer.
struct Highway {
    int64_t T, B, H, L;
    int64_t Z;                 // steps that z and dz hold: those from a multiple of it on
    int64_t ld_y;              // elements between rows of y and dy: H, or L H where they hold every layer
    double keep_scale;         // what a kept unit of the transform gate is multiplied by
    double zone_rate;          // the expectation where there is no mask
    int64_t threads;           // slots of sums
    const void* u;             // [L, T, B, 2 H]: s W_l
    const void* gx;            // [T, B, 2 H]: what layer 0 adds to u
    const void* z;             // [L, Z, B, H] without its bias, or null
    const void* bias;          // [L, 2 H] state type
    const void* bias_x;        // [2 H] state type or null: layer 0's second bias
    const void* bias_z;        // [L, H] state type, or null
    const uint8_t* first;      // [T, B] or null: where layer 0 leaves bias out
    const uint8_t* mask;       // [T, B]
    const uint8_t* keep;       // [T, B, L H]
    const uint8_t* zone;       // [T, B, H]
    const void* s0;            // [B, H] state type
    void* s;                   // [L, T, B, H] state type: after each layer
    void* o;                   // the same as operands; null where they are one
    void* y;                   // [T, B, ld_y]
    const void* dy;            // [T, B, ld_y] or null
    const void* ds;            // [B, H] operands: gradient that came through a matrix from the next layer
    void* ds_direct;           // [B, H] state type: the rest of it, in and out
    void* past;                // [B, H] state type: what goes past all layers of a time step
    void* du;                  // [L, T, B, 2 H]
    void* dgx;                 // [T, B, 2 H]
    void* dz;                  // [L, Z, B, H]
    void* sums;                // [threads, (3 L + 2) H] state type: gradients of bias, bias_x and bias_z
};

template <typename T>
class HighwayStep {
    using S = typename Arithmetic<T>::type;

   public:
    using State = S;

    HighwayStep(const Highway& p, int64_t n) : p(p), t(n / p.L), l(n % p.L), H(p.H), last(l == p.L - 1) {}

    void forward(int64_t first, int64_t last, S* scratch) const {
        for (int64_t b = first; b < last; ++b) forward_row(b, scratch);
    }

    void backward(int64_t first, int64_t last, S* scratch, int64_t slot) const {
        S* total = static_cast<S*>(p.sums) + slot * (3 * p.L + 2) * H;
        for (int64_t b = first; b < last; ++b) backward_row(b, scratch, total);
    }

    static int64_t scratch_size(const Highway& p) { return 7 * p.H; }

   private:
    void forward_row(int64_t b, S* scratch) const {
        const int64_t row = at_row(l, b) * H;
        S* s = static_cast<S*>(p.s) + row;
        T* o = p.o ? static_cast<T*>(p.o) + row : nullptr;
        T* y = output(b);
        const S* __restrict old = before(b);
        const S* start = at_start(b);
        if (p.mask && !p.mask[t * p.B + b]) {
            if (last) std::copy(start, start + H, s);
            else std::fill(s, s + H, S(0));
            if (o) narrow(s, o);
            if (y) std::fill(y, y + H, T{});
            return;
        }
        S *__restrict h = scratch, *__restrict gate = scratch + H, *__restrict keep = scratch + 2 * H;
        sums(b, h);
        factors(keep_row(b), S(p.keep_scale), S(1), keep, H);
#pragma omp simd
        for (int64_t j = 0; j < H; ++j) {
            h[j] = hyperbolic_tangent(h[j]);
            gate[j] = sigmoid(gate[j]);
        }
        {
            S* __restrict to = s;
#pragma omp simd
            for (int64_t j = 0; j < H; ++j) to[j] = (S(1) - gate[j]) * old[j] + gate[j] * keep[j] * h[j];
        }
        if (y && p.ld_y != H) narrow(s, y);
        if (last) {
            if (p.zone) {
                const uint8_t* zone = p.zone + (t * p.B + b) * H;
                for (int64_t j = 0; j < H; ++j) s[j] = zone[j] ? start[j] : s[j];
            } else if (p.zone_rate != 0) {
                for (int64_t j = 0; j < H; ++j) s[j] += S(p.zone_rate) * (start[j] - s[j]);
            }
            if (p.ld_y == H) narrow(s, y);
        }
        if (o) narrow(s, o);
    }

    void backward_row(int64_t b, S* scratch, S* total) const {
        const int64_t place = b * H;
        const T* __restrict ds_mm = static_cast<const T*>(p.ds) + place;
        S* __restrict direct = static_cast<S*>(p.ds_direct) + place;
        S* __restrict past = static_cast<S*>(p.past) + place;
        if (p.mask && !p.mask[t * p.B + b]) {
            if (last)
                for (int64_t j = 0; j < H; ++j) past[j] = direct[j] + load(ds_mm[j]);
            for (int64_t j = 0; j < H; ++j) direct[j] = l ? S(0) : past[j];
            clear(b);
            return;
        }
        S *__restrict h = scratch, *__restrict gate = scratch + H;
        S *__restrict ds = scratch + 2 * H, *__restrict da = scratch + 3 * H;
        S *__restrict keep = scratch + 5 * H, *__restrict around = scratch + 6 * H;
#pragma omp simd
        for (int64_t j = 0; j < H; ++j) ds[j] = direct[j] + load(ds_mm[j]);
        if (last && p.ld_y == H) add_output(b, ds);
        if (last) {
            const uint8_t* zone = p.zone ? p.zone + (t * p.B + b) * H : nullptr;
            for (int64_t j = 0; j < H; ++j) {
                const S stays = zone ? S(zone[j]) : S(p.zone_rate);
                past[j] = ds[j] * stays;
                ds[j] *= S(1) - stays;
            }
        }
        if (p.ld_y != H) add_output(b, ds);
        sums(b, h);
        const S* __restrict old = before(b);
        factors(keep_row(b), S(p.keep_scale), S(1), keep, H);
        if (l) std::fill(around, around + H, S(0));
        else std::copy(past, past + H, around);
#pragma omp simd
        for (int64_t j = 0; j < H; ++j) {
            h[j] = hyperbolic_tangent(h[j]);
            gate[j] = sigmoid(gate[j]);
        }
#pragma omp simd
        for (int64_t j = 0; j < H; ++j) {
            da[j] = ds[j] * gate[j] * keep[j] * (S(1) - h[j] * h[j]);
            da[H + j] = (ds[j] * h[j] * keep[j] - ds[j] * old[j]) * gate[j] * (S(1) - gate[j]);
            direct[j] = ds[j] * (S(1) - gate[j]) + around[j];
        }
        spread(b, da, total);
    }

    int64_t at_row(int64_t layer, int64_t b) const { return (layer * p.T + t) * p.B + b; }

    // The state that the time step started from.
    const S* at_start(int64_t b) const {
        if (t == 0) return static_cast<const S*>(p.s0) + b * H;
        return static_cast<const S*>(p.s) + (at_row(p.L - 1, b) - p.B) * H;
    }
    // The state that this layer reads.
    const S* before(int64_t b) const {
        return l ? static_cast<const S*>(p.s) + at_row(l - 1, b) * H : at_start(b);
    }
    // Where a layer's output goes; null for all but the last where only that one has any.
    T* output(int64_t b) const {
        if (p.ld_y == H && !last) return nullptr;
        return static_cast<T*>(p.y) + (t * p.B + b) * p.ld_y + (p.ld_y == H ? 0 : l * H);
    }
    void add_output(int64_t b, S* __restrict ds) const {
        if (!p.dy) return;
        const T* __restrict dy =
            static_cast<const T*>(p.dy) + (t * p.B + b) * p.ld_y + (p.ld_y == H ? 0 : l * H);
#pragma omp simd
        for (int64_t j = 0; j < H; ++j) ds[j] += load(dy[j]);
    }
    void narrow(const S* __restrict from, T* __restrict to) const {
#pragma omp simd
        for (int64_t j = 0; j < H; ++j) store(to[j], from[j]);
    }
    const uint8_t* keep_row(int64_t b) const {
        return p.keep ? p.keep + ((t * p.B + b) * p.L + l) * H : nullptr;
    }
    bool takes_bias(int64_t b) const { return l || !p.first || !p.first[t * p.B + b]; }

    int64_t scaling_row(int64_t b) const { return (l * p.Z + t % p.Z) * p.B + b; }
    const T* scaling(int64_t b) const {
        return p.z ? static_cast<const T*>(p.z) + scaling_row(b) * H : nullptr;
    }

    // What z scales, or without it all but the bias.
    S product(const T* u, const T* gx, int64_t j) const { return load(u[j]) + (gx ? load(gx[j]) : S(0)); }

    const T* products(int64_t b) const { return static_cast<const T*>(p.u) + at_row(l, b) * 2 * H; }
    const T* inputs(int64_t b) const {
        return l ? nullptr : static_cast<const T*>(p.gx) + (t * p.B + b) * 2 * H;
    }

    // The sums of the halves h and t of a row.
    void sums(int64_t b, S* __restrict a) const {
        const T *u = products(b), *gx = inputs(b), *z = scaling(b);
        const S* bias = takes_bias(b) ? static_cast<const S*>(p.bias) + l * 2 * H : nullptr;
        const S* bias_x = l ? nullptr : static_cast<const S*>(p.bias_x);
        const S* bias_z = z ? static_cast<const S*>(p.bias_z) + l * H : nullptr;
        for (int64_t half = 0; half < 2; ++half) {
            S* __restrict to = a + half * H;
            const int64_t at = half * H;
            for (int64_t j = 0; j < H; ++j) to[j] = product(u, gx, at + j);
            if (z)
                for (int64_t j = 0; j < H; ++j) to[j] *= load(z[j]) + bias_z[j];
            if (bias)
                for (int64_t j = 0; j < H; ++j) to[j] += bias[at + j];
            if (bias_x)
                for (int64_t j = 0; j < H; ++j) to[j] += bias_x[at + j];
        }
    }

    // From the gradient of the sums to those of their parts.
    void spread(int64_t b, const S* __restrict da, S* total) const {
        if (takes_bias(b)) add(da, total + l * 2 * H);
        if (!l && p.bias_x) add(da, total + p.L * 2 * H);
        T* __restrict du = static_cast<T*>(p.du) + at_row(l, b) * 2 * H;
        T* __restrict dgx = l ? nullptr : static_cast<T*>(p.dgx) + (t * p.B + b) * 2 * H;
        if (p.z) {
            const T* __restrict z = scaling(b);
            const T *__restrict u = products(b), *__restrict gx = inputs(b);
            const S* __restrict bias_z = static_cast<const S*>(p.bias_z) + l * H;
            T* __restrict dz = static_cast<T*>(p.dz) + scaling_row(b) * H;
            S* __restrict dbias_z = total + (2 * p.L + 2 + l) * H;
            if (gx) {
#pragma omp simd
                for (int64_t j = 0; j < H; ++j) {
                    const S h = load(u[j]) + load(gx[j]), gate = load(u[H + j]) + load(gx[H + j]);
                    const S d = da[j] * h + da[H + j] * gate;
                    store(dz[j], d);
                    dbias_z[j] += d;
                }
            } else {
#pragma omp simd
                for (int64_t j = 0; j < H; ++j) {
                    const S d = da[j] * load(u[j]) + da[H + j] * load(u[H + j]);
                    store(dz[j], d);
                    dbias_z[j] += d;
                }
            }
            for (int64_t half = 0; half < 2; ++half) {
                const S* __restrict from = da + half * H;
                T* __restrict to = du + half * H;
#pragma omp simd
                for (int64_t j = 0; j < H; ++j) store(to[j], from[j] * (load(z[j]) + bias_z[j]));
            }
        } else {
#pragma omp simd
            for (int64_t j = 0; j < 2 * H; ++j) store(du[j], da[j]);
        }
        if (dgx) std::copy(du, du + 2 * H, dgx);
    }
    void add(const S* __restrict da, S* __restrict to) const {
#pragma omp simd
        for (int64_t j = 0; j < 2 * H; ++j) to[j] += da[j];
    }

    // Padding: no gradient reaches the sums.
    void clear(int64_t b) const {
        T* du = static_cast<T*>(p.du) + at_row(l, b) * 2 * H;
        std::fill(du, du + 2 * H, T{});
        if (!l) {
            T* dgx = static_cast<T*>(p.dgx) + (t * p.B + b) * 2 * H;
            std::fill(dgx, dgx + 2 * H, T{});
        }
        if (p.z) {
            T* dz = static_cast<T*>(p.dz) + scaling_row(b) * H;
            std::fill(dz, dz + H, T{});
        }
    }

    const Highway& p;
    const int64_t t, l, H;
    const bool last;
};

}  // namespace rhhn

#define RHHN_EXPORT(NAME, TYPE)                                                                            \
    extern "C" void highway_forward_##NAME(const rhhn::Highway* p, int64_t n) {                            \
        rhhn::over_rows<rhhn::HighwayStep<TYPE>, false>(rhhn::HighwayStep<TYPE>(*p, n), *p);               \
    }                                                                                                      \
    extern "C" void highway_backward_##NAME(const rhhn::Highway* p, int64_t n) {                           \
        rhhn::over_rows<rhhn::HighwayStep<TYPE>, true>(rhhn::HighwayStep<TYPE>(*p, n), *p);                \
    }

RHHN_EXPORT(float32, float)
RHHN_EXPORT(float64, double)
RHHN_EXPORT(bfloat16, rhhn::bfloat16)
