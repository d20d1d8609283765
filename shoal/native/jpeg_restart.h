// One image that is being cut: jpeg_restart.c begins and ends it, jpeg_pack.c has several of them on their way.

#ifndef SHOAL_JPEG_RESTART_H
#define SHOAL_JPEG_RESTART_H

#include "jpeg.h"
#include "jpeg_lanes.h"
#include "jpeg_steps.h"

enum { MOST_SCAN_BYTES = 1 << 28 };  // bits are counted in 32 bits

// Tables of steps; images in different lanes that have the same share them.
typedef struct {
    struct {
        Steps steps;
        int users;
    } each[3 * LANES];
} StepsPool;

typedef struct {
    Header header;
    Sizes sizes[2];
    HuffmanText texts[2];
    DcCodes codes[2];
    Room scan, segments, ends;
    Lane lane;
    int steps[3];  // of each plane, in the pool
    int mcu_blocks;
    int64_t restart;  // MCUs in a segment that is written
} Cut;

// Reads an image up to where its lane can run. On JPEG_OK the lane holds tables until jpeg_give_back.
int jpeg_begin_cut(Cut *cut, const uint8_t *data, size_t size, int restart, StepsPool *pool);
void jpeg_give_back(Cut *cut, StepsPool *pool);
// What an image that is cut, and its index, may take at most.
size_t jpeg_most_bytes(const Cut *cut);
size_t jpeg_most_index_bytes(const Cut *cut);
// Writes the image in segments of `restart` x 16 pixels of width, and its index, when the lane is done.
int jpeg_end_cut(const Cut *cut, uint8_t *out, size_t *out_bytes, uint8_t *index, size_t *index_bytes, int portable);
void jpeg_free_cut(Cut *cut);

#endif
