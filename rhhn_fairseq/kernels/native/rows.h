// Sharing the rows of a batch between threads.

#pragma once

#include <cstdint>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace rhhn {

// Runs a step for all rows of the batch. Every thread has scratch of its own, and in the backward pass slots
// of its own in which it adds up gradients; which rows a thread gets depends on nothing but their
// number and the number of threads, so that sums come out the same in every run.
template <typename Step, bool BACKWARD, typename Sequence>
void over_rows(const Step& step, const Sequence& p) {
    using S = typename Step::State;
    const int64_t size = Step::scratch_size(p);
    // Below this much work, waking other threads costs more than they save.
    const bool shared = p.B * p.H >= 8192;
#pragma omp parallel if (shared) num_threads(shared ? int(p.threads) : 1)
    {
        int64_t thread = 0, count = 1;
#ifdef _OPENMP
        thread = omp_get_thread_num();
        count = omp_get_num_threads();
#endif
        static thread_local std::vector<S> scratch;
        if (int64_t(scratch.size()) < size) scratch.resize(size);
        const int64_t first = p.B * thread / count, last = p.B * (thread + 1) / count;
        if constexpr (BACKWARD)
            step.backward(first, last, scratch.data(), thread);
        else
            step.forward(first, last, scratch.data());
    }
}

}  // namespace rhhn
