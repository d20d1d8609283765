// Tables that step over codes without reading their values: jpeg_steps.c fills them, jpeg_restart.c uses them.

#ifndef SHOAL_JPEG_STEPS_H
#define SHOAL_JPEG_STEPS_H

#include "jpeg.h"

// A step: in bits 0-5 how many bits it takes, 6-13 how many coefficients it goes on. STEP_ENDS: the last of them ends the
// block. STEP_LONG: the code has more than STEP bits.
enum { STEP = 12, STEPS = 1 << STEP, STEP_ENDS = 1 << 14, STEP_LONG = 1 << 15, BLOCK_ENDS = STEP_ENDS >> 6 };

typedef struct {
    uint16_t steps[STEPS];
    uint16_t shorter[STEPS];  // what r bits give, for each r below STEP: from 1 << r on; 0: no whole code
    uint8_t counts[16], symbols[256];
    int is_built;
} Steps;

// LOOK bits give a DC code's length and, from bit 8 on, its value's; 0: the code has more than LOOK bits.
typedef struct {
    uint16_t sizes[LOOKED];
    uint8_t counts[16], symbols[256];
    int is_built;
} Sizes;

// Both keep what they have if the table is the same.
void jpeg_build_steps(Steps *table, const Huffman *ac);
void jpeg_build_sizes(Sizes *table, const Huffman *dc);

#endif
