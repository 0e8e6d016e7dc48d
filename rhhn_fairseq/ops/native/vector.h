// The vector registers of the processor that a build targets.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

namespace rhhn {

// A vector register of floats, and the number of registers.
#ifdef __AVX512F__
typedef float Vector __attribute__((vector_size(64)));
constexpr int REGISTERS = 32;
#elif defined(__AVX2__)
typedef float Vector __attribute__((vector_size(32)));
constexpr int REGISTERS = 16;
#else
typedef float Vector __attribute__((vector_size(16)));
constexpr int REGISTERS = 16;
#endif
constexpr int64_t WIDTH = sizeof(Vector) / sizeof(float);

inline Vector load(const float* from) {
    Vector v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
inline void store(float* to, Vector v) { std::memcpy(to, &v, sizeof v); }
// Subtracting zero changes no number, and compilers remove it; adding zero would cost an addition.
inline Vector broadcast(float x) { return x - Vector{}; }

// Interleaves two vectors: their first halves, or with `high` their second halves.
template <bool high, size_t... i>
inline Vector interleave(Vector a, Vector b, std::index_sequence<i...>) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, (i % 2 * WIDTH + i / 2 + high * WIDTH / 2)...);
#else
    typedef int32_t Places __attribute__((vector_size(sizeof(Vector))));
    return __builtin_shuffle(a, b, Places{int32_t(i % 2 * WIDTH + i / 2 + high * WIDTH / 2)...});
#endif
}

// Transposes a square of numbers.
inline void transpose(Vector (&square)[WIDTH]) {
    constexpr auto all = std::make_index_sequence<WIDTH>();
    for (int64_t done = 1; done < WIDTH; done *= 2) {
        Vector next[WIDTH];
        for (int64_t i = 0; i < WIDTH / 2; ++i) {
            next[2 * i] = interleave<false>(square[i], square[i + WIDTH / 2], all);
            next[2 * i + 1] = interleave<true>(square[i], square[i + WIDTH / 2], all);
        }
        std::copy(next, next + WIDTH, square);
    }
}

}  // namespace rhhn
