// The order of samples (shoal/data/order.py says how it is made), and in which part of a pack a row lies.

#include <stddef.h>
#include <stdint.h>

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

// samples[i] = the sample at positions[i], all of which lie in [0, n); n <= a * b, and a, b < 2^32.
void shoal_permute(const int64_t *positions, int64_t *samples, size_t count, uint64_t n, uint64_t a, uint64_t b,
                   const uint64_t *keys, size_t num_keys) {
    const Grid grid = {n, a, b, UINT64_MAX / a, UINT64_MAX / b};
    size_t at = 0;
    for (; at + LANES <= count; at += LANES) {
        uint64_t points[LANES];
        for (int i = 0; i < LANES; i++) points[i] = (uint64_t)positions[at + i];
        rounds(&grid, keys, num_keys, points, LANES);
        for (int i = 0; i < LANES; i++) {
            while (points[i] >= n) rounds(&grid, keys, num_keys, points + i, 1);
            samples[at + i] = (int64_t)points[i];
        }
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
