// Distributing work, and the rows of a batch, over threads.

#pragma once

#include <cstdint>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace rhhn {

// Calls work(thread, count) in each of up to ``threads`` threads.
template <typename Work>
void in_threads(int64_t threads, Work work) {
#pragma omp parallel if (threads > 1) num_threads(int(threads))
    {
        int64_t thread = 0, count = 1;
#ifdef _OPENMP
        thread = omp_get_thread_num();
        count = omp_get_num_threads();
#endif
        work(thread, count);
    }
}

// Calls work(first, last, thread) for each thread's rows of the batch. The assignment depends only on the
// numbers of rows and threads, so sums repeat from run to run.
template <typename Work>
void share_rows(int64_t rows, int64_t threads, Work work) {
    in_threads(threads, [&](int64_t thread, int64_t count) {
        const int64_t first = rows * thread / count, last = rows * (thread + 1) / count;
        if (first < last) work(first, last, thread);
    });
}

// Runs step number n for all rows of the batch. Every thread has its own scratch and, in the backward pass, its
// own slots for sums of gradients.
template <typename Step, bool BACKWARD, typename Sequence>
void over_rows(const Sequence& p, int64_t n) {
    using S = typename Step::State;
    const Step step(p, n);
    const int64_t size = Step::scratch_size(p);
    // Below this amount of work, waking threads costs more than they save.
    const bool shared = p.B * p.H >= 8192;
    share_rows(p.B, shared ? p.threads : 1, [&](int64_t first, int64_t last, int64_t thread) {
        static thread_local std::vector<S> scratch;
        if (int64_t(scratch.size()) < size) scratch.resize(size);
        if constexpr (BACKWARD)
            step.backward(first, last, scratch.data(), thread);
        else
            step.forward(first, last, scratch.data());
    });
}

// Exports the functions that run a step forward and backward, for every type of operands.
#define RHHN_EXPORT_STEP_FOR(NAME, STEP, SEQUENCE, SUFFIX, TYPE)                        \
    extern "C" void NAME##_forward_##SUFFIX(const rhhn::SEQUENCE* p, int64_t n) {       \
        rhhn::over_rows<rhhn::STEP<TYPE>, false>(*p, n);                                \
    }                                                                                   \
    extern "C" void NAME##_backward_##SUFFIX(const rhhn::SEQUENCE* p, int64_t n) {      \
        rhhn::over_rows<rhhn::STEP<TYPE>, true>(*p, n);                                 \
    }
#define RHHN_EXPORT_STEP(NAME, STEP, SEQUENCE)                      \
    RHHN_EXPORT_STEP_FOR(NAME, STEP, SEQUENCE, float32, float)      \
    RHHN_EXPORT_STEP_FOR(NAME, STEP, SEQUENCE, float64, double)     \
    RHHN_EXPORT_STEP_FOR(NAME, STEP, SEQUENCE, bfloat16, rhhn::bfloat16)

}  // namespace rhhn
