// Matrix products of floats on several threads, and the packing of matrices into panels.

#include <memory>
#include <new>

#include "matmul.h"
#include "rows.h"

namespace rhhn {

// ops/native/build.py declares the same fields in the same order.
struct Matmul {
    int64_t M, K, N;
    int64_t ld_x, next_x;  // elements between rows of x, and between neighbours in a row
    int64_t ld_w, next_w;
    int64_t ld_add, ld_y;  // ld_add is 0 if all rows add the same
    int64_t threads;
    const float* x;       // [M, K]
    const float* w;       // [K, N]; null if panels is given
    const float* panels;  // [ceil(N / PANEL), K, PANEL]
    const float* add;     // [M or 1, N]; null for zero
    float* y;             // [M, N] = add + x w
};

// Inner width of a block: a panel of this many lines stays in a core's cache.
constexpr int64_t DEPTH = 1536;
// Tiles of a block.
constexpr int64_t HEIGHT = 64;
// Panels of a block.
constexpr int64_t BREADTH = 24;

// Memory aligned to cache lines, so that no vector of a panel crosses a line.
class Scratch {
   public:
    float* of(int64_t size) {
        if (size > held) {
            held = size;
            numbers.reset(static_cast<float*>(::operator new(size * sizeof(float), LINE)));
        }
        return numbers.get();
    }

   private:
    static constexpr std::align_val_t LINE{64};
    struct Free {
        void operator()(float* numbers) const { ::operator delete(numbers, LINE); }
    };
    std::unique_ptr<float, Free> numbers;
    int64_t held = 0;
};

// Splits the range [first, last) evenly into pieces of at most `most`.
template <typename Work>
void in_pieces(int64_t first, int64_t last, int64_t most, Work work) {
    const int64_t size = last - first, pieces = (size + most - 1) / most;
    for (int64_t i = 0; i < pieces; ++i) work(first + size * i / pieces, first + size * (i + 1) / pieces);
}

// Whether a matrix can be read without packing: it is stored by rows, and the distance between them does not
// make the lines of a panel evict each other from the cache.
inline bool stays(int64_t ld, int64_t next) { return next == 1 && ld % 256 != 0; }

// Packs the tiles [first, last) of an x that is stored by columns.
inline void lay_tiles(Rows<const float> x, int64_t rows, int64_t first, int64_t last, int64_t K, float* to) {
    // Takes a few elements of all rows at a time, because two tiles share cache lines.
    constexpr int64_t NUMBERS = 16;
    const int64_t begin = tile_start(rows, first);
    for (int64_t k = 0; k < K; k += NUMBERS)
        in_tiles(rows, first, last, [&](int64_t start, int64_t count) {
            const float* from = x.data + start * x.ld + k * x.next;
            float* tile = to + (start - begin) * K + k * count;
            for (int64_t i = std::min(NUMBERS, K - k); i > 0; --i, from += x.next, tile += count) {
                __builtin_prefetch(from + AHEAD * x.next);
                if (x.ld == 1 && count == TILE)
                    std::copy(from, from + TILE, tile);
                else
                    for (int64_t m = 0; m < count; ++m) tile[m] = from[m * x.ld];
            }
        });
}

// A thread's share of some rows of y. Tiles are counted panel by panel, so threads get equal work for any number
// of panels.
class Share {
   public:
    Share(const Matmul& p, int64_t m, int64_t rows, int64_t thread, int64_t count)
        : p(p), m(m), rows(rows), first_tile(all_tiles() * thread / count),
          last_tile(all_tiles() * (thread + 1) / count) {}

    void run() {
        const int64_t tiles = tiles_of(rows), end = (last_tile + tiles - 1) / tiles;
        in_pieces(0, p.K, DEPTH, [&](int64_t k_first, int64_t k_last) {
            in_pieces(first_tile / tiles, end, BREADTH, [&](int64_t first, int64_t last) {
                lay(k_first, k_last - k_first, first, last);
                in_pieces(0, tiles, HEIGHT, [&](int64_t tile, int64_t tile_last) {
                    block(tile, tile_last, k_first, k_last - k_first, first, last);
                });
            });
        });
    }

   private:
    // Whether a panel is read from w directly, which needs complete vectors.
    bool in_place(int64_t i) const {
        return stays(p.ld_w, p.next_w) && std::min(PANEL, p.N - i * PANEL) % WIDTH == 0;
    }

    // Packs the panels of a block that are not read in place.
    void lay(int64_t k, int64_t K, int64_t first, int64_t last) {
        if (p.panels) return;
        panels = panel_scratch.of((last - first) * K * PANEL);
        const Rows<const float> w{p.w, p.ld_w, p.next_w};
        for (int64_t i = first; i < last; ++i)
            if (!in_place(i))
                lay_panel(w.from(k, i * PANEL), K, p.N - i * PANEL, panels + (i - first) * K * PANEL);
    }

    // Panel i of the block of K lines from line k on, whose first panel is `first`.
    Rows<const float> panel_at(int64_t i, int64_t k, int64_t K, int64_t first) const {
        if (p.panels) return {p.panels + (i * p.K + k) * PANEL, PANEL};
        if (in_place(i)) return {p.w + k * p.ld_w + i * PANEL, p.ld_w};
        return {panels + (i - first) * K * PANEL, PANEL};
    }

    // Adds the products of K elements from element k, for a range of tiles and panels.
    void block(int64_t tile, int64_t tile_last, int64_t k, int64_t K, int64_t first, int64_t last) {
        const Rows<const float> x = Rows<const float>{p.x, p.ld_x, p.next_x}.from(m, k);
        const bool by_columns = p.next_x != 1;
        const int64_t first_row = tile_start(rows, tile);
        if (by_columns) {
            tiles = tile_scratch.of((tile_start(rows, tile_last) - first_row) * K);
            lay_tiles(x, rows, tile, tile_last, K, tiles);
        }
        const auto tile_at = [&](int64_t start, int64_t count) {
            return by_columns ? Rows<const float>{tiles + (start - first_row) * K, 1, count} : x.from(start);
        };
        const Rows<float> y{p.y, p.ld_y};
        const Rows<const float> add = k ? Rows<const float>{p.y, p.ld_y} : Rows<const float>{p.add, p.ld_add};
        for (int64_t i = first; i < last; ++i) {
            const int64_t n = i * PANEL, before = i * tiles_of(rows);
            const int64_t begin = std::max(tile, first_tile - before);
            const int64_t end = std::min(tile_last, last_tile - before);
            multiply_tiles(tile_at, rows, begin, end, K, panel_at(i, k, K, first), panel_at(i + 1, k, K, first).data,
                           add.from(m, n), y.from(m, n), p.N - n);
        }
    }

    int64_t all_tiles() const { return panels_of(p.N) * tiles_of(rows); }

    const Matmul& p;
    const int64_t m, rows, first_tile, last_tile;
    float *panels = nullptr, *tiles = nullptr;
    static thread_local Scratch panel_scratch, tile_scratch;
};

thread_local Scratch Share::panel_scratch, Share::tile_scratch;

void matmul(const Matmul& p) {
    if (p.M == 0) return;
    const bool lays_rows = p.next_x != 1, lays_panels = !p.panels && !stays(p.ld_w, p.next_w);
    in_threads(p.threads, [&](int64_t thread, int64_t count) {
        // Each thread packs what it reads. Threads share rows if only rows are packed or panels are few, otherwise
        // tiles.
        const bool few = lays_panels ? panels_of(p.N) < 4 * count && p.M >= TILE * count : p.M >= 4 * TILE * count;
        if ((lays_rows || lays_panels) && few) {
            const int64_t m = p.M * thread / count;
            Share(p, m, p.M * (thread + 1) / count - m, 0, 1).run();
        } else {
            Share(p, 0, p.M, thread, count).run();
        }
    });
}

void lay_panels(const Matmul& p, float* to) {
    const int64_t panels = panels_of(p.N);
    const Rows<const float> w{p.w, p.ld_w, p.next_w};
    in_threads(p.threads, [&](int64_t thread, int64_t count) {
        for (int64_t i = panels * thread / count; i < panels * (thread + 1) / count; ++i)
            lay_panel(w.from(0, i * PANEL), p.K, p.N - i * PANEL, to + i * PANEL * p.K);
    });
}

}  // namespace rhhn

extern "C" void matmul(const rhhn::Matmul* p) { rhhn::matmul(*p); }
extern "C" void lay_panels(const rhhn::Matmul* p, float* to) { rhhn::lay_panels(*p, to); }
extern "C" int stays(int64_t ld, int64_t next) { return rhhn::stays(ld, next); }
extern "C" int64_t panel_columns() { return rhhn::PANEL; }
extern "C" int64_t size_of_matmul() { return sizeof(rhhn::Matmul); }
