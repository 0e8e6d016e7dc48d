// Many steps of a HyperLSTM, with layer normalisation or without, in one call; see sequence.h.
//
// Equations and names are those of ops/hyper_lstm.py.

#include <vector>

#include "gated.h"

namespace rhhn {

// ops/native/build.py declares the same fields in the same order. Matrices are packed into panels; in the
// backward pass they are transposed.
struct HyperRecurrence {
    int64_t previous;       // whether z comes from the hypernetwork's state of the previous step
    int64_t start, stop;    // the time steps to run; stop is excluded
    const float* weight;    // [H, 4 (H + N)]: columns of the main network, then of the hypernetwork
    const float* weight_e;  // [N, 4 N]
    const float* weight_z;  // [N, 12 Z]
    const float* bias_z;    // [12 Z]
    const float* g_hyper;   // [T, B, 4 N]: the hypernetwork's projected input
    const float* gal;       // [B, H] or null: factors of h before its product
    const float* share;     // [T] or null: factors of the gradient of h through its product
};

using Main = GatedStep<float, true>;
using Hyper = GatedStep<float, false>;

// One thread's rows of the batch.
class HyperRows {
   public:
    HyperRows(const Gated& main, const Gated& hyper, const HyperRecurrence& r, int64_t first, int64_t last)
        : main(main), hyper(hyper), r(r), first(first), last(last), rows(last - first), H(main.H), N(hyper.H),
          main_scratch(Main::scratch_size(main)), hyper_scratch(Hyper::scratch_size(hyper)) {}

    void forward() {
        std::vector<float> dropped(r.gal ? rows * H : 0);
        for (int64_t t = r.start; t < r.stop; ++t) {
            const Main step(main, t);
            const Hyper inner(hyper, t);
            step.clear_state(first, last);
            inner.clear_state(first, last);
            Rows<const float> h{step.read(first), H};
            if (r.gal) {
                for (int64_t i = 0; i < rows * H; ++i) dropped[i] = h.data[i] * r.gal[first * H + i];
                h.data = dropped.data();
            }
            const Rows<float> u = step.sums_at(first), a = inner.sums_at(first);
            multiply(h, rows, H, r.weight, {nullptr, 0}, u, 4 * (H + N));
            const float* g = r.g_hyper + (t * main.B + first) * 4 * N;
            for (int64_t b = 0; b < rows; ++b)
                for (int64_t j = 0; j < 4 * N; ++j)
                    a.data[b * a.ld + j] = g[b * 4 * N + j] + u.data[b * u.ld + 4 * H + j];
            const Rows<const float> e{inner.read(first), N};
            multiply(e, rows, N, r.weight_e, {a.data, a.ld}, a, 4 * N);
            inner.forward(first, last, hyper_scratch.data());
            const Rows<const float> read = r.previous ? e : Rows<const float>{inner.state(first), N};
            multiply(read, rows, N, r.weight_z, {r.bias_z, 0}, step.embeddings_at(first), 12 * main.Z);
            step.forward(first, last, main_scratch.data());
        }
    }

    void backward(int64_t slot) {
        for (int64_t t = r.stop - 1; t >= r.start; --t) {
            const Main step(main, t);
            const Hyper inner(hyper, t);
            step.backward(first, last, main_scratch.data(), slot);
            if (!r.previous) through_z(step, inner);
            inner.backward(first, last, hyper_scratch.data(), slot);
            float *dh = step.arriving_at(first), *de = inner.arriving_at(first);
            multiply(step.gradient(first), rows, 4 * (H + N), r.weight, {nullptr, 0}, {dh, H}, H);
            multiply(inner.gradient(first), rows, 4 * N, r.weight_e, {nullptr, 0}, {de, N}, N);
            if (r.previous) through_z(step, inner);
            if (r.gal)
                for (int64_t i = 0; i < rows * H; ++i) dh[i] *= r.gal[first * H + i];
            if (r.share)
                for (int64_t i = 0; i < rows * H; ++i) dh[i] *= r.share[t];
            step.clear_gradient(first, last);
            inner.clear_gradient(first, last);
        }
    }

   private:
    // Adds the gradient through z to that of e.
    void through_z(const Main& step, const Hyper& inner) const {
        const Rows<float> de{inner.arriving_at(first), N};
        multiply(step.embeddings_gradient(first), rows, 12 * main.Z, r.weight_z, {de.data, N}, de, N);
    }

    const Gated &main, &hyper;
    const HyperRecurrence& r;
    const int64_t first, last, rows, H, N;
    std::vector<float> main_scratch, hyper_scratch;
};

}  // namespace rhhn

extern "C" void hyper_lstm_sequence_forward(const rhhn::Gated* main, const rhhn::Gated* hyper,
                                            const rhhn::HyperRecurrence* r) {
    rhhn::share_rows(main->B, main->threads, [&](int64_t first, int64_t last, int64_t) {
        rhhn::HyperRows(*main, *hyper, *r, first, last).forward();
    });
}
extern "C" void hyper_lstm_sequence_backward(const rhhn::Gated* main, const rhhn::Gated* hyper,
                                             const rhhn::HyperRecurrence* r) {
    rhhn::share_rows(main->B, main->threads, [&](int64_t first, int64_t last, int64_t thread) {
        rhhn::HyperRows(*main, *hyper, *r, first, last).backward(thread);
    });
}
extern "C" int64_t size_of_hyper_recurrence() { return sizeof(rhhn::HyperRecurrence); }
