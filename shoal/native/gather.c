// Rows, windows and variable rows from anywhere in the parts of a pack into one buffer, one call a batch.
// Which rows come is random, so each read misses every cache: they are asked for AHEAD rows before they are copied.
// Every function returns -1, or the first position found that points outside its part; it is found before it is read.

#include "gather.h"

#include <string.h>

#include "parallel.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EVERY_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EVERY_PROCESSOR
#endif

enum { LINE = 64, AHEAD = 12, WINDOWS_AHEAD = 2, GRAIN_BYTES = 256 << 10 };

// The parts of one column: where each begins, and how many rows (tokens, of a stream) it has.
typedef struct {
    const char *const *bases;
    const int64_t *lengths;
    int64_t num_parts;
} Parts;

typedef struct {
    Parts parts;
    const int32_t *part;  // NULL: everything is in part 0
    const int64_t *row;
    size_t row_bytes;     // of a window: its width in tokens
    char *out;
    int token_bytes, is_signed;
    const int64_t *const *offsets;
    int64_t *out_offsets;
    atomic_llong outside;
} Gather;

static inline int32_t part_at(const Gather *gather, size_t i) { return gather->part ? gather->part[i] : 0; }

// The position of the first of [begin, end) that is not in its part with `width` items after it; else -1.
static int64_t first_outside(const Gather *gather, size_t begin, size_t end, int64_t width) {
    for (size_t i = begin; i < end; i++) {
        int32_t part = part_at(gather, i);
        if (part < 0 || part >= gather->parts.num_parts) return (int64_t)i;
        int64_t row = gather->row[i], length = gather->parts.lengths[part];
        if (row < 0 || width > length || row > length - width) return (int64_t)i;
    }
    return -1;
}

// Keeps the smallest position, so that the answer does not depend on the number of threads.
static int is_outside(Gather *gather, size_t begin, size_t end, int64_t width) {
    long long found = first_outside(gather, begin, end, width);
    if (found < 0) return 0;
    long long before = atomic_load(&gather->outside);
    while ((before < 0 || found < before) && !atomic_compare_exchange_weak(&gather->outside, &before, found)) {}
    return 1;
}

static inline const char *row_at(const Gather *gather, size_t i, size_t row_bytes) {
    return gather->parts.bases[part_at(gather, i)] + (size_t)gather->row[i] * row_bytes;
}

static inline void ask_for(const char *from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += LINE) __builtin_prefetch(from + at);
}

// The size of a row is a constant wherever this is inlined with one: the copy is then a few loads and stores.
static inline __attribute__((always_inline)) void copy_rows(const Gather *gather, size_t begin, size_t end,
                                                            size_t row_bytes) {
    size_t asked = row_bytes < 1024 ? row_bytes : 1024;  // after that the processor has seen where it goes
    char *out = gather->out + begin * row_bytes;
    for (size_t i = begin; i < end && i < begin + AHEAD; i++) ask_for(row_at(gather, i, row_bytes), asked);
    for (size_t i = begin; i < end; i++, out += row_bytes) {
        if (i + AHEAD < end) ask_for(row_at(gather, i + AHEAD, row_bytes), asked);
        memcpy(out, row_at(gather, i, row_bytes), row_bytes);
    }
}

FOR_EVERY_PROCESSOR
static void gather_rows_work(void *context, size_t slot, size_t begin, size_t end) {
    (void)slot;
    Gather *gather = context;
    if (is_outside(gather, begin, end, 1)) return;
    switch (gather->row_bytes) {
        case 1: copy_rows(gather, begin, end, 1); break;
        case 2: copy_rows(gather, begin, end, 2); break;
        case 4: copy_rows(gather, begin, end, 4); break;
        case 8: copy_rows(gather, begin, end, 8); break;
        case 512: copy_rows(gather, begin, end, 512); break;
        default: copy_rows(gather, begin, end, gather->row_bytes);
    }
}

// A thread costs as long to start as copying some 100 KB takes: a small batch is left to the thread that asks.
static size_t grain_of(size_t bytes) { return bytes >= GRAIN_BYTES ? 1 : GRAIN_BYTES / (bytes ? bytes : 1); }

static size_t useful_threads(size_t threads, size_t bytes) {
    size_t most = bytes / (4 * GRAIN_BYTES) + 1;
    return threads < most ? threads : most;
}

// out[i] = row[i] of part[i], where a row has row_bytes bytes.
int64_t shoal_gather_parts(const char *const *bases, const int64_t *lengths, int64_t num_parts, const int32_t *part,
                           const int64_t *row, size_t count, size_t row_bytes, char *out, size_t threads) {
    Gather gather = {.parts = {bases, lengths, num_parts}, .part = part, .row = row, .row_bytes = row_bytes,
                     .out = out};
    atomic_init(&gather.outside, -1);
    run_parallel(gather_rows_work, &gather, count, grain_of(row_bytes), useful_threads(threads, count * row_bytes));
    return atomic_load(&gather.outside);
}

// A line of the window after the next is asked for with every line that is copied: all of a window at once are more
// than the processor keeps track of (12 lines; 15% slower, 2026-11).
#define WIDEN(NAME, NUMBER)                                                                             \
    FOR_EVERY_PROCESSOR static void NAME(Gather *gather, size_t begin, size_t end) {                    \
        typedef NUMBER Token __attribute__((aligned(1), may_alias)); /* a column may begin anywhere */  \
        enum { LINE_TOKENS = LINE / sizeof(NUMBER) };                                                   \
        const size_t width = gather->row_bytes;                                                         \
        int64_t *out = (int64_t *)gather->out + begin * width;                                          \
        for (size_t i = begin; i < end; i++, out += width) {                                            \
            const Token *from = (const Token *)row_at(gather, i, sizeof(NUMBER));                       \
            size_t next = i + WINDOWS_AHEAD < end ? i + WINDOWS_AHEAD : i;                              \
            const char *later = row_at(gather, next, sizeof(NUMBER));                                   \
            size_t k = 0;                                                                               \
            for (; k + LINE_TOKENS <= width; k += LINE_TOKENS) {                                        \
                __builtin_prefetch(later + k * sizeof(NUMBER), 0, 2);                                   \
                for (size_t j = 0; j < LINE_TOKENS; j++) out[k + j] = (int64_t)from[k + j];             \
            }                                                                                           \
            __builtin_prefetch(later + k * sizeof(NUMBER), 0, 2);                                       \
            for (; k < width; k++) out[k] = (int64_t)from[k];                                           \
        }                                                                                               \
    }

WIDEN(widen_uint8, uint8_t)
WIDEN(widen_int8, int8_t)
WIDEN(widen_uint16, uint16_t)
WIDEN(widen_int16, int16_t)
WIDEN(widen_uint32, uint32_t)
WIDEN(widen_int32, int32_t)
WIDEN(widen_int64, int64_t)

static void gather_windows_work(void *context, size_t slot, size_t begin, size_t end) {
    (void)slot;
    Gather *gather = context;
    if (is_outside(gather, begin, end, (int64_t)gather->row_bytes)) return;
    switch (gather->token_bytes * 2 + gather->is_signed) {
        case 2: widen_uint8(gather, begin, end); break;
        case 3: widen_int8(gather, begin, end); break;
        case 4: widen_uint16(gather, begin, end); break;
        case 5: widen_int16(gather, begin, end); break;
        case 8: widen_uint32(gather, begin, end); break;
        case 9: widen_int32(gather, begin, end); break;
        default: widen_int64(gather, begin, end);  // uint64 too: the same bits
    }
}

// out[i] = the `width` tokens of part[i] from start[i] on, each as int64.
int64_t shoal_gather_windows(const char *const *bases, const int64_t *lengths, int64_t num_parts, const int32_t *part,
                             const int64_t *start, size_t count, size_t width, int token_bytes, int is_signed,
                             char *out, size_t threads) {
    Gather gather = {.parts = {bases, lengths, num_parts}, .part = part, .row = start, .row_bytes = width, .out = out,
                     .token_bytes = token_bytes, .is_signed = is_signed};
    atomic_init(&gather.outside, -1);
    size_t bytes = width * sizeof(int64_t);
    run_parallel(gather_windows_work, &gather, count, grain_of(bytes), useful_threads(threads, count * bytes));
    return atomic_load(&gather.outside);
}

// Writes count + 1 offsets: where each variable row will begin in one buffer, in items; rows[part] offsets less one
// are the rows of a part, lengths[part] the items its buffer has. Also finds offsets that run backwards or out of it.
int64_t shoal_ragged_offsets(const int64_t *const *offsets, const int64_t *rows, const int64_t *lengths,
                             int64_t num_parts, const int32_t *part, const int64_t *row, size_t count,
                             int64_t *out_offsets) {
    out_offsets[0] = 0;
    for (size_t i = 0; i < count; i++) {
        int32_t from = part ? part[i] : 0;
        if (from < 0 || from >= num_parts || row[i] < 0 || row[i] >= rows[from]) return (int64_t)i;
        int64_t begin = offsets[from][row[i]], end = offsets[from][row[i] + 1];
        if (begin < 0 || end < begin || end > lengths[from]) return (int64_t)i;
        out_offsets[i + 1] = out_offsets[i] + (end - begin);
    }
    return -1;
}

static inline const char *ragged_at(const Gather *gather, size_t i) {
    int32_t part = part_at(gather, i);
    return gather->parts.bases[part] + (size_t)gather->offsets[part][gather->row[i]] * gather->row_bytes;
}

static void gather_ragged_work(void *context, size_t slot, size_t begin, size_t end) {
    (void)slot;
    Gather *gather = context;
    for (size_t i = begin; i < end; i++) {
        if (i + WINDOWS_AHEAD < end) ask_for(ragged_at(gather, i + WINDOWS_AHEAD), 4 * LINE);
        int64_t at = gather->out_offsets[i], items = gather->out_offsets[i + 1] - at;
        size_t bytes = (size_t)items * gather->row_bytes;
        if (bytes) memcpy(gather->out + (size_t)at * gather->row_bytes, ragged_at(gather, i), bytes);
    }
}

// Copies the rows that shoal_ragged_offsets has checked to where it said; an item has item_bytes bytes.
void shoal_gather_ragged(const char *const *bases, const int64_t *const *offsets, int64_t num_parts,
                         const int32_t *part, const int64_t *row, size_t count, size_t item_bytes,
                         int64_t *out_offsets, char *out, size_t threads) {
    Gather gather = {.parts = {bases, NULL, num_parts}, .part = part, .row = row, .row_bytes = item_bytes, .out = out,
                     .offsets = offsets, .out_offsets = out_offsets};
    size_t bytes = (size_t)out_offsets[count] * item_bytes;
    run_parallel(gather_ragged_work, &gather, count, 64, useful_threads(threads, bytes));
}
