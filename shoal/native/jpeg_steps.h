// Tables that step over codes without reading their values: jpeg_steps.c fills them, jpeg_lanes.c uses them.

#ifndef SHOAL_JPEG_STEPS_H
#define SHOAL_JPEG_STEPS_H

#include "jpeg.h"

// A step: in bits 0-5 how many bits it takes, 6-13 how many coefficients it goes on. STEP_ENDS: the end of the block is
// its last code. STEP_LONG, which is more coefficients than there are: its code has more than STEP bits, or more than
// MOST_STEP_BITS with its value. Three steps are at most 57 bits, which is what a load gives wherever it begins.
enum { STEP = 12, STEPS = 1 << STEP, MOST_STEP_BITS = 19 };
enum { COEFFICIENT = 1 << 6, STEP_LONG = 64 * COEFFICIENT, STEP_BEYOND = 3 * STEP_LONG, STEP_ENDS = 4 * STEP_LONG };

// The steps of one plane's blocks: `first` begins with the DC code, `rest` goes on behind any AC code.
typedef struct {
    uint16_t first[STEPS], rest[STEPS];
    uint16_t shorter[STEPS];  // what r bits give, for each r below STEP: from 1 << r on; 0: no whole code
    uint8_t counts[2][16], symbols[2][256];
    int is_built;
} Steps;

// LOOK bits give a DC code's length and, from bit 8 on, its value's; 0: the code has more than LOOK bits.
typedef struct {
    uint16_t sizes[LOOKED];
    uint8_t counts[16], symbols[256];
    int is_built;
} Sizes;

int jpeg_has_steps(const Steps *steps, const Huffman *dc, const Huffman *ac);
void jpeg_build_steps(Steps *steps, const Huffman *dc, const Huffman *ac);
// Keeps what it has if the table is the same.
void jpeg_build_sizes(Sizes *table, const Huffman *dc);

#endif
