// The order of samples (shoal/data/order.py says how it is made), and in which part of a pack a row lies.

#include "gather.h"

enum { LANES = 8 };  // points that go through the rounds side by side: each round waits for the one before

typedef struct {
    uint64_t n, a, b;
    uint64_t a_inverse, b_inverse;
} Grid;

static inline uint64_t high_product(uint64_t x, uint64_t y) {
    return (uint64_t)(((unsigned __int128)x * y) >> 64);
}

// x / d by a multiplication with floor((2^64 - 1) / d): that is right, or one too small.
static inline uint64_t quotient(uint64_t x, uint64_t d, uint64_t inverse) {
    uint64_t q = high_product(x, inverse);
    return q + (x - q * d >= d);
}

static inline uint64_t rest(uint64_t x, uint64_t d, uint64_t inverse) {
    uint64_t r = x - high_product(x, inverse) * d;
    return r >= d ? r - d : r;
}

static inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static inline void rounds(const Grid *grid, const uint64_t *keys, size_t num_keys, uint64_t *points, int lanes) {
    uint64_t left[LANES], right[LANES];
    const uint64_t a = grid->a, b = grid->b;
    for (int i = 0; i < lanes; i++) {
        left[i] = quotient(points[i], b, grid->b_inverse);
        right[i] = points[i] - left[i] * b;
    }
    for (size_t k = 0; k < num_keys; k++) {
        const uint64_t key = keys[k];
        if (k % 2 == 0) {
            for (int i = 0; i < lanes; i++) {
                uint64_t sum = left[i] + rest(mix(right[i] ^ key), a, grid->a_inverse);
                left[i] = sum >= a ? sum - a : sum;
            }
        } else {
            for (int i = 0; i < lanes; i++) {
                uint64_t sum = right[i] + rest(mix(left[i] ^ key), b, grid->b_inverse);
                right[i] = sum >= b ? sum - b : sum;
            }
        }
    }
    for (int i = 0; i < lanes; i++) points[i] = left[i] * b + right[i];
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

// The same for 32 points by AVX-512: four registers, so that none waits for itself. 8 ns a point
// instead of 18, where gathering a row of 512 bytes takes 110 (2026-11).
#define WIDE __attribute__((target("avx512f,avx512dq")))
enum { REGISTERS = 4, WIDE_LANES = 8 * REGISTERS };

WIDE static inline __m512i wide_high_product(__m512i x, __m512i y) {
    const __m512i x1 = _mm512_srli_epi64(x, 32), y1 = _mm512_srli_epi64(y, 32), low = _mm512_set1_epi64(0xFFFFFFFF);
    const __m512i inner = _mm512_mul_epu32(x, y1), first = _mm512_srli_epi64(_mm512_mul_epu32(x, y), 32);
    const __m512i middle = _mm512_add_epi64(_mm512_mul_epu32(x1, y),
                                            _mm512_add_epi64(first, _mm512_and_si512(inner, low)));
    const __m512i carried = _mm512_add_epi64(_mm512_srli_epi64(inner, 32), _mm512_srli_epi64(middle, 32));
    return _mm512_add_epi64(_mm512_mul_epu32(x1, y1), carried);
}

// x, or x - d where that is not negative: of x < 2 d, the rest.
WIDE static inline __m512i wide_once(__m512i x, __m512i d) { return _mm512_min_epu64(x, _mm512_sub_epi64(x, d)); }

WIDE static inline __m512i wide_rest(__m512i x, __m512i d, __m512i inverse) {
    return wide_once(_mm512_sub_epi64(x, _mm512_mullo_epi64(wide_high_product(x, inverse), d)), d);
}

WIDE static inline __m512i wide_mix(__m512i x) {
    const __m512i first = _mm512_set1_epi64((int64_t)0xBF58476D1CE4E5B9u);
    const __m512i second = _mm512_set1_epi64((int64_t)0x94D049BB133111EBu);
    x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 30)), first);
    x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 27)), second);
    return _mm512_xor_si512(x, _mm512_srli_epi64(x, 31));
}

WIDE static void wide_rounds(const Grid *grid, const uint64_t *keys, size_t num_keys, uint64_t *points) {
    const __m512i sizes[2] = {_mm512_set1_epi64((int64_t)grid->a), _mm512_set1_epi64((int64_t)grid->b)};
    const __m512i inverses[2] = {_mm512_set1_epi64((int64_t)grid->a_inverse),
                                 _mm512_set1_epi64((int64_t)grid->b_inverse)};
    __m512i halves[2][REGISTERS];
    for (int r = 0; r < REGISTERS; r++) {
        const __m512i point = _mm512_loadu_si512(points + 8 * r);
        halves[1][r] = wide_rest(point, sizes[1], inverses[1]);
        // What is left is a multiple of b; the quotient is right, or one too small.
        const __m512i whole = _mm512_sub_epi64(point, halves[1][r]), q = wide_high_product(whole, inverses[1]);
        const __mmask8 is_small = _mm512_cmpneq_epu64_mask(_mm512_mullo_epi64(q, sizes[1]), whole);
        halves[0][r] = _mm512_mask_add_epi64(q, is_small, q, _mm512_set1_epi64(1));
    }
    for (size_t k = 0; k < num_keys; k++) {
        const __m512i key = _mm512_set1_epi64((int64_t)keys[k]), size = sizes[k % 2], inverse = inverses[k % 2];
        for (int r = 0; r < REGISTERS; r++) {
            const __m512i moved = wide_rest(wide_mix(_mm512_xor_si512(halves[1 - k % 2][r], key)), size, inverse);
            halves[k % 2][r] = wide_once(_mm512_add_epi64(halves[k % 2][r], moved), size);
        }
    }
    for (int r = 0; r < REGISTERS; r++)
        _mm512_storeu_si512(points + 8 * r,
                            _mm512_add_epi64(_mm512_mullo_epi64(halves[0][r], sizes[1]), halves[1][r]));
}

static int is_wide(void) { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"); }
#else
enum { WIDE_LANES = LANES };
static void wide_rounds(const Grid *grid, const uint64_t *keys, size_t num_keys, uint64_t *points) {
    rounds(grid, keys, num_keys, points, LANES);
}
static int is_wide(void) { return 0; }
#endif

// samples[i] = the sample at positions[i], all of which lie in [0, n); n <= a * b, and a, b < 2^32.
void shoal_permute(const int64_t *positions, int64_t *samples, size_t count, uint64_t n, uint64_t a, uint64_t b,
                   const uint64_t *keys, size_t num_keys) {
    const Grid grid = {n, a, b, UINT64_MAX / a, UINT64_MAX / b};
    const size_t wide = is_wide() ? WIDE_LANES : LANES;
    size_t at = 0;
    for (; at + LANES <= count;) {
        uint64_t points[WIDE_LANES];
        const size_t lanes = at + wide <= count ? wide : LANES;
        for (size_t i = 0; i < lanes; i++) points[i] = (uint64_t)positions[at + i];
        if (lanes == LANES) rounds(&grid, keys, num_keys, points, LANES);
        else wide_rounds(&grid, keys, num_keys, points);
        for (size_t i = 0; i < lanes; i++) {
            while (points[i] >= n) rounds(&grid, keys, num_keys, points + i, 1);
            samples[at + i] = (int64_t)points[i];
        }
        at += lanes;
    }
    for (; at < count; at++) {
        uint64_t point = (uint64_t)positions[at];
        do rounds(&grid, keys, num_keys, &point, 1);
        while (point >= n);
        samples[at] = (int64_t)point;
    }
}

static size_t part_by_halving(const int64_t *starts, size_t num_parts, int64_t row) {
    size_t low = 0, high = num_parts;  // starts[low] <= row < starts[high]
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (starts[middle] <= row) low = middle;
        else high = middle;
    }
    return low;
}

// Part p holds rows [starts[p], starts[p + 1]). Returns how many rows were found: fewer than count where the next one
// lies in no part.
size_t shoal_locate(const int64_t *rows, size_t count, const int64_t *starts, size_t num_parts, int32_t *part,
                    int64_t *row_in_part) {
    if (num_parts == 0 || starts[num_parts] <= 0) return 0;
    const double parts_per_row = (double)num_parts / (double)starts[num_parts];  // most parts are of one size
    for (size_t i = 0; i < count; i++) {
        const int64_t row = rows[i];
        if (row < 0 || row >= starts[num_parts]) return i;
        size_t guess = (size_t)((double)row * parts_per_row);
        if (guess >= num_parts) guess = num_parts - 1;
        if (row < starts[guess]) guess -= guess > 0;
        else if (row >= starts[guess + 1]) guess += guess + 1 < num_parts;
        if (row < starts[guess] || row >= starts[guess + 1]) guess = part_by_halving(starts, num_parts, row);
        part[i] = (int32_t)guess;
        row_in_part[i] = row - starts[guess];
    }
    return count;
}
