// Where the blocks of a scan end: jpeg_lanes.c finds it for LANES images at once, jpeg_restart.c cuts there.

#ifndef SHOAL_JPEG_LANES_H
#define SHOAL_JPEG_LANES_H

#include "jpeg.h"
#include "jpeg_steps.h"

// A lane pauses after ROUND blocks at the latest, a whole number of MCUs of any kind, to see whether it is still inside
// its scan. A block has at most 64 codes of 31 bits.
enum { LANES = 3, ROUND = 192, LANE_SLACK = ROUND * 64 * 31 / 8 + 64 };

// One image on its way. `scan` holds its bits, without the zeros after 0xFF, and LANE_SLACK readable bytes behind them;
// each of the file's own segments begins at a byte, its first at 0.
typedef struct {
    const uint8_t *scan;
    const uint32_t *segments;  // the byte at which each of the file's own segments ends
    uint32_t *ends;            // [ROUND], from the block on with which this round begins: the bit at which each ends
    uint64_t place;            // the bit at which the next load begins
    uint64_t reached;          // how far the block is, as a step has it, with the bits since `place`
    uint64_t block, pause;     // of this round
    const uint16_t *table;     // the steps that come next
    // For each block of a round, how it goes on behind its first step, and the first step of the block behind it.
    const uint16_t *rest[ROUND], *first[ROUND];
    const Huffman *dc[6], *ac[6];  // of each block of an MCU
    int mcu_blocks;
    int64_t segment_blocks, left_in_segment, left;  // from this round's first block on
    int problem, is_done;
    uint32_t nowhere;  // what an idle lane writes to
} Lane;

// Begins with the first of so many blocks, of which so many are in each of the file's own segments (0: all of them).
// Scan, segments, ends and tables have been filled in.
void jpeg_begin_lane(Lane *lane, int64_t blocks, int64_t segment_blocks);

// Steps over the blocks of all lanes until one of them is done, or cannot go on. Those that are done may be among them.
void jpeg_run_lanes(Lane *const lanes[LANES], int portable);

// A lane that goes nowhere, for where there are fewer images.
void jpeg_idle_lane(Lane *lane);

#endif
