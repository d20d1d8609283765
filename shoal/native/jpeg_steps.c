// How far STEP bits of a scan go.
//
// 1. For r = 1, 2, ... bits: a code and its value, and behind them what the bits that are left give by themselves,
//    which is known by then, as these are fewer.
// 2. Bits that hold no whole code go nowhere; with all STEP of them, one whose value lies beyond is counted, too.
// 3. The same for bits that begin with a DC code; what is behind it are AC codes.
//
// Example: codes 0 (the end), 10 (a value of 1 bit), 110 (one zero, then a value of 2 bits). The bits 10v 110vv 0 xxx
// are one step: 9 bits, 1 + 2 coefficients, the end.

#include <string.h>

#include "jpeg_steps.h"

// Fills the steps of all bits that begin with a code: it, its value, and what the bits after it are by themselves.
static void fill_code(const Steps *steps, uint16_t *to, int bits, int code, int length, int size, int coefficients) {
    int left = bits - length - size, ends = coefficients == 0;
    uint16_t step = (uint16_t)((length + size) | coefficients * COEFFICIENT | (ends ? STEP_ENDS : 0));
    uint16_t *begin = to + ((size_t)code << (bits - length));
    if (ends || left <= 0) {  // with STEP bits, a value may also lie beyond them: its code is enough
        if (left < 0) step = bits < STEP ? 0 : length + size > MOST_STEP_BITS ? STEP_LONG : step;
        for (size_t i = 0; i < (size_t)1 << (bits - length); i++) begin[i] = step;
        return;
    }
    const uint16_t *then = steps->shorter + ((size_t)1 << left);
    for (int value = 0; value < 1 << size; value++, begin += (size_t)1 << left)
        for (size_t i = 0; i < (size_t)1 << left; i++) begin[i] = (uint16_t)(step + then[i]);
}

static void fill_all(const Steps *steps, uint16_t *to, int bits, const Huffman *table, int is_dc) {
    int code = 0, place = 0;
    for (int length = 1; length <= bits; length++, code <<= 1)
        for (int i = 0; i < table->counts[length - 1]; i++, code++, place++) {
            int symbol = table->symbols[place], size = symbol & 15, run = is_dc ? 0 : symbol >> 4;
            int ends = !is_dc && size == 0 && run < 15;
            fill_code(steps, to, bits, code, length, size, ends ? 0 : run + 1);
        }
}

// A step that goes beyond a block wherever it begins is none: three of them still add up to less than STEP_ENDS.
static uint16_t at_most_a_block(uint16_t step) { return step % STEP_ENDS < STEP_LONG ? step : STEP_LONG; }

int jpeg_has_steps(const Steps *steps, const Huffman *dc, const Huffman *ac) {
    const Huffman *tables[2] = {dc, ac};
    for (int i = 0; i < 2; i++)
        if (memcmp(tables[i]->counts, steps->counts[i], 16) || memcmp(tables[i]->symbols, steps->symbols[i], 256))
            return 0;
    return steps->is_built;
}

void jpeg_build_steps(Steps *steps, const Huffman *dc, const Huffman *ac) {
    const Huffman *tables[2] = {dc, ac};
    memset(steps->shorter, 0, sizeof steps->shorter);
    for (size_t i = 0; i < STEPS; i++) steps->first[i] = steps->rest[i] = STEP_LONG;
    for (int bits = 1; bits < STEP; bits++) fill_all(steps, steps->shorter + ((size_t)1 << bits), bits, ac, 0);
    fill_all(steps, steps->rest, STEP, ac, 0);
    fill_all(steps, steps->first, STEP, dc, 1);
    for (size_t i = 0; i < STEPS; i++)
        steps->first[i] = at_most_a_block(steps->first[i]), steps->rest[i] = at_most_a_block(steps->rest[i]);
    for (int i = 0; i < 2; i++) {
        memcpy(steps->counts[i], tables[i]->counts, 16);
        memcpy(steps->symbols[i], tables[i]->symbols, 256);
    }
    steps->is_built = 1;
}

void jpeg_build_sizes(Sizes *table, const Huffman *dc) {
    if (table->is_built && memcmp(dc->counts, table->counts, 16) == 0 && memcmp(dc->symbols, table->symbols, 256) == 0)
        return;
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
