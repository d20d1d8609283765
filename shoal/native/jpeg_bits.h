// Bits of a scan: Huffman codes read from a copy without the zeros after 0xFF, and bits written with them.
// For jpeg_segments.c and jpeg_restart.c.

#ifndef SHOAL_JPEG_BITS_H
#define SHOAL_JPEG_BITS_H

#include <string.h>

#include "jpeg.h"

#define INLINE static inline __attribute__((always_inline))

enum { NO_MORE = 64, NO_CODE = 127 };

typedef struct {
    const uint8_t *at;
    uint64_t bits;  // the next one is the highest
    int count;      // how many of them are valid
} Bits;

INLINE uint64_t load_big_endian(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

// At least 56 bits are valid afterwards: a code and its value have at most 31.
INLINE void refill(Bits *bits) {
    bits->bits |= load_big_endian(bits->at) >> bits->count;
    bits->at += (63 - bits->count) >> 3;
    bits->count |= 56;
}

// The bits from bit `at` on.
INLINE Bits bits_from(const uint8_t *from, size_t at) {
    Bits bits = {.at = from + (at >> 3)};
    refill(&bits);
    bits.bits <<= at & 7, bits.count -= (int)(at & 7);
    return bits;
}

// The entry of a code that is longer than LOOK bits; 0 when there is no such code.
static inline int32_t long_entry(const Huffman *table, uint64_t bits) {
    int32_t code = (int32_t)(bits >> 48);
    int length = LOOK + 1;
    while (code > table->most[length]) length++;
    if (length > 16) return 0;
    return huffman_entry(length, table->symbols[((code >> (16 - length)) + table->shift[length]) & 255]);
}

// Reads one code and its value; returns how many zeros come before it: 64 when there are no more values, NO_CODE when
// there is no such code.
INLINE int read_value(Bits *bits, const Huffman *table, int32_t *value) {
    if (bits->count < 32) refill(bits);
    int32_t entry = table->entries[bits->bits >> (64 - LOOK)];
    if (__builtin_expect(entry == 0, 0)) {
        entry = long_entry(table, bits->bits);
        if (entry == 0) return *value = 0, NO_CODE;
    }
    int used = entry & 31, size = entry >> 5 & 15;
    *value = entry >> 16;
    if (size) {
        int32_t mask = (1 << size) - 1, read = (int32_t)(bits->bits >> (64 - used)) & mask;
        *value = read <= mask >> 1 ? read - mask : read;
    }
    bits->bits <<= used, bits->count -= used;
    return entry >> 9 & 127;
}

// Bits on their way out; `count` of them, the highest of `bits`, are not written yet.
typedef struct {
    uint8_t *to;
    uint64_t bits;
    int count;
} Out;

INLINE void write_bytes(Out *out, uint64_t word, int bytes) {
    for (int i = 0; i < bytes; i++, word <<= 8) {
        *out->to++ = (uint8_t)(word >> 56);
        if (word >> 56 == 0xFF) *out->to++ = 0;
    }
}

// Whether one of the bytes is 0xFF.
INLINE int has_ff(uint64_t word) { return ((~word - 0x0101010101010101) & word & 0x8080808080808080) != 0; }

INLINE void store_big_endian(uint8_t *to, uint64_t word) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    memcpy(to, &word, sizeof word);
}

INLINE void write_word(Out *out, uint64_t word) {
    if (__builtin_expect(has_ff(word), 0)) {
        write_bytes(out, word, 8);
        return;
    }
    store_big_endian(out->to, word);
    out->to += 8;
}

// Writes the highest `count` bits of `value`, at most 64; its others are 0.
INLINE void write_bits(Out *out, uint64_t value, int count) {
    out->bits |= value >> out->count;
    int left = out->count + count - 64;
    if (left < 0) {
        out->count += count;
        return;
    }
    write_word(out, out->bits);
    out->bits = left ? value << (count - left) : 0;
    out->count = left;
}

// The 64 bits from bit `at` on.
INLINE uint64_t bits_at(const uint8_t *from, size_t at) {
    const uint8_t *byte = from + (at >> 3);
    int shift = (int)(at & 7);
    return load_big_endian(byte) << shift | (uint64_t)byte[8] >> (8 - shift);
}

INLINE void copy_bits(Out *out, const uint8_t *from, size_t begin, size_t end) {
    if (out->count && end - begin >= 64) {
        int fill = 64 - out->count;
        write_word(out, out->bits | bits_at(from, begin) >> out->count);
        out->bits = 0, out->count = 0, begin += (size_t)fill;
    }
    if (out->count == 0)
        for (; end - begin >= 64; begin += 64) write_word(out, bits_at(from, begin));
    int rest = (int)(end - begin);
    if (rest) write_bits(out, bits_at(from, begin) & ~(UINT64_MAX >> rest), rest);
}

// Ends a segment: ones up to a whole byte, then a marker. Up to 8 bytes are written behind it.
INLINE void end_segment(Out *out, int marker) {
    int fill = -out->count & 7, bytes = (out->count + 7) / 8;
    uint64_t word = out->bits | (fill ? ((1ull << fill) - 1) << (64 - 8 * bytes) : 0);
    if (__builtin_expect(has_ff(word), 0)) {
        write_bytes(out, word, bytes);
    } else {
        store_big_endian(out->to, word);
        out->to += bytes;
    }
    *out->to++ = 0xFF, *out->to++ = (uint8_t)marker;
    out->bits = 0, out->count = 0;
}

#endif
