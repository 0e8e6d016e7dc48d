// Energies of additive attention, v . tanh(q + k), for every pair of a query and a source position, forward and
// backward. The hidden layer of A numbers a pair is never stored.

#include <algorithm>
#include <limits>

#include "math.h"
#include "rows.h"

namespace rhhn {

// ops/native/build.py declares the same fields in the same order. A missing tensor is null.
struct Energy {
    int64_t B, R, S, A;    // sentences, queries and source positions of each, width
    int64_t H;             // work per sentence, which decides whether to use threads
    int64_t threads;       // slots of dv
    const void* q;         // [B, R, A]
    const void* k;         // [B, S, A]
    const void* v;         // [A] state type
    const uint8_t* mask;   // [B, S], true at real positions
    void* e;               // [B, R, S] state type, minus infinity at padding
    const void* de;        // [B, R, S] state type
    void* dq;              // [B, R, A]
    void* dk;              // [B, S, A]
    void* dv;              // [threads, A] state type, summed over pairs
};

template <typename T>
class EnergyStep {
    using S = typename Arithmetic<T>::type;

   public:
    using State = S;

    EnergyStep(const Energy& p, int64_t) : p(p) {}

    void forward(int64_t first, int64_t last, S* scratch) const {
        const int64_t A = p.A;
        const S* __restrict v = static_cast<const S*>(p.v);
        S *keys = scratch, *__restrict query = scratch + p.S * A;
        for (int64_t b = first; b < last; ++b) {
            widen(static_cast<const T*>(p.k) + b * p.S * A, keys, p.S * A);
            for (int64_t r = 0; r < p.R; ++r) {
                widen(static_cast<const T*>(p.q) + (b * p.R + r) * A, query, A);
                S* to = static_cast<S*>(p.e) + (b * p.R + r) * p.S;
                for (int64_t s = 0; s < p.S; ++s) {
                    if (!p.mask[b * p.S + s]) {
                        to[s] = -std::numeric_limits<S>::infinity();
                        continue;
                    }
                    const S* __restrict key = keys + s * A;
                    S sum = 0;
#pragma omp simd reduction(+ : sum)
                    for (int64_t a = 0; a < A; ++a) sum += v[a] * hyperbolic_tangent(query[a] + key[a]);
                    to[s] = sum;
                }
            }
        }
    }

    void backward(int64_t first, int64_t last, S* scratch, int64_t slot) const {
        const int64_t A = p.A;
        const S* __restrict v = static_cast<const S*>(p.v);
        S *keys = scratch, *__restrict query = keys + p.S * A;
        S *dkeys = query + A, *__restrict dquery = dkeys + p.S * A;
        S* __restrict dv = static_cast<S*>(p.dv) + slot * A;
        for (int64_t b = first; b < last; ++b) {
            widen(static_cast<const T*>(p.k) + b * p.S * A, keys, p.S * A);
            std::fill(dkeys, dkeys + p.S * A, S(0));
            for (int64_t r = 0; r < p.R; ++r) {
                widen(static_cast<const T*>(p.q) + (b * p.R + r) * A, query, A);
                std::fill(dquery, dquery + A, S(0));
                const S* de = static_cast<const S*>(p.de) + (b * p.R + r) * p.S;
                for (int64_t s = 0; s < p.S; ++s) {
                    if (!p.mask[b * p.S + s]) continue;
                    const S g = de[s];
                    const S* __restrict key = keys + s * A;
                    S* __restrict dkey = dkeys + s * A;
#pragma omp simd
                    for (int64_t a = 0; a < A; ++a) {
                        const S h = hyperbolic_tangent(query[a] + key[a]);
                        const S d = g * v[a] * (S(1) - h * h);
                        dv[a] += g * h;
                        dquery[a] += d;
                        dkey[a] += d;
                    }
                }
                narrow(dquery, static_cast<T*>(p.dq) + (b * p.R + r) * A, A);
            }
            narrow(dkeys, static_cast<T*>(p.dk) + b * p.S * A, p.S * A);
        }
    }

    static int64_t scratch_size(const Energy& p) { return 2 * (p.S + 1) * p.A; }

   private:
    static void widen(const T* __restrict from, S* __restrict to, int64_t size) {
#pragma omp simd
        for (int64_t a = 0; a < size; ++a) to[a] = load(from[a]);
    }
    static void narrow(const S* __restrict from, T* __restrict to, int64_t size) {
#pragma omp simd
        for (int64_t a = 0; a < size; ++a) store(to[a], from[a]);
    }

    const Energy& p;
};

}  // namespace rhhn

RHHN_EXPORT_STEP(energy, EnergyStep, Energy)
extern "C" int64_t size_of_energy() { return sizeof(rhhn::Energy); }
