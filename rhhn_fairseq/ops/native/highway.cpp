// The point-wise work of one layer of one time step of recurrent highway networks, plain or scaled by the
// hypervectors z of a HyperRHN, forward and backward.
//
// The order of halves is h, t. The equations are in cells/rhn.py and cells/hyper_rhn.py, the buffers in
// ops/buffers.py.

#include <algorithm>

#include "math.h"
#include "rows.h"
#include "sequence.h"

namespace rhhn {

// ops/native/build.py declares the same fields in the same order. A missing tensor is null.
struct Highway {
    int64_t T, B, H, L;
    int64_t D;                 // number of steps that du and dz hold
    int64_t ld_y;              // elements between rows of y and dy: H, or L H with every layer
    double keep_scale;         // factor of a kept unit of the transform gate
    double zone_rate;          // the share that zoneout keeps without a mask
    int64_t threads;           // slots of sums
    void* u;                   // [L, T, B, 2 H]: s W_l
    const void* gx;            // [T, B, 2 H]: what layer 0 adds to u
    const void* z;             // [L, T, B, H] without its bias, or null
    const void* bias;          // [L, 2 H] state type
    const void* bias_x;        // [2 H] state type or null: layer 0's second bias
    const void* bias_z;        // [L, H] state type, or null
    const uint8_t* first;      // [T, B] or null: positions at which layer 0 takes no bias
    const uint8_t* mask;       // [T, B]
    const uint8_t* resets;     // [T, B]: before which steps the state starts anew; read by whole sequences only
    const uint8_t* keep;       // [T, B, L H]
    const uint8_t* zone;       // [T, B, H]
    const void* s0;            // [B, H] state type
    void* s;                   // [L, T, B, H] state type: after each layer
    void* o;                   // the same as operands; null if the types are the same
    void* y;                   // [T, B, ld_y]
    const void* dy;            // [T, B, ld_y] or null
    void* ds;                  // [B, H] operands: gradient through the matrix of the next layer
    void* ds_direct;           // [B, H] state type: the remaining gradient, in and out
    void* past;                // [B, H] state type: the gradient that bypasses a time step
    void* du;                  // [L, D, B, 2 H]
    void* dgx;                 // [T, B, 2 H]
    void* dz;                  // [L, D, B, H]
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

    static int64_t scratch_size(const Highway& p) { return 8 * p.H; }

    // The interface of sequence.h.
    static int64_t layers(const Highway& p) { return p.L; }
    static int64_t sums_of(const Highway& p) { return 2 * p.H; }
    int64_t time() const { return t; }
    int64_t layer() const { return l; }
    // The state that this layer reads.
    const S* read(int64_t b) const {
        return l ? static_cast<const S*>(p.s) + at_row(l - 1, b) * H : at_start(b);
    }
    Rows<const T> start(int64_t) const { return {nullptr, 0}; }
    Rows<T> sums_at(int64_t b) const { return {static_cast<T*>(p.u) + at_row(l, b) * 2 * H, 2 * H}; }
    Rows<const T> gradient(int64_t b) const {
        return {products_gradient(b), 2 * H};
    }
    T* arriving_at(int64_t b) const { return static_cast<T*>(p.ds) + b * H; }
    void clear_state(int64_t first, int64_t last) const {
        for (int64_t b = first; b < last && !l; ++b)
            if (starts_anew(p, t, b))
                std::fill_n(static_cast<S*>(p.s) + (((p.L - 1) * p.T + t - 1) * p.B + b) * H, H, S{});
    }
    void clear_gradient(int64_t first, int64_t last) const {
        for (int64_t b = first; b < last && !l; ++b) {
            if (!starts_anew(p, t, b)) continue;
            std::fill_n(static_cast<T*>(p.ds) + b * H, H, T{});
            std::fill_n(static_cast<S*>(p.ds_direct) + b * H, H, S{});
        }
    }

   private:
    void forward_row(int64_t b, S* scratch) const {
        const int64_t row = at_row(l, b) * H;
        S* s = static_cast<S*>(p.s) + row;
        T* o = p.o ? static_cast<T*>(p.o) + row : nullptr;
        T* y = output(b);
        const S* start = at_start(b);
        if (p.mask && !p.mask[t * p.B + b]) {
            if (last) std::copy(start, start + H, s);
            else std::fill(s, s + H, S(0));
            if (o) narrow(s, o);
            if (y) std::fill(y, y + H, T{});
            return;
        }
        const S *bias = bias_of(b, scratch), *keep = keep_of(b, scratch + 2 * H);
        if (l) advance(products(b), b, bias, keep, s);
        else advance(with_input(b, scratch + 3 * H), b, bias, keep, s);
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
        S* __restrict ds = scratch + 5 * H;
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
        const S *bias = bias_of(b, scratch), *keep = keep_of(b, scratch + 2 * H);
        T* __restrict du = products_gradient(b);
        if (l) {
            retreat(products(b), b, bias, keep, ds, direct, du, total + l * 2 * H, total);
            return;
        }
        S *__restrict da = scratch + 6 * H, *__restrict dbias = total, *__restrict dbias_x = total + p.L * 2 * H;
        std::fill(da, da + 2 * H, S(0));
        retreat(with_input(b, scratch + 3 * H), b, bias, keep, ds, direct, du, da, total);
        for (int64_t j = 0; j < H; ++j) direct[j] += past[j];
        if (takes_bias(b)) add(da, dbias);
        if (p.bias_x) add(da, dbias_x);
        std::copy(du, du + 2 * H, static_cast<T*>(p.dgx) + (t * p.B + b) * 2 * H);
    }

    // The new state from u, [2 H], which z scales and which lacks the bias.
    template <typename X>
    void advance(const X* u, int64_t b, const S* bias, const S* keep, S* to) const {
        specialised(p.z != nullptr, keep != nullptr, [&](auto scaled, auto drops) {
            advance<decltype(scaled)::value, decltype(drops)::value>(u, scaling(b), bias, keep, read(b), to);
        });
    }
    template <bool SCALED, bool DROPS, typename X>
    void advance(const X* __restrict u, const T* __restrict z, const S* __restrict bias,
                 const S* __restrict keep, const S* __restrict old, S* __restrict to) const {
        const S* __restrict bias_z = shift();
#pragma omp simd
        for (int64_t j = 0; j < H; ++j) {
            const S scale = SCALED ? load(z[j]) + bias_z[j] : S(1);
            const S h = hyperbolic_tangent(load(u[j]) * scale + bias[j]);
            const S gate = sigmoid(load(u[H + j]) * scale + bias[H + j]);
            to[j] = (S(1) - gate) * old[j] + (DROPS ? gate * keep[j] : gate) * h;
        }
    }

    // Turns the gradient ds of the new state into those of u, z and the old state (without the path through
    // u). Adds to the gradients of the biases.
    template <typename X>
    void retreat(const X* u, int64_t b, const S* bias, const S* keep, const S* ds, S* direct, T* du, S* dbias,
                 S* total) const {
        T* dz = scaling_gradient(b);
        S* dbias_z = total + (2 * p.L + 2 + l) * H;
        specialised(p.z != nullptr, keep != nullptr, [&](auto scaled, auto drops) {
            retreat<decltype(scaled)::value, decltype(drops)::value>(u, scaling(b), bias, keep, read(b), ds,
                                                                     direct, du, dz, dbias, dbias_z);
        });
    }
    template <bool SCALED, bool DROPS, typename X>
    void retreat(const X* __restrict u, const T* __restrict z, const S* __restrict bias,
                 const S* __restrict keep, const S* __restrict old, const S* __restrict ds,
                 S* __restrict direct, T* __restrict du, T* __restrict dz, S* __restrict dbias,
                 S* __restrict dbias_z) const {
        const S* __restrict bias_z = shift();
#pragma omp simd
        for (int64_t j = 0; j < H; ++j) {
            const S u_h = load(u[j]), u_gate = load(u[H + j]);
            const S scale = SCALED ? load(z[j]) + bias_z[j] : S(1);
            const S h = hyperbolic_tangent(u_h * scale + bias[j]);
            const S gate = sigmoid(u_gate * scale + bias[H + j]);
            const S kept = DROPS ? ds[j] * keep[j] : ds[j];
            const S da_h = kept * gate * (S(1) - h * h);
            const S da_gate = (kept * h - ds[j] * old[j]) * gate * (S(1) - gate);
            direct[j] = ds[j] * (S(1) - gate);
            dbias[j] += da_h;
            dbias[H + j] += da_gate;
            store(du[j], da_h * scale);
            store(du[H + j], da_gate * scale);
            if (SCALED) {
                const S d = da_h * u_h + da_gate * u_gate;
                store(dz[j], d);
                dbias_z[j] += d;
            }
        }
    }
    // The bias of z, [H], or null.
    const S* shift() const { return p.z ? static_cast<const S*>(p.bias_z) + l * H : nullptr; }

    int64_t at_row(int64_t layer, int64_t b) const { return (layer * p.T + t) * p.B + b; }

    // The state at the start of the time step.
    const S* at_start(int64_t b) const {
        if (t == 0) return static_cast<const S*>(p.s0) + b * H;
        return static_cast<const S*>(p.s) + (at_row(p.L - 1, b) - p.B) * H;
    }
    // A layer's output; null if only the last layer has one and this is another.
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
    bool takes_bias(int64_t b) const { return l || !p.first || !p.first[t * p.B + b]; }

    const T* scaling(int64_t b) const {
        return p.z ? static_cast<const T*>(p.z) + at_row(l, b) * H : nullptr;
    }
    // The gradient of the products.
    T* products_gradient(int64_t b) const {
        return static_cast<T*>(p.du) + ((l * p.D + t % p.D) * p.B + b) * 2 * H;
    }
    // The gradient of z.
    T* scaling_gradient(int64_t b) const {
        return p.z ? static_cast<T*>(p.dz) + ((l * p.D + t % p.D) * p.B + b) * H : nullptr;
    }

    const T* products(int64_t b) const { return static_cast<const T*>(p.u) + at_row(l, b) * 2 * H; }
    const T* inputs(int64_t b) const {
        return l ? nullptr : static_cast<const T*>(p.gx) + (t * p.B + b) * 2 * H;
    }

    // u of layer 0 plus the projected input, [2 H].
    const S* with_input(int64_t b, S* __restrict to) const {
        const T *__restrict u = products(b), *__restrict gx = inputs(b);
#pragma omp simd
        for (int64_t j = 0; j < 2 * H; ++j) to[j] = load(u[j]) + load(gx[j]);
        return to;
    }
    // The sum of the row's biases, [2 H].
    const S* bias_of(int64_t b, S* __restrict to) const {
        const S* bias = static_cast<const S*>(p.bias) + l * 2 * H;
        if (l || (takes_bias(b) && !p.bias_x)) return bias;
        std::fill(to, to + 2 * H, S(0));
        if (takes_bias(b)) add(bias, to);
        if (p.bias_x) add(static_cast<const S*>(p.bias_x), to);
        return to;
    }
    // Factors of the update, [H]; null if all are one.
    const S* keep_of(int64_t b, S* to) const {
        if (!p.keep) return nullptr;
        factors(p.keep + ((t * p.B + b) * p.L + l) * H, S(p.keep_scale), S(1), to, H);
        return to;
    }
    void add(const S* __restrict from, S* __restrict to) const {
#pragma omp simd
        for (int64_t j = 0; j < 2 * H; ++j) to[j] += from[j];
    }

    // Padding: no gradient reaches the sums.
    void clear(int64_t b) const {
        T* du = products_gradient(b);
        std::fill(du, du + 2 * H, T{});
        if (!l) {
            T* dgx = static_cast<T*>(p.dgx) + (t * p.B + b) * 2 * H;
            std::fill(dgx, dgx + 2 * H, T{});
        }
        if (T* dz = scaling_gradient(b)) std::fill(dz, dz + H, T{});
    }

    const Highway& p;
    const int64_t t, l, H;
    const bool last;
};

}  // namespace rhhn

RHHN_EXPORT_STEP(highway, HighwayStep, Highway)

// Only for float32, where operands and states have one type.
extern "C" void highway_sequence_forward(const rhhn::Highway* p, const rhhn::Recurrence* r) {
    rhhn::run_sequence<rhhn::HighwayStep<float>, false>(*p, *r);
}
extern "C" void highway_sequence_backward(const rhhn::Highway* p, const rhhn::Recurrence* r) {
    rhhn::run_sequence<rhhn::HighwayStep<float>, true>(*p, *r);
}
extern "C" int64_t size_of_highway() { return sizeof(rhhn::Highway); }
