// Copies many pieces of memory in one call, and sums them up on the way: what a snapshot of a training state takes.
//
// The sum of a piece: its bytes, padded with zeros to lines of 64, are lines of 8 words. For each word of a line, first
// adds up that word of all lines, and second adds up what first was after each line, so that lines cannot change places.
// These 16 numbers are then stirred into the sum of all pieces. Modulo 2^64 throughout.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

enum { LINE = 64, WORDS = 8, STREAMED = 256 << 10 };

typedef struct {
    uint64_t first[WORDS], second[WORDS];
} Sums;

static void add_line(Sums *sums, const char *line) {
    uint64_t words[WORDS];
    memcpy(words, line, LINE);
    for (int i = 0; i < WORDS; i++) sums->first[i] += words[i], sums->second[i] += sums->first[i];
}

#if defined(__x86_64__)
// Copies whole lines to aligned memory without reading what it overwrites; returns how many bytes.
static size_t stream_lines(char *to, const char *from, size_t bytes, Sums *sums) {
    __m128i first[4], second[4];
    memcpy(first, sums->first, LINE), memcpy(second, sums->second, LINE);
    size_t at = 0;
    for (; at + LINE <= bytes; at += LINE) {
        for (int i = 0; i < 4; i++) {
            __m128i words = _mm_loadu_si128((const __m128i *)(from + at) + i);
            _mm_stream_si128((__m128i *)(to + at) + i, words);
            first[i] = _mm_add_epi64(first[i], words);
            second[i] = _mm_add_epi64(second[i], first[i]);
        }
    }
    memcpy(sums->first, first, LINE), memcpy(sums->second, second, LINE);
    _mm_sfence();  // the copy is there for everybody before whatever is written next
    return at;
}
#endif

static uint64_t stir(uint64_t sum, const Sums *sums) {
    for (int i = 0; i < WORDS; i++) {
        sum = (sum ^ sums->first[i]) * 0x100000001b3u;
        sum = (sum ^ sums->second[i]) * 0x100000001b3u;
        sum ^= sum >> 29;
    }
    return sum;
}

// Copies from[i] to to[i], and returns the sum of all pieces, sum being that of pieces before. Where to is null, it only
// sums them up.
uint64_t shoal_copy_pieces(char *const *to, const char *const *from, const size_t *bytes, size_t count, uint64_t sum) {
    for (size_t piece = 0; piece < count; piece++) {
        Sums sums = {{0}, {0}};
        const char *source = from[piece];
        size_t size = bytes[piece], at = 0;
#if defined(__x86_64__)
        if (to && size >= STREAMED && (uintptr_t)to[piece] % 16 == 0) at = stream_lines(to[piece], source, size, &sums);
#endif
        for (; at + LINE <= size; at += LINE) {
            add_line(&sums, source + at);
            if (to) memcpy(to[piece] + at, source + at, LINE);
        }
        if (at < size) {
            char last[LINE] = {0};
            memcpy(last, source + at, size - at);
            add_line(&sums, last);
            if (to) memcpy(to[piece] + at, source + at, size - at);
        }
        sum = stir(sum, &sums);
    }
    return sum;
}
