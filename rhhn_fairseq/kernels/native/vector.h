// The vector register of floats that a build is made for.

#pragma once

#include <cstdint>
#include <cstring>

namespace rhhn {

// One vector register of floats, and how many registers there are.
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
// Less zero, which changes no number and which compilers drop; plus zero would cost an addition.
inline Vector broadcast(float x) { return x - Vector{}; }

}  // namespace rhhn
