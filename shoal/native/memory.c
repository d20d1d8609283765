// Moving and adding up large memory: what torch does in two passes here takes one.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

// Compiled for several processors; the loader picks the best that this one has.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EVERY_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EVERY_PROCESSOR
#endif

enum { LINE = 64, STREAMED = 256 << 10 };

// Copies without reading the lines that it overwrites and without driving others out of the cache.
void shoal_copy(char *to, const char *from, size_t bytes) {
#if defined(__x86_64__)
    if (bytes >= STREAMED) {
        size_t head = (LINE - (uintptr_t)to % LINE) % LINE;
        memcpy(to, from, head);
        to += head, from += head, bytes -= head;
        for (; bytes >= LINE; to += LINE, from += LINE, bytes -= LINE) {
            const __m128i *source = (const __m128i *)from;
            __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
            __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
            __m128i *target = (__m128i *)to;
            _mm_stream_si128(target, a), _mm_stream_si128(target + 1, b);
            _mm_stream_si128(target + 2, c), _mm_stream_si128(target + 3, d);
        }
        _mm_sfence();  // the copy is there for everybody before whatever is written next
    }
#endif
    memcpy(to, from, bytes);
}

// Puts rows[0][i] + rows[1][i] + ..., added in this order, into every row, for begin <= i < end.
#define ADD_ROWS(NAME, NUMBER)                                                              \
    static inline __attribute__((always_inline)) void NAME##_block(                        \
        NUMBER *const *rows, size_t count, size_t begin, size_t end) {                      \
        NUMBER sums[1024];                                                                   \
        size_t n = end - begin;                                                              \
        const NUMBER *first = rows[0] + begin, *second = rows[1] + begin;                   \
        for (size_t i = 0; i < n; i++) sums[i] = first[i] + second[i];                      \
        for (size_t row = 2; row < count; row++) {                                           \
            const NUMBER *next = rows[row] + begin;                                          \
            for (size_t i = 0; i < n; i++) sums[i] += next[i];                              \
        }                                                                                    \
        for (size_t row = 0; row < count; row++) memcpy(rows[row] + begin, sums, n * sizeof(NUMBER)); \
    }                                                                                        \
    FOR_EVERY_PROCESSOR                                                                      \
    void NAME(NUMBER *const *rows, size_t count, size_t begin, size_t end) {                \
        for (size_t at = begin; at < end; at += 1024)                                        \
            NAME##_block(rows, count, at, at + 1024 < end ? at + 1024 : end);               \
    }

ADD_ROWS(shoal_add_rows_float32, float)
ADD_ROWS(shoal_add_rows_float64, double)
