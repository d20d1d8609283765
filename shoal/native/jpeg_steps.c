// How far STEP bits of a scan go.
//
// 1. For r = 1, 2, ... bits: a code and its value, and behind them what the bits that are left give by themselves, which
//    is known by then, as these are fewer.
// 2. Bits that hold no whole code go nowhere; with all STEP of them, one whose value lies beyond is counted, too.
//
// Example: codes 0 (the end), 10 (a value of 1 bit), 110 (one zero, then a value of 2 bits). The bits 10v 110vv 0 xxx are
// one step: 9 bits, 1 + 2 + 1 coefficients, the end.

#include <string.h>

#include "jpeg_steps.h"

// Fills the steps of all bits that begin with a code: the code, its value, and what the bits after it are by themselves.
static void fill_code(Steps *table, uint16_t *to, int bits, int code, int length, int symbol) {
    int size = symbol & 15, run = symbol >> 4, left = bits - length - size;
    int ends = size == 0 && run < 15;
    uint16_t step = (uint16_t)((length + size) | (ends ? 1 : run + 1) << 6 | (ends ? STEP_ENDS : 0));
    uint16_t *begin = to + ((size_t)code << (bits - length));
    if (ends || left <= 0) {  // with STEP bits, a value may also lie beyond them: its code is enough
        for (size_t i = 0; i < (size_t)1 << (bits - length); i++) begin[i] = left < 0 && bits < STEP ? 0 : step;
        return;
    }
    const uint16_t *then = table->shorter + ((size_t)1 << left);
    for (int value = 0; value < 1 << size; value++, begin += (size_t)1 << left)
        for (size_t i = 0; i < (size_t)1 << left; i++) begin[i] = (uint16_t)(step + then[i]);
}

static int is_same(const Huffman *table, int is_built, const uint8_t *counts, const uint8_t *symbols) {
    return is_built && memcmp(table->counts, counts, 16) == 0 && memcmp(table->symbols, symbols, 256) == 0;
}

void jpeg_build_steps(Steps *table, const Huffman *ac) {
    if (is_same(ac, table->is_built, table->counts, table->symbols)) return;
    memset(table->shorter, 0, sizeof table->shorter);
    for (size_t i = 0; i < STEPS; i++) table->steps[i] = STEP_LONG;
    for (int bits = 1; bits <= STEP; bits++) {
        uint16_t *to = bits == STEP ? table->steps : table->shorter + ((size_t)1 << bits);
        int code = 0, place = 0;
        for (int length = 1; length <= bits; length++, code <<= 1)
            for (int i = 0; i < ac->counts[length - 1]; i++, code++, place++)
                fill_code(table, to, bits, code, length, ac->symbols[place]);
    }
    memcpy(table->counts, ac->counts, 16);
    memcpy(table->symbols, ac->symbols, 256);
    table->is_built = 1;
}

void jpeg_build_sizes(Sizes *table, const Huffman *dc) {
    if (is_same(dc, table->is_built, table->counts, table->symbols)) return;
    memset(table->sizes, 0, sizeof table->sizes);
    int code = 0, place = 0;
    for (int length = 1; length <= LOOK; length++, code <<= 1)
        for (int i = 0; i < dc->counts[length - 1]; i++, code++, place++)
            for (int k = 0; k < 1 << (LOOK - length); k++)
                table->sizes[(code << (LOOK - length)) + k] = (uint16_t)(length | (dc->symbols[place] & 15) << 8);
    memcpy(table->counts, dc->counts, 16);
    memcpy(table->symbols, dc->symbols, 256);
    table->is_built = 1;
}
